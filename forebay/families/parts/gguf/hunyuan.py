"""Names of Hunyuan's norms."""

from __future__ import annotations

from typing import Final

from forebay.families.base.architecture import PRE_NORM, within

_NORMS: Final = within("self_attn", {"attn_q_norm": "query_layernorm", "attn_k_norm": "key_layernorm"})
NAMES: Final = {**PRE_NORM, **_NORMS}
