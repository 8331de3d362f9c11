"""A checkpoint's tokens as llguidance takes them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from llguidance import LLTokenizer, TokenizerWrapper

from forebay.text.token_bytes import TokenBytes


class _Tokens:
    """What `TokenizerWrapper` asks for."""

    bos_token_id = None

    def __init__(
        self, table: TokenBytes, encode: Callable[[str], list[int]], eos_token_ids: Sequence[int], vocab_size: int
    ) -> None:
        self._encode = encode
        self.eos_token_id = eos_token_ids[0]
        self.tokens = [table.spelled(token) for token in range(vocab_size)]
        self.special_token_ids = sorted(table.skipped)

    def __call__(self, text: str) -> list[int]:
        return self._encode(text)


def vocabulary(
    table: TokenBytes, encode: Callable[[str], list[int]], eos_token_ids: Sequence[int], vocab_size: int
) -> LLTokenizer:
    """Of a model with `vocab_size` columns: those without bytes, which pad it, and control tokens are never text.
    `encode` says of which tokens the model would make a text."""
    tokens = _Tokens(table, encode, eos_token_ids, vocab_size)
    return LLTokenizer(TokenizerWrapper(tokens), n_vocab=vocab_size, eos_token=list(eos_token_ids))
