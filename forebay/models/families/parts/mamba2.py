"""Mamba-2 mixers."""

from __future__ import annotations

from forebay.families.parts.mamba2 import Mamba2Config
from forebay.layers.mamba2 import GatedNormSpec, Mamba2Spec


def mamba2_spec(config: Mamba2Config, name: str) -> Mamba2Spec:
    """With a gated norm behind the scan; `name` is the checkpoint's prefix."""
    norm = GatedNormSpec(eps=config.rms_norm_eps)
    return Mamba2Spec(name=name, hidden_size=config.hidden_size, mixer=config.mixer, norm=norm)
