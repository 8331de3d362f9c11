"""The encoder of Gemma 4: an image is one tile of its own ratio, resized to about as many tokens as there may be."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, TypedDict

from forebay.base.errors import ModelError
from forebay.base.pixels import CHANNELS
from forebay.families.base.fields import MAX_LAYERS, Fields
from forebay.families.base.options import unknown_options
from forebay.families.config.vision.base import MAX_TILE, MAX_TILE_BYTES, Channels, Vision, VisionConfig, pixel_numbers

MOST_TOKENS: Final = 4096
_DEFAULT_TOKENS: Final = 280
_MAX_HEAD_DIM: Final = 1024
# Linear layers have no biases, with `attention_bias` or without. The tokens of an image are those of the processor.
_HARMLESS: Final = frozenset({
    "attention_bias", "default_output_length", "global_head_dim", "max_position_embeddings",
})  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
class ScaledVisionConfig(VisionConfig):
    """A patch has two learned positions, those of its row and of its column, of `num_positions` each.

    An image has at most `most_tokens`, between the tokens `begin` and `end`. The language model is given the id
    `padding` in their place, which counts for the inputs of its layers. `bidirectional`: in layers with a window, the
    tokens of an image attend to each other in both directions."""

    num_positions: int
    most_tokens: int
    bidirectional: bool
    begin: int
    end: int
    padding: int

    @property
    def max_edge(self) -> int:
        return min(self.most_tokens, self.num_positions // self.merge) * self.token_edge

    @property
    def max_tokens(self) -> int:
        return self.most_tokens

    @property
    def input_id(self) -> int:
        return self.padding

    @property
    def longest_span(self) -> int:
        return self.most_tokens if self.bidirectional else 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Gemma4VisionConfig(ScaledVisionConfig):
    """Heads of `head_dim` are rotated by row and column with the base `theta`. With `clipped` the inputs and outputs of
    linear layers are held within bounds of the file. With `standardized` the averages of patches have a mean and a
    scale of it."""

    num_kv_heads: int
    head_dim: int
    theta: float
    clipped: bool
    standardized: bool

    @property
    def heads_width(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def layer_products(self) -> tuple[int, int]:
        """Return the products of a patch in a layer's matrices, and of a pair of patches in its attention."""
        heads = 2 * (self.num_heads + self.num_kv_heads) * self.head_dim
        return self.hidden_size * (heads + 3 * self.intermediate_size), 2 * self.num_heads * self.head_dim

    def outer_products(self, output_size: int) -> float:
        """Return the products of a patch in its embedding, and its share of those of a token's projection."""
        return self.hidden_size * (CHANNELS * self.patch_size**2 + output_size / self.merge**2)


class ImageValues(TypedDict):
    """The values of a `ScaledVisionConfig` about images."""

    kind: str
    placeholder: int
    begin: int
    end: int
    padding: int
    most_tokens: int
    bidirectional: bool


def gemma4(fields: Fields, processor: Fields, vocab_size: int) -> Vision:
    """Read the encoder of a Gemma 4. Defaults are those of transformers' classes."""
    own = Fields.of_file(fields.get("vision_config"), f"{fields.where}: vision_config")
    own.only("hidden_activation", "gelu_pytorch_tanh")
    rescale, mean, std = _pixel_numbers(processor)
    config = Gemma4VisionConfig(
        **image_fields(fields, processor, vocab_size, attention=None),
        patch_size=own.size("patch_size", default=16, most=MAX_TILE),
        merge=own.size("pooling_kernel_size", default=3, most=MAX_TILE),
        hidden_size=own.size("hidden_size", default=768),
        intermediate_size=own.size("intermediate_size", default=3072),
        num_layers=own.size("num_hidden_layers", default=16, most=MAX_LAYERS),
        num_heads=own.size("num_attention_heads", default=12),
        num_kv_heads=own.size("num_key_value_heads", default=12),
        head_dim=own.size("head_dim", default=64, most=_MAX_HEAD_DIM),
        norm_eps=own.number("rms_norm_eps", default=1e-6),
        theta=_theta(own),
        num_positions=own.size("position_embedding_size", default=10_240),
        clipped=own.flag("use_clipped_linears", default=False),
        standardized=own.flag("standardize", default=False),
        rescale=rescale,
        mean=mean,
        std=std,
    )
    _check(config, own, processor)
    return config, tuple(f"vision_config.{name}" for name in unknown_options(own, _HARMLESS))


def image_fields(fields: Fields, processor: Fields, vocab_size: int, *, attention: str | None) -> ImageValues:
    """Read the fields of a `ScaledVisionConfig` about images. `attention` is the language model's
    `use_bidirectional_attention` if the file has none."""
    text = fields.within("text_config")
    given = text.get("use_bidirectional_attention") if text.has("use_bidirectional_attention") else attention
    return {
        "kind": str(fields.get("model_type")),
        "placeholder": _token(fields, "image_token_id", 258_880, vocab_size),
        "begin": _token(fields, "boi_token_id", 255_999, vocab_size),
        "end": _token(fields, "eoi_token_id", 258_882, vocab_size),
        "padding": _token(text, "pad_token_id", 0, vocab_size),
        "most_tokens": processor.size("max_soft_tokens", default=_DEFAULT_TOKENS, most=MOST_TOKENS),
        "bidirectional": given is not None,
    }


def _pixel_numbers(processor: Fields) -> tuple[float, Channels, Channels]:
    """Return the numbers of pixels with those that the encoder itself makes of them, 2 (x - 0.5), included. Processors
    of this type normalize only where the file says so."""
    processor = processor.replaced(do_normalize=processor.flag("do_normalize", default=False))
    rescale, mean, std = pixel_numbers(processor, mean=(0.0, 0.0, 0.0), std=(1.0, 1.0, 1.0))
    red, green, blue = (each + deviation / 2 for each, deviation in zip(mean, std, strict=True))
    return rescale, (red, green, blue), (std[0] / 2, std[1] / 2, std[2] / 2)


def _token(fields: Fields, name: str, default: int, vocab_size: int) -> int:
    return fields.size(name, default=default, least=0, most=vocab_size - 1)


def _theta(own: Fields) -> float:
    rope = own.within("rope_parameters")
    rope.only("rope_type", "axial", "default")
    theta = rope.number("rope_theta", default=100.0)
    if theta < 1:
        raise rope.wrong("rope_theta", "a number of at least 1")
    return theta


def _check(config: Gemma4VisionConfig, own: Fields, processor: Fields) -> None:
    if config.head_dim % 4:
        raise own.wrong("head_dim", "a multiple of 4: halves are rotated by row and column, and each has pairs")
    if config.num_heads % config.num_kv_heads:
        raise ModelError(
            f"{own.where}: {config.num_heads} heads do not divide among {config.num_kv_heads} of keys and values"
        )
    check_image_size(config, own.where)
    if config.num_positions < config.merge:
        raise own.wrong("position_embedding_size", f"at least {config.merge}, the patches on an edge of a token")
    for name, ours in (("patch_size", config.patch_size), ("pooling_kernel_size", config.merge)):
        if processor.get(name, ours) != ours:
            raise processor.wrong(name, f"{ours}, as the encoder has it")


def check_image_size(config: ScaledVisionConfig, where: str) -> None:
    """Raise ModelError for images that are too large, and for tokens around them that are not different."""
    if len({config.placeholder, config.begin, config.end}) < 3:
        raise ModelError(f"{where}: image_token_id, boi_token_id and eoi_token_id must be three different ids")
    edge = config.token_edge
    if edge > MAX_TILE or config.most_tokens * edge**2 * CHANNELS > MAX_TILE_BYTES:
        raise ModelError(
            f"{where}: images of {config.most_tokens} tokens of {edge} x {edge} pixels are too large: at most "
            f"{MAX_TILE_BYTES} bytes of an image are encoded, and {MAX_TILE} pixels to an edge of a token"
        )
