from __future__ import annotations

from typing import Final

from forebay.families.base.architecture import PRE_NORM, Architecture, Header, Tensors
from forebay.families.parts.gguf.partial_rotary import configure
from forebay.formats.stored_tensor import ComputedTensor, StoredTensor, read_tensor

_NORMS: Final = {f"attn_{part}_norm": f"self_attn.{part}_layernorm" for part in "qk"}
_STACKS: Final = tuple(f".{name}.weight" for name in _NORMS.values())


def _configure(header: Header) -> None:
    """Complete the configuration: rotated share, biases, norms of heads."""
    configure(header)
    header.config.update(use_qkv_bias=header.config["attention_bias"], qk_layernorm=header.has("attn_q_norm.weight"))


def _restore(tensors: Tensors) -> Tensors:
    """Return the tensors with the norms of heads each by itself; files have those of a layer in one tensor."""
    restored: Tensors = {}
    for name, tensor in tensors.items():
        if name.endswith(_STACKS) and len(tensor.shape) == 2:
            stem = name.removesuffix(".weight")
            restored |= {f"{stem}.norms.{i}.weight": _row(tensor, i) for i in range(tensor.shape[0])}
        else:
            restored[name] = tensor
    return restored


def _row(stack: StoredTensor, index: int) -> StoredTensor:
    return ComputedTensor(stack.shape[1:], [stack], lambda: iter([read_tensor(stack)[index : index + 1]]))


ARCHITECTURES: Final = {
    "stablelm": Architecture(
        block_names={**PRE_NORM, **_NORMS},
        keys={"attention.layer_norm_epsilon": "layer_norm_eps", "use_parallel_residual": "use_parallel_residual"},
        checked=("rope.dimension_count",),
        configure=_configure,
        restore=_restore,
    ),
}
