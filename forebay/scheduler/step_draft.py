"""The next step while it is decided, and frozen into its plan."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypedDict

import numpy as np

from forebay.base.parts import Mask
from forebay.memory.draft import Draft
from forebay.memory.kinds.kind import Kinds
from forebay.memory.pictures import Pictures
from forebay.memory.slots import NO_IDS, PAD, Ids
from forebay.requests.request import Request
from forebay.requests.rope_positions import rope_positions
from forebay.requests.schedule_batch import Chunk
from forebay.requests.step_plan import (
    Admission,
    Encode,
    HostCopy,
    HostWork,
    KindWork,
    PictureWork,
    RowWrites,
    StepPlan,
    TierCopy,
    kind_work,
)


class _Sequences(TypedDict):
    """The columns of a plan by sequence; see `StepPlan`."""

    rows: Ids
    q_lens: Ids
    starts: Ids
    input_ids: Ids
    drafts: Ids
    sample_mask: Mask
    pooled: tuple[int, ...]


class _Work(TypedDict, total=False):
    """The parts of a plan that only some steps have; see `StepPlan`."""

    kinds: KindWork
    writes: RowWrites
    host: HostWork
    pictures: PictureWork


@dataclass(eq=False)
class StepDraft(Draft):
    """The prompts that a step computes, and its copies to the host and back, besides its changes of memory."""

    drops: list[int] = field(default_factory=list)
    saves: list[HostCopy] = field(default_factory=list, init=False)
    loads: list[HostCopy] = field(default_factory=list, init=False)
    stores: list[TierCopy] = field(default_factory=list, init=False)
    fetches: list[TierCopy] = field(default_factory=list, init=False)
    copies_tiers: bool = field(default=False, init=False)  # there are stores or fetches
    chunks: list[Chunk] = field(default_factory=list, init=False)
    prebuilt: list[Request] = field(default_factory=list, init=False)  # run from here on; other engines computed them
    draft_tokens: list[int] = field(default_factory=list, init=False)  # of host proposers, in the order of the decodes
    masked: Ids = field(default_factory=lambda: NO_IDS, init=False)  # sequences under a grammar
    pictures: Pictures | None = None
    encodes: list[Encode] = field(default_factory=list, init=False)
    encoded_for: dict[Request, int] = field(default_factory=dict, init=False)  # as of a flight

    @property
    def reads_released(self) -> bool:
        """Whether the step copies memory to other places that is released, or may be before the step."""
        return bool(self.saves or self.stores)

    def forget_row(self, row: int) -> None:
        super().forget_row(row)
        if self.prebuilt:
            self.prebuilt = [req for req in self.prebuilt if req.maybe_allocation]

    def freeze(self, decodes: Ids, admitted: Sequence[Request], kinds: Kinds) -> StepPlan:
        """Return the plan of the draft and of the decodes in these rows; `admitted` are the requests that start."""
        sequences = self._sequences(decodes)
        work = _Work()
        if kinds.planned:
            work["kinds"] = kind_work({kind.name: kind.columns(self, sequences["rows"]) for kind in kinds.planned})
        write_rows, columns, pages = self.row_writes
        if len(write_rows):
            work["writes"] = RowWrites(write_rows=write_rows, write_columns=columns, write_pages=pages)
        if self.saves or self.loads or self.drops or self.copies_tiers:
            work["host"] = HostWork(
                saves=tuple(self.saves),
                drops=tuple(self.drops),
                loads=tuple(self.loads),
                stores=tuple(self.stores),
                fetches=tuple(self.fetches),
            )
        if (pictures := self.pictures) is not None:
            work["pictures"] = self._picture_work(pictures)
        return StepPlan(
            step=self.step,
            num_extends=len(self.chunks),
            admissions=tuple(
                self._admission(req, prebuilt=i >= len(admitted)) for i, req in enumerate((*admitted, *self.prebuilt))
            ),
            masked=self.masked,
            prompt_logprobs=tuple(i for i, chunk in enumerate(self.chunks) if chunk.req.wants_prompt_logprobs),
            **sequences,
            **work,
        )

    def _admission(self, req: Request, *, prebuilt: bool) -> Admission:
        """Return what the device must know of a request that starts; another engine computed a `prebuilt` one."""
        tokens, pictures = np.array(req.tokens, dtype=np.int32), self.pictures
        return Admission(
            row=req.allocation.row,
            request_id=req.id,
            params=req.params,
            token_ids=tokens if pictures is None else pictures.as_tokens(tokens),
            num_prompt=req.num_prompt,
            stop_ids=tuple(req.stop_ids) if req.num_output < req.params.min_tokens else (),
            prebuilt=prebuilt,
            adapter=req.adapter.slot if req.adapter else PAD,
            rope_delta=req.pictures.rope_delta if req.pictures and pictures and pictures.config.mrope else 0,
        )

    def _sequences(self, rows: Ids) -> _Sequences:
        """Return the columns of the plan's sequences: the chunks, then the decodes in `rows`."""
        q_lens, sample_mask = np.ones(len(rows), dtype=np.int64), np.ones(len(rows), dtype=np.bool_)
        starts = input_ids = NO_IDS
        pooled: list[int] = []
        if self.num_drafts is not None:
            q_lens += self.num_drafts
        if self.chunks:
            allocations = [chunk.req.allocation for chunk in self.chunks]
            spans = zip(allocations, self.chunks, strict=True)
            extends = [
                (allocation.row, start, stop, allocation.extend_target) for allocation, (_, start, stop) in spans
            ]
            tokens = [np.frombuffer(req.tokens[start:stop], dtype=np.int32) for req, start, stop in self.chunks]
            extended, starts, stops, targets = np.array(extends, dtype=np.int64).T
            rows = np.concatenate([extended, rows])
            q_lens = np.concatenate([stops - starts, q_lens])
            input_ids = np.concatenate(tokens, dtype=np.int64)
            sample_mask = np.concatenate([stops == targets, sample_mask])
            pooled = [i for i, chunk in enumerate(self.chunks) if chunk.req.params.pooling]
            sample_mask[pooled] = False
        if self.pictures is not None:
            input_ids = self.pictures.as_inputs(input_ids)
        return _Sequences(
            rows=rows,
            q_lens=q_lens,
            starts=starts,
            input_ids=input_ids,
            drafts=np.array(self.draft_tokens, dtype=np.int64) if self.draft_tokens else NO_IDS,
            sample_mask=sample_mask,
            pooled=tuple(pooled),
        )

    def _picture_work(self, pictures: Pictures) -> PictureWork:
        """Return the rows of encodings that the chunks read, their spans, the slices to encode, and the pictures that
        the device forgets."""
        tokens, rows, spans, lens, first = [NO_IDS], [NO_IDS], [NO_IDS], [NO_IDS], 0
        for req, start, stop in self.chunks:
            if req.pictures is not None:
                of_chunk, taken = req.pictures.rows(start, stop)
                tokens.append(first + of_chunk)
                rows.append(taken)
                if pictures.config.longest_span:
                    begins, lengths = req.pictures.spans(start, stop)
                    spans.append(first + begins)
                    lens.append(lengths)
            first += stop - start
        positions = NO_IDS
        if pictures.config.mrope and any(req.pictures for req, _, _ in self.chunks):
            positions = np.concatenate([_rope_positions(chunk) for chunk in self.chunks], axis=1).reshape(-1)
        drops, pictures.drops = tuple(sorted(pictures.drops)), set()
        return PictureWork(
            picture_tokens=np.concatenate(tokens),
            picture_rows=np.concatenate(rows),
            span_starts=np.concatenate(spans),
            span_lens=np.concatenate(lens),
            rope_positions=positions,
            encodes=tuple(self.encodes),
            drops=drops,
        )


def _rope_positions(chunk: Chunk) -> Ids:
    """The rotary positions of a chunk's tokens, [3, tokens]."""
    req, start, stop = chunk
    return rope_positions((), start, stop) if req.pictures is None else req.pictures.rope_positions(start, stop)
