"""The experts of gpt-oss: all of a layer in one tensor, inputs before outputs, gate and up in turns, with biases.

As published, their weights are in MXFP4 instead, with outputs before inputs: `x_blocks` [E, N, K / 32, 16] has two
codes to a byte, and `x_scales` [E, N, K / 32] an exponent for every 32 of them (`formats/small_floats.py`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from forebay.base.errors import ModelError
from forebay.formats.file_array import FileArray
from forebay.formats.quantized import F32, GROUP, MXFP4, GroupQuantized, Order, Reader, stored_codes, values_of
from forebay.formats.stored_tensor import StoredTensor

BLOCKS: Final = "_blocks"
SCALES: Final = "_scales"
BIAS: Final = "_bias"
GATE_UP: Final = "gate_up_proj"
DOWN: Final = "down_proj"
# Ours, of the rows that take turns.
_MATRICES: Final = {GATE_UP: ("gate_proj", "up_proj"), DOWN: (DOWN,)}
SUFFIXES: Final = tuple(f".experts.{name}{kind}" for name in _MATRICES for kind in ("", BIAS, BLOCKS, SCALES))


def turned_experts(stacks: Mapping[str, FileArray], num_experts: int, where: str) -> dict[str, StoredTensor]:
    """Return each expert's matrices [N, K] and biases [N] of `stacks`, whose names end with `SUFFIXES`. ModelError if
    shapes or types do not go together."""
    tensors: dict[str, StoredTensor] = {}
    for name, stack in stacks.items():
        if name.endswith(SCALES):
            if name.removesuffix(SCALES) + BLOCKS not in stacks:
                raise ModelError(f"{where}: {name} has no blocks beside it")
            continue
        prefix, _, kind = name.removesuffix(BLOCKS).removesuffix(BIAS).rpartition(".")
        parts, packed = _MATRICES[kind], name.endswith(BLOCKS)
        scales = stacks.get(name.removesuffix(BLOCKS) + SCALES) if packed else None
        if packed:
            _check_packed(name, stack, scales, where)
        _check_shape(name, stack, num_experts, len(parts), where)
        for expert in range(num_experts):
            for i, part in enumerate(parts):
                own = f"{prefix}.{expert}.{part}.{'bias' if name.endswith(BIAS) else 'weight'}"
                turn = slice(i, None, len(parts))
                if scales is not None:
                    tensors[own] = _Packed(stack, scales, expert, turn, f"{where}: {own}")
                else:
                    tensors[own] = TurnedMatrix(stack, expert, turn)
    return tensors


def _check_shape(name: str, stack: FileArray, num_experts: int, num_parts: int, where: str) -> None:
    """Raises ModelError unless a stack has an entry for each expert, whose outputs divide into the parts."""
    packed = name.endswith(BLOCKS)
    outputs = stack.shape[1 if packed else -1] if stack.shape else 0
    dims = 4 if packed else 2 if name.endswith(BIAS) else 3
    if len(stack.shape) != dims or 0 in stack.shape or outputs % num_parts or len(stack) != num_experts:
        raise ModelError(f"{where}: {name} has the shape {stack.shape}, not one part for each expert")


def _check_packed(name: str, blocks: FileArray, scales: FileArray | None, where: str) -> None:
    if (
        scales is None
        or blocks.shape != (*scales.shape, GROUP // 2)
        or not blocks.dtype == scales.dtype == np.dtype(np.uint8)
    ):
        shapes = [None if part is None else part.shape for part in (blocks, scales)]
        stem = name.removesuffix(BLOCKS)
        raise ModelError(f"{where}: {stem} has blocks and scales of the shapes {shapes}, which do not go together")


class TurnedMatrix:
    """The outputs `turn` of one expert's matrix, as [N, K], or bias."""

    codes = None

    def __init__(self, stack: FileArray, expert: int, turn: slice) -> None:
        self._stack, self._expert, self._turn = stack, expert, turn
        self.shape = (len(range(stack.shape[-1])[turn]), *stack.shape[1:-1])
        self.bfloat16 = stack.dtype == np.dtype(np.uint16)
        self.storage = "BF16" if self.bfloat16 else {2: "F16", 4: "F32"}[stack.dtype.itemsize]
        self.num_bytes = math.prod(self.shape) * stack.dtype.itemsize

    def pieces(self) -> Iterator[npt.NDArray[Any]]:
        """Read the expert as a whole: its rows lie across all of it."""
        outputs = self._stack.part(self._expert, self._expert + 1).read()[0][..., self._turn]
        yield np.ascontiguousarray(outputs.T).reshape(-1, *self.shape[1:] or self.shape)


class _Packed:
    """The rows `turn` of one expert's matrix in MXFP4."""

    bfloat16 = False
    storage = "MXFP4"

    def __init__(self, blocks: FileArray, scales: FileArray, expert: int, turn: slice, where: str) -> None:
        self._of_file, self._expert, self._turn, self._where = (blocks, scales), expert, turn, where
        _, outputs, per_row = scales.shape
        self.shape = (len(range(outputs)[turn]), per_row * GROUP)
        self.num_bytes = self.shape[0] * per_row * (GROUP // 2 + 1)
        self.codes = stored_codes(MXFP4, self.shape, self._open)

    def _open(self) -> Reader:
        blocks, scales = (a.part(self._expert, self._expert + 1).read()[0][self._turn] for a in self._of_file)

        def read(rows: Order) -> GroupQuantized:
            pairs = blocks[rows]
            codes = np.stack([pairs & 15, pairs >> 4], axis=-1).reshape(len(rows), -1)
            return GroupQuantized(format=MXFP4, codes=codes, scales=scales[rows])

        return read

    def pieces(self) -> Iterator[F32]:
        return values_of(self.codes, self._where)
