from __future__ import annotations

from typing import Final

from forebay.families.base.architecture import EXPERTS, PRE_NORM, Architecture, Header, Tensors
from forebay.families.parts.gguf.gated_delta import unflattened
from forebay.families.parts.gguf.shared_experts import SHARED_EXPERT


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
