"""Where a tokenizer comes from: a checkpoint's folder, or the metadata of a GGUF file."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np
import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers

from forebay.base.errors import ModelError, brief
from forebay.families.model_config import ModelConfig, config_from_folder, config_from_gguf
from forebay.formats.files import is_there, read_json, read_large_json, read_text
from forebay.formats.gguf import GgufFile
from forebay.formats.gguf_parts import model_file
from forebay.formats.strings import Strings
from forebay.text.pre_tokenizers import ignores_merges, normalizer, pre_tokenizer
from forebay.text.token_bytes import PieceReader, byte_level, sentencepiece

_CONTROL: Final = 3  # ggml's token types
_USER_DEFINED: Final = 4

MAX_TOKENS: Final = 1 << 21
"""Ids of a tokenizer: eight times the largest vocabulary that is published."""
_FRAMES_IMAGES: Final = re.compile(r"<(image|fake_token_around_image|global-img|row_\d+_col_\d+)>")
_STRANGE: Final = "a \u0378"  # no character has this code
_MAX_JSON_VALUES: Final = 3_000_000  # Gemma 3's tokenizer.json has 1.9 million, its merges being lists of two


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenizerParts:
    """The tokenizer of a checkpoint. `control` are the ids that structure a conversation, `hidden` those of them that
    are no part of a text; `names` spells `bos_token`, `eos_token` and the like, `template` is the chat template."""

    backend: tokenizers.Tokenizer
    pieces: Sequence[str]  # by id; "" for an id without one
    reader: PieceReader
    added: dict[str, int]
    control: frozenset[int]
    hidden: frozenset[int]
    names: dict[str, str] = field(default_factory=dict)
    add_bos: bool = False  # put there by us; a tokenizer.json has it in its post-processor
    template: str | None = None


def from_path(path: Path) -> TokenizerParts:
    """ModelError, too, for the tokenizer of another model: one with more tokens than that at `path` embeds."""
    config: ModelConfig | None = None
    path = model_file(path)
    if path.is_dir():
        parts = from_folder(path)
        if is_there(path / "config.json"):
            config = config_from_folder(path)
    else:
        file = GgufFile(path)
        parts, config = from_gguf(file.metadata), config_from_gguf(file)
    if config is not None:
        _check_fits(parts, config.vocab_size, path)
    return parts


def _check_fits(parts: TokenizerParts, vocab_size: int, path: Path) -> None:
    """Some published models have added tokens without an embedding: there only the request that has one is refused."""
    added = set(parts.added.values())
    beyond = [i for i in range(vocab_size, len(parts.pieces)) if parts.pieces[i] and i not in added]
    if beyond:
        raise ModelError(
            f"{path}: its tokenizer has {len(beyond)} tokens beyond the model's vocabulary of {vocab_size}, such as "
            f"{beyond[0]} ({brief(parts.pieces[beyond[0]])}): take the tokenizer that the model was trained with"
        )


def from_gguf(metadata: Mapping[str, Any]) -> TokenizerParts:
    """From `tokenizer.ggml.*`, of model `gpt2` (byte-level BPE) or `llama` (SentencePiece with byte fallback)."""
    model = metadata.get("tokenizer.ggml.model")
    tokens = metadata.get("tokenizer.ggml.tokens")
    if not isinstance(tokens, Strings) or not 0 < len(tokens) <= MAX_TOKENS:
        raise ModelError("the GGUF file has no tokenizer.ggml.tokens: convert the model again, with its tokenizer")
    if not isinstance(model, str) or model not in ("gpt2", "llama"):
        raise ModelError(f"tokenizer.ggml.model is {brief(model)}; known are gpt2 and llama")
    types = _numbers(metadata, "token_type", len(tokens), default=1)
    control = frozenset(i for i, kind in enumerate(types) if kind == _CONTROL)
    user_defined = [i for i, kind in enumerate(types) if kind == _USER_DEFINED]
    names = _names_by_id(metadata, tokens)
    backend = _byte_level_bpe(metadata, tokens) if model == "gpt2" else _sentencepiece_bpe(metadata, tokens, names)
    _add(backend, tokens, control, user_defined)
    return TokenizerParts(
        backend=backend,
        pieces=tokens,
        reader=byte_level if model == "gpt2" else sentencepiece,
        added={tokens[i]: i for i in (*sorted(control), *user_defined)},
        control=control,
        hidden=control,
        names=names,
        add_bos=_flag(metadata, "add_bos_token", default=model == "llama"),
        template=_gguf_template(metadata),
    )


def _flag(metadata: Mapping[str, Any], name: str, *, default: bool) -> bool:
    value = metadata.get(f"tokenizer.ggml.{name}", default)
    if not isinstance(value, bool):
        raise ModelError(f"tokenizer.ggml.{name} is {brief(value)}, not true or false")
    return value


def _numbers(metadata: Mapping[str, Any], name: str, count: int, *, default: int | None = None) -> list[Any]:
    """One for each token; `default` for all where the file has none."""
    values = metadata.get(f"tokenizer.ggml.{name}")
    if values is None and default is not None:
        return [default] * count
    numbers = values.tolist() if isinstance(values, np.ndarray) else values
    if not isinstance(numbers, list) or len(numbers) != count or any(isinstance(item, str) for item in numbers):
        raise ModelError(f"tokenizer.ggml.{name} is {brief(values)}, not one number for each of {count} tokens")
    return numbers


def _gguf_template(metadata: Mapping[str, Any]) -> str | None:
    template = metadata.get("tokenizer.chat_template")
    if template is None or isinstance(template, str):
        return template
    raise ModelError(f"tokenizer.chat_template is a {type(template).__name__}: it must be text")


def _names_by_id(metadata: Mapping[str, Any], tokens: Strings) -> dict[str, str]:
    names = {}
    for name, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")):
        token = metadata.get(f"tokenizer.ggml.{key}_token_id")
        if type(token) is int and 0 <= token < len(tokens):
            names[f"{name}_token"] = tokens[token]
    return names


def _byte_level_bpe(metadata: Mapping[str, Any], tokens: Strings) -> tokenizers.Tokenizer:
    pre = str(metadata.get("tokenizer.ggml.pre", "default"))
    vocab = {piece: i for i, piece in enumerate(tokens)}
    merges, lines = [], metadata.get("tokenizer.ggml.merges", Strings([]))
    if not isinstance(lines, Strings):
        raise ModelError(f"tokenizer.ggml.merges is {brief(lines)}, not a list of texts")
    for line in lines:
        left, _, right = line[1:].partition(" ")  # a piece is never empty, but it may be a space
        merges.append((line[:1] + left, right))
    try:
        backend = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=merges, ignore_merges=ignores_merges(pre)))
    except Exception as error:  # the package raises bare Exception for merges outside the vocabulary
        raise ModelError(f"the GGUF file's tokenizer cannot be built: {error}") from error
    backend.pre_tokenizer = pre_tokenizer(pre)
    kind = normalizer(pre)
    if kind is not None:
        backend.normalizer = kind
    return backend


def _sentencepiece_bpe(metadata: Mapping[str, Any], tokens: Strings, names: dict[str, str]) -> tokenizers.Tokenizer:
    vocab = {piece: i for i, piece in enumerate(tokens)}
    merges = _merges_by_score(vocab, _numbers(metadata, "scores", len(tokens)))
    backend = tokenizers.Tokenizer(
        models.BPE(vocab=vocab, merges=merges, unk_token=names.get("unk_token"), fuse_unk=True, byte_fallback=True)
    )
    steps: list[normalizers.Normalizer] = [normalizers.Replace(" ", "▁")]
    if _flag(metadata, "add_space_prefix", default=True):
        steps.insert(0, normalizers.Prepend("▁"))
    backend.normalizer = normalizers.Sequence(steps)
    return backend


def _merges_by_score(vocab: dict[str, int], scores: list[float]) -> list[tuple[str, str]]:
    """SentencePiece keeps a score per piece instead of merges: joining any two pieces into a better one is a merge, the
    best-scored first."""
    merges = []
    for piece, token in vocab.items():
        splits = [
            (piece[:cut], piece[cut:]) for cut in range(1, len(piece)) if piece[:cut] in vocab and piece[cut:] in vocab
        ]
        splits.sort(key=lambda pair: (vocab[pair[0]], vocab[pair[1]]))
        merges += [(scores[token], pair) for pair in splits]
    merges.sort(key=lambda item: item[0], reverse=True)
    return [pair for _, pair in merges]


def _add(backend: tokenizers.Tokenizer, tokens: Strings, control: frozenset[int], user_defined: Sequence[int]) -> None:
    backend.add_special_tokens([AddedToken(tokens[i], special=True, normalized=False) for i in sorted(control)])
    backend.add_tokens([AddedToken(tokens[i], special=False, normalized=False) for i in user_defined])


def from_folder(folder: Path) -> TokenizerParts:
    """From `tokenizer.json`, `tokenizer_config.json`, `special_tokens_map.json`, `chat_template.jinja` and, of models
    with images, `chat_template.json`."""
    path = folder / "tokenizer.json"
    if not is_there(path):
        raise ModelError(f"{folder} has no tokenizer.json: save the model with its fast tokenizer")
    config = _read_optional(folder / "tokenizer_config.json")
    template = _template(folder, config)
    layout = read_large_json(path, most_values=_MAX_JSON_VALUES)
    try:
        # An added token that frames images, or that the template writes, structures the conversation, whatever its
        # `special` flag says.
        for added in layout.get("added_tokens", []):
            added["special"] = added["special"] or _FRAMES_IMAGES.fullmatch(added["content"]) is not None
        hidden = frozenset(int(added["id"]) for added in layout.get("added_tokens", []) if added["special"])
        for added in layout.get("added_tokens", []):
            added["special"] = added["special"] or (template is not None and added["content"] in template)
        backend = tokenizers.Tokenizer.from_str(json.dumps(layout, ensure_ascii=False))
        backend.encode(_STRANGE)  # it fails where what stands for the unknown is unknown itself
    except Exception as error:  # the package raises bare Exception for a file it cannot read
        raise ModelError(f"{path} cannot be read as a tokenizer: {str(error)[:200]}") from error
    backend.no_truncation()
    backend.no_padding()
    added_tokens = layout.get("added_tokens", [])
    return TokenizerParts(
        backend=backend,
        pieces=_pieces(backend.get_vocab(), path),
        reader=_reader(backend.decoder, layout, path),
        added={added["content"]: int(added["id"]) for added in added_tokens},
        control=frozenset(int(added["id"]) for added in added_tokens if added["special"]),
        hidden=hidden,
        names=_names({**_read_optional(folder / "special_tokens_map.json"), **config}),
        template=template,
    )


def _read_optional(path: Path) -> dict[str, Any]:
    return read_json(path) if is_there(path) else {}


def _pieces(vocab: Mapping[str, int], path: Path) -> Strings:
    count = max(vocab.values(), default=-1) + 1
    if count > MAX_TOKENS:
        raise ModelError(f"{path}: it has the token id {count - 1}; at most {MAX_TOKENS} ids are possible")
    pieces = [""] * count
    for piece, token in vocab.items():
        pieces[token] = piece
    return Strings.of(pieces)


def _names(config: Mapping[str, Any]) -> dict[str, str]:
    names = {}
    for name in ("bos_token", "eos_token", "unk_token", "pad_token"):
        value = config.get(name)
        value = value.get("content") if isinstance(value, dict) else value
        if isinstance(value, str):
            names[name] = value
    return names


def _template(folder: Path, config: Mapping[str, Any]) -> str | None:
    path = folder / "chat_template.jinja"
    if is_there(path):
        return read_text(path)
    template = config.get("chat_template")
    if isinstance(template, list):  # several, by name
        named = {str(entry.get("name")): entry.get("template") for entry in template if isinstance(entry, dict)}
        template = named.get("default")
    where = "tokenizer_config.json"
    if template is None:
        where = "chat_template.json"
        template = _read_optional(folder / where).get("chat_template")
    if template is not None and not isinstance(template, str):
        raise ModelError(f"{folder / where}: the chat_template is {type(template).__name__}, not a text")
    return template


def _reader(decoder: decoders.Decoder | None, layout: Mapping[str, Any], path: Path) -> PieceReader:
    kinds = json.dumps(layout.get("decoder") or {})
    if "ByteLevel" in kinds:
        return byte_level
    if "ByteFallback" in kinds or "Metaspace" in kinds:
        return sentencepiece
    raise ModelError(f"{path} decodes with {type(decoder).__name__}; known are ByteLevel, ByteFallback and Metaspace")
