from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any, Final

from forebay.base.errors import ModelError, brief
from forebay.families.architecture import Architecture, Tensors, within
from forebay.families.mamba.gguf import BACKBONE, MIXER, SSM_KEYS, restored, with_backbone, without_attention
from forebay.formats.gguf import GgufFile

MAMBA2: Final = {**MIXER, "ssm_dt": "dt", "ssm_norm": "norm"}


def _configure(file: GgufFile, own: Mapping[str, Any], config: dict[str, Any]) -> None:
    without_attention(file, config)
    heads, head_dim, inner = heads_of(file, own)
    config |= {"num_heads": heads, "head_dim": head_dim, "expand": expansion(file, config, inner)}


def heads_of(file: GgufFile, own: Mapping[str, Any]) -> tuple[int, int, int]:
    """Of a Mamba-2 mixer: heads, their size, and channels. The format calls the number of heads the rank of dt."""
    heads, inner = own.get("ssm.time_step_rank"), own.get("ssm.inner_size")
    if type(heads) is not int or type(inner) is not int or heads < 1 or inner % heads:
        raise ModelError(f"{file.path}: {brief(inner)} channels of a mixer for {brief(heads)} heads")
    return heads, inner // heads, inner


def expansion(file: GgufFile, config: Mapping[str, Any], inner: Any) -> int:
    hidden_size = config.get("hidden_size")
    if type(inner) is not int or type(hidden_size) is not int or hidden_size < 1 or inner % hidden_size:
        raise ModelError(f"{file.path}: {brief(inner)} channels of a mixer, not a multiple of {brief(hidden_size)}")
    return inner // hidden_size


def restore_mamba2(tensors: Tensors) -> Tensors:
    """One number per head is stored as a column, and the mixer's norm as a row for each group."""
    flat = (".A_log", ".D", ".mamba.norm.weight", ".mixer.norm.weight")
    renamed = ((name.replace(".dt.bias", ".dt_bias"), tensor) for name, tensor in tensors.items())
    return {name: restored(name, tensor, flat=flat) for name, tensor in renamed}


ARCHITECTURES: Final = {
    "mamba2": Architecture(
        top_names=BACKBONE,
        block_names={**within("mixer", MAMBA2), "attn_norm": "norm"},
        keys={"ssm.conv_kernel": "conv_kernel", "ssm.state_size": "state_size", "ssm.group_count": "n_groups"},
        checked=SSM_KEYS,
        configure=_configure,
        restore=partial(with_backbone, restore_mamba2),
    ),
}
