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
import torch

from forebay.memory.slots import PAD, Ids, inside
from forebay.requests.step_plan import StepResult, TokenLogprob
from forebay.runtime.host.to_host import ToHost
from forebay.runtime.sampling.logprobs import unpack
from forebay.runtime.sampling.pooling import Vectors
from forebay.runtime.sampling.prompt_logprobs import ScoredChunk
from forebay.runtime.sampling.row_options import Sampling


@dataclass(frozen=True, slots=True)
class CopiedStep:
    """A step without sequences, whose copies, and slices of encoders, were launched.

    `loaded` is an event behind what it loads from a tier of the prefix cache; None: it is there, or there is nothing.
    """

    lost: tuple[int, ...]
    loaded: torch.cuda.Event | None = None

    def result(self) -> StepResult:
        """Wait for what was loaded, so that the step's duration is that of its loads. Nothing was sampled."""
        if self.loaded is not None:
            self.loaded.synchronize()
        return StepResult(token_ids=[], lost=self.lost)


@dataclass(frozen=True, slots=True)
class LaunchedStep:
    """A step whose sampled tokens are on their way: one of each sequence; or, where `q_lens` are given, one behind each
    of as many tokens, and then how many of those count."""

    vocab_size: int
    token_ids: ToHost  # [S], or [T + S]
    sample_mask: npt.NDArray[np.bool_] | None  # [S]; None where all of them sample
    sampling: Sampling
    logprobs: ToHost | None
    chunks: tuple[ScoredChunk, ...] = ()
    q_lens: Ids | None = None  # [S]
    vectors: Vectors | None = None
    counted: Mapping[str, int] = field(default_factory=dict)  # by kind of cache the number of totals behind the ids
    lost: tuple[int, ...] = ()  # as of its result
    replayed: bool = False  # likewise
    padded: bool = False  # likewise

    def result(self) -> StepResult:
        """Wait for the tokens. A sequence with an id that counts and is outside the vocabulary, for whatever reason,
        has failed."""
        array, counts = self._without_counts(self.token_ids.wait())
        return self._sampled(array, counts) if self.q_lens is None else self._accepted(array, self.q_lens, counts)

    def _sampled(self, array: npt.NDArray[Any], counts: dict[str, Ids]) -> StepResult:
        token_ids, failed = self._in_vocabulary(array)
        if self.sample_mask is not None:
            token_ids = list(compress(token_ids, self.sample_mask.tolist()))
        vectors, not_finite = self.vectors.result() if self.vectors else (None, [])
        return StepResult(
            token_ids=token_ids,
            failed=(*failed, *(place for place in not_finite if place not in failed)),
            vectors=vectors,
            logprobs=self._reported(token_ids),
            prompt_logprobs={scored.chunk.extend: scored.entries() for scored in self.chunks} or None,
            counts=counts,
            lost=self.lost,
            replayed=self.replayed,
            padded=self.padded,
        )

    def _in_vocabulary(self, array: npt.NDArray[Any]) -> tuple[list[int], tuple[int, ...]]:
        """Return the ids, PAD for those outside the vocabulary, and the places of these."""
        token_ids: list[int] = array.tolist()
        if not token_ids or (min(token_ids) >= 0 and max(token_ids) < self.vocab_size):
            return token_ids, ()
        outside = (array < 0) | (array >= self.vocab_size)
        return np.where(outside, PAD, array).tolist(), tuple(np.flatnonzero(outside).tolist())

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
        entries = self._reported(token_ids)
        return StepResult(
            token_ids=list(compress(token_ids, counted)),
            num_new=num_new.tolist(),
            failed=tuple(np.unique(seqs[counted & broken]).tolist()),
            logprobs=None if entries is None else list(compress(entries, counted)),
            counts=counts,
            lost=self.lost,
            replayed=self.replayed,
            padded=self.padded,
        )

    def _reported(self, token_ids: list[int]) -> list[TokenLogprob | None] | None:
        if self.logprobs is None:
            return None
        entries: list[TokenLogprob | None] = [None] * len(token_ids)
        which, num_top = self.sampling.reporting.tolist(), self.sampling.num_top.tolist()
        for i, entry in zip(which, unpack(self.logprobs.wait(), [token_ids[i] for i in which], num_top), strict=True):
            entries[i] = entry
        return entries
