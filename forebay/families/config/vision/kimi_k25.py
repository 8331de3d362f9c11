"""MoonViT with a patch merger behind it: the encoder of Kimi K2.5, which reads an image of any size as one tile."""

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

NORM_EPS: Final = 1e-5  # of the encoder's norms, which no configuration has
_SIDE: Final = 64
_MAX_PATCHES: Final = 16_384
_MAX_PATCHES_OF_A_SIDE: Final = 512
# Fields of published files, and those of transformers.
_PUBLISHED: Final = {
    "init_pos_emb_height": "pos_emb_height",
    "init_pos_emb_width": "pos_emb_width",
    "vt_hidden_size": "hidden_size",
    "vt_intermediate_size": "intermediate_size",
    "vt_num_attention_heads": "num_attention_heads",
    "vt_num_hidden_layers": "num_hidden_layers",
}
_PROCESSOR: Final = {"in_patch_limit": "max_patches", "merge_kernel_size": "merge_size"}
_ONLY: Final = {
    "hidden_act": "gelu_pytorch_tanh",
    "merge_type": "sd2_tpool",
    "mm_projector_type": "patchmerger",
    "pos_emb_type": "divided_fixed",
    "projector_hidden_act": "gelu",
}
# About videos, and what others say as well.
_HARMLESS: Final = frozenset(
    {"_attn_implementation", "init_pos_emb_time", "pos_emb_time", "text_hidden_size", "video_attn_type"}
)
# transformers 5 saves weights of patches under the name of the layers.
_PATCHES: Final = ("vision_tower.encoder.patch_embed.", "vision_tower.patch_embed.")


@dataclass(frozen=True, kw_only=True, slots=True)
class KimiVisionConfig(VisionConfig):
    """A table of `side` x `side` positions is interpolated to the patches of an image, and heads are rotated by a
    patch's row and column at the base `theta`. An image has about `most_patches` patches, and at most `most_of_a_side`
    in a row or a column. `projector_eps` is of the norm in the projector. arXiv 2504.07491, section 2.1."""

    side: int
    theta: float
    most_patches: int
    most_of_a_side: int
    projector_eps: float

    @property
    def max_edge(self) -> int:
        return math.ceil(self.most_of_a_side / self.merge) * self.token_edge

    @property
    def max_tokens(self) -> int:
        """Return the most tokens of an image. Patches are counted before edges are rounded up: each edge may have one
        more, and then those that complete a token."""
        more, longest = self.merge + 1, min(self.most_of_a_side, self.most_patches)
        shortest = min(longest, self.most_patches / longest)
        return int((longest * shortest + more * (longest + shortest) + more**2) / self.merge**2)

    def here(self, stored: str) -> str:
        """Return what published files call a tensor of the encoder, below `model`."""
        return f"model.{stored.removeprefix('model.')}".replace(*_PATCHES)

    def outer_products(self, output_size: int) -> float:
        """Return the products that a patch takes in its embedding, and its share of those of a token's projector."""
        width = self.hidden_size
        return width * (CHANNELS * self.patch_size**2 + self.merge**2 * width + output_size)


def kimi_k25(fields: Fields, processor: Fields, vocab_size: int) -> Vision:
    """Read the encoder of a model. Defaults are those of transformers' classes."""
    own = Fields.of_file(fields.get("vision_config"), f"{fields.where}: vision_config").renamed(_PUBLISHED)
    processor = processor_of(processor)
    for name, value in _ONLY.items():
        own.only(name, value)
    rescale, mean, std = pixel_numbers(processor)
    merge = _merge(own)
    config = KimiVisionConfig(
        kind=str(fields.get("model_type")),
        placeholder=fields.renamed({"media_placeholder_token_id": "image_token_id"}).size(
            "image_token_id", default=163_605, least=0, most=vocab_size - 1
        ),
        patch_size=own.size("patch_size", default=14, most=MAX_TILE),
        merge=merge,
        hidden_size=own.size("hidden_size", default=1152),
        intermediate_size=own.size("intermediate_size", default=4304),
        num_layers=own.size("num_hidden_layers", default=27, most=MAX_LAYERS),
        num_heads=own.size("num_attention_heads", default=16),
        norm_eps=NORM_EPS,
        side=own.size("pos_emb_height", default=_SIDE, most=MAX_TILE),
        theta=rope_theta(own),
        most_patches=min(processor.size("max_patches", default=_MAX_PATCHES), MOST_TOKENS * merge**2),
        most_of_a_side=_most_of_a_side(processor),
        projector_eps=fields.number(
            "projection_layer_norm_eps", default=own.number("projector_ln_eps", default=NORM_EPS)
        ),
        rescale=rescale,
        mean=mean,
        std=std,
    )
    return _checked(config, fields, own, processor), tuple(
        f"vision_config.{name}" for name in unknown_options(own, _HARMLESS)
    )


def processor_of(processor: Fields) -> Fields:
    """Return the fields of an image processor, which published files have within `media_proc_cfg`."""
    return processor.within("media_proc_cfg").renamed(_PROCESSOR) if processor.has("media_proc_cfg") else processor


def _merge(own: Fields) -> int:
    sides = own.get("merge_kernel_size", [2, 2])
    if not isinstance(sides, list | tuple) or len(sides) != 2 or sides[0] != sides[1]:
        raise own.wrong("merge_kernel_size", "two equal numbers of patches")
    if type(sides[0]) is not int or not 1 <= sides[0] <= MAX_TILE:
        raise own.wrong("merge_kernel_size", f"two whole numbers from 1 to {MAX_TILE}")
    return sides[0]


def _most_of_a_side(processor: Fields) -> int:
    if processor.has("patch_limit_on_one_side"):
        return processor.size("patch_limit_on_one_side", most=MAX_TILE)
    size = processor.within("size")
    most = size.size("max_height", default=_MAX_PATCHES_OF_A_SIDE, most=MAX_TILE)
    size.only("max_width", most)
    return most


def _checked(config: KimiVisionConfig, fields: Fields, own: Fields, processor: Fields) -> KimiVisionConfig:
    check_heads(config, own.where)
    if config.hidden_size // config.num_heads % 4:
        raise ModelError(
            f"{own.where}: heads of {config.hidden_size // config.num_heads} do not divide into four parts"
        )
    own.only("pos_emb_width", config.side)
    own.only("mm_hidden_size", config.hidden_size)
    fields.only("projection_hidden_size", config.hidden_size)
    if processor.get("fixed_output_tokens") is not None:
        raise processor.wrong("fixed_output_tokens", "absent: images have tokens by their size")
    for name, ours in (("patch_size", config.patch_size), ("merge_size", config.merge)):
        processor.only(name, ours)
    check_tile_bytes(config, own.where)
    return config
