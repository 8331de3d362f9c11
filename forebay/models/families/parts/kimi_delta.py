"""Kimi's delta rule."""

from __future__ import annotations

from forebay.families.parts.kimi_delta import KimiLinearConfig
from forebay.layers.kimi_delta import KimiDeltaSpec


def kimi_delta_spec(
    config: KimiLinearConfig, name: str, *, low_rank: bool, a_log_shape: tuple[int, ...]
) -> KimiDeltaSpec:
    """Describe the delta rule of the checkpoint's part `name`. `low_rank`: the gates come through a low-rank layer."""
    return KimiDeltaSpec(
        name=name,
        hidden_size=config.hidden_size,
        delta=config.delta,
        norm_eps=config.rms_norm_eps,
        low_rank=low_rank,
        a_log_shape=a_log_shape,
    )
