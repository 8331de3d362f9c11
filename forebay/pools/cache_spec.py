"""What a layer keeps of the tokens it has seen. A model returns its layers' specs; nobody asks for layer types.

Sizing, the pools, copies, snapshots and transfers are all derived from these. No torch: planning needs them too.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple


@dataclass(frozen=True, kw_only=True, slots=True)
class FullAttention:
    """K and V of every token. `v_head_dim` 0: as `head_dim`."""

    num_kv_heads: int
    head_dim: int
    v_head_dim: int = 0

    @property
    def elements_per_token(self) -> int:
        return self.num_kv_heads * (self.head_dim + (self.v_head_dim or self.head_dim))

    @property
    def scales_per_token(self) -> int:
        return 2 * self.num_kv_heads


@dataclass(frozen=True, kw_only=True, slots=True)
class LatentAttention:
    """Multi-head latent attention: one vector per token, whose first `rank` entries are the values of all heads and
    which, with the rotated key's `rope_dim` entries behind them, is the key of all heads."""

    rank: int
    rope_dim: int

    @property
    def elements_per_token(self) -> int:
        return self.rank + self.rope_dim

    @property
    def scales_per_token(self) -> int:
        return 1


@dataclass(frozen=True, kw_only=True, slots=True)
class SlidingWindow:
    """K and V; a query reads itself and the `window` - 1 tokens before it. Older tokens' pages are given back."""

    num_kv_heads: int
    head_dim: int
    window: int

    @property
    def elements_per_token(self) -> int:
        return 2 * self.num_kv_heads * self.head_dim

    @property
    def scales_per_token(self) -> int:
        return 2 * self.num_kv_heads


@dataclass(frozen=True, kw_only=True, slots=True)
class RecurrentState:
    """A state of fixed size: `conv` are the last inputs of a causal convolution, `[kernel - 1, channels]`, in the
    model's dtype; `ssm` is what a scan carries on, of any shape, in the dtype of `--mamba-ssm-dtype`. () for none."""

    conv: tuple[int, ...] = ()
    ssm: tuple[int, ...] = ()

    @property
    def conv_elements(self) -> int:
        return math.prod(self.conv) if self.conv else 0

    @property
    def ssm_elements(self) -> int:
        return math.prod(self.ssm) if self.ssm else 0


CacheSpec = FullAttention | LatentAttention | SlidingWindow | RecurrentState


class CacheSizes(NamedTuple):
    """Bytes over all layers, for one token of full and of windowed KV, and for one state slot. `window` 0: no layer has
    one; otherwise the widest, since the window pages of a token are kept or given back for all layers together."""

    kv_bytes_per_token: int
    window_bytes_per_token: int
    state_bytes: int
    window: int


_SCALE_BYTES = 4


def cache_sizes(
    specs: Iterable[CacheSpec], *, itemsize: int, ssm_itemsize: int, kv_itemsize: int | None = None
) -> CacheSizes:
    """`kv_itemsize` None: as `itemsize`; of one byte: with the scales of 8-bit KV."""
    kv = windowed = state = window = 0
    kv_bytes = kv_itemsize or itemsize
    scale_bytes = _SCALE_BYTES if kv_bytes == 1 else 0
    for spec in specs:
        match spec:
            case FullAttention() | LatentAttention():
                kv += spec.elements_per_token * kv_bytes + spec.scales_per_token * scale_bytes
            case SlidingWindow():
                windowed += spec.elements_per_token * kv_bytes + spec.scales_per_token * scale_bytes
                window = max(window, spec.window)
            case RecurrentState():
                state += spec.conv_elements * itemsize + spec.ssm_elements * ssm_itemsize
    return CacheSizes(kv, windowed, state, window)
