"""InternViT with a pixel shuffle behind it: the encoder of InternVL, whose tiles are squares of one size."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from forebay.base.errors import ModelError
from forebay.families.base.fields import MAX_LAYERS, Fields, is_number
from forebay.families.base.options import unknown_options
from forebay.families.config.vision.base import MAX_TILE, SquareTileConfig, Vision, check_heads, pixel_numbers
from forebay.families.config.vision.pixtral import MEAN, STD

# About training, and where values of the layer scale begin.
_HARMLESS: Final = frozenset({"layer_scale_init_value", "projection_dropout"})
_NORMS: Final = ("layer_norm", "rms_norm")
_ONLY: Final = {
    "hidden_act": "gelu",
    "num_channels": 3,
    "use_absolute_position_embeddings": True,
    "use_mask_token": False,
}
_OUTER: Final = {
    "projector_hidden_act": "gelu",
    "vision_feature_layer": -1,
    "vision_feature_select_strategy": "default",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class InternVitConfig(SquareTileConfig):
    """InternViT. `bias`: of queries, keys and values. `head_norm`: queries and keys have a norm over all heads.
    `rms_norm`: norms of layers are RMS norms. `last_norm`: there is one behind the last layer. arXiv 2404.16821,
    section 3.1."""

    bias: bool
    head_norm: bool
    rms_norm: bool
    last_norm: bool


def internvl(fields: Fields, processor: Fields, vocab_size: int) -> Vision:
    """Read the encoder of a model. Defaults are those of transformers' classes."""
    own = Fields.of_file(fields.get("vision_config"), f"{fields.where}: vision_config")
    for given, values in ((own, _ONLY), (fields, _OUTER)):
        for name, value in values.items():
            given.only(name, value)
    norm = own.get("norm_type", _NORMS[0])
    if norm not in _NORMS:
        raise own.wrong("norm_type", " or ".join(_NORMS))
    rescale, mean, std = pixel_numbers(processor, MEAN, STD)
    config = InternVitConfig(
        kind=str(fields.get("model_type")),
        placeholder=fields.size("image_token_id", default=151_667, least=0, most=vocab_size - 1),
        image_size=_edge(own, "image_size", 448),
        patch_size=_edge(own, "patch_size", 14),
        merge=_merge(fields),
        hidden_size=own.size("hidden_size", default=1024),
        intermediate_size=own.size("intermediate_size", default=4096),
        num_layers=own.size("num_hidden_layers", default=24, most=MAX_LAYERS),
        num_heads=own.size("num_attention_heads", default=16),
        norm_eps=own.number("layer_norm_eps", default=1e-6),
        rescale=rescale,
        mean=mean,
        std=std,
        bias=own.flag("attention_bias", default=False),
        head_norm=own.flag("use_qk_norm", default=False),
        rms_norm=norm == "rms_norm",
        last_norm=not own.flag("use_mean_pooling", default=True),
    )
    _check_sizes(config, own.where)
    return config, tuple(f"vision_config.{name}" for name in unknown_options(own, _HARMLESS))


def _edge(own: Fields, name: str, default: int) -> int:
    """Return an edge in pixels, of a square that may be given by both of its edges."""
    value = own.get(name, default)
    if isinstance(value, list):
        if len(value) != 2 or value[0] != value[1]:
            raise own.wrong(name, "the edge of a square, or two equal ones")
        own = own.replaced(**{name: value[0]})
    return own.size(name, default=default, most=MAX_TILE)


def _merge(fields: Fields) -> int:
    """Return the patches on an edge of what becomes one token: 1 divided by `downsample_ratio`."""
    ratio = fields.get("downsample_ratio", 0.5)
    if not is_number(ratio) or not 1 / MAX_TILE <= ratio <= 1 or 1 / ratio != int(1 / ratio):
        raise fields.wrong("downsample_ratio", "1 divided by a whole number")
    return int(1 / ratio)


def _check_sizes(config: InternVitConfig, where: str) -> None:
    check_heads(config, where)
    if not config.side or config.side % config.merge:
        raise ModelError(
            f"{where}: a tile of {config.image_size} pixels has {config.side} patches of {config.patch_size} in a row, "
            f"which do not divide into groups of {config.merge} (downsample_ratio)"
        )
