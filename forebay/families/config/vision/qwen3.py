"""The encoder of Qwen3-VL, Qwen3.5, their mixtures and Qwen 4."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

from forebay.families.base.fields import MAX_LAYERS, Fields
from forebay.families.base.options import unknown_options
from forebay.families.config.vision.base import Vision
from forebay.families.config.vision.qwen import HARMLESS, QwenConfig, check_sizes, common_fields

_PLACEHOLDERS: Final = {
    "qwen3_5": 248_056,
    "qwen3_5_moe": 248_056,
    "qwen3_vl": 151_655,
    "qwen3_vl_moe": 151_655,
    "qwen4_exp": 248_056,
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Qwen3Config(QwenConfig):
    """A table of `side` x `side` positions is interpolated to the patches of a tile. Behind the layers `deepstack` a
    feature of each token is kept for the language model."""

    side: int
    deepstack: tuple[int, ...]

    @property
    def num_mergers(self) -> int:
        return 1 + len(self.deepstack)


def qwen3_vl(fields: Fields, processor: Fields, vocab_size: int) -> Vision:
    """Read the encoder of a Qwen3-VL. Defaults are those of transformers' classes."""
    own = Fields.of_file(fields.get("vision_config"), f"{fields.where}: vision_config")
    num_layers = own.size("depth", default=27, most=MAX_LAYERS)
    return _qwen3(fields, own, processor, vocab_size, _layers(own, num_layers, (8, 16, 24)))


def qwen3_5(fields: Fields, processor: Fields, vocab_size: int) -> Vision:
    """Read the encoder of a Qwen3.5 or Qwen 4: a Qwen3-VL's without features."""
    own = Fields.of_file(fields.get("vision_config"), f"{fields.where}: vision_config")
    return _qwen3(fields, own, processor, vocab_size, ())


def _qwen3(fields: Fields, own: Fields, processor: Fields, vocab_size: int, deepstack: tuple[int, ...]) -> Vision:
    own.only("hidden_act", "gelu_pytorch_tanh")
    positions = own.size("num_position_embeddings", default=2304, most=1 << 24)
    placeholder = _PLACEHOLDERS[str(fields.get("model_type"))]
    config = Qwen3Config(
        **common_fields(fields, own, processor, vocab_size, placeholder=placeholder, num_layers=27, patch_size=16),
        hidden_size=own.size("hidden_size", default=1152),
        intermediate_size=own.size("intermediate_size", default=4304),
        output_size=own.size("out_hidden_size", default=3584),
        side=math.isqrt(positions),
        deepstack=deepstack,
    )
    if config.side**2 != positions:
        raise own.wrong("num_position_embeddings", "a square number")
    check_sizes(config, processor, own.where)
    return config, tuple(f"vision_config.{name}" for name in unknown_options(own, HARMLESS))


def _layers(own: Fields, num_layers: int, default: tuple[int, ...]) -> tuple[int, ...]:
    given = own.get("deepstack_visual_indexes", default)
    layers = tuple(given) if isinstance(given, list | tuple) else (-1,)
    if not all(type(layer) is int and 0 <= layer < num_layers for layer in layers):
        raise own.wrong("deepstack_visual_indexes", f"a list of layers, 0 to {num_layers - 1}")
    if list(layers) != sorted(set(layers)):
        raise own.wrong("deepstack_visual_indexes", "a list of ascending layers")
    return layers
