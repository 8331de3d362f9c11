"""What the device gets of a plan, against loops over sequences and tokens."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from forebay.config.engine_config import CacheTypes
from forebay.ops import Ops
from forebay.pools.cache_pool import CachePool
from forebay.pools.cache_spec import FullAttention
from forebay.pools.request_rows import RequestRows, SamplingRows
from forebay.requests.sampling_params import SamplingParams
from forebay.requests.step_plan import Admission, StepPlan
from forebay.runtime.host.packing import Sections
from forebay.runtime.sampling.row_options import Sampling
from forebay.runtime.sampling.sampler import Wants
from forebay.runtime.steps.extend import input_ids_of, tokens_of
from forebay.runtime.steps.forward import Batch, Forward, StepTokens
from forebay.runtime.steps.inputs import Shape, StepInputs
from tests.plans import plan_of
from tests.runtime.fake_model import FakeModel
from tests.runtime.plans import known
from tests.tiers import examples

NUM_ROWS, PAGES, PAGE_SIZE = 9, 8, 4
CPU = torch.device("cpu")


def pools() -> tuple[RequestRows, CachePool]:
    specs = (FullAttention(num_kv_heads=1, head_dim=1),)
    cache = CachePool(specs, CacheTypes(), num_slots={"kv": 2}, page_size=PAGE_SIZE, device="cpu")
    return RequestRows(NUM_ROWS, PAGES), cache


def random_plan(rng: np.random.Generator, step: int) -> StepPlan:
    num_extends, num_decodes = int(rng.integers(0, 4)), int(rng.integers(0, 5))
    num_seqs = num_extends + num_decodes
    q_lens = np.concatenate([rng.integers(1, 7, num_extends), np.ones(num_decodes, np.int64)]).astype(np.int64)
    writes = int(rng.integers(0, 6))
    cells = rng.permutation(NUM_ROWS * PAGES)[:writes]
    admitted = rng.permutation(NUM_ROWS)[: int(rng.integers(0, 3))] + 1
    rows = rng.permutation(NUM_ROWS)[:num_seqs] + 1
    prebuilt = np.setdiff1d(admitted, rows[:num_extends])[:1]
    return plan_of(
        step=step,
        num_extends=num_extends,
        rows=rows,
        q_lens=q_lens,
        starts=rng.integers(0, 20, num_extends),
        input_ids=rng.integers(0, 1000, int(q_lens[:num_extends].sum())),
        sample_mask=np.concatenate([rng.random(num_extends) < 0.6, np.ones(num_decodes, np.bool_)]),
        write_rows=cells // PAGES + 1,
        write_columns=cells % PAGES,
        write_pages=rng.integers(1, 99, writes),
        admissions=tuple(
            Admission(
                row=int(row),
                request_id=0,
                params=random_params(rng),
                token_ids=known(rng.integers(0, 1000, 1 + int(rng.integers(0, 20)))),
                num_prompt=0,
                prebuilt=row in prebuilt,
            )
            for row in admitted
        ),
    )


def random_params(rng: np.random.Generator) -> SamplingParams:
    return SamplingParams(
        temperature=float(rng.random()),
        top_k=int(rng.integers(0, 2**31)),
        top_p=float(rng.random()),
        min_p=float(rng.random()),
        repetition_penalty=float(1 + rng.random()),
        presence_penalty=float(rng.random()),
        frequency_penalty=float(rng.random()),
        seed=int(rng.integers(2**62, 2**63)),
    )


def tokens_on_device(plan: StepPlan, staging: StepInputs, inputs: Sections, forward: Forward) -> StepTokens:
    """What layers are told in a step of any shape."""
    batch = Batch(inputs["req_pool_indices"], inputs["q_start"])
    return tokens_of(forward, batch, inputs, input_ids_of(forward.rows, plan, inputs))


def check(plan: StepPlan, step: StepTokens, inputs: Sections, rows: RequestRows, table: np.ndarray) -> None:
    """Every field, one token at a time."""
    q_start, positions, tokens, locations, lens, sampled, sample_rows = [0], [], [], [], [], [], []
    known = iter(plan.input_ids.tolist())
    for i in range(plan.num_seqs):
        row, q_len = int(plan.rows[i]), int(plan.q_lens[i])
        start = int(plan.starts[i]) if i < plan.num_extends else int(rows.kv_lens[row])
        for position in range(start, start + q_len):
            positions.append(position)
            locations.append(int(table[row, position // PAGE_SIZE]) * PAGE_SIZE + position % PAGE_SIZE)
            tokens.append(next(known) if i < plan.num_extends else int(rows.last_tokens[row]))
        q_start.append(q_start[-1] + q_len)
        lens.append(start + q_len)
        if plan.sample_mask[i]:
            sampled.append(q_start[-1] - 1)
            sample_rows.append(row)
    placed = step.placed
    assert step.batch.q_start.tolist() == q_start
    assert placed.positions.tolist() == positions
    assert step.input_ids.tolist() == tokens
    assert step.batch.rows.tolist() == plan.rows.tolist()
    assert placed.seq_lens.tolist() == lens
    assert placed.out_cache_loc.tolist() == locations
    assert inputs["sample_rows"].tolist() == sample_rows
    assert inputs["sample_tokens"].tolist() == sampled
    narrow = (step.batch.rows, step.batch.q_start, placed.seq_lens, inputs["sample_rows"])
    wide = (step.input_ids, placed.positions, placed.out_cache_loc, inputs["sample_tokens"])
    assert {tensor.dtype for tensor in narrow} == {torch.int32}
    assert {tensor.dtype for tensor in wide} == {torch.int64}


@settings(max_examples=examples(60))
@given(seed=st.integers(0, 2**32), max_num_tokens=st.sampled_from([1, 100]))
def test_inputs_of_random_plans_in_a_row_are_those_of_a_loop(seed, max_num_tokens):
    """C10: the page table and the sampling columns too are what the plans so far have written, and nothing else."""
    rng = np.random.default_rng(seed)
    rows, cache = pools()
    rows.last_tokens.copy_(torch.from_numpy(rng.integers(0, 1000, NUM_ROWS + 1)))
    rows.kv_lens.copy_(torch.from_numpy(rng.integers(0, PAGES * PAGE_SIZE, NUM_ROWS + 1)))
    forward = Forward(FakeModel(), Ops(1), rows, cache)
    staging = StepInputs(forward, forward.cache.mover, max_num_tokens=max_num_tokens)
    table = np.zeros((NUM_ROWS + 1, PAGES), dtype=np.int64)
    params: dict[int, SamplingParams] = {}
    for step in range(5):
        plan = random_plan(rng, step)
        writes = plan.writes
        for row, column, page in zip(writes.write_rows, writes.write_columns, writes.write_pages, strict=True):
            table[row, column] = page
        params.update({admission.row: admission.params for admission in plan.admissions})
        kv_lens, last_tokens = rows.kv_lens.clone(), rows.last_tokens.clone()
        kv_lens[plan.rows[: plan.num_extends].copy()] = torch.from_numpy(plan.starts.copy())
        for admission in plan.admissions:
            if admission.prebuilt:
                kv_lens[admission.row] = len(admission.token_ids) - 1
                last_tokens[admission.row] = int(admission.token_ids[-1])
        sample_rows = plan.rows[plan.sample_mask]
        some = np.flatnonzero(rng.random(len(sample_rows)) < 0.5)
        targets = rng.integers(0, 1000, int(rng.integers(0, 5)))
        inputs = staging.stage(plan, Shape.TOKENS, Sampling(sample_rows, Wants.DRAW, some, some[::2]), targets)
        assert rows.kv_lens.tolist() == kv_lens.tolist()
        assert rows.last_tokens.tolist() == last_tokens.tolist()
        check(plan, tokens_on_device(plan, staging, inputs, forward), inputs, rows, table)
        assert inputs["drawing"].tolist() == some.tolist()
        assert inputs["reporting"].tolist() == some[::2].tolist()
        assert inputs["targets"].tolist() == targets.tolist()
        assert rows.req_to_token.tolist() == table.tolist()
        for row in range(NUM_ROWS + 1):
            for name, column in SamplingRows.declared.items():
                value = getattr(params[row], name) if row in params else column.pad
                assert rows[name][row] == torch.tensor(value, dtype=column.dtype), (row, name)
