"""Left out: the blocks that draft, which are behind the model's own."""

from __future__ import annotations

from typing import Final

from forebay.base.errors import brief
from forebay.families.base.architecture import GATED, PRE_NORM, Architecture, Header, Tensors, expert_names, within
from forebay.families.parts.experts import DENSE, SPARSE
from forebay.families.parts.gguf.latent import DRAFT, leave_out_draft, without_draft

_NAMES: Final = {
    **PRE_NORM,
    **DRAFT,
    "ffn_gate_inp": "mlp.router.gate",
    "exp_probs_b": "mlp.expert_bias",
    **expert_names("mlp", GATED),
    **within("mlp.shared_mlp", {f"{stored}_shexp": name for stored, name in GATED.items()}),
}


def _configure(header: Header) -> None:
    header.check_sigmoid()
    leave_out_draft(header)
    own, config = header.own, header.config
    if not own.get("expert_weights_norm", True):
        raise header.wrong("the experts' weights do not sum to 1: unsupported")
    inner = header.whole("expert_feed_forward_length")
    shared = header.whole("expert_shared_feed_forward_length")
    if shared % inner:
        raise header.wrong(f"a shared expert of {brief(shared)} entries is no multiple of {brief(inner)}")
    config.update(
        mlp_layer_types=header.kinds({"ffn_gate_inp": SPARSE}, DENSE),
        num_shared_experts=shared // inner,
        router_scaling_factor=own.get("expert_weights_scale", 1.0),
    )


def _restore(tensors: Tensors) -> Tensors:
    """The correction of the experts' scores has no suffix."""
    return {name.removesuffix(".bias") if ".expert_bias" in name else name: t for name, t in tensors.items()}


ARCHITECTURES: Final = {
    "hy_v3": Architecture(
        block_names=_NAMES,
        keys={"expert_weights_scale": "router_scaling_factor"},
        checked=(
            *("expert_gating_func", "expert_weights_norm", "expert_shared_feed_forward_length"),
            "nextn_predict_layers",
        ),
        configure=_configure,
        reorder=without_draft,
        restore=_restore,
    )
}
