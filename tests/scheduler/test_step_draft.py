"""Plans are frozen from the host's tables (C10)."""

import numpy as np

from tests.scheduler.rig import Rig


def test_c10_rows_and_locations_of_a_plan_are_those_of_the_hosts_table():
    rig = Rig(page_size=4, chunked_prefill_size=24, radix_cache=False)
    lengths = (9, 6, 13)
    for length in lengths:
        rig.add(length, max_new=6)
    held = rig.scheduler.held
    while not rig.scheduler.idle:
        plan = rig.launch()
        decodes = [req for req in rig.scheduler.running.reqs if req.held.row not in plan.rows[: plan.num_extends]]
        tenants = {req.held.row: req for req in rig.reqs.values() if req.held}
        assert plan.rows[plan.num_extends :].tolist() == [req.held.row for req in decodes]
        positions = [
            (row, position)
            for row, count, stop in zip(plan.rows.tolist(), plan.q_lens.tolist(), plan.seq_lens.tolist(), strict=True)
            for position in range(stop - count, stop)
        ]
        table = held.rows.req_to_token
        assert plan.out_cache_loc.tolist() == [table[row, at // 4] * 4 + at % 4 for row, at in positions]
        extended = positions[: len(plan.input_ids)]
        assert plan.input_ids.tolist() == [tenants[row].tokens[at] for row, at in extended]
        rig.commit()
    assert np.all([len(rig.tokens_of(req)) == 6 for req in rig.reqs.values()])
