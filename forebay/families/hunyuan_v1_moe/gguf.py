from __future__ import annotations

from typing import Final

from forebay.families.base.architecture import EXPERTS, GATED, Architecture, Header, within
from forebay.families.parts.gguf.hunyuan import NAMES


def _configure(header: Header) -> None:
    """The shared MLP is as wide as an expert, or shapes will not fit."""
    config = header.config
    config["moe_topk"] = config.pop("num_experts_per_tok", None)


ARCHITECTURES: Final = {
    "hunyuan-moe": Architecture(
        block_names={
            **NAMES,
            **EXPERTS,
            "ffn_gate_inp": "mlp.gate.wg",
            **within("mlp.shared_mlp", {f"{stored}_shexp": name for stored, name in GATED.items()}),
        },
        keys={"expert_shared_count": "num_shared_expert"},
        checked=("expert_shared_feed_forward_length",),
        configure=_configure,
    )
}
