"""Left out: files with a norm in the mixers (they do not say whether it comes before the gate) or with tied embeddings
(two multipliers are folded into one tensor)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from forebay.base.errors import ModelError
from forebay.families.architecture import FINAL_NORM, GATED, PROJECTIONS, Architecture, Tensors, has, within
from forebay.families.mamba.gguf import SSM_KEYS
from forebay.families.mamba2.gguf import MAMBA2, heads_of, restore_mamba2
from forebay.formats.gguf import GgufFile


def _configure(file: GgufFile, own: Mapping[str, Any], config: dict[str, Any]) -> None:
    """The multipliers are in the weights."""
    if has(file, "ssm_norm.weight") or "output.weight" not in file.tensors:
        raise ModelError(f"{file.path}: a falcon-h1 file with a norm in the mixers or tied embeddings is ambiguous")
    if any(has(file, f"attn_{part}.bias") for part in ("q", "k", "v", "output")):
        raise ModelError(f"{file.path}: biases of a falcon-h1 file's attention are ambiguous")
    heads, head_dim, inner = heads_of(file, own)
    config |= {
        "mamba_d_ssm": inner,
        "mamba_n_heads": heads,
        "mamba_d_head": head_dim,
        "mamba_conv_bias": has(file, "ssm_conv1d.bias"),
        "mamba_proj_bias": has(file, "ssm_in.bias"),
        "projectors_bias": has(file, "ssm_out.bias"),
    }


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
        keys={
            "ssm.conv_kernel": "mamba_d_conv",
            "ssm.state_size": "mamba_d_state",
            "ssm.group_count": "mamba_n_groups",
        },
        checked=SSM_KEYS,
        configure=_configure,
        restore=_restore,
    ),
}
