"""A checkpoint's tokens as llguidance takes them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Self

import msgspec
from llguidance import LLTokenizer, TokenizerWrapper

from forebay.base.errors import InvalidRequest
from forebay.text.token_bytes import TokenBytes


class Vocabulary(msgspec.Struct, frozen=True, array_like=True):
    """Of a model with so many columns as there are `tokens`: those without bytes, which pad it, and `special` ones are
    never text."""

    tokens: list[bytes]
    special: list[int]
    ends: list[int]

    @classmethod
    def of(cls, table: TokenBytes, ends: Sequence[int], num_columns: int) -> Self:
        """Raises InvalidRequest where there are no ends."""
        if not ends:
            raise InvalidRequest("a grammar ends with an end token, and this checkpoint names none", param="grammar")
        tokens = table.spellings()[:num_columns]
        return cls([*tokens, *[b""] * (num_columns - len(tokens))], sorted(table.skipped), list(ends))

    def tokenizer(self, encode: Callable[[str], list[int]]) -> LLTokenizer:
        """`encode` says of which tokens the model would make a text."""
        wrapper = TokenizerWrapper(_Tokens(self, encode))
        return LLTokenizer(wrapper, n_vocab=len(self.tokens), eos_token=self.ends)


class _Tokens:
    """What `TokenizerWrapper` asks for."""

    bos_token_id = None

    def __init__(self, vocabulary: Vocabulary, encode: Callable[[str], list[int]]) -> None:
        self._encode = encode
        self.eos_token_id = vocabulary.ends[0]
        self.tokens, self.special_token_ids = vocabulary.tokens, vocabulary.special

    def __call__(self, text: str) -> list[int]:
        return self._encode(text)
