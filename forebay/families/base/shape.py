"""The sizes of a small model, from which a family makes a configuration."""

from __future__ import annotations

from typing import Any, Final, NamedTuple

WINDOW: Final = 128
_WIDE: Final = 512  # from here on heads have 64 dimensions, below 32


class Shape(NamedTuple):
    """The sizes that a small model is made of; those of heads follow from the hidden size."""

    hidden_size: int
    num_layers: int
    vocab_size: int

    @property
    def head_dim(self) -> int:
        return 64 if self.hidden_size >= _WIDE else 32

    @property
    def num_heads(self) -> int:
        return self.hidden_size // self.head_dim

    @property
    def num_kv_heads(self) -> int:
        return self.num_heads if self.num_heads % 2 else self.num_heads // 2

    def cycle(self, *kinds: str) -> list[str]:
        """One of the kinds for each layer, in turn."""
        return [kinds[i % len(kinds)] for i in range(self.num_layers)]

    def experts(self) -> dict[str, Any]:
        """Return the fields of eight experts, two for each token."""
        return {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": self.hidden_size}
