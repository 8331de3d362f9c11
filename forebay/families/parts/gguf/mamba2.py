"""Names and keys of Mamba-2 mixers."""

from __future__ import annotations

from typing import Any, Final

from forebay.base.errors import brief
from forebay.families.base.architecture import Header, Tensors
from forebay.families.parts.gguf.mamba import MIXER, restored

MAMBA2: Final = {**MIXER, "ssm_dt": "dt", "ssm_norm": "norm"}
BAMBA_KEYS: Final = {
    "ssm.conv_kernel": "mamba_d_conv",
    "ssm.state_size": "mamba_d_state",
    "ssm.group_count": "mamba_n_groups",
}


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
