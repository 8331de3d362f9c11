"""Writes the tokenizer of a GGUF file as the files of a folder, as `tokenizer_files.from_folder` reads them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, decoders, processors

from forebay.base.errors import ModelError
from forebay.text.gguf_tokenizer import from_gguf
from forebay.text.token_bytes import byte_level


def save_tokenizer(
    metadata: Mapping[str, Any], folder: Path, *, more: Sequence[str] = (), template: str | None = None
) -> None:
    """Write `tokenizer.json`, `tokenizer_config.json` and, if there is a template, `chat_template.jinja`, from a GGUF
    file's metadata. `more` are special tokens behind those of the file, `template` another chat template. ModelError if
    the tokenizer is not a byte-level one."""
    parts = from_gguf(metadata)
    if parts.reader is not byte_level:
        raise ModelError("only byte-level tokenizers can be saved as a folder's files")
    backend = parts.backend
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in more])
    bos = parts.names.get("bos_token")
    if parts.add_bos and bos is not None:
        backend.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A", pair=f"{bos} $A {bos} $B", special_tokens=[(bos, parts.added[bos])]
        )
    backend.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False, **parts.names}
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2), "utf-8")
    if template is None:
        template = parts.template
    if template is not None:
        (folder / "chat_template.jinja").write_text(template, "utf-8")
