"""The ops of linear layers, for every backend.

Shape letters: T tokens, N and K a linear layer's outputs and inputs."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from forebay.formats.file_array import Array
from forebay.formats.quantized import GroupQuantized, StoredCodes


class LinearWeight(Protocol):
    """A linear layer's weight in the form its backend reads fastest; only the `Ops` that packed it can use it."""

    @property
    def in_features(self) -> int: ...

    @property
    def out_features(self) -> int: ...


class LinearOps(Protocol):
    """Packing of linear layers' weights, their products with inputs, and embedding lookups.

    `widens_bfloat16`: a weight or table in bfloat16 that is packed for inputs in float32 stays in two bytes.
    """

    widens_bfloat16: bool

    def pack(self, weight: Tensor, bias: Tensor | None = None, *, inputs: torch.dtype | None = None) -> LinearWeight:
        """Pack weight [N, K] and bias [N]. Keeps neither. `inputs` is the dtype of x and of the bias: the weight's, the
        default, or float32 for a weight in bfloat16, which gives the bits of its numbers in float32."""
        ...

    def pack_quantized(self, weight: StoredCodes, bias: Tensor | None = None) -> LinearWeight:
        """Read weight [N, K], each panel of which has one format, pack it in the codes it has, and bias [N]. Keeps
        neither.

        `apply` uses it as the matrix of `GroupQuantized`. If the backend's activation bits are 8 or 16, x is rounded
        to integers of that size. Each group of 32 inputs has a scale, and the sums of a group are exact; else the
        matrix is rounded to x's dtype. Only the codes are kept.
        """
        ...

    def quantize_into(self, values: Array, out: GroupQuantized, first: int) -> None:
        """Write the codes of values [n, K], contiguous, to rows `first`.. of `out`, as `formats/quantize.py` has it."""
        ...

    def apply(self, x: Tensor, w: LinearWeight) -> Tensor:
        """x [T, K] @ weight.T + bias -> [T, N] in x's dtype, accumulated in float32. A weight that is not quantized was
        packed for x's dtype."""
        ...

    def apply_f32(self, x: Tensor, w: LinearWeight) -> Tensor:
        """As `apply`, but the float32 sums are returned: for logits. (Of torch's they are rounded to x's dtype.)"""
        ...

    def embedding(self, ids: Tensor, table: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """Rows ids [T] int64 of table [V, H] -> [T, H] of dtype: the table's, the default, or float32 for a table in
        bfloat16."""
        ...

    def embedding_packed(self, ids: Tensor, table: LinearWeight, dtype: torch.dtype) -> Tensor:
        """Rows ids [T] int64 of a table [V, H] that `pack_quantized` made -> [T, H]: its numbers, rounded to dtype."""
        ...
