"""Configurations of the encoders that turn pictures into rows of a model's embedding."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from forebay.base.errors import ModelError, brief
from forebay.families.fields import MAX_LAYERS, Fields, is_number
from forebay.families.options import unknown_options

Channels = tuple[float, float, float]
"""A number for each channel of a pixel, red first."""

MAX_TILE: Final = 4096  # pixels of an edge
_HALVES: Final = (0.5, 0.5, 0.5)
# About how pictures become tiles, which the server has from the image processor's file.
_HARMLESS: Final = frozenset({"max_image_size", "size", "tie_word_embeddings", "use_base_siglip"})


@dataclass(frozen=True, kw_only=True, slots=True)
class VisionConfig:
    """The encoder beside a language model, of a `kind`: the type of the model around both.

    Tiles are squares of `image_size` pixels, in patches of `patch_size`; what fills no patch is left out.
    `scale_factor` squared patches become one token of the prompt, whose id there is `placeholder`. A pixel's channels
    are multiplied by `rescale`, and then have `mean` and the deviation `std`.
    """

    kind: str
    placeholder: int
    image_size: int
    patch_size: int
    scale_factor: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    norm_eps: float
    rescale: float = 1 / 255
    mean: Channels = _HALVES
    std: Channels = _HALVES

    @property
    def side(self) -> int:
        """Return the number of patches in a row and in a column of a tile."""
        return self.image_size // self.patch_size

    @property
    def num_patches(self) -> int:
        return self.side**2

    @property
    def tokens_per_tile(self) -> int:
        return (self.side // self.scale_factor) ** 2


Vision = tuple[VisionConfig, tuple[str, ...]]
"""An encoder, and the fields of its configuration that nobody knows here."""


def vision_of(raw: Mapping[str, Any], where: str, processor: Mapping[str, Any], vocab_size: int) -> Vision | None:
    """Read the encoder in the fields of a model around a language model of `vocab_size`, and in those of its image
    `processor`. None where there is none, and for types whose encoders are not served. ModelError for a wrong value."""
    read = _READERS.get(str(raw.get("model_type")))
    if read is None or raw.get("vision_config") is None:
        return None
    if not isinstance(raw["vision_config"], dict):
        raise ModelError(f"{where}: vision_config is {brief(raw['vision_config'])}; it must be an object")
    return read(Fields.of_file(raw, where), Fields.of_file(processor, f"{where}: image processor"), vocab_size)


def _siglip(fields: Fields, processor: Fields, vocab_size: int) -> Vision:
    """SigLIP with a pixel shuffle behind it: SmolVLM and Idefics 3. Defaults are those of transformers' classes."""
    own = Fields.of_file(fields.get("vision_config"), f"{fields.where}: vision_config")
    own.only("hidden_act", "gelu_pytorch_tanh")
    own.only("num_channels", 3)
    rescale, mean, std = _pixels(processor)
    config = VisionConfig(
        kind=str(fields.get("model_type")),
        placeholder=fields.size("image_token_id", default=128_257, least=0, most=vocab_size - 1),
        image_size=own.size("image_size", default=224, most=MAX_TILE),
        patch_size=own.size("patch_size", default=32, most=MAX_TILE),
        scale_factor=fields.size("scale_factor", default=2, most=MAX_TILE),
        hidden_size=own.size("hidden_size", default=1152),
        intermediate_size=own.size("intermediate_size", default=3072),
        num_layers=own.size("num_hidden_layers", default=12, most=MAX_LAYERS),
        num_heads=own.size("num_attention_heads", default=16),
        norm_eps=own.number("layer_norm_eps", default=1e-6),
        rescale=rescale,
        mean=mean,
        std=std,
    )
    _check_sizes(config, own.where)
    return config, tuple(f"vision_config.{name}" for name in unknown_options(own, _HARMLESS))


def _check_sizes(config: VisionConfig, where: str) -> None:
    if config.hidden_size % config.num_heads:
        raise ModelError(f"{where}: {config.hidden_size} dimensions do not divide into {config.num_heads} heads")
    if not config.side or config.side % config.scale_factor:
        raise ModelError(
            f"{where}: a tile of {config.image_size} pixels has {config.side} patches of {config.patch_size} in a row, "
            f"which do not divide into groups of {config.scale_factor} (scale_factor)"
        )


def _pixels(processor: Fields) -> tuple[float, Channels, Channels]:
    """Return by what pixels are multiplied, and their mean and deviation then."""
    rescale = processor.number("rescale_factor", default=1 / 255)
    if not processor.flag("do_rescale", default=True):
        rescale = 1.0
    if not processor.flag("do_normalize", default=True):
        return rescale, (0.0, 0.0, 0.0), (1.0, 1.0, 1.0)
    return rescale, _channels(processor, "image_mean", 0.0), _channels(processor, "image_std", 1e-6)


def _channels(processor: Fields, name: str, least: float) -> Channels:
    value = processor.get(name, _HALVES)
    numbers = [value] * 3 if is_number(value) else value
    if not isinstance(numbers, list | tuple) or len(numbers) != 3:
        raise processor.wrong(name, "a number for each of three channels")
    if not all(is_number(number) and least <= number <= 1e6 for number in numbers):
        raise processor.wrong(name, f"three numbers of at least {least:g}")
    red, green, blue = map(float, numbers)
    return red, green, blue


_READERS: Final[Mapping[str, Callable[[Fields, Fields, int], Vision]]] = {"smolvlm": _siglip, "idefics3": _siglip}
