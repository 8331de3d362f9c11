"""Kimi's delta rule."""

from __future__ import annotations

from typing import Protocol

from forebay.families.base.mixers import KimiDelta
from forebay.layers.kimi_delta import KimiDeltaSpec


class WithDelta(Protocol):
    """The configuration of a model with Kimi's delta rule."""

    @property
    def hidden_size(self) -> int: ...

    @property
    def rms_norm_eps(self) -> float: ...

    @property
    def delta(self) -> KimiDelta: ...


def kimi_delta_spec(config: WithDelta, name: str, *, low_rank: bool, a_log_shape: tuple[int, ...]) -> KimiDeltaSpec:
    """Describe the delta rule of the checkpoint's part `name`. `low_rank`: the gates come through a low-rank layer."""
    return KimiDeltaSpec(
        name=name,
        hidden_size=config.hidden_size,
        delta=config.delta,
        norm_eps=config.rms_norm_eps,
        low_rank=low_rank,
        a_log_shape=a_log_shape,
    )
