"""The encoder of Muse Glimmer, which reads an image of any size as one tile, most layers within windows."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

from forebay.base.errors import ModelError
from forebay.base.pixels import CHANNELS
from forebay.families.base.fields import MAX_LAYERS, Fields
from forebay.families.base.options import unknown_options
from forebay.families.config.vision.base import (
    MAX_TILE,
    Vision,
    VisionConfig,
    check_heads,
    check_tile_bytes,
    pixel_numbers,
)
from forebay.families.config.vision.qwen import MOST_TOKENS, rope_theta

BLOCK_EPS: Final = 1e-5  # of the norms of layers, whatever the file has
_WHOLE: Final = "full_attention"
_KINDS: Final = (_WHOLE, "window_attention")
# The number of positions, which the encoder's table has, too.
_HARMLESS: Final = frozenset({"max_position_embeddings"})


@dataclass(frozen=True, kw_only=True, slots=True)
class MuseVisionConfig(VisionConfig):
    """A table of `side` x `side` positions is interpolated to the patches of an image, and heads are rotated by a
    patch's row and column at the base `theta`. Attention is within windows of `side` x `side` patches, and between all
    patches in the layers `whole`. Each kernel sees `depth` frames, all of which are the image. An image has at most
    `most_tokens`. Tokens go through a width of `projector_size`."""

    side: int
    theta: float
    whole: frozenset[int]
    depth: int
    most_tokens: int
    projector_size: int

    @property
    def max_edge(self) -> int:
        return self.most_tokens * self.token_edge

    @property
    def max_tokens(self) -> int:
        return self.most_tokens

    @property
    def seen_tokens(self) -> tuple[int, ...]:
        """Return for each layer the most tokens of an image to which one of them attends."""
        window = min(self.max_tokens, math.ceil(self.side / self.merge) ** 2)
        return tuple(self.max_tokens if layer in self.whole else window for layer in range(self.num_layers))

    def outer_products(self, output_size: int) -> float:
        """Return the products that a patch takes in its embedding, and its share of those of a token's adapter."""
        token = self.projector_size * (self.projector_size + output_size) / self.merge**2
        return self.hidden_size * (CHANNELS * self.patch_size**2 + self.projector_size) + token


def muse_glimmer(fields: Fields, processor: Fields, vocab_size: int) -> Vision:
    """Read the encoder of a model. Defaults are those of transformers' classes."""
    own = Fields.of_file(fields.get("vision_config"), f"{fields.where}: vision_config")
    own.only("hidden_act", "gelu")
    fields.only("projector_hidden_act", "gelu")
    rescale, mean, std = pixel_numbers(processor)
    num_layers = own.size("num_hidden_layers", default=50, most=MAX_LAYERS)
    config = MuseVisionConfig(
        kind=str(fields.get("model_type")),
        placeholder=fields.size("image_token_id", default=200_092, least=0, most=vocab_size - 1),
        patch_size=own.size("patch_size", default=14, most=MAX_TILE),
        merge=own.size("merge_size", default=2, most=MAX_TILE),
        hidden_size=own.size("hidden_size", default=1536),
        intermediate_size=own.size("intermediate_size", default=8960),
        num_layers=num_layers,
        num_heads=own.size("num_attention_heads", default=16),
        norm_eps=own.number("layer_norm_eps", default=1e-5),
        side=own.size("pos_emb_height", default=32, most=MAX_TILE),
        theta=rope_theta(own),
        whole=_whole(own, num_layers),
        depth=own.size("patch_temporal", default=2, most=16),
        most_tokens=min(processor.size("max_image_tokens", default=MOST_TOKENS), MOST_TOKENS),
        projector_size=fields.size("projector_hidden_size", default=4096),
        rescale=rescale,
        mean=mean,
        std=std,
    )
    _check(config, fields, own, processor)
    return config, tuple(f"vision_config.{name}" for name in unknown_options(own, _HARMLESS))


def _whole(own: Fields, num_layers: int) -> frozenset[int]:
    """Return the layers without windows: those that are listed, or every fourth and the last."""
    if own.get("layer_types") is None:
        return frozenset({*range(3, num_layers, 4), num_layers - 1})
    kinds = own.one_of_each("layer_types", num_layers, _KINDS)
    return frozenset(layer for layer, kind in enumerate(kinds) if kind == _WHOLE)


def _check(config: MuseVisionConfig, fields: Fields, own: Fields, processor: Fields) -> None:
    check_heads(config, own.where)
    if config.hidden_size // config.num_heads % 4:
        raise ModelError(
            f"{own.where}: heads of {config.hidden_size // config.num_heads} do not divide into four parts"
        )
    own.only("pos_emb_width", config.side)
    width = config.merge**2 * config.hidden_size
    given = fields.size("out_hidden_size", default=6144)
    if given != width:
        raise ModelError(
            f"{fields.where}: out_hidden_size is {given}; {config.merge} x {config.merge} patches have {width} numbers"
        )
    ours = {"patch_size": config.patch_size, "merge_size": config.merge, "temporal_patch_size": config.depth}
    for name, value in ours.items():
        processor.only(name, value)
    check_tile_bytes(config, own.where)
