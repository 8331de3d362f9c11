"""Names of gated delta rules, and their order in files."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import numpy as np
import numpy.typing as npt

from forebay.base.errors import brief
from forebay.families.base.architecture import ATTENTION, MLP, Header, Tensors
from forebay.families.config.transformer import FULL, LINEAR
from forebay.families.parts.gated_delta import Qwen35Config
from forebay.families.parts.gguf.mamba2 import restore_mamba2
from forebay.formats.quantized import F32
from forebay.formats.stored_tensor import ComputedTensor, StoredTensor, less_one, read_tensor

Order = npt.NDArray[np.int64]
NAMES: Final = {
    **MLP,
    "attn_norm": "input_layernorm",
    "post_attention_norm": "post_attention_layernorm",
    **ATTENTION,
    "attn_qkv": "linear_attn.in_proj_qkv",
    "attn_gate": "linear_attn.in_proj_z",
    "ssm_beta": "linear_attn.in_proj_b",
    "ssm_alpha": "linear_attn.in_proj_a",
    "ssm_conv1d": "linear_attn.conv1d",
    "ssm_a": "linear_attn.A_log",
    "ssm_dt": "linear_attn.dt",
    "ssm_norm": "linear_attn.norm",
    "ssm_out": "linear_attn.out_proj",
}
KEYS: Final = {
    "ssm.conv_kernel": "linear_conv_kernel_dim",
    "ssm.state_size": "linear_key_head_dim",
    "ssm.group_count": "linear_num_key_heads",
    "ssm.time_step_rank": "linear_num_value_heads",
    "expert_shared_feed_forward_length": "shared_expert_intermediate_size",
}
CHECKED: Final = (
    "attention.recurrent_layers",
    "ssm.inner_size",
    "full_attention_interval",
    "rope.dimension_count",
    "rope.dimension_sections",  # of pictures' axes, which all have a text's position
    "nextn_predict_layers",
)


def configure(header: Header) -> None:
    """Complete the configuration as `configure_delta` does. Raises ModelError for blocks that draft."""
    if drafting := header.own.get("nextn_predict_layers"):
        raise header.wrong(f"its last {brief(drafting)} blocks draft tokens: not supported")
    configure_delta(header)


def configure_delta(header: Header) -> None:
    """Complete the configuration: sizes of the delta rules, kinds of the layers, rotated share. Raises ModelError for
    metadata that contradicts itself; lists may have entries for blocks behind the model's own."""
    heads, inner, rotated, head_dim = map(
        header.whole, ("ssm.time_step_rank", "ssm.inner_size", "rope.dimension_count", "attention.key_length")
    )
    if inner % heads or rotated > head_dim:
        raise header.wrong(f"{inner} channels of the delta nets for {heads} heads, {rotated} of {head_dim} rotated")
    recurrent, layers = header.own.get("attention.recurrent_layers"), header.kinds({"attn_q": FULL}, LINEAR)
    if (
        recurrent is not None
        and [kind == LINEAR for kind in layers] != np.atleast_1d(recurrent)[: len(layers)].tolist()
    ):
        raise header.wrong(f"attention.recurrent_layers contradicts the layers' weights: {brief(recurrent)}")
    header.config.update(
        linear_value_head_dim=inner // heads,
        partial_rotary_factor=min(1.0, (rotated + 0.5) / head_dim),  # which is rounded down to `rotated` again
        layer_types=layers,
        attention_bias=header.has("attn_q.bias"),
        norm_topk_prob=True,  # the format has no key for it, and llama.cpp takes it for granted
    )


def reorder(tensors: Tensors, config: Qwen35Config) -> Tensors:
    """Value heads are stored turn by turn: the first of each key head, then the second of each, and so on."""
    delta = config.delta
    key_heads, heads = delta.num_key_heads, delta.num_value_heads
    keys, value = 2 * delta.key_size, delta.value_head_dim

    def order(size: int, *, behind: int = 0) -> Order:
        """Where in the file the rows of heads of `size` rows each are, behind others that are in order."""
        rows = np.arange(heads * size).reshape(heads // key_heads, key_heads, size).swapaxes(0, 1).reshape(-1)
        return np.concatenate([np.arange(behind), behind + rows])

    orders = {
        "in_proj_qkv.weight": (order(value, behind=keys), 0),
        "conv1d.weight": (order(value, behind=keys), 0),
        "in_proj_z.weight": (order(value), 0),
        "in_proj_b.weight": (order(1), 0),
        "in_proj_a.weight": (order(1), 0),
        "A_log": (order(1), 0),
        "dt.bias": (order(1), 0),
        "out_proj.weight": (order(value), 1),
    }
    reordered = {}
    for name, tensor in tensors.items():
        _, _, part = name.partition(".linear_attn.")
        reordered[name] = taken(tensor, *orders[part]) if part in orders else tensor
    return reordered


def taken(tensor: StoredTensor, order: Order, axis: int) -> StoredTensor:
    """A tensor of another shape than it should have is left for the check of all shapes."""
    if len(tensor.shape) <= axis or tensor.shape[axis] != len(order):
        return tensor

    def pieces() -> Iterator[F32]:
        yield np.ascontiguousarray(np.atleast_2d(read_tensor(tensor).take(order, axis=axis)))

    codes = tensor.codes
    if codes is not None:
        codes = codes.rows(order) if axis == 0 else codes.columns(order)
    return ComputedTensor(tensor.shape, [tensor], pieces, codes)


def restore(tensors: Tensors) -> Tensors:
    """Norm weights are stored as they are used, but for that behind the delta rule; a layer of one output is flat."""
    restored: Tensors = {}
    for name, tensor in restore_mamba2(tensors).items():
        if name.endswith("norm.weight") and not name.endswith(".linear_attn.norm.weight"):
            restored[name] = less_one(tensor)
        else:
            restored[name] = unflattened(name, tensor)
    return restored


def unflattened(name: str, tensor: StoredTensor) -> StoredTensor:
    """Return the gate of a shared expert as a layer of one output, and any other tensor as it is."""
    flat = name.endswith(".shared_expert_gate.weight") and len(tensor.shape) == 1
    return ComputedTensor((1, *tensor.shape), [tensor], tensor.pieces) if flat else tensor
