from __future__ import annotations

from typing import Any, Final

import numpy as np

from forebay.families.apertus.config import ACTIVATIONS
from forebay.families.base.architecture import PRE_NORM, Architecture, Header
from forebay.families.base.mixers import Xielu


def _configure(header: Header) -> None:
    """Take the numbers of the activations from the metadata, where each has a list with an entry for each layer."""
    columns = [_entries(header, f"xielu.{name}") for name in Xielu._fields]
    header.config.update(hidden_act="xielu", **{ACTIVATIONS: [list(row) for row in zip(*columns, strict=True)]})


def _entries(header: Header, key: str) -> list[Any]:
    value = header.file.metadata.get(key)
    entries = value.tolist() if isinstance(value, np.ndarray) else value
    if isinstance(entries, float):
        entries = [entries] * len(header.layers)
    if not isinstance(entries, list) or len(entries) != len(header.layers):
        raise header.wrong(f"{key} has no number for each of {len(header.layers)} layers")
    return entries


ARCHITECTURES: Final = {
    "apertus": Architecture(
        block_names={**PRE_NORM, "attn_norm": "attention_layernorm", "ffn_norm": "feedforward_layernorm"},
        configure=_configure,
    )
}
