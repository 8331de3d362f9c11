from __future__ import annotations

from typing import Final

from forebay.families.architecture import PRE_NORM, Architecture, within

_NORMS: Final = within("self_attn", {"attn_q_norm": "query_layernorm", "attn_k_norm": "key_layernorm"})
NAMES: Final = {**PRE_NORM, **_NORMS}

# The base in the files is the stretched one.
ARCHITECTURES: Final = {"hunyuan-dense": Architecture(block_names=NAMES)}
