from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

from forebay.families.base.fields import MAX_LAYERS, Fields
from forebay.families.base.mixers import Mamba1Mixer
from forebay.families.base.rope import ROPE_FIELDS
from forebay.families.base.shape import Shape
from forebay.families.config.model_config import Experts, Family
from forebay.families.config.transformer import FULL, LINEAR, Defaults, count_of, kernel_width, transformer
from forebay.families.parts.mamba import KERNELS, MambaConfig, rank_of
from forebay.families.parts.mamba2 import expanded
from forebay.families.parts.own_code import OWN_CODE


@dataclass(frozen=True, kw_only=True, slots=True)
class JambaConfig(MambaConfig):
    """A Mamba configuration with experts, and the numbers of the layers that have them."""

    experts: Experts
    expert_layers: tuple[int, ...]


def parse(fields: Fields) -> JambaConfig:
    """Read Jamba's fields: attention and experts each in every n-th layer, and no rotary embeddings."""
    num_layers = fields.size("num_hidden_layers", most=MAX_LAYERS)
    attention = _every(fields, num_layers, "attn_layer", period=8, offset=4)
    layers = [FULL if layer in attention else LINEAR for layer in range(num_layers)]
    values = transformer(fields.dropped(*ROPE_FIELDS), Defaults(attention_bias=False), layer_types=layers)
    number = fields.size("num_experts", default=16)
    return JambaConfig(
        **values,
        mixer=_mixer(fields, values["hidden_size"]),
        experts=Experts(
            num_experts=number,
            per_token=fields.size("num_experts_per_tok", default=2, most=max(2, number)),
            intermediate_size=values["intermediate_size"],
        ),
        expert_layers=_every(fields, num_layers, "expert_layer", period=2, offset=1) if number > 1 else (),
    )


def _every(fields: Fields, num_layers: int, name: str, *, period: int, offset: int) -> tuple[int, ...]:
    """The layers i with i % `name`_period == `name`_offset."""
    period = fields.size(f"{name}_period", default=period)
    offset = count_of(fields, f"{name}_offset", default=offset)
    if offset >= period:
        raise fields.wrong(f"{name}_offset", f"less than {name}_period, {period}")
    return tuple(range(offset, num_layers, period))


def _mixer(fields: Fields, hidden_size: int) -> Mamba1Mixer:
    return Mamba1Mixer(
        intermediate_size=expanded(fields),
        state_size=fields.size("mamba_d_state", default=16),
        dt_rank=rank_of(fields, "mamba_dt_rank", hidden_size),
        width=kernel_width(fields, "mamba_d_conv"),
        bias=fields.flag("mamba_proj_bias", default=False),
        conv_bias=fields.flag("mamba_conv_bias", default=True),
    )


def small(shape: Shape) -> dict[str, Any]:
    """Return the own fields of a small model: attention in one layer of four."""
    return {
        "mamba_d_state": 16,
        "mamba_d_conv": 4,
        "mamba_expand": 2,
        "attn_layer_period": 4,
        "attn_layer_offset": 2,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "use_mamba_kernels": False,
    }


FAMILY: Final = Family(parse=parse, small=small, harmless=OWN_CODE | KERNELS)
