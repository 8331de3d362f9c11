"""Names and keys of parallel attention and MLP."""

from __future__ import annotations

from typing import Final

from forebay.families.base.architecture import ATTENTION, MLP

COHERE_NAMES: Final = {**ATTENTION, **MLP, "attn_norm": "input_layernorm"}
COHERE_KEYS: Final = {"attention.layer_norm_epsilon": "layer_norm_eps", "logit_scale": "logit_scale"}
