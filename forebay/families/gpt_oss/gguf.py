from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Final

import numpy as np

from forebay.base.errors import ModelError
from forebay.families.architecture import ATTENTION, GATED, Architecture, Header, Tensors, expert_names
from forebay.formats.quantized import F32
from forebay.formats.stored_tensor import ComputedTensor, StoredTensor, read_tensor

_EXPERT: Final = re.compile(r"(.*\.mlp\.experts)\.0\.(gate|down)_proj\.(weight|bias)")

_NAMES: Final = {
    **ATTENTION,
    "attn_sinks": "self_attn.sinks",
    "attn_norm": "input_layernorm",
    "post_attention_norm": "post_attention_layernorm",
    "ffn_gate_inp": "mlp.router",
    **expert_names("mlp", GATED),
}


def _configure(header: Header) -> None:
    config = header.config
    config["intermediate_size"] = config.pop("moe_intermediate_size", config.get("intermediate_size"))
    scaling = config["rope_scaling"]
    if scaling is not None and scaling["rope_type"] == "yarn":
        scaling["truncate"] = False
        header.yarn_options()


def _restore(tensors: Tensors) -> Tensors:
    """Experts are stacked again, weights with inputs before outputs, gate and up in turns; sinks have no suffix."""
    restored = {name.replace(".sinks.weight", ".sinks"): t for name, t in tensors.items() if ".experts." not in name}
    for name in tensors:
        match = _EXPERT.fullmatch(name)
        if match is not None:
            experts, part, kind = match.groups()
            suffix = "" if kind == "weight" else "_bias"
            parts = ("gate_proj", "up_proj") if part == "gate" else ("down_proj",)
            stacked = "gate_up_proj" if part == "gate" else "down_proj"
            of_experts = [_experts(tensors, f"{experts}.{{}}.{own}.{kind}") for own in parts]
            if len({tensor.shape for part in of_experts for tensor in part}) > 1 or not all(of_experts):
                raise ModelError(f"{name}: the experts' tensors do not have one shape")
            restored[f"{experts}.{stacked}{suffix}"] = _in_turns(of_experts)
    return restored


def _experts(tensors: Tensors, name: str) -> list[StoredTensor]:
    """Return the experts of a `name` with a `{}` for the number, from 0 on."""
    found: list[StoredTensor] = []
    while (tensor := tensors.get(name.format(len(found)))) is not None:
        found.append(tensor)
    return found


def _in_turns(parts: list[list[StoredTensor]]) -> StoredTensor:
    """`parts` are, for gate and up or for down alone, each expert's weight [N, K] or bias [N]; one tensor [E, K, N] or
    [E, N] of all, where N is over the parts in turns."""
    first = parts[0][0].shape
    outputs = first[0] * len(parts)

    def pieces() -> Iterator[F32]:
        for of_expert in zip(*parts, strict=True):
            values = np.stack([read_tensor(tensor) for tensor in of_expert], axis=1).reshape(outputs, -1)
            yield np.ascontiguousarray(values.T)

    sources = [tensor for part in parts for tensor in part]
    return ComputedTensor((len(parts[0]), *first[1:], outputs), sources, pieces)


ARCHITECTURES: Final = {
    "gpt-oss": Architecture(
        block_names=_NAMES,
        keys={"attention.sliding_window": "sliding_window"},
        checked=("rope.scaling.yarn_beta_fast", "rope.scaling.yarn_beta_slow"),
        configure=_configure,
        restore=_restore,
    ),
}
