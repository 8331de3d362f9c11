from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

from forebay.families.base.fields import MAX_LAYERS, Fields
from forebay.families.base.rope import ROPE_FIELDS
from forebay.families.base.shape import Shape
from forebay.families.config.model_config import Experts, Family
from forebay.families.config.transformer import FULL, LINEAR, Defaults, count_of, transformer
from forebay.families.parts.joined_experts import NAMES
from forebay.families.parts.mamba import KERNELS
from forebay.families.parts.mamba2 import Mamba2Config, bamba_mixer, expanded, listed_layers, small_mixer
from forebay.families.parts.multipliers import Multipliers, multipliers


@dataclass(frozen=True, kw_only=True, slots=True)
class GraniteMoeHybridConfig(Mamba2Config):
    """A Mamba-2 configuration with the multipliers of embeddings, logits, residuals and attention scores."""

    has_rope: bool
    shared_intermediate_size: int
    multipliers: Multipliers


def parse(fields: Fields) -> GraniteMoeHybridConfig:
    """Read Granite 4's fields: mixers and attention by `layer_types`, and rotary embeddings only where
    `position_embedding_type` says so."""
    fields.only("position_embedding_type", "rope", "nope")
    rope = fields.get("position_embedding_type") == "rope"
    transformed = fields if rope else fields.dropped(*ROPE_FIELDS)
    values = transformer(transformed, Defaults(kv_heads=True), layer_types=_layer_types(fields))
    return GraniteMoeHybridConfig(
        **values,
        mixer=bamba_mixer(fields, expanded(fields)),
        experts=_experts(fields, values["intermediate_size"]),
        has_rope=rope,
        shared_intermediate_size=fields.size("shared_intermediate_size", default=1024),
        multipliers=multipliers(fields),
    )


def _layer_types(fields: Fields) -> list[str]:
    num_layers = fields.size("num_hidden_layers", most=MAX_LAYERS)
    for name in ("layer_types", "layers_block_type"):
        if fields.get(name) is not None:
            types = listed_layers(fields, name, (LINEAR, FULL))
            if len(types) != num_layers:
                raise fields.wrong(name, f"a list of {num_layers}")
            return types
    return [LINEAR] * num_layers


def _experts(fields: Fields, intermediate_size: int) -> Experts | None:
    number = count_of(fields, "num_local_experts", default=8)
    if not number:
        return None
    per_token = fields.size("num_experts_per_tok", default=2, most=number)
    return Experts(num_experts=number, per_token=per_token, intermediate_size=intermediate_size)


def small(shape: Shape) -> dict[str, Any]:
    """Return the own fields of a small model: three mixers and one attention, without rotary embeddings."""
    return {
        **small_mixer(shape),
        "layer_types": shape.cycle("mamba", "mamba", "attention", "mamba"),
        "intermediate_size": shape.hidden_size,
        "shared_intermediate_size": 2 * shape.hidden_size,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "position_embedding_type": "nope",
    }


FAMILY: Final = Family(parse=parse, small=small, harmless=KERNELS, names=NAMES)
