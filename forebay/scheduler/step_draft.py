"""The next step while it is decided, and frozen into its plan."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from forebay.memory.draft import Draft
from forebay.memory.kinds.kind import Kind
from forebay.memory.req_to_token_pool import ReqToTokenPool
from forebay.memory.slots import NO_IDS, Ids
from forebay.requests.request import Request
from forebay.requests.schedule_batch import Chunk
from forebay.requests.step_plan import Admission, HostCopy, HostWork, RowWrites, StepPlan, kind_work


class StepDraft(Draft):
    """The prompts that a step computes, and its copies to the host and back, besides its changes of memory."""

    def __init__(self, step: int, rows: ReqToTokenPool, drops: Iterable[int] = ()) -> None:
        super().__init__(step, rows)
        self.chunks: list[Chunk] = []
        self.prebuilt: list[Request] = []  # who runs from this step on with what another engine has computed
        self.draft_tokens: list[int] = []  # of host proposers, in the order of the decodes
        self.masked: Ids = NO_IDS  # sequences under a grammar
        self.saves: list[HostCopy] = []
        self.loads: list[HostCopy] = []
        self.drops = list(drops)

    def forget_row(self, row: int) -> None:
        super().forget_row(row)
        if self.prebuilt:
            self.prebuilt = [req for req in self.prebuilt if req.held]

    def freeze(self, decodes: Ids, admitted: Sequence[Request], kinds: Sequence[Kind]) -> StepPlan:
        """The plan of the draft and of the decodes in these rows."""
        sequences = self._sequences(decodes)
        pooled = [i for i, chunk in enumerate(self.chunks) if chunk.req.params.pooling]
        if pooled:
            sequences["sample_mask"][pooled] = False
        work: dict[str, Any] = {}
        if kinds:
            work["kinds"] = kind_work({kind.name: kind.columns(self, sequences["rows"]) for kind in kinds})
        write_rows, columns, pages = self.row_writes
        if len(write_rows):
            work["writes"] = RowWrites(write_rows=write_rows, write_columns=columns, write_pages=pages)
        if self.saves or self.loads or self.drops:
            work["host"] = HostWork(saves=tuple(self.saves), drops=tuple(self.drops), loads=tuple(self.loads))
        return StepPlan(
            step=self.step,
            num_extends=len(self.chunks),
            admissions=tuple(
                Admission(
                    row=req.residency.row,
                    request_id=req.id,
                    params=req.params,
                    token_ids=np.array(req.tokens, dtype=np.int32),
                    num_prompt=req.num_prompt,
                    stop_ids=tuple(req.stop_ids) if req.num_output < req.params.min_tokens else (),
                    prebuilt=i >= len(admitted),
                )
                for i, req in enumerate((*admitted, *self.prebuilt))
            ),
            masked=self.masked,
            prompt_logprobs=tuple(i for i, chunk in enumerate(self.chunks) if chunk.req.wants_prompt_logprobs),
            pooled=tuple(pooled),
            **sequences,
            **work,
        )

    def _sequences(self, rows: Ids) -> dict[str, Any]:
        """The plan's columns about its sequences: the chunks, and the decodes in `rows`."""
        q_lens, sample_mask = np.ones(len(rows), dtype=np.int64), np.ones(len(rows), dtype=np.bool_)
        starts = input_ids = NO_IDS
        if self.num_drafts is not None:
            q_lens += self.num_drafts
        if self.chunks:
            residents = [chunk.req.residency for chunk in self.chunks]
            spans = zip(residents, self.chunks, strict=True)
            extends = [(held.row, start, stop, held.extend_target) for held, (_, start, stop) in spans]
            tokens = [np.frombuffer(req.tokens[start:stop], dtype=np.int32) for req, start, stop in self.chunks]
            extended, starts, stops, targets = np.array(extends, dtype=np.int64).T
            rows = np.concatenate([extended, rows])
            q_lens = np.concatenate([stops - starts, q_lens])
            input_ids = np.concatenate(tokens, dtype=np.int64)
            sample_mask = np.concatenate([stops == targets, sample_mask])
        return {
            "rows": rows,
            "q_lens": q_lens,
            "starts": starts,
            "input_ids": input_ids,
            "drafts": np.array(self.draft_tokens, dtype=np.int64) if self.draft_tokens else NO_IDS,
            "sample_mask": sample_mask,
        }
