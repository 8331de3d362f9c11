"""Muse Glimmer in GGUF. Files carry the factor of queries in norm weights that the model itself does not have: all of
the queries' are the factor, all of the keys' are 1. Only layers with a window have a rotary embedding."""

from __future__ import annotations

from typing import Final

import numpy as np

from forebay.base.errors import brief
from forebay.families.base.architecture import Architecture, Header, Tensors
from forebay.families.config.transformer import SLIDING
from forebay.families.parts.gguf.gemma import GEMMA_NAMES
from forebay.formats.stored_tensor import less_one

_SCALE: Final = "logit_scale"
_CAP: Final = "final_logit_softcapping"
_WINDOW: Final = "attention.sliding_window"
_WINDOW_BASE: Final = "rope.freq_base_swa"
_QUERY_NORM, _KEY_NORM = "attn_q_norm", "attn_k_norm"


def _configure(header: Header) -> None:
    """Complete the configuration. Raises ModelError if metadata are missing that llama.cpp's converter
    always writes, and for norms that are no factor."""
    own, config = header.own, header.config
    for key in (_SCALE, _CAP):
        if key not in own:
            raise header.wrong(f"{key} is missing")
    config["sliding_window"] = header.whole(_WINDOW)
    config["layer_types"] = kinds = header.windowed()
    config["final_logit_softcapping"] = own[_CAP] or None
    config["rope_theta"] = theta = own.get(_WINDOW_BASE, config.get("rope_theta"))
    config["layer_rope_theta"] = [theta if kind == SLIDING else 0 for kind in kinds]
    config["qk_scale_factor"] = _factor(header, _QUERY_NORM)
    if _factor(header, _KEY_NORM) != 1:
        raise header.wrong(f"{_KEY_NORM} has other weights than 1: keys are not scaled by Muse Glimmer")


def _factor(header: Header, norm: str) -> float:
    """Return the one number that is in the weights of `norm` of all layers. Raises ModelError if there are more, and
    for a tensor that is not a vector of F32 as long as a head."""
    size, found = header.config.get("head_dim"), set()
    for layer in header.layers:
        name = f"blk.{layer}.{norm}.weight"
        tensor = header.file.tensors.get(name)
        if tensor is None or tensor.type.name != "F32" or tensor.shape != (size,):
            raise header.wrong(f"{name} is no vector of {brief(size)} F32 numbers")
        found.update(np.unique(header.file.raw(name).read().view(np.float32)).tolist())
    if len(found) != 1:
        raise header.wrong(f"{norm} has {len(found)} different weights, not one factor of all layers")
    return float(found.pop())


def _restore(tensors: Tensors) -> Tensors:
    """Leave out the factors; layers' norm weights are stored as they are used, not as differences from 1."""
    return {
        name: less_one(tensor) if name.endswith("layernorm.weight") else tensor
        for name, tensor in tensors.items()
        if not name.endswith(("q_norm.weight", "k_norm.weight"))
    }


ARCHITECTURES: Final = {
    "muse-glimmer": Architecture(
        interleaved_rope=True,
        block_names={**GEMMA_NAMES, "attn_gate": "self_attn.gate_proj"},
        keys={_SCALE: "output_multiplier"},
        checked=(_CAP, _WINDOW, "attention.sliding_window_pattern", _WINDOW_BASE),
        configure=_configure,
        restore=_restore,
    ),
}
