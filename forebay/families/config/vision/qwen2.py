"""The encoders of Qwen2-VL and Qwen2.5-VL."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from forebay.families.base.fields import Fields
from forebay.families.base.options import unknown_options
from forebay.families.config.vision.base import MAX_TILE, Vision
from forebay.families.config.vision.qwen import HARMLESS, MOST_TOKENS, QwenConfig, check_sizes, common_fields

_PLACEHOLDER: Final = 151_655
_WHOLE_LAYERS: Final = [7, 15, 23, 31]
_MOST_RATIO: Final = 64
# Fields that repeat others and have no effect.
_REPEATED: Final = frozenset({"in_chans", "spatial_patch_size"})


@dataclass(frozen=True, kw_only=True, slots=True)
class Qwen2Config(QwenConfig):
    """Attention is within windows of `window` x `window` tokens, and in the layers `whole` between all patches of an
    image (arXiv 2502.13923, section 2.1.1). With `gated` norms are RMS norms, and feed-forward layers have a gate."""

    window: int
    whole: frozenset[int]
    gated: bool

    @property
    def seen_tokens(self) -> tuple[int, ...]:
        return tuple(self.max_tokens if layer in self.whole else self.window**2 for layer in range(self.num_layers))

    @property
    def layer_products(self) -> tuple[int, int]:
        """Return the products of a patch in a layer's matrices, and of a pair of patches in its attention."""
        matrices = 3 if self.gated else 2
        return 4 * self.hidden_size**2 + matrices * self.hidden_size * self.intermediate_size, 2 * self.hidden_size


def qwen2_vl(fields: Fields, processor: Fields, vocab_size: int) -> Vision:
    """Read the encoder of a Qwen2-VL, all of whose layers see the whole image. Defaults are those of transformers'
    classes."""
    own = Fields.of_file(fields.get("vision_config"), f"{fields.where}: vision_config")
    own.only("hidden_act", "quick_gelu")
    common = common_fields(fields, own, processor, vocab_size, placeholder=_PLACEHOLDER, num_layers=32, patch_size=14)
    width = own.size("embed_dim", default=1280)
    config = Qwen2Config(
        **common,
        hidden_size=width,
        intermediate_size=own.size("mlp_ratio", default=4, most=_MOST_RATIO) * width,
        output_size=own.size("hidden_size", default=3584),
        window=MOST_TOKENS,  # one window for each image
        whole=frozenset(range(common["num_layers"])),
        gated=False,
    )
    check_sizes(config, processor, own.where)
    return config, tuple(f"vision_config.{name}" for name in unknown_options(own, HARMLESS | _REPEATED))


def qwen2_5_vl(fields: Fields, processor: Fields, vocab_size: int) -> Vision:
    """Read the encoder of a Qwen2.5-VL. Defaults are those of transformers' classes."""
    own = Fields.of_file(fields.get("vision_config"), f"{fields.where}: vision_config")
    own.only("hidden_act", "silu")
    common = common_fields(fields, own, processor, vocab_size, placeholder=_PLACEHOLDER, num_layers=32, patch_size=14)
    edge = common["patch_size"] * common["merge"]
    window = own.size("window_size", default=112, most=MAX_TILE) // edge
    if not window:
        raise own.wrong("window_size", f"at least the {edge} pixels of a token's edge")
    config = Qwen2Config(
        **common,
        hidden_size=own.size("hidden_size", default=3584),
        intermediate_size=own.size("intermediate_size", default=3420),
        output_size=own.size("out_hidden_size", default=3584),
        window=window,
        whole=frozenset(own.ints("fullatt_block_indexes", default=_WHOLE_LAYERS)),
        gated=True,
    )
    check_sizes(config, processor, own.where)
    return config, tuple(f"vision_config.{name}" for name in unknown_options(own, HARMLESS | _REPEATED))
