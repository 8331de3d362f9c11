"""A step whose tokens are on their way to the host, and what becomes of them there.

Shape letters: S sequences, T tokens, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import compress
from typing import Any

import numpy as np
import numpy.typing as npt

from forebay.memory.slots import PAD, Ids, inside
from forebay.requests.step_plan import StepResult, TokenLogprob
from forebay.runtime.logprobs import unpack
from forebay.runtime.pooling import Vectors
from forebay.runtime.row_options import Sampling
from forebay.runtime.to_host import ToHost


@dataclass(frozen=True, slots=True)
class PromptChunk:
    """The log-probabilities of one extend's positions: the tokens asked about, and the blocks they come in."""

    extend: int
    num_positions: int
    targets: Ids
    num_top: int
    blocks: list[ToHost]


@dataclass(frozen=True, slots=True)
class LaunchedStep:
    """A step whose sampled tokens are on their way: one of each sequence; or, where `q_lens` are given, one behind each
    of as many tokens, and then how many of those count."""

    vocab_size: int
    token_ids: ToHost  # [S], or [T + S]
    sample_mask: npt.NDArray[np.bool_] | None  # [S]; None where all of them sample
    sampling: Sampling
    logprobs: ToHost | None
    chunks: tuple[PromptChunk, ...] = ()
    q_lens: Ids | None = None  # [S]
    vectors: Vectors | None = None
    counted: Mapping[str, int] = field(default_factory=dict)  # by kind of cache the number of totals behind the ids

    def result(self) -> StepResult:
        """Wait for the tokens. A sequence with an id that counts and is outside the vocabulary, for whatever reason,
        has failed."""
        array, counts = self._without_counts(self.token_ids.wait())
        if self.q_lens is not None:
            return self._accepted(array, self.q_lens, counts)
        token_ids = array.tolist()
        failed: tuple[int, ...] = ()
        if token_ids and not (min(token_ids) >= 0 and max(token_ids) < self.vocab_size):
            failed = tuple(np.flatnonzero((array < 0) | (array >= self.vocab_size)).tolist())
            token_ids = [PAD if i in failed else token for i, token in enumerate(token_ids)]
        if self.sample_mask is not None:
            token_ids = list(compress(token_ids, self.sample_mask.tolist()))
        vectors, not_finite = self.vectors.result() if self.vectors else (None, [])
        return StepResult(
            token_ids=token_ids,
            failed=(*failed, *(place for place in not_finite if place not in failed)),
            vectors=vectors,
            logprobs=None if self.logprobs is None else self._reported(token_ids, self.logprobs.wait()),
            prompt_logprobs={chunk.extend: _prompt_entries(chunk) for chunk in self.chunks} or None,
            counts=counts,
        )

    def _without_counts(self, array: npt.NDArray[Any]) -> tuple[npt.NDArray[Any], dict[str, Ids]]:
        """Return the ids, and by kind of cache the totals that follow them."""
        counts: dict[str, Ids] = {}
        for name, size in reversed([*self.counted.items()]):
            array, counts[name] = array[:-size], array[-size:]
        return array, counts

    def _accepted(self, array: npt.NDArray[Any], q_lens: Ids, counts: dict[str, Ids]) -> StepResult:
        seqs = np.repeat(np.arange(len(q_lens)), q_lens)
        num_new, ids = array[len(seqs) :], array[: len(seqs)]
        places, broken = inside(q_lens), (ids < 0) | (ids >= self.vocab_size)
        np.minimum.at(num_new, seqs[broken], places[broken] + 1)
        counted = places < num_new[seqs]
        token_ids = np.where(broken, PAD, ids).tolist()
        entries = None if self.logprobs is None else self._reported(token_ids, self.logprobs.wait())
        return StepResult(
            token_ids=list(compress(token_ids, counted)),
            num_new=num_new.tolist(),
            failed=tuple(np.unique(seqs[counted & broken]).tolist()),
            logprobs=None if entries is None else list(compress(entries, counted)),
            counts=counts,
        )

    def _reported(self, token_ids: list[int], packed: npt.NDArray[Any]) -> list[TokenLogprob | None]:
        entries: list[TokenLogprob | None] = [None] * len(token_ids)
        which, num_top = self.sampling.reporting.tolist(), self.sampling.num_top.tolist()
        for i, entry in zip(which, unpack(packed, [token_ids[i] for i in which], num_top), strict=True):
            entries[i] = entry
        return entries


def _prompt_entries(chunk: PromptChunk) -> list[TokenLogprob | None]:
    entries: list[TokenLogprob | None] = []
    for block in chunk.blocks:
        packed = block.wait()
        known = chunk.targets[len(entries) : len(entries) + len(packed)].tolist()
        entries += unpack(packed, known, [chunk.num_top] * len(packed))
    return entries + [None] * (chunk.num_positions - len(entries))
