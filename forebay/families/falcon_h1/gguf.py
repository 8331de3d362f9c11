"""Left out: files with a norm in the mixers (they do not say whether it comes before the gate) or with tied embeddings
(two multipliers are folded into one tensor)."""

from __future__ import annotations

from typing import Final

from forebay.families.base.architecture import FINAL_NORM, GATED, PROJECTIONS, Architecture, Header, Tensors, within
from forebay.families.parts.gguf.mamba import SSM_KEYS
from forebay.families.parts.gguf.mamba2 import BAMBA_KEYS, MAMBA2, configure_bamba, restore_mamba2


def _configure(header: Header) -> None:
    """The multipliers are in the weights."""
    if header.has("ssm_norm.weight") or "output.weight" not in header.file.tensors:
        raise header.wrong("a falcon-h1 file with a norm in the mixers or tied embeddings is ambiguous")
    if any(header.has(f"attn_{part}.bias") for part in ("q", "k", "v", "output")):
        raise header.wrong("biases of a falcon-h1 file's attention are ambiguous")
    header.config["mamba_d_ssm"] = configure_bamba(header)
    header.config["projectors_bias"] = header.has("ssm_out.bias")


def _restore(tensors: Tensors) -> Tensors:
    """The table of names that the converter uses has lost a suffix."""
    norm = ".pre_ff_layernorm"
    return restore_mamba2({f"{name}.weight" if name.endswith(norm) else name: t for name, t in tensors.items()})


ARCHITECTURES: Final = {
    "falcon-h1": Architecture(
        top_names=FINAL_NORM,
        block_names={
            **within("self_attn", PROJECTIONS),
            **within("mamba", MAMBA2),
            **within("feed_forward", GATED),
            "attn_norm": "input_layernorm",
            "ffn_norm": "pre_ff_layernorm",
        },
        keys=BAMBA_KEYS,
        checked=SSM_KEYS,
        configure=_configure,
        restore=_restore,
    ),
}
