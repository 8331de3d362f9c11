"""Names and keys of Mamba mixers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, Final

import numpy as np

from forebay.base.errors import ModelError
from forebay.families.base.architecture import Header, Tensors
from forebay.formats.quantized import F32
from forebay.formats.stored_tensor import ComputedTensor, StoredTensor

_NO_CONTEXT: Final = 1 << 20
_POSITIONS: Final = 1 << 17
BACKBONE: Final = {"token_embd": "backbone.embeddings", "output_norm": "backbone.norm_f", "output": "lm_head"}
MIXER: Final = {
    "ssm_in": "in_proj",
    "ssm_conv1d": "conv1d",
    "ssm_a": "A_log",
    "ssm_d": "D",
    "ssm_out": "out_proj",
}
MAMBA1: Final = {**MIXER, "ssm_x": "x_proj", "ssm_dt": "dt_proj"}
SSM_KEYS: Final = tuple(
    f"ssm.{key}" for key in ("conv_kernel", "inner_size", "state_size", "time_step_rank", "group_count")
)


def without_attention(header: Header) -> None:
    """Complete the configuration of a file of mixers alone: the norms' epsilon, and which biases there are."""
    header.config.update(
        layer_norm_epsilon=header.config.pop("rms_norm_eps", None),
        use_bias=header.has("ssm_in.bias"),
        use_conv_bias=header.has("ssm_conv1d.bias"),
    )
    limit_positions(header.config)


def limit_positions(config: dict[str, Any]) -> None:
    """Set the default context length of models of mixers if the file has llama.cpp's placeholder for none."""
    if config.get("max_position_embeddings") == _NO_CONTEXT:
        config["max_position_embeddings"] = _POSITIONS


def restore_mamba1(tensors: Tensors) -> Tensors:
    """Give the tensors of Mamba mixers the shapes and values of a checkpoint."""
    return {name: restored(name, tensor, flat=()) for name, tensor in tensors.items()}


def restored(name: str, tensor: StoredTensor, *, flat: tuple[str, ...]) -> StoredTensor:
    """Return the tensor as a checkpoint has it: decays as logarithms, convolutions with a dimension of channels, and
    those that end with a name of `flat` as vectors. Values are read when they are needed."""
    shape = (int(np.prod(tensor.shape)),) if name.endswith(flat) else tensor.shape
    if name.endswith(".A_log"):
        return ComputedTensor(shape, [tensor], partial(_logarithms, name, tensor))
    if name.endswith(".conv1d.weight"):
        shape = (tensor.shape[0], 1, *tensor.shape[1:])
    return tensor if shape == tensor.shape else ComputedTensor(shape, [tensor], tensor.pieces)


def _logarithms(name: str, decays: StoredTensor) -> Iterator[F32]:
    """Decays are stored as they are used: -exp(A_log)."""
    for piece in decays.pieces():
        if not (piece < 0).all():
            raise ModelError(f"{name}: a decay in the file is not negative")
        yield np.log(-piece)


def with_backbone(restore: Callable[[Tensors], Tensors], tensors: Tensors) -> Tensors:
    """Rename the layers as a model without attention calls them, then apply `restore`."""
    renamed = {name.replace("model.layers.", "backbone.layers.", 1): tensor for name, tensor in tensors.items()}
    return restore(renamed)
