"""Log-probabilities of prompt positions, computed from hidden states in blocks.

Shape letters: T tokens, X prompt positions with log-probabilities, H hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from forebay.memory.slots import NO_IDS, Ids
from forebay.requests.step_plan import TokenLogprob
from forebay.runtime.host.to_host import ToHost
from forebay.runtime.sampling.logprobs import block_size, token_logprobs, unpack


@dataclass(frozen=True, slots=True)
class PromptChunk:
    """The tokens of one extend. Their log-probabilities are those of the tokens that follow them, `targets`: one less
    than tokens if the chunk ends the prompt."""

    extend: int  # place in the plan
    first: int  # index of the first token in the step
    num_tokens: int
    targets: Ids
    num_top: int  # alternatives of each target


@dataclass(frozen=True, slots=True)
class ScoredChunk:
    """A chunk whose log-probabilities are on their way to the host."""

    chunk: PromptChunk
    blocks: list[ToHost]

    def entries(self) -> list[TokenLogprob | None]:
        """Wait, and return an entry for each token; None for one without a target."""
        chunk, entries = self.chunk, list[TokenLogprob | None]()
        for block in self.blocks:
            packed = block.wait()
            known = chunk.targets[len(entries) : len(entries) + len(packed)].tolist()
            entries += unpack(packed, known, [chunk.num_top] * len(packed))
        return entries + [None] * (chunk.num_tokens - len(entries))


def targets_of(chunks: Sequence[PromptChunk]) -> Ids:
    """Return the targets of all chunks [X]."""
    return np.concatenate([chunk.targets for chunk in chunks]) if chunks else NO_IDS


def score(
    chunks: Sequence[PromptChunk],
    hidden: Tensor,
    targets: Tensor,
    logits: Callable[[Tensor], Tensor],
    vocab_size: int,
) -> tuple[ScoredChunk, ...]:
    """Compute the log-probabilities of targets [X] from the step's hidden [T, H]. `logits` maps [n, H] to [n, V]."""
    most, scored, before = block_size(vocab_size), [], 0
    for chunk in chunks:
        blocks = []
        for at in range(0, len(chunk.targets), most):
            n = min(most, len(chunk.targets) - at)
            first = chunk.first + at
            known = targets[before + at : before + at + n]
            blocks.append(ToHost(token_logprobs(logits(hidden[first : first + n]), known, chunk.num_top)))
        scored.append(ScoredChunk(chunk, blocks))
        before += len(chunk.targets)
    return tuple(scored)
