from __future__ import annotations

from functools import partial
from typing import Any, Final

from forebay.base.errors import brief
from forebay.families.architecture import Architecture, Header, Tensors, within
from forebay.families.mamba.gguf import BACKBONE, MIXER, SSM_KEYS, restored, with_backbone, without_attention

MAMBA2: Final = {**MIXER, "ssm_dt": "dt", "ssm_norm": "norm"}

BAMBA_KEYS: Final = {
    "ssm.conv_kernel": "mamba_d_conv",
    "ssm.state_size": "mamba_d_state",
    "ssm.group_count": "mamba_n_groups",
}


def _configure(header: Header) -> None:
    without_attention(header)
    heads, head_dim, inner = heads_of(header)
    header.config.update(num_heads=heads, head_dim=head_dim, expand=expansion(header, inner))


def heads_of(header: Header) -> tuple[int, int, int]:
    """Return a Mamba-2 mixer's heads, their size, and channels. The format calls the number of heads the rank of dt."""
    heads, inner = header.own.get("ssm.time_step_rank"), header.own.get("ssm.inner_size")
    if type(heads) is not int or type(inner) is not int or heads < 1 or inner % heads:
        raise header.wrong(f"{brief(inner)} channels of a mixer for {brief(heads)} heads")
    return heads, inner // heads, inner


def configure_bamba(header: Header) -> int:
    """A mixer whose fields have Bamba's names; its channels."""
    heads, head_dim, inner = heads_of(header)
    header.config.update(
        mamba_n_heads=heads,
        mamba_d_head=head_dim,
        mamba_conv_bias=header.has("ssm_conv1d.bias"),
        mamba_proj_bias=header.has("ssm_in.bias"),
    )
    return inner


def expansion(header: Header, inner: Any) -> int:
    """Return the mixer's channels divided by the hidden size. Raises ModelError unless the quotient is whole."""
    hidden_size = header.config.get("hidden_size")
    if type(inner) is not int or type(hidden_size) is not int or hidden_size < 1 or inner % hidden_size:
        raise header.wrong(f"{brief(inner)} channels of a mixer, not a multiple of {brief(hidden_size)}")
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
