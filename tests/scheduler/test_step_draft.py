"""Plans are frozen from the host's tables (C10)."""

import numpy as np

from tests.scheduler.rig import Rig


def test_c10_rows_and_tokens_of_a_plan_are_those_of_the_hosts_table():
    rig = Rig(page_size=4, chunked_prefill_size=24, radix_cache=False)
    lengths = (9, 6, 13)
    for length in lengths:
        rig.add(length, max_new=6)
    pools = rig.scheduler.pools
    while not rig.scheduler.idle:
        plan = rig.launch()
        decodes = [
            req for req in rig.scheduler.queues.running.reqs if req.allocation.row not in plan.rows[: plan.num_extends]
        ]
        tenants = {req.allocation.row: req for req in rig.reqs.values() if req.maybe_allocation}
        assert plan.rows[plan.num_extends :].tolist() == [req.allocation.row for req in decodes]
        assert plan.q_lens[plan.num_extends :].tolist() == [1] * len(decodes)
        spans = zip(plan.rows.tolist(), plan.starts.tolist(), plan.ends.tolist(), strict=False)
        extended = [(row, position) for row, start, end in spans for position in range(start, end)]
        assert plan.input_ids.tolist() == [tenants[row].tokens[at] for row, at in extended]
        lens = pools.table.kv_lens(plan.rows)
        assert lens[: plan.num_extends].tolist() == plan.ends.tolist()
        assert pools.rows.req_to_token[plan.rows, (lens - 1) // 4].all(), "a token without a page"
        rig.commit()
    assert np.all([len(rig.tokens_of(req)) == 6 for req in rig.reqs.values()])
