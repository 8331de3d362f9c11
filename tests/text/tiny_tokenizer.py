"""A byte-level tokenizer made here: every byte, a few words, three control tokens. No files."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

from forebay.formats.strings import Strings
from forebay.text.backend import Backend
from forebay.text.gguf_tokenizer import from_gguf
from forebay.text.token_bytes import _ALPHABET
from forebay.text.tokenizer import Tokenizer
from forebay.text.tokenizer_parts import TokenizerParts

CONTROL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def tiny_metadata(vocab_size: int = 49152, template: str | None = TEMPLATE) -> dict[str, Any]:
    """As a GGUF file would have it. Ids 3..258 are the bytes, then merges, then numbered words up to `vocab_size`."""
    letters = [chr(code) for code in sorted(_ALPHABET, key=lambda code: _ALPHABET[code])]
    merges = ["h e", "l l", "he ll", "hell o", "Ġ w", "o r", "l d", "Ġw or", "Ġwor ld"]
    tokens = [*CONTROL, *letters, *(merge.replace(" ", "") for merge in merges)]
    tokens += [f"Ġw{i}" for i in range(vocab_size - len(tokens))]
    metadata: dict[str, Any] = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": Strings.of(tokens),
        "tokenizer.ggml.token_type": [3] * len(CONTROL) + [1] * (len(tokens) - len(CONTROL)),
        "tokenizer.ggml.merges": Strings.of(merges),
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.ggml.add_bos_token": False,
    }
    return metadata if template is None else {**metadata, "tokenizer.chat_template": template}


@cache
def _parts(vocab_size: int) -> TokenizerParts:
    return from_gguf(tiny_metadata(vocab_size, None))


@cache
def _backend(vocab_size: int) -> Backend:
    return Backend(_parts(vocab_size).backend)


def tiny_tokenizer(vocab_size: int = 49152, template: str | None = TEMPLATE) -> Tokenizer:
    return Tokenizer(replace(_parts(vocab_size), template=template))


def sharing_tokenizer(template: str, vocab_size: int = 49152) -> Tokenizer:
    """Return a tokenizer that shares the copies of its vocabulary with others made here: each copy takes a tenth of a
    second."""
    tokenizer = tiny_tokenizer(vocab_size, template)
    tokenizer._backend = _backend(vocab_size)
    return tokenizer
