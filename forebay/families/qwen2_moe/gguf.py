from __future__ import annotations

from typing import Final

from forebay.families.architecture import EXPERTS, PRE_NORM, Architecture, Header, Tensors
from forebay.families.qwen3_5_moe_text.gguf import SHARED_EXPERT
from forebay.families.qwen3_5_text.gguf import unflattened


def _configure(header: Header) -> None:
    # The format has no keys for these: llama.cpp takes the weights as they are, and whatever biases there are.
    header.config.update(norm_topk_prob=False, qkv_bias=header.config["attention_bias"])


def _restore(tensors: Tensors) -> Tensors:
    return {name: unflattened(name, tensor) for name, tensor in tensors.items()}


ARCHITECTURES: Final = {
    "qwen2moe": Architecture(
        block_names={**PRE_NORM, **EXPERTS, **SHARED_EXPERT},
        keys={"expert_shared_feed_forward_length": "shared_expert_intermediate_size"},
        configure=_configure,
        restore=_restore,
    )
}
