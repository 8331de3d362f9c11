"""Files of mixers alone, and what those of every mixer have in common, as llama.cpp's converter writes them."""

from __future__ import annotations

from functools import partial
from typing import Final

from forebay.families.base.architecture import Architecture, Header, within
from forebay.families.parts.gguf.mamba import (
    BACKBONE,
    MAMBA1,
    SSM_KEYS,
    restore_mamba1,
    with_backbone,
    without_attention,
)


def _configure(header: Header) -> None:
    without_attention(header)
    if header.own.get("ssm.dt_b_c_rms"):
        header.config["model_type"] = "falcon_mamba"
    header.config["intermediate_size"] = header.own.get("ssm.inner_size")


ARCHITECTURES: Final = {
    "mamba": Architecture(
        top_names=BACKBONE,
        block_names={**within("mixer", MAMBA1), "attn_norm": "norm"},
        keys={
            "ssm.conv_kernel": "conv_kernel",
            "ssm.state_size": "state_size",
            "ssm.time_step_rank": "time_step_rank",
        },
        checked=(*SSM_KEYS, "ssm.dt_b_c_rms"),
        configure=_configure,
        restore=partial(with_backbone, restore_mamba1),
    ),
}
