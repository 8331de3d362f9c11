"""The shape of a model, read from config.json or GGUF metadata before any weight is touched. No torch."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelConfig:
    """What every architecture has. Whatever only one has is in `extra`, under transformers' name for it."""

    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position_embeddings: int
    rms_norm_eps: float
    rope_theta: float
    rope_scaling: dict[str, Any] | None = None
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    mlp_bias: bool = False
    sliding_window: int = 0  # tokens, 0 for none
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    extra: dict[str, Any] = field(default_factory=dict)

    def kv_bytes_per_token(self, itemsize: int) -> int:
        """Bytes of K and V that one token keeps over all layers."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * itemsize
