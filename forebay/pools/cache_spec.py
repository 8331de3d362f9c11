"""What a layer keeps of the tokens it has seen. A model returns one spec per layer; nobody asks for layer types."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class FullAttention:
    """K and V of every token."""

    num_kv_heads: int
    head_dim: int


@dataclass(frozen=True, kw_only=True, slots=True)
class SlidingWindow:
    """K and V; a query reads itself and the `window` - 1 tokens before it."""

    num_kv_heads: int
    head_dim: int
    window: int


CacheSpec = FullAttention | SlidingWindow
