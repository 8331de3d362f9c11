from __future__ import annotations

from functools import partial
from typing import Final

from forebay.families.base.architecture import Architecture, Header, within
from forebay.families.parts.gguf.mamba import BACKBONE, SSM_KEYS, with_backbone, without_attention
from forebay.families.parts.gguf.mamba2 import MAMBA2, expansion, heads_of, restore_mamba2


def _configure(header: Header) -> None:
    without_attention(header)
    heads, head_dim, inner = heads_of(header)
    header.config.update(num_heads=heads, head_dim=head_dim, expand=expansion(header, inner))


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
