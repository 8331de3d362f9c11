from __future__ import annotations

from typing import Final

from forebay.families.base.architecture import Architecture, Header, Tensors
from forebay.families.config.transformer import FULL, LINEAR
from forebay.families.parts.gguf.kimi_delta import DELTA_KEYS, DELTA_NAMES, restore_delta
from forebay.families.parts.gguf.latent import CHECKED, KEYS, NAMES, configure_latent, restore_latent
from forebay.formats.stored_tensor import ComputedTensor

_NAMES: Final = {
    **NAMES,
    **DELTA_NAMES,
    "ffn_gate_exps": "mlp.experts.{}.w1",
    "ffn_up_exps": "mlp.experts.{}.w3",
    "ffn_down_exps": "mlp.experts.{}.w2",
}


def _configure(header: Header) -> None:
    configure_latent(header)
    header.check_sigmoid()
    header.config.update(
        layer_types=header.kinds({"attn_kv_a_mqa": FULL}, LINEAR),
        linear_num_heads=header.config.get("num_attention_heads"),
        norm_topk_prob=True,  # the format has no key for it, and llama.cpp takes it for granted
    )


def _restore(tensors: Tensors) -> Tensors:
    """Restore latent attention and delta rules; decays have axes of size 1 around the axis of heads."""
    return {
        name: ComputedTensor((1, 1, *tensor.shape, 1), [tensor], tensor.pieces) if name.endswith(".A_log") else tensor
        for name, tensor in restore_delta(restore_latent(tensors)).items()
    }


ARCHITECTURES: Final = {
    "kimi-linear": Architecture(
        block_names=_NAMES,
        keys={**KEYS, **DELTA_KEYS},
        checked=CHECKED,
        configure=_configure,
        restore=_restore,
    ),
}
