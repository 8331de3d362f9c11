"""Sampling defaults by a model's authors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from forebay.base.errors import ModelError, brief
from forebay.base.sampling import NUMBERS, OF_MODELS
from forebay.families.base.fields import Fields, is_number

if TYPE_CHECKING:  # the types here are the command line's too, which is to be read at once
    from forebay.formats.gguf import GgufFile


@dataclass(frozen=True, slots=True)
class SamplingDefaults:
    """Values of sampling parameters for requests that omit them, by name, and the file that has them. A missing one has
    OpenAI's default: temperature 1, all tokens."""

    values: Mapping[str, float] = field(default_factory=dict)
    source: str = "OpenAI's defaults"


NEUTRAL: Final = SamplingDefaults()


def of_generation_config(fields: Fields | None) -> SamplingDefaults:
    """Read the sampling defaults of generation_config.json; None stands for no such file. Raises ModelError for values
    out of bounds."""
    names = [number.name for number in OF_MODELS]
    values = {name: value for name in names if fields is not None and (value := fields.get(name)) is not None}
    return _checked(values, "generation_config.json", fields.where if fields is not None else "")


def of_gguf(file: GgufFile) -> SamplingDefaults:
    """The embedded model's own file has none; its authors' are on its card."""
    from forebay.formats.store import DEFAULT_MODEL

    if file.path.name == DEFAULT_MODEL.file:
        return SamplingDefaults(DEFAULT_MODEL.sampling, "its model card")
    keys = {number.name: f"general.sampling.{number.gguf}" for number in OF_MODELS}
    values = {name: file.metadata[key] for name, key in keys.items() if key in file.metadata}
    return _checked(values, "the GGUF file", str(file.path))


def _checked(values: Mapping[str, Any], source: str, where: str) -> SamplingDefaults:
    if not values:
        return NEUTRAL
    for name, value in values.items():
        if not is_number(value):
            raise ModelError(f"{where}: {name} is {brief(value)}; it must be a number")
    # float32, as GGUF files have them, is good for seven digits; no top_k is -1 to some.
    rounded = {name: value if type(value) is int else float(f"{value:.6g}") for name, value in values.items()}
    return SamplingDefaults({name: NUMBERS[name].read(value) for name, value in rounded.items()}, source)
