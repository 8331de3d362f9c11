"""The bytes of the KV cache: one K and one V buffer per layer, page 0 the padding page (C5)."""

from __future__ import annotations

import torch
from torch import Tensor


class KvPool:
    """K and V of every layer, `[(num_pages + 1) * page_size, num_kv_heads, head_dim]`, indexed by
    `page * page_size + offset`. Page 0 is never handed out: writes that must go nowhere go there.
    """

    def __init__(
        self,
        *,
        num_layers: int,
        num_pages: int,
        page_size: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> None:
        self.page_size = page_size
        self.num_pages = num_pages
        shape = (2, (num_pages + 1) * page_size, num_kv_heads, head_dim)
        self._layers = [torch.zeros(shape, dtype=dtype, device=device) for _ in range(num_layers)]

    def k(self, layer: int) -> Tensor:
        return self._layers[layer][0]

    def v(self, layer: int) -> Tensor:
        return self._layers[layer][1]

    @property
    def num_bytes(self) -> int:
        return sum(t.nbytes for t in self._layers)
