"""How GGUF files hold the tensors of Mamba mixers, and of the layers around them, and how that is undone."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import numpy as np

from forebay.base.errors import ModelError
from forebay.families.architecture import Tensors
from forebay.formats.stored_tensor import F32, ComputedTensor, StoredTensor, one_below_the_other


def restore_mamba1(tensors: Tensors) -> Tensors:
    return {name: _restored(name, tensor, flat=()) for name, tensor in tensors.items()}


def restore_mamba2(tensors: Tensors) -> Tensors:
    """One number per head is stored as a column, and the mixer's norm as a row for each group."""
    flat = (".A_log", ".D", ".mamba.norm.weight", ".mixer.norm.weight")
    renamed = ((name.replace(".dt.bias", ".dt_bias"), tensor) for name, tensor in tensors.items())
    return {name: _restored(name, tensor, flat=flat) for name, tensor in renamed}


def _restored(name: str, tensor: StoredTensor, *, flat: tuple[str, ...]) -> StoredTensor:
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
    renamed = {name.replace("model.layers.", "backbone.layers.", 1): tensor for name, tensor in tensors.items()}
    return restore(renamed)


def restore_granite(tensors: Tensors) -> Tensors:
    """Gate and up of the shared MLP are one tensor."""
    restored = restore_mamba2(tensors)
    for name in [name for name in restored if name.endswith(".shared_mlp.gate.weight")]:
        gate, up = restored.pop(name), restored.pop(name.replace(".gate.", ".up."), None)
        if up is None or up.shape != gate.shape:
            raise ModelError(f"{name}: there is no up of the same shape")
        restored[name.replace(".gate.", ".input_linear.")] = one_below_the_other(gate, up)
    return restored


def restore_falcon_h1(tensors: Tensors) -> Tensors:
    """The table of names that the converter uses has lost a suffix."""
    norm = ".pre_ff_layernorm"
    return restore_mamba2({f"{name}.weight" if name.endswith(norm) else name: t for name, t in tensors.items()})


def restore_nemotron_h(tensors: Tensors) -> Tensors:
    name = "gate.e_score_correction"
    renamed = {stored.replace(f"{name}.bias", f"{name}_bias"): tensor for stored, tensor in tensors.items()}
    return with_backbone(restore_mamba2, renamed)
