"""Tokenizers of text encoders in the metadata of a GGUF file: WordPiece (`bert`), Unigram (`t5`), and the tokens that
stand around one text and around two."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np
import tokenizers
from tokenizers import Regex, models, normalizers, pre_tokenizers, processors

from forebay.base.errors import ModelError, brief

WORDPIECE: Final = "bert"
UNIGRAM: Final = "t5"
ARCHITECTURES: Final = ("bert", "jina-bert-v2", "modern-bert", "nomic-bert")
"""llama.cpp's names of text encoders."""

_CONTROL: Final = 3  # ggml's token type
_SPACE: Final = "\u2581"  # begins a word in files
_CONTINUES: Final = "##"
_MOST_CHARS: Final = 100  # of a word that is cut, as in BERT's files
_MAX_CHARSMAP: Final = 1 << 24
_KEY: Final = "tokenizer.ggml"


def wordpiece_pieces(tokens: Sequence[str], types: Sequence[int]) -> list[str]:
    """Return the pieces of a WordPiece vocabulary in BERT's spelling: files mark the beginnings of words, not what
    continues them."""
    return [_piece(token, kind) for token, kind in zip(tokens, types, strict=True)]


def _piece(token: str, kind: int) -> str:
    if kind == _CONTROL:
        return token
    return token.removeprefix(_SPACE) if token.startswith(_SPACE) else _CONTINUES + token


def wordpiece(pieces: Sequence[str], unknown: str, *, lowercase: bool, strip_accents: bool | None) -> Any:
    """Return BERT's tokenizer. `strip_accents` None is as `lowercase`. Raises ModelError for pieces that make none."""
    vocab = {piece: token for token, piece in enumerate(pieces)}
    if unknown not in vocab:
        raise ModelError(f"the GGUF file's vocabulary has no token {unknown!r} for words that are unknown")
    backend = tokenizers.Tokenizer(
        models.WordPiece(vocab=vocab, unk_token=unknown, max_input_chars_per_word=_MOST_CHARS)
    )
    backend.normalizer = normalizers.BertNormalizer(
        clean_text=True, handle_chinese_chars=True, strip_accents=strip_accents, lowercase=lowercase
    )
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    return backend


def unigram(metadata: Mapping[str, Any], tokens: Sequence[str], scores: Sequence[float], unknown: int) -> Any:
    """Return SentencePiece's unigram tokenizer, as XLM-RoBERTa's. Raises ModelError for a map of characters that is
    none."""
    backend = tokenizers.Tokenizer(models.Unigram(list(zip(tokens, scores, strict=True)), unk_id=unknown))
    steps: list[Any] = [normalizers.Replace(Regex(" {2,}"), " ")]
    charsmap = metadata.get(f"{_KEY}.precompiled_charsmap")
    if charsmap is not None:
        steps.insert(0, _precompiled(charsmap))
    backend.normalizer = normalizers.Sequence(steps)
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.WhitespaceSplit(),
            pre_tokenizers.Metaspace(replacement=_SPACE, prepend_scheme="always"),
        ]
    )
    return backend


def _precompiled(charsmap: Any) -> normalizers.Normalizer:
    if (
        not isinstance(charsmap, np.ndarray)
        or charsmap.dtype not in (np.uint8, np.int8)
        or charsmap.size > _MAX_CHARSMAP
    ):
        raise ModelError(f"{_KEY}.precompiled_charsmap is {brief(charsmap)}, not at most {_MAX_CHARSMAP} bytes")
    try:
        found: normalizers.Normalizer = normalizers.Precompiled(charsmap.tobytes())
    except Exception as error:  # the package raises bare Exception for bytes that are no map
        raise ModelError(f"{_KEY}.precompiled_charsmap cannot be read: {str(error)[:200]}") from error
    return found


def frame(backend: tokenizers.Tokenizer, start: tuple[str, int], end: tuple[str, int], *, twice: bool) -> None:
    """Put the tokens of a text encoder around a text and around two, of which the second has another kind. `twice`: two
    end tokens stand between them, and both have one kind, as RoBERTa reads them."""
    first, last = start[0], end[0]
    pair = f"{first} $A {last} {last} $B {last}" if twice else f"{first} $A {last} $B:1 {last}:1"
    backend.post_processor = processors.TemplateProcessing(
        single=f"{first} $A {last}", pair=pair, special_tokens=[start, end]
    )
