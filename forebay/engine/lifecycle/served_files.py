"""Checks the files of a checkpoint that a server reads besides its weights: one check for every command that says
whether a model can be served."""

from __future__ import annotations

from pathlib import Path

from forebay.families.base.embedding import embedding_of
from forebay.formats.files import is_there
from forebay.formats.gguf_parts import model_file
from forebay.formats.safetensors import has_weights
from forebay.text.tokenizer import Tokenizer


def check_served_files(path: Path, chat_template: str | None = None) -> None:
    """Read tokenizer, chat template and pooling of the checkpoint at `path` as a server does. `chat_template` replaces
    the one in the files. A folder without weights may also lack a tokenizer: its config.json alone can be planned.
    Raises ModelError for what a server refuses."""
    path = model_file(path)
    folder = path.parent if path.name == "config.json" else path
    if folder.is_dir() and not is_there(folder / "tokenizer.json") and not has_weights(folder):
        return
    Tokenizer.from_path(folder, chat_template).check_chat_template()
    embedding_of(folder)
