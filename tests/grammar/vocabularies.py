"""One small vocabulary for all: bytes, a few words, and columns that only pad it."""

from __future__ import annotations

from functools import cache

from llguidance import LLTokenizer

from forebay.grammar.vocabulary import Vocabulary
from tests.text.tiny_tokenizer import tiny_tokenizer

EOS = 2
TOKENIZER = tiny_tokenizer(300)
PADDED = 333
VOCABULARY = Vocabulary.of(TOKENIZER.table, [EOS], PADDED)


def encode(text: str) -> list[int]:
    return TOKENIZER.encode(text, add_special_tokens=False)


@cache
def tokenizer() -> LLTokenizer:
    return VOCABULARY.tokenizer(encode)
