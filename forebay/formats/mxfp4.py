"""Weights in MXFP4, as gpt-oss is published: four-bit floats, two to a byte, and an exponent for every 32 of them.

OCP Microscaling Formats 1.0, sections 5.3.3 (E2M1) and 5.4.1 (E8M0).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Final

import numpy as np

from forebay.base.errors import ModelError
from forebay.formats.file_array import FileArray
from forebay.formats.gguf_types import E2M1, E8M0_BIAS
from forebay.formats.quantized import F32
from forebay.formats.stored_tensor import StoredTensor

BLOCKS: Final = "_blocks"
SCALES: Final = "_scales"
_BLOCK: Final = 32


def unpacked(packed: Mapping[str, FileArray], where: str) -> dict[str, StoredTensor]:
    """Return the tensor `x`, [E, K, N], of each pair `x_blocks` [E, N, K / 32, 16] and `x_scales` [E, N, K / 32]."""
    tensors: dict[str, StoredTensor] = {}
    for stem in {name.removesuffix(BLOCKS).removesuffix(SCALES) for name in packed}:
        blocks, scales = packed.get(stem + BLOCKS), packed.get(stem + SCALES)
        if (
            blocks is None
            or scales is None
            or blocks.shape != (*scales.shape, _BLOCK // 2)
            or len(scales.shape) != 3
            or not blocks.dtype == scales.dtype == np.uint8
        ):
            shapes = [None if part is None else part.shape for part in (blocks, scales)]
            raise ModelError(f"{where}: {stem} has blocks and scales of the shapes {shapes}, which do not go together")
        tensors[stem] = _Mxfp4Tensor(blocks, scales)
    return tensors


class _Mxfp4Tensor:
    bfloat16 = False
    storage = "MXFP4"
    codes = None

    def __init__(self, blocks: FileArray, scales: FileArray) -> None:
        experts, outputs, per_row = scales.shape
        self.shape = (experts, per_row * _BLOCK, outputs)
        self.num_bytes = blocks.nbytes + scales.nbytes
        self._blocks, self._scales = blocks, scales

    def pieces(self) -> Iterator[F32]:
        """One expert at a time, with its inputs before its outputs, as gpt-oss has them where they are not packed."""
        for expert in range(self.shape[0]):
            blocks, scales = (whole.part(expert, expert + 1).read()[0] for whole in (self._blocks, self._scales))
            pairs = np.stack([blocks & 15, blocks >> 4], axis=-1).reshape(*scales.shape, _BLOCK)
            values = np.ldexp(E2M1[pairs], scales.astype(np.int32)[..., None] - E8M0_BIAS)
            yield np.ascontiguousarray(values.reshape(len(scales), -1).T)
