"""A checkpoint's tokens as llguidance takes them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Final, Self

import msgspec
from llguidance import LLTokenizer, TokenizerWrapper

from forebay.base.errors import InvalidRequest
from forebay.text.token_bytes import TokenBytes

FORCED_CHARS: Final = 512  # that are made tokens of: more than any step has drafts for
MAX_REMEMBERED: Final = 1024  # of such texts, which come again with every output of a schema
_OF_STRINGS: Final = r'[^"\\\x00-\x1F\x7F]'
# Texts whose tokens a mask allows all at once, where it can, and need not walk: white space, and what stands in strings
# of which so many characters are left. With llguidance's own lengths, 10 and 30, masks take a fifth longer.
SLICES: Final = [
    r"[\x20\x0A\x0D\x09]+",
    *(f"{_OF_STRINGS}{{1,{most}}}" for most in (6, 10, 15, 20, 30)),
    f"{_OF_STRINGS}+",
]


class Vocabulary(msgspec.Struct, frozen=True, array_like=True):
    """The vocabulary of a model, with one column for each of `tokens`: those without bytes, which pad it, and `special`
    ones are never text."""

    tokens: list[bytes]
    special: list[int]
    ends: list[int]

    @classmethod
    def of(cls, table: TokenBytes, ends: Sequence[int], num_columns: int) -> Self:
        """Raises InvalidRequest if there are no end tokens."""
        if not ends:
            raise InvalidRequest("a grammar ends with an end token, and this checkpoint names none", param="grammar")
        tokens = table.spellings()[:num_columns]
        return cls([*tokens, *[b""] * (num_columns - len(tokens))], sorted(table.skipped), list(ends))

    def tokenizer(self, encode: Callable[[str], list[int]]) -> LLTokenizer:
        """`encode` says of which tokens the model would make a text."""
        wrapper = TokenizerWrapper(_Tokens(self, encode))
        return LLTokenizer(wrapper, n_vocab=len(self.tokens), eos_token=self.ends, slices=SLICES)


class _Tokens:
    """The tokenizer interface that `TokenizerWrapper` expects. For each mask llguidance asks it for the tokens of the
    last token and of all forced text behind it, and uses only the first of them: of a long text it tokenizes the
    beginning."""

    bos_token_id = None

    def __init__(self, vocabulary: Vocabulary, encode: Callable[[str], list[int]]) -> None:
        self._encode = lru_cache(MAX_REMEMBERED)(encode)
        # llguidance takes some away again at the end, together no longer than the longest one.
        self._most_chars = max(FORCED_CHARS, 4 * max(map(len, vocabulary.tokens)))
        self.eos_token_id = vocabulary.ends[0]
        self.tokens, self.special_token_ids = vocabulary.tokens, vocabulary.special

    def __call__(self, text: str) -> list[int]:
        return self._encode(text[: self._most_chars])
