from __future__ import annotations

from typing import Final

from forebay.families.base.architecture import PRE_NORM, Architecture, Header


def _configure(header: Header) -> None:
    header.config["attention_out_bias"] = header.has("attn_output.bias")


ARCHITECTURES: Final = {
    "seed_oss": Architecture(
        block_names={**PRE_NORM, "post_attention_norm": "post_attention_layernorm"}, configure=_configure
    )
}
