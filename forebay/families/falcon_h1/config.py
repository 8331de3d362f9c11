from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

from forebay.families.base.fields import MAX_LAYERS, Fields
from forebay.families.base.shape import Shape
from forebay.families.config.model_config import Family
from forebay.families.config.transformer import Defaults, transformer
from forebay.families.parts.mamba import KERNELS
from forebay.families.parts.mamba2 import HYBRID, Mamba2Config, bamba_mixer, expanded, small_mixer
from forebay.families.parts.multipliers import _multipliers, multiplier


@dataclass(frozen=True, kw_only=True, slots=True)
class FalconH1Config(Mamba2Config):
    """`mlp_multipliers` are of the gate and of the output, `ssm_multipliers` of z, x, B, C and dt."""

    mamba_rms_norm: bool
    mamba_norm_before_gate: bool
    embedding_multiplier: float
    lm_head_multiplier: float
    key_multiplier: float
    attention_in_multiplier: float
    attention_out_multiplier: float
    ssm_in_multiplier: float
    ssm_out_multiplier: float
    mlp_multipliers: tuple[float, ...]
    ssm_multipliers: tuple[float, ...]


def parse(fields: Fields) -> FalconH1Config:
    """Read Falcon-H1's fields: every layer has attention and a mixer side by side, and most outputs have a
    multiplier."""
    layers = [HYBRID] * fields.size("num_hidden_layers", most=MAX_LAYERS)
    intermediate = expanded(fields) if fields.is_null("mamba_d_ssm") else fields.size("mamba_d_ssm", default=1024)
    return FalconH1Config(
        **transformer(fields, Defaults(rms_norm_eps=1e-5, mlp_bias=True), layer_types=layers),
        mixer=bamba_mixer(fields, intermediate, out_bias="projectors_bias"),
        mamba_rms_norm=fields.flag("mamba_rms_norm", default=False),
        mamba_norm_before_gate=fields.flag("mamba_norm_before_gate", default=True),
        embedding_multiplier=multiplier(fields, "embedding_multiplier"),
        lm_head_multiplier=multiplier(fields, "lm_head_multiplier"),
        key_multiplier=multiplier(fields, "key_multiplier"),
        attention_in_multiplier=multiplier(fields, "attention_in_multiplier"),
        attention_out_multiplier=multiplier(fields, "attention_out_multiplier"),
        ssm_in_multiplier=multiplier(fields, "ssm_in_multiplier"),
        ssm_out_multiplier=multiplier(fields, "ssm_out_multiplier"),
        mlp_multipliers=_multipliers(fields, "mlp_multipliers", fields.get("mlp_multipliers"), 2),
        ssm_multipliers=_multipliers(fields, "ssm_multipliers", fields.get("ssm_multipliers"), 5),
    )


def small(shape: Shape) -> dict[str, Any]:
    """Return the own fields of a small model, whose mixer is twice as wide as the model."""
    return {**small_mixer(shape), "mamba_d_ssm": 2 * shape.hidden_size}


FAMILY: Final = Family(parse=parse, small=small, harmless=KERNELS | {"mamba_expand"})
