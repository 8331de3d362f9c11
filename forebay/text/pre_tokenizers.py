"""How a GGUF names its way of cutting text into words (`tokenizer.ggml.pre`), as `tokenizers` building blocks.

The names and expressions are those of llama.cpp's `llama-vocab.cpp`.
"""

from __future__ import annotations

from typing import Final

from tokenizers import Regex, normalizers, pre_tokenizers

from forebay.base.errors import ModelError, brief

_LLAMA3: Final = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2: Final = _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
_TEKKEN: Final = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_BY_EXPRESSION: Final = {
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "smaug-bpe": _LLAMA3,
    "dbrx": _LLAMA3,
    "qwen2": _QWEN2,
    "tekken": _TEKKEN,
}
_GPT2: Final = ("default", "gpt-2", "gpt2", "olmo", "phi-2", "jina-en", "mpt")
_GPT2_SINGLE_DIGITS: Final = ("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone")
_WHOLE_WORDS_FIRST: Final = ("llama-bpe", "llama3", "llama-v3", "tekken")  # a word in the vocabulary is not merged


def pre_tokenizer(pre: str) -> pre_tokenizers.PreTokenizer:
    """Raises ModelError for a name it does not know: a guess would give other ids without anybody noticing."""
    if pre in _GPT2:
        return pre_tokenizers.ByteLevel(add_prefix_space=False)
    if pre in _GPT2_SINGLE_DIGITS:
        digits = pre_tokenizers.Digits(individual_digits=True)
        return pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    if pre in _BY_EXPRESSION:
        words = pre_tokenizers.Split(Regex(_BY_EXPRESSION[pre]), behavior="isolated")
        return pre_tokenizers.Sequence([words, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    known = ", ".join((*_GPT2, *_GPT2_SINGLE_DIGITS, *_BY_EXPRESSION))
    raise ModelError(f"tokenizer.ggml.pre is {brief(pre)}; known are {known}: use a safetensors folder of this model")


def normalizer(pre: str) -> normalizers.Normalizer | None:
    """Return the Unicode normalizer that the pre-tokenizer `pre` implies; None if it has none."""
    return normalizers.NFC() if pre == "qwen2" else None


def ignores_merges(pre: str) -> bool:
    """Return whether a word that is a token by itself is looked up before BPE merges."""
    return pre in _WHOLE_WORDS_FIRST
