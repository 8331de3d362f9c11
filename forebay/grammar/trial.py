"""Outputs that are begun for trial, since some grammars compile and break when they are used."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import numpy as np
from llguidance import LLMatcher

from forebay.grammar.compiler import refused, why_broken
from forebay.grammar.vocabulary import Vocabulary
from forebay.memory.slots import Ids
from forebay.requests.sampling_params import Grammar

NUM_TOKENS: Final = 8  # of each output: those made to explode do so behind six
_GOLDEN: Final = 0.618  # multiples of it fall everywhere between whole numbers


class Trial:
    """Two outputs of each grammar: one of the longest tokens, which goes through most of it, and one of any."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._lengths = np.array([len(token) for token in vocabulary.tokens])
        self._lengths[vocabulary.special] = 0

    def run(self, grammar: Grammar, prototype: LLMatcher) -> None:
        """Raises InvalidRequest where one breaks."""
        self._begin(grammar, prototype.deep_copy(), lambda may, _: int(self._lengths[may].argmax()))
        self._begin(grammar, prototype.deep_copy(), lambda may, at: int(len(may) * (_GOLDEN * (at + 1) % 1)))

    def _begin(self, grammar: Grammar, matcher: LLMatcher, choose: Callable[[Ids, int], int]) -> None:
        for at in range(NUM_TOKENS):
            bits = np.frombuffer(matcher.compute_bitmask(), dtype=np.uint8)
            if why := why_broken(matcher):
                raise refused(grammar, f"an output breaks behind {at} tokens: {why}")
            columns = np.unpackbits(bits, count=len(self._lengths), bitorder="little")
            may = np.flatnonzero(columns & (self._lengths > 0))
            if not len(may):
                return
            matcher.consume_token(int(may[choose(may, at)]))
