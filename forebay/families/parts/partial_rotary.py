"""Rotary embeddings of a part of each head."""

from __future__ import annotations

from dataclasses import dataclass

from forebay.families.model_config import ModelConfig


@dataclass(frozen=True, kw_only=True, slots=True)
class PartialRotaryConfig(ModelConfig):
    """`rotary_dim`: how many dimensions of a head, the first ones, are rotated."""

    rotary_dim: int
