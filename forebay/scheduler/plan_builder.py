"""From batches to a frozen plan."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from forebay.memory.kv_allocator import decode_locations, extend_locations
from forebay.memory.slots import Ids
from forebay.requests.request import Request
from forebay.requests.schedule_batch import Chunk
from forebay.requests.step_plan import KIND_PARTS, Admission, HostWork, RowWrites, StepPlan
from forebay.scheduler.residency import Residencies

_NO_WRITES, _NO_HOST_WORK = RowWrites(), HostWork()


def build_plan(
    step: int, chunks: Sequence[Chunk], rows: Ids, admitted: Sequence[Request], held: Residencies
) -> StepPlan:
    """The plan of `chunks` and of the decodes in `rows`, whose lengths count this step already."""
    seq_lens = held.table.kv_len[rows]
    locations = decode_locations(held.rows.req_to_token, rows, seq_lens - 1, held.page_size)
    q_lens = np.ones(len(rows), dtype=np.int64)
    sample_mask = np.ones(len(rows), dtype=np.bool_)
    input_ids = np.empty(0, dtype=np.int64)
    if chunks:
        table = held.rows.req_to_token
        extends = np.array(
            [(req.residency.row, start, stop, req.residency.extend_target) for req, start, stop in chunks],
            dtype=np.int64,
        )
        extended, starts, stops, targets = extends.T
        locations = np.concatenate(
            [extend_locations(table[row], start, stop, held.page_size) for row, start, stop, _ in extends.tolist()]
            + [locations]
        )
        input_ids = np.concatenate(
            [np.frombuffer(req.tokens[start:stop], dtype=np.int32) for req, start, stop in chunks], dtype=np.int64
        )
        rows = np.concatenate([extended, rows])
        q_lens = np.concatenate([stops - starts, q_lens])
        sample_mask = np.concatenate([stops == targets, sample_mask])
        seq_lens = np.concatenate([stops, seq_lens])
    write_rows, write_columns, write_pages = held.row_writes.take()
    saves, loads, drops = held.kept.planned
    return StepPlan(
        step=step,
        num_extends=len(chunks),
        rows=rows,
        q_lens=q_lens,
        seq_lens=seq_lens,
        out_cache_loc=locations,
        input_ids=input_ids,
        sample_mask=sample_mask,
        writes=RowWrites(write_rows=write_rows, write_columns=write_columns, write_pages=write_pages)
        if len(write_rows)
        else _NO_WRITES,
        **_kinds(held, rows, locations),
        host=HostWork(saves=saves, drops=drops, loads=loads) if saves or drops or loads else _NO_HOST_WORK,
        admissions=tuple(_admission(req) for req in admitted),
        prompt_logprobs=tuple(i for i, (req, _, _) in enumerate(chunks) if req.wants_prompt_logprobs),
    )


def _kinds(held: Residencies, rows: Ids, locations: Ids) -> dict[str, Any]:
    """What is done about other kinds of cache, for sequences in `rows` whose KV goes to `locations`."""
    told = [(kind, *KIND_PARTS[kind.name]) for kind in held.kinds if kind.name in KIND_PARTS]
    return {field: part(**kind.columns(rows, locations)) for kind, field, part in told}


def _admission(req: Request) -> Admission:
    return Admission(
        row=req.residency.row,
        request_id=req.id,
        params=req.params,
        token_ids=np.array(req.tokens, dtype=np.int32),
        num_prompt=req.num_prompt,
    )
