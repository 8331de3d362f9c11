"""Dry runs of grammars, since some grammars compile and fail only in use.

A dry run has an eighth of the limits that the engine has (`compiler.ENGINE`): a grammar that passes has room to spare.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import numpy as np
from llguidance import LLMatcher, LLTokenizer

from forebay.grammar.compiler import CHECKED, GROWING, compiled, refused, why_broken
from forebay.grammar.vocabulary import Vocabulary
from forebay.memory.slots import Ids
from forebay.requests.sampling_params import Grammar, GrammarKind

NUM_TOKENS: Final = 12  # of each output: those made to explode do so behind six
NUM_GROWING: Final = 256  # of an output of the shortest tokens: an ambiguous grammar has 500 items a row by then
_GOLDEN: Final = 0.618  # multiples of it fall everywhere between whole numbers

Choose = Callable[[Ids, int], int]
"""The place among the allowed tokens, in ascending order, of the one that comes at a position."""


class DryRun:
    """Starts short outputs of each grammar, to see whether its matcher fails.

    One has the tokens with the longest text, which covers most of the grammar; one the shortest, which visits most rows
    of the parser; one the longest with white space; and one any tokens.
    """

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._lengths = np.array([len(token) for token in vocabulary.tokens])
        self._lengths[vocabulary.special] = 0
        self._text_lengths = np.array([len(token.strip()) for token in vocabulary.tokens])

    def run(self, grammar: Grammar, tokenizer: LLTokenizer) -> None:
        """Start the outputs; raises InvalidRequest if one breaks."""
        prototype = compiled(grammar, tokenizer, CHECKED)
        for choose in (self._longest_text, self._shortest_text, self._longest, self._any):
            self._begin(grammar, prototype.deep_copy(), NUM_TOKENS, choose)
        if grammar.kind is GrammarKind.LARK:
            self._begin(grammar, compiled(grammar, tokenizer, GROWING), NUM_GROWING, self._shortest_text)

    def _longest_text(self, may: Ids, _: int) -> int:
        return int(self._text_lengths[may].argmax())

    def _longest(self, may: Ids, _: int) -> int:
        return int(self._lengths[may].argmax())

    def _shortest_text(self, may: Ids, at: int) -> int:
        """One of the shortest that have a text, each in turn."""
        lengths = self._text_lengths[may]
        shortest = np.flatnonzero(lengths == min(lengths[lengths > 0], default=0))
        return int(shortest[self._any(shortest, at)])

    def _any(self, may: Ids, at: int) -> int:
        return int(len(may) * (_GOLDEN * (at + 1) % 1))

    def _begin(self, grammar: Grammar, matcher: LLMatcher, num_tokens: int, choose: Choose) -> None:
        for at in range(num_tokens):
            bits = np.frombuffer(matcher.compute_bitmask(), dtype=np.uint8)
            if why := why_broken(matcher):
                raise refused(grammar, f"an output breaks behind {at} tokens: {why}")
            columns = np.unpackbits(bits, count=len(self._lengths), bitorder="little")
            may = np.flatnonzero(columns & (self._lengths > 0))
            if not len(may):
                return
            matcher.consume_token(int(may[choose(may, at)]))
            if why := why_broken(matcher):
                raise refused(grammar, f"an output breaks behind {at + 1} tokens: {why}")
