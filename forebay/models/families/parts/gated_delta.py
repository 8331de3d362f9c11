"""Layers of gated delta rules and attention."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Final, TypeVar

from forebay.families.config.transformer import FULL, LINEAR
from forebay.families.parts.gated_delta import Qwen35Config
from forebay.layers.attention import AttentionSpec, QkNorm
from forebay.layers.build import BlockSpec, PartSpec
from forebay.layers.draft_head import DraftHeadSpec
from forebay.layers.gated_delta import GatedDeltaSpec
from forebay.layers.params import Rows
from forebay.models.decoder import (
    DecoderOptions,
    attention_spec,
    block_spec,
    draft_head_spec,
    layer_name,
    mlp_spec,
    rope_spec,
)

NORM_OFFSET: Final = 1.0  # norm weights are stored as differences from it, but for the norm behind the delta rule
DECODER: DecoderOptions = {"norm_offset": NORM_OFFSET}
Config = TypeVar("Config", bound=Qwen35Config)


def block(config: Qwen35Config, layer: int) -> BlockSpec:
    """Describe a layer: a gated delta rule or gated attention, and an MLP."""
    delta = delta_spec(config, layer, separate_inputs(config))
    return qwen_block(config, layer, delta=delta, mlp=mlp_spec(config, layer))


def qwen_draft_head(config: Qwen35Config, block: BlockSpec) -> DraftHeadSpec:
    """Describe a head that drafts with `block`, with Qwen's offset of the norms."""
    return draft_head_spec(config, block, norm_offset=NORM_OFFSET)


def with_draft_layer(config: Config) -> Config:
    """With the draft head's layer behind the model's own, which has attention."""
    return replace(config, layer_types=(*config.layer_types, FULL))


def separate_inputs(config: Qwen35Config) -> Sequence[tuple[str, int]]:
    """Return the names and rows of the delta rule's input matrices if the checkpoint has four."""
    keys, values, heads = config.delta.key_size, config.delta.value_size, config.delta.num_value_heads
    return (("in_proj_qkv", 2 * keys + values), ("in_proj_z", values), ("in_proj_b", heads), ("in_proj_a", heads))


def qwen_block(config: Qwen35Config, layer: int, *, delta: GatedDeltaSpec, mlp: PartSpec) -> BlockSpec:
    """With attention instead of the delta net in the layers that have it."""
    mixer = delta if config.layer_types[layer] == LINEAR else gated_attention(config, layer)
    return block_spec(config, layer, mixer, mlp, norm_offset=NORM_OFFSET)


def gated_attention(config: Qwen35Config, layer: int) -> AttentionSpec:
    """Describe attention with norms of heads, a partial rotation and a gate for each entry of its output."""
    return replace(
        attention_spec(config, layer, qk_norm=QkNorm.HEAD),
        norm_offset=NORM_OFFSET,
        rope=replace(rope_spec(config), dim=config.rotary_dim),
        output_gate=True,
    )


def delta_spec(
    config: Qwen35Config, layer: int, inputs: Sequence[tuple[str, int]], input_rows: Rows = ()
) -> GatedDeltaSpec:
    """Describe the gated delta rule of a layer. `input_rows` is the order of the inputs' rows that layers need, if not
    the checkpoint's."""
    return GatedDeltaSpec(
        name=f"{layer_name(layer)}.linear_attn",
        hidden_size=config.hidden_size,
        delta=config.delta,
        norm_eps=config.rms_norm_eps,
        inputs=inputs,
        input_rows=input_rows,
    )
