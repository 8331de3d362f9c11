"""The files of a tokenizer: a checkpoint's folder, or the metadata of a GGUF file."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import tokenizers
from tokenizers import decoders

from forebay.base.errors import ModelError, brief
from forebay.families.config.model_config import ModelConfig, config_from_folder, config_from_gguf
from forebay.formats.files import is_there, read_json, read_large_json, read_text
from forebay.formats.gguf import GgufFile
from forebay.formats.gguf_parts import model_file
from forebay.formats.strings import Strings
from forebay.text.gguf_tokenizer import from_gguf
from forebay.text.token_bytes import PieceReader, byte_level, sentencepiece, wordpiece
from forebay.text.tokenizer_parts import MAX_TOKENS, TokenizerParts

_TEMPLATES: Final = "additional_chat_templates"
_MAX_TEMPLATES: Final = 16
_DEFAULT: Final = "default"
_FRAMES_IMAGES: Final = re.compile(r"<(image|fake_token_around_image|global-img|row_\d+_col_\d+)>")
_STRANGE: Final = "a \u0378"  # no character has this code
_MAX_JSON_VALUES: Final = 3_000_000  # Gemma 3's tokenizer.json has 1.9 million, its merges being lists of two


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


def _mark_special(added_tokens: list[dict[str, Any]], sources: Sequence[str]) -> frozenset[int]:
    """Set the `special` flag of each added token that frames images or that a template's source has: it structures the
    conversation. Returns the ids of the special tokens and of those that frame images."""
    for added in added_tokens:
        added["special"] = added["special"] or _FRAMES_IMAGES.fullmatch(added["content"]) is not None
    hidden = frozenset(int(added["id"]) for added in added_tokens if added["special"])
    for added in added_tokens:
        added["special"] = added["special"] or any(added["content"] in source for source in sources)
    return hidden


def from_folder(folder: Path) -> TokenizerParts:
    """From `tokenizer.json`, `tokenizer_config.json`, `special_tokens_map.json`, `chat_template.jinja` and, of models
    with images, `chat_template.json`."""
    path = folder / "tokenizer.json"
    if not is_there(path):
        raise ModelError(f"{folder} has no tokenizer.json: save the model with its fast tokenizer")
    config = _read_optional(folder / "tokenizer_config.json")
    template, named = _template(folder, config), _named_templates(folder, config)
    sources = [source for source in (template, *named.values()) if source is not None]
    layout = read_large_json(path, most_values=_MAX_JSON_VALUES)
    try:
        hidden = _mark_special(layout.get("added_tokens", []), sources)
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
        space_prefix=_space_prefix(backend),
        names=_names({**_read_optional(folder / "special_tokens_map.json"), **config}),
        template=template,
        response_template=config.get("response_template"),
        named_templates=named,
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
        template = named.get(_DEFAULT)
    where = "tokenizer_config.json"
    if template is None:
        where = "chat_template.json"
        template = _read_optional(folder / where).get("chat_template")
    if template is not None and not isinstance(template, str):
        raise ModelError(f"{folder / where}: the chat_template is {type(template).__name__}, not a text")
    return template


def _named_templates(folder: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """Return the templates besides the default one, by name: those of a list in tokenizer_config.json, and the files
    of a folder, which count first."""
    listed = config.get("chat_template")
    entries = [entry for entry in listed if isinstance(entry, dict)] if isinstance(listed, list) else []
    found: dict[str, Any] = {str(entry.get("name")): entry.get("template") for entry in entries}
    found.pop(_DEFAULT, None)
    if wrong := [name for name, template in found.items() if not isinstance(template, str)]:
        raise ModelError(f"{folder / 'tokenizer_config.json'}: the chat_template {brief(wrong[0])} is not a text")
    files = sorted((folder / _TEMPLATES).glob("*.jinja")) if (folder / _TEMPLATES).is_dir() else []
    return {**found, **{path.stem: read_text(path) for path in files[:_MAX_TEMPLATES]}}


def _space_prefix(backend: tokenizers.Tokenizer) -> bool:
    """Return whether encoding puts a space before a text: the decoder then takes it away again."""
    return backend.decoder is not None and backend.decoder.decode(["▁a"]) == "a"


def _reader(decoder: decoders.Decoder | None, layout: Mapping[str, Any], path: Path) -> PieceReader:
    kinds = json.dumps(layout.get("decoder") or {})
    if "ByteLevel" in kinds:
        return byte_level
    if "ByteFallback" in kinds or "Metaspace" in kinds:
        return sentencepiece
    if "WordPiece" in kinds:
        return wordpiece
    raise ModelError(
        f"{path} decodes with {type(decoder).__name__}; known are ByteLevel, ByteFallback, Metaspace and WordPiece"
    )
