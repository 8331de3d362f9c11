"""Parts of small models that read pictures: what each kind of encoder brings beside its language model."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from forebay.families.base.shape import Shape


@dataclass(frozen=True, kw_only=True, slots=True)
class SmallPictures:
    """`tokens` come behind those of the text; the first stands for a row of an encoding. `written` is the text that the
    chat template writes for an image, empty if that is the first token. `around` gives the fields around the language
    model, for one of that shape whose tokens are those of text, and `inside` those of its own that it has besides.
    `files` are those that say how pictures become tiles and tokens, by their names."""

    tokens: tuple[str, ...]
    around: Callable[[Shape], Mapping[str, Any]]
    files: Mapping[str, Mapping[str, Any]]
    written: str = ""
    inside: Callable[[Shape], Mapping[str, Any]] = lambda shape: {}


def encoder_fields(shape: Shape) -> dict[str, Any]:
    """Return the fields of an encoder's layers."""
    return {
        "hidden_size": shape.hidden_size,
        "intermediate_size": 3 * shape.hidden_size,
        "num_hidden_layers": shape.num_layers,
        "num_attention_heads": shape.num_heads,
    }
