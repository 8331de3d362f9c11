"""Attention and MLP in parallel, as Cohere has them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from forebay.families.base.fields import Fields
from forebay.families.config.model_config import ModelConfig
from forebay.families.config.transformer import Defaults, TransformerValues, Windows, transformer
from forebay.families.parts.multipliers import multiplier


@dataclass(frozen=True, kw_only=True, slots=True)
class CohereConfig(ModelConfig):
    """Logits are multiplied by `logit_scale`. `use_qk_norm`: each head of queries and keys has a LayerNorm."""

    logit_scale: float
    use_qk_norm: bool = False


class ParallelValues(TransformerValues):
    """The values of a `CohereConfig` without those of a default."""

    logit_scale: float


def parallel_transformer(fields: Fields, *, rope_theta: float, windows: Windows | None = None) -> ParallelValues:
    """Return the values that Cohere's types share."""
    fields = fields.without("rms_norm_eps").renamed({"layer_norm_eps": "rms_norm_eps"})
    defaults = Defaults(kv_heads=True, rms_norm_eps=1e-5, rope_theta=rope_theta, tied=True)
    scale = multiplier(fields, "logit_scale") if fields.get("logit_scale") is not None else 0.0625
    return {**transformer(fields, defaults, windows=windows), "logit_scale": scale}


# Names of what every model of the type has, in files that were written with remote code.
HARMLESS: Final = frozenset(
    {"cache_implementation", "layer_switch", "order_of_interleaved_layers", "position_embedding_type", "rotary_pct"}
    | {"use_embedding_sharing", "use_gated_activation", "use_parallel_block", "use_parallel_embedding"}
)
