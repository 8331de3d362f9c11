"""Linear layers: cuBLAS through torch where the weight is dense, and one kernel for weights in codes and for experts.

Shape letters: T tokens, N and K a layer's outputs and inputs, G groups of rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from forebay.formats.quantized import GROUP, GroupQuantized
from forebay.ops.linear import LinearWeight
from forebay.ops.triton.common import dot, owner

_FEW_ROWS: Final = 16  # the least that a matrix unit takes
_MANY_ROWS: Final = 64


@dataclass(frozen=True, slots=True, eq=False)
class TritonLinearWeight:
    """The tensors that were packed, and where they lie: `addresses` [4] int64 on the device, of values or codes,
    scales, minimums and bias, 0 for none.

    `bits` 16: `values` [N, K] in the model's dtype, and `bias` in the same. Otherwise `values`, `scales` and `minimums`
    are what `GroupQuantized` calls so, and `bias` is float32.
    """

    values: Tensor
    scales: Tensor | None
    minimums: Tensor | None
    bias: Tensor | None
    bits: int
    zero: int
    in_features: int
    addresses: Tensor

    @property
    def out_features(self) -> int:
        return len(self.values)


@triton.jit(do_not_specialize=["num_groups", "num_rows"])
def _matmul(
    x,
    x_rows,
    out,
    out_rows,
    starts,
    addresses,
    num_groups,
    num_rows,
    x_stride,
    n,
    k,
    zero,
    BITS: tl.constexpr,
    GROUPED: tl.constexpr,
    HAS_X_ROWS: tl.constexpr,
    HAS_OUT_ROWS: tl.constexpr,
    HAS_MINIMUMS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    DEPTH: tl.constexpr,
):
    """out[i] = x[i] @ weight.T + bias, rows starts[g]..starts[g + 1] with the weight at addresses[g].

    Row i is row x_rows[i] of x and row out_rows[i] of `out` where there are such.
    """
    block = tl.program_id(0)
    group = block * 0
    first = group
    count = group + num_rows
    if GROUPED:
        group = owner(starts, num_groups, block, ROWS)
        first = tl.load(starts + group)
        count = tl.load(starts + group + 1) - first
    begin = (block - first // ROWS - group) * ROWS
    if begin >= count:
        return
    row = begin + tl.arange(0, ROWS)
    live = row < count
    source = (first + row).to(tl.int64)
    target = source
    if HAS_X_ROWS:
        source = tl.load(x_rows + source, mask=live, other=0)
    if HAS_OUT_ROWS:
        target = tl.load(out_rows + target, mask=live, other=0)
    x_at = x + source[:, None] * x_stride
    col = tl.program_id(1) * COLS + tl.arange(0, COLS)
    live_col = col < n
    col_at = col.to(tl.int64)[None, :]
    acc = tl.zeros([ROWS, COLS], tl.float32)
    here = addresses + group * 4
    dtype = x.dtype.element_ty
    if BITS == 16:
        weight = tl.multiple_of(tl.load(here), 16).to(tl.pointer_type(dtype))
        for start in range(0, k, DEPTH):
            at = start + tl.arange(0, DEPTH)
            values = tl.load(x_at + at[None, :], mask=live[:, None] & (at[None, :] < k), other=0.0)
            tile = tl.load(weight + col_at * k + at[:, None], mask=live_col[None, :] & (at[:, None] < k), other=0.0)
            acc += dot(values, tile)
    else:
        codes_at = tl.multiple_of(tl.load(here), 16).to(tl.pointer_type(tl.uint8))
        scales_at = tl.load(here + 1).to(tl.pointer_type(tl.float16))
        minimums_at = tl.load(here + 2).to(tl.pointer_type(tl.float16))
        PER_BYTE: tl.constexpr = 8 // BITS
        width = k // PER_BYTE
        for start in range(0, width, DEPTH):
            byte = start + tl.arange(0, DEPTH)
            inside = byte < width
            mask = live_col[None, :] & inside[:, None]
            packed = tl.load(codes_at + col_at * width + byte[:, None], mask=mask, other=0)
            # A group of 32 is 32 bytes, or 16 whose lower halves are its first 16 elements.
            in_group = byte // (32 // PER_BYTE)
            scale = tl.load(scales_at + col_at * (k // 32) + in_group[:, None], mask=mask, other=0.0).to(tl.float32)
            least = tl.zeros([DEPTH, COLS], tl.float32)
            if HAS_MINIMUMS:
                least = tl.load(minimums_at + col_at * (k // 32) + in_group[:, None], mask=mask, other=0.0)
                least = least.to(tl.float32)
            for half in tl.static_range(PER_BYTE):
                at = in_group * 32 + byte % (32 // PER_BYTE) + half * 16
                values = tl.load(x_at + at[None, :], mask=live[:, None] & inside[None, :], other=0.0)
                code = packed
                if BITS == 4:
                    code = (packed >> (4 * half)) & 15
                tile = scale * (code.to(tl.int32) - zero).to(tl.float32) + least
                acc += dot(values, tile.to(dtype))
    if HAS_BIAS:
        bias_at = tl.load(here + 3).to(tl.pointer_type(dtype if BITS == 16 else tl.float32))
        acc += tl.load(bias_at + col, mask=live_col, other=0.0).to(tl.float32)[None, :]
    place = out + target[:, None] * n + col_at
    tl.store(place, acc.to(out.dtype.element_ty), mask=live[:, None] & live_col[None, :])


class TritonLinear:
    """See `LinearOps`. What is packed is kept as it is, not copied: on a GPU nothing reads it faster in another order,
    and there may be no room for it twice. So whoever packs a tensor must not change it afterwards.

    Weights in codes are multiplied by x as it is, not by x in codes as on a CPU: what a GPU waits for is the weights.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def pack_linear(self, weight: Tensor, bias: Tensor | None = None) -> TritonLinearWeight:
        weight = weight.contiguous()
        return _packed(weight, None, None, bias, 16, 0, weight.shape[1])

    def pack_quantized(self, weight: GroupQuantized, bias: Tensor | None = None) -> TritonLinearWeight:
        codes, scales = (torch.tensor(part, device=self._device) for part in (weight.codes, weight.scales))
        minimums = None if weight.minimums is None else torch.tensor(weight.minimums, device=self._device)
        bias = None if bias is None else bias.to(self._device, torch.float32)
        return _packed(codes, scales, minimums, bias, weight.bits, weight.zero, weight.shape[1])

    def linear(self, x: Tensor, w: LinearWeight) -> Tensor:
        assert isinstance(w, TritonLinearWeight), type(w)
        return F.linear(x, w.values, w.bias) if w.bits == 16 else _linear_in_codes(x, w, x.dtype)

    def linear_f32(self, x: Tensor, w: LinearWeight) -> Tensor:
        assert isinstance(w, TritonLinearWeight), type(w)
        if w.bits != 16:
            return _linear_in_codes(x, w, torch.float32)
        if not x.is_cuda or x.dtype == torch.float32:
            return F.linear(x, w.values, w.bias).float()
        sums = torch.mm(x, w.values.t(), out_dtype=torch.float32)
        return sums if w.bias is None else sums.add_(w.bias)

    def embedding(self, ids: Tensor, table: Tensor) -> Tensor:
        return table.index_select(0, ids)

    def embedding_packed(self, ids: Tensor, table: LinearWeight, dtype: torch.dtype) -> Tensor:
        assert isinstance(table, TritonLinearWeight), type(table)
        assert table.scales is not None, "a table that is not quantized"
        codes = table.values.index_select(0, ids).unflatten(1, (table.scales.shape[1], -1))
        if table.bits == 4:
            codes = torch.cat([codes & 15, codes >> 4], dim=-1)
        rows = (codes.float() - table.zero) * table.scales.index_select(0, ids).float().unsqueeze(-1)
        if table.minimums is not None:
            rows += table.minimums.index_select(0, ids).float().unsqueeze(-1)
        return rows.flatten(1).to(dtype)


def _packed(
    values: Tensor,
    scales: Tensor | None,
    minimums: Tensor | None,
    bias: Tensor | None,
    bits: int,
    zero: int,
    in_features: int,
) -> TritonLinearWeight:
    addresses = [0 if part is None else part.data_ptr() for part in (values, scales, minimums, bias)]
    where = torch.tensor(addresses, dtype=torch.int64, device=values.device)
    return TritonLinearWeight(values, scales, minimums, bias, bits, zero, in_features, where)


def _linear_in_codes(x: Tensor, w: TritonLinearWeight, dtype: torch.dtype) -> Tensor:
    out = torch.empty(len(x), w.out_features, dtype=dtype, device=x.device)
    matmul(x, None, out, None, None, w.addresses, w, len(x))
    return out


def matmul(
    x: Tensor,
    x_rows: Tensor | None,
    out: Tensor,
    out_rows: Tensor | None,
    starts: Tensor | None,
    addresses: Tensor,
    like: TritonLinearWeight,
    num_rows: int,
) -> None:
    """out[i] = x[i] @ weight.T + bias for `num_rows` rows, on the weights at `addresses` [G, 4].

    Rows `starts[g]..starts[g + 1]` (int32) have the g-th weight; `starts` None: there is one, for all. `x_rows` and
    `out_rows` [num_rows] int64 say which rows of x and `out` these are, None that they lie in order. `like` says what
    all the weights have in common.
    """
    num_groups = addresses.numel() // 4
    many = num_rows > _FEW_ROWS * num_groups
    rows, cols = (_MANY_ROWS, 64) if many else (_FEW_ROWS, 32)
    blocks = triton.cdiv(num_rows, rows) if starts is None else num_rows // rows + num_groups
    _matmul[(blocks, triton.cdiv(like.out_features, cols))](
        x,
        x_rows,
        out,
        out_rows,
        starts,
        addresses,
        num_groups,
        num_rows,
        x.stride(0),
        like.out_features,
        like.in_features,
        like.zero,
        BITS=like.bits,
        GROUPED=starts is not None,
        HAS_X_ROWS=x_rows is not None,
        HAS_OUT_ROWS=out_rows is not None,
        HAS_MINIMUMS=like.minimums is not None,
        HAS_BIAS=like.bias is not None,
        ROWS=rows,
        COLS=cols,
        DEPTH=GROUP if x.dtype == torch.float32 else 2 * GROUP,
        num_stages=3,
    )
