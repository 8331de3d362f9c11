"""The tokenizer in the metadata of a GGUF file, `tokenizer.ggml.*`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

import numpy as np
import tokenizers
from tokenizers import AddedToken, models, normalizers, pre_tokenizers

from forebay.base.errors import ModelError, brief
from forebay.formats.strings import Strings
from forebay.text import gguf_encoder_tokenizers as encoders
from forebay.text.pre_tokenizers import Words, pre_tokenizer, words_of
from forebay.text.token_bytes import PieceReader, byte_level, sentencepiece, wordpiece
from forebay.text.tokenizer_parts import MAX_TOKENS, TokenizerParts

_UNKNOWN, _CONTROL, _USER_DEFINED = 2, 3, 4  # ggml's token types
_NAMED: Final = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding", "sep": "seperator"}  # llama.cpp's
_TEMPLATE: Final = "tokenizer.chat_template"
_ACCENTS: Final = "normalizer.strip_accents"
_ROBERTA: Final = "roberta-bpe"
_STRUCTURE: Final = ("bos", "eos", "eot", "eom")  # control tokens, whatever type a converter gave them
_SENTENCEPIECE_IDS: Final = {"bos": 1, "eos": 2}  # of a `llama` tokenizer that does not say
_TIKTOKEN: Final = "kimi-k2"  # a tiktoken vocabulary: files may leave its merges out, which follow from the ids
_MODELS: Final = {
    "gpt2": "byte-level BPE",
    "llama": "SentencePiece",
    "gemma4": "BPE with byte fallback",
    "whitespace": "words",
    encoders.WORDPIECE: "WordPiece",
    encoders.UNIGRAM: "unigrams of SentencePiece",
}
_CLS, _SEP, _UNK = "[CLS]", "[SEP]", "[UNK]"


def from_gguf(metadata: Mapping[str, Any]) -> TokenizerParts:
    """Return the tokenizer that the metadata describes. Raises ModelError for one that is not known."""
    model, tokens = _model_and_tokens(metadata)
    if metadata.get("general.architecture") in encoders.ARCHITECTURES:
        return _of_encoder(metadata, model, tokens)
    if model in (encoders.WORDPIECE, encoders.UNIGRAM):
        raise ModelError(f"tokenizer.ggml.model is {model}, which only text encoders have here")
    return _of_decoder(metadata, model, tokens)


def _of_encoder(metadata: Mapping[str, Any], model: str, tokens: Strings) -> TokenizerParts:
    """Return the tokenizer of a text encoder, which puts its own tokens around a text."""
    types = _numbers(metadata, "token_type", len(tokens), default=1)
    is_wordpiece = model == encoders.WORDPIECE
    pieces = Strings.of(encoders.wordpiece_pieces(tokens, types)) if is_wordpiece else tokens
    ids = _ids(metadata, len(pieces), {})
    cls, sep = _ends_of_texts(metadata, pieces, ids)
    backend, reader = _encoder_backend(metadata, model, pieces, types, ids)
    control, user_defined = _added(types, ids)
    control |= {cls, sep}
    _add(backend, pieces, control, user_defined)
    twice = model == encoders.UNIGRAM or metadata.get("tokenizer.ggml.pre") == _ROBERTA
    encoders.frame(backend, (pieces[cls], cls), (pieces[sep], sep), twice=twice)
    return TokenizerParts(
        backend=backend,
        pieces=pieces,
        reader=reader,
        added={pieces[i]: i for i in (*sorted(control), *user_defined)},
        control=control,
        hidden=control,
        names={f"{name}_token": pieces[ids[name]] for name in _NAMED if name in ids},
    )


def _ends_of_texts(metadata: Mapping[str, Any], pieces: Strings, ids: Mapping[str, int]) -> tuple[int, int]:
    """Return the ids of the first and last token of each text. Raises ModelError for a file without them."""
    spelled = {piece: token for token, piece in enumerate(pieces) if piece in (_CLS, _SEP)}
    cls = metadata.get("tokenizer.ggml.cls_token_id", ids.get("bos", spelled.get(_CLS)))
    sep = ids.get("sep", ids.get("eos", spelled.get(_SEP)))
    if type(cls) is not int or not 0 <= cls < len(pieces) or sep is None:
        raise ModelError(f"tokenizer.ggml: the first token of a text is {brief(cls)}, the last one {brief(sep)}")
    return cls, sep


def _encoder_backend(
    metadata: Mapping[str, Any], model: str, pieces: Strings, types: Sequence[int], ids: Mapping[str, int]
) -> tuple[tokenizers.Tokenizer, PieceReader]:
    if model == encoders.WORDPIECE:
        accents = _flag(metadata, _ACCENTS, default=False) if f"tokenizer.ggml.{_ACCENTS}" in metadata else None
        lowercase = _flag(metadata, "normalizer.lowercase", default=True)
        unknown = pieces[ids["unk"]] if "unk" in ids else _UNK
        return encoders.wordpiece(pieces, unknown, lowercase=lowercase, strip_accents=accents), wordpiece
    if model == encoders.UNIGRAM:
        unknown_id = types.index(_UNKNOWN) if _UNKNOWN in types else ids.get("unk", 0)
        return encoders.unigram(metadata, pieces, _numbers(metadata, "scores", len(pieces)), unknown_id), sentencepiece
    words = words_of(metadata.get("tokenizer.ggml.pre", "default"))
    return _backend(metadata, pieces, words, None), byte_level


def _of_decoder(metadata: Mapping[str, Any], model: str, tokens: Strings) -> TokenizerParts:
    pre = "gemma4" if model == "gemma4" else metadata.get("tokenizer.ggml.pre", "default")
    words = Words(byte_level=False, add_bos=True) if model == "llama" else words_of(pre)
    _check_harmless(metadata)
    types = _numbers(metadata, "token_type", len(tokens), default=1)
    ids = _ids(metadata, len(tokens), _SENTENCEPIECE_IDS if model == "llama" else {})
    if model == "llama" and _UNKNOWN in types:
        ids.setdefault("unk", types.index(_UNKNOWN))
    control, user_defined = _added(types, ids)
    names = {f"{name}_token": tokens[ids[name]] for name in _NAMED if name in ids}
    backend = _backend(metadata, tokens, words, names.get("unk_token"))
    _add(backend, tokens, control, user_defined)
    return TokenizerParts(
        backend=backend,
        pieces=tokens,
        reader=byte_level if words.byte_level else sentencepiece,
        added={tokens[i]: i for i in (*sorted(control), *user_defined)},
        control=control,
        hidden=control,
        names=names,
        # Gemma 4's first files say that it has none, which is wrong.
        add_bos=_adds(metadata, "bos", ids, default=words.add_bos) or (pre == "gemma4" and "bos" in ids),
        space_prefix=_space_prefix(metadata),
        add_eos=_adds(metadata, "eos", ids, default=False),
        template=_template(metadata, _TEMPLATE),
        named_templates=_named_templates(metadata),
    )


def _model_and_tokens(metadata: Mapping[str, Any]) -> tuple[str, Strings]:
    """Return llama.cpp's name of the algorithm, and the tokens. Raises ModelError."""
    model, tokens = metadata.get("tokenizer.ggml.model"), metadata.get("tokenizer.ggml.tokens")
    if not isinstance(tokens, Strings) or not 0 < len(tokens) <= MAX_TOKENS:
        raise ModelError("the GGUF file has no tokenizer.ggml.tokens: convert the model again, with its tokenizer")
    if not isinstance(model, str) or model not in _MODELS:
        known = ", ".join(f"{name} ({what})" for name, what in _MODELS.items())
        raise ModelError(f"tokenizer.ggml.model is {brief(model)}; known are {known}")
    return model, tokens


def _added(types: Sequence[int], ids: Mapping[str, int]) -> tuple[frozenset[int], list[int]]:
    """Return the ids of control tokens, and those of the other tokens that the model's author has added. A control
    token is one by its type, or by its part in the structure of a conversation."""
    by_type = frozenset(i for i, kind in enumerate(types) if kind == _CONTROL)
    control = by_type | frozenset(ids[name] for name in _STRUCTURE if name in ids)
    return control, [i for i, kind in enumerate(types) if kind == _USER_DEFINED and i not in control]


def _named_templates(metadata: Mapping[str, Any]) -> dict[str, str]:
    keys = [key for key in metadata if key.startswith(f"{_TEMPLATE}.")]
    return {key.removeprefix(f"{_TEMPLATE}."): _template(metadata, key) or "" for key in keys}


def _check_harmless(metadata: Mapping[str, Any]) -> None:
    """Raise ModelError for a setting that would change texts and is not implemented. `add_sep_token` changes none: it
    is for pairs of texts, which only a classifier's head reads."""
    _flag(metadata, "add_sep_token", default=False)
    for name in ("normalizer.lowercase", "normalizer.strip_accents"):
        if _flag(metadata, name, default=False) and metadata["tokenizer.ggml.model"] == "whitespace":
            raise ModelError(f"tokenizer.ggml.{name} is true, and texts are not normalized so: it is not supported")


def _adds(metadata: Mapping[str, Any], name: str, ids: Mapping[str, int], *, default: bool) -> bool:
    """Return whether texts get the begin or end token. Raises ModelError if the file asks for one that it lacks."""
    key = f"add_{name}_token"
    adds = _flag(metadata, key, default=default)
    if adds and name not in ids and f"tokenizer.ggml.{key}" in metadata:
        raise ModelError(f"tokenizer.ggml.{key} is true, and tokenizer.ggml.{name}_token_id is not in the file")
    return adds and name in ids


def _flag(metadata: Mapping[str, Any], name: str, *, default: bool) -> bool:
    value = metadata.get(f"tokenizer.ggml.{name}", default)
    if not isinstance(value, bool):
        raise ModelError(f"tokenizer.ggml.{name} is {brief(value)}, not true or false")
    return value


def _space_prefix(metadata: Mapping[str, Any]) -> bool:
    return _flag(metadata, "add_space_prefix", default=metadata["tokenizer.ggml.model"] == "llama")


def _numbers(metadata: Mapping[str, Any], name: str, count: int, *, default: int | None = None) -> list[Any]:
    """Return a number for each token; `default` for all of them if the file has none."""
    values = metadata.get(f"tokenizer.ggml.{name}")
    if values is None and default is not None:
        return [default] * count
    numbers = values.tolist() if isinstance(values, np.ndarray) else values
    if not isinstance(numbers, list) or len(numbers) != count or any(isinstance(item, str) for item in numbers):
        raise ModelError(f"tokenizer.ggml.{name} is {brief(values)}, not one number for each of {count} tokens")
    return numbers


def _ids(metadata: Mapping[str, Any], num_tokens: int, otherwise: Mapping[str, int]) -> dict[str, int]:
    """Return the ids of the tokens that have a role; as in llama.cpp, an id outside the vocabulary is none."""
    stored = {**_NAMED, "eot": "eot", "eom": "eom"}
    found = {name: metadata.get(f"tokenizer.ggml.{key}_token_id", otherwise.get(name)) for name, key in stored.items()}
    return {name: token for name, token in found.items() if type(token) is int and 0 <= token < num_tokens}


def _template(metadata: Mapping[str, Any], key: str) -> str | None:
    template = metadata.get(key)
    if template is None or isinstance(template, str):
        return template
    raise ModelError(f"{key} is a {type(template).__name__}: it must be text")


def _backend(metadata: Mapping[str, Any], tokens: Strings, words: Words, unknown: str | None) -> tokenizers.Tokenizer:
    vocab = {piece: i for i, piece in enumerate(tokens)}
    options: dict[str, Any] = {"ignore_merges": words.whole_words}
    if not words.byte_level:
        options |= {"unk_token": unknown, "fuse_unk": True, "byte_fallback": True}
    merges = _merges(metadata, vocab)
    try:
        backend = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=merges, **options))
    except Exception as error:  # the package raises bare Exception for merges outside the vocabulary
        raise ModelError(f"the GGUF file's tokenizer cannot be built: {error}") from error
    if words.byte_level:
        backend.pre_tokenizer = pre_tokenizer(words)
        if words.nfc:
            backend.normalizer = normalizers.NFC()
        return backend
    if not words.spaces:
        backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
        return backend
    steps: list[normalizers.Normalizer] = [normalizers.Replace(" ", "▁")]
    if _space_prefix(metadata):
        steps.insert(0, normalizers.Prepend("▁"))
    backend.normalizer = normalizers.Sequence(steps)
    return backend


def _merges(metadata: Mapping[str, Any], vocab: dict[str, int]) -> list[tuple[str, str]]:
    """Return the merges, the first to be done first. SentencePiece keeps a score of each piece instead, tiktoken its
    id."""
    if metadata["tokenizer.ggml.model"] == "llama":
        return _joined(vocab, _numbers(metadata, "scores", len(vocab)))
    lines = metadata.get("tokenizer.ggml.merges")
    if lines is None and metadata.get("tokenizer.ggml.pre") == _TIKTOKEN:
        return _joined(vocab, range(0, -len(vocab), -1))
    if not isinstance(lines, Strings):
        found = "missing" if lines is None else brief(lines)
        raise ModelError(f"tokenizer.ggml.merges is {found}: it must be a list of texts")
    merges = []
    for line in lines:
        left, _, right = line[1:].partition(" ")  # a piece is never empty, but it may be a space
        merges.append((line[:1] + left, right))
    return merges


def _joined(vocab: dict[str, int], scores: Sequence[float]) -> list[tuple[str, str]]:
    """Return a merge for any two pieces that make a third, the best-scored first."""
    merges = []
    for piece, token in vocab.items():
        splits = [
            (piece[:cut], piece[cut:]) for cut in range(1, len(piece)) if piece[:cut] in vocab and piece[cut:] in vocab
        ]
        splits.sort(key=lambda pair: (vocab[pair[0]], vocab[pair[1]]))
        merges += [(scores[token], pair) for pair in splits]
    merges.sort(key=lambda item: item[0], reverse=True)
    return [pair for _, pair in merges]


def _add(backend: tokenizers.Tokenizer, tokens: Strings, control: frozenset[int], user_defined: Iterable[int]) -> None:
    backend.add_special_tokens([AddedToken(tokens[i], special=True, normalized=False) for i in sorted(control)])
    backend.add_tokens([AddedToken(tokens[i], special=False, normalized=False) for i in user_defined])
