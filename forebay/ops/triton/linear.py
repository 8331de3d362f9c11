"""Linear layers: cuBLAS through torch for dense weights, and one kernel for weights in codes and for experts.

The kernel also computes dense layers of a shape for which cuBLAS has other bits by the number of rows.

Shape letters: T tokens, N and K a layer's outputs and inputs, G groups of rows.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from forebay.base.log import get_logger
from forebay.formats.quantized import GROUP, LEVELS, U8, CodeFormat, GroupQuantized, Levels, StoredCodes, joined
from forebay.formats.small_floats import E4M3, E8M0_BIAS
from forebay.ops.linear import LinearOps, LinearWeight
from forebay.ops.triton.common import dot, owner

_LOG: Final = get_logger("ops")
_FEW_ROWS: Final = 16  # the least that a matrix unit takes
_MANY_ROWS: Final = 64
PROBED_ROWS: Final = (1, 2, 7, 8, 16, 17, 64, 128, 256, 1024, 2048)
_PROBE_BYTES: Final = 256 << 20  # that a product of so many rows may take
_LEVELS_ZERO: Final = 128  # of whole numbers that codes stand for


@dataclass(frozen=True, slots=True, eq=False)
class TritonLinearWeight:
    """The tensors that were packed, and where they lie: `addresses` [8] int64 on the device, of what `_PARTS` names, 0
    for none.

    `form` None: `values` [N, K] in the model's dtype, and `bias` in the same. `by_rows`: cuBLAS adds up a row of this
    shape in an order that depends on the number of rows, so that these ops' own kernel computes it.

    Otherwise `values` are the lower bits of the codes and `high` the others, both in planes (see `_plane`), `scales`,
    `minimums` and factors what `GroupQuantized` calls so, and `bias` is float32.
    """

    values: Tensor
    scales: Tensor | None
    minimums: Tensor | None
    bias: Tensor | None
    high: Tensor | None
    factors: Tensor | None
    minimum_factors: Tensor | None
    form: CodeFormat | None
    in_features: int
    addresses: Tensor
    by_rows: bool = False

    @property
    def out_features(self) -> int:
        return len(self.values)


@dataclass(frozen=True, slots=True, eq=False)
class TritonParts:
    """Matrices of several formats, one below the other."""

    parts: tuple[TritonLinearWeight, ...]

    @property
    def in_features(self) -> int:
        return self.parts[0].in_features

    @property
    def out_features(self) -> int:
        return sum(part.out_features for part in self.parts)


_PARTS: Final = ("values", "scales", "minimums", "bias", "high", "factors", "minimum_factors")
_LOW_BITS: Final = {2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 8: 8}  # by the bits of a code: of the plane of `values`


@triton.jit
def _field(plane, col_at, at, k, mask, BITS: tl.constexpr):
    """Entries [at, col] of a plane: of 32 inputs, i is in byte i % (4 * BITS), above those before it."""
    span: tl.constexpr = 4 * BITS
    byte = at // 32 * span + at % span
    packed = tl.load(plane + col_at * (k // 8 * BITS) + byte[:, None], mask=mask, other=0).to(tl.int32)
    return (packed >> (at % 32 // span * BITS)[:, None]) & ((1 << BITS) - 1)


@triton.jit
def _powers(exponents):
    """Half of the powers of two that E8M0 exponents stand for; the least is no normal number."""
    return tl.maximum(exponents.to(tl.int32) << 23, 0x400000).to(tl.float32, bitcast=True) * 0.5


@triton.jit
def _floats(codes):
    """The numbers of E4M3 codes: sign and magnitude as of a float32 whose exponent is 120 too low."""
    codes = codes.to(tl.int32)
    return (((codes & 128) << 24) | ((codes & 127) << 20)).to(tl.float32, bitcast=True) * 1.329227995784916e36


@triton.jit
def _number(numbers, factors, col_at, at, k, mask, SPAN: tl.constexpr, FACTORS: tl.constexpr, SCALES: tl.constexpr):
    """The scale or minimum of entries [at, col], float32; SCALES is its `ScaleType`."""
    stored = tl.load(numbers + col_at * (k // SPAN) + (at // SPAN)[:, None], mask=mask, other=0)
    number = _powers(stored) if SCALES == 1 else stored.to(tl.float32)
    if FACTORS > 0:
        factor = tl.load(factors + col_at * (k // FACTORS) + (at // FACTORS)[:, None], mask=mask, other=0)
        number *= _floats(factor) if SCALES == 2 else factor.to(tl.float32)
    return number


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
    HIGH: tl.constexpr,
    SPAN: tl.constexpr,
    FACTORS: tl.constexpr,
    LEVELS: tl.constexpr,
    SCALES: tl.constexpr,
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

    Row i is row x_rows[i] of x and row out_rows[i] of `out` if these are given.
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
    here = addresses + group * 8
    dtype = x.dtype.element_ty
    if BITS == 16:
        weight = tl.multiple_of(tl.load(here), 16).to(tl.pointer_type(dtype))
        for start in range(0, k, DEPTH):
            at = start + tl.arange(0, DEPTH)
            values = tl.load(x_at + at[None, :], mask=live[:, None] & (at[None, :] < k), other=0.0)
            tile = tl.load(weight + col_at * k + at[:, None], mask=live_col[None, :] & (at[:, None] < k), other=0.0)
            acc += dot(values, tile)
    elif SPAN > 32 or HIGH > 0 or LEVELS:
        low_at = tl.load(here).to(tl.pointer_type(tl.uint8))
        scale_type = tl.float16 if SCALES == 0 else tl.uint8 if SCALES == 1 else tl.float32
        scales_at = tl.load(here + 1).to(tl.pointer_type(scale_type))
        minimums_at = tl.load(here + 2).to(tl.pointer_type(tl.float16))
        high_at = tl.load(here + 4).to(tl.pointer_type(tl.uint8))
        factors_at = tl.load(here + 5).to(tl.pointer_type(tl.uint8 if SCALES == 2 else tl.int8))
        minimum_factors_at = tl.load(here + 6).to(tl.pointer_type(tl.int8))
        levels_at = tl.load(here + 7).to(tl.pointer_type(tl.float32))
        for start in range(0, k, DEPTH):
            at = start + tl.arange(0, DEPTH)
            mask = live_col[None, :] & (at < k)[:, None]
            values = tl.load(x_at + at[None, :], mask=live[:, None] & (at < k)[None, :], other=0.0)
            code = _field(low_at, col_at, at, k, mask, BITS)
            if HIGH > 0:
                code += _field(high_at, col_at, at, k, mask, HIGH) << BITS
            level = tl.load(levels_at + code) if LEVELS else (code - zero).to(tl.float32)
            tile = _number(scales_at, factors_at, col_at, at, k, mask, SPAN, FACTORS, SCALES) * level
            if HAS_MINIMUMS:
                tile += _number(minimums_at, minimum_factors_at, col_at, at, k, mask, SPAN, FACTORS, 0)
            acc += dot(values, tile.to(dtype))
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


class TritonLinear(LinearOps):
    """See `LinearOps`. A packed tensor is kept as it is, not copied: on a GPU no other order is read faster, and there
    may be no room for it twice. So the caller must not change a tensor after packing it.

    Weights in codes are multiplied by x as it is, not by x in codes as on a CPU: a GPU waits for the weights.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._by_rows: dict[tuple[torch.Size, torch.dtype], bool] = {}

    def pack_linear(
        self, weight: Tensor, bias: Tensor | None = None, *, inputs: torch.dtype | None = None
    ) -> TritonLinearWeight:
        weight = weight.to(inputs or weight.dtype).contiguous()
        packed = _packed(None, weight.shape[1], values=weight, bias=bias)
        return replace(packed, by_rows=True) if weight.is_cuda and self._depends_on_rows(weight) else packed

    def _depends_on_rows(self, weight: Tensor) -> bool:
        """Whether cuBLAS has other bits for other numbers of rows; tried once for each shape and type."""
        key = weight.shape, weight.dtype
        if key not in self._by_rows:
            most = max(count for count in PROBED_ROWS if count == 1 or 4 * count * len(weight) <= _PROBE_BYTES)
            rows = torch.randn(most, weight.shape[1], device=weight.device).to(weight.dtype)
            products = (lambda x: F.linear(x, weight), lambda x: _sums(x, weight))
            self._by_rows[key] = not all(rows_agree(product, rows) for product in products)
            if self._by_rows[key]:
                _LOG.info(
                    "products of %s weights %s: cuBLAS's bits depend on the number of rows, Forebay's own kernel "
                    "computes them",
                    str(weight.dtype).removeprefix("torch."),
                    " x ".join(map(str, weight.shape)),
                )
        return self._by_rows[key]

    def pack_quantized(self, weight: StoredCodes, bias: Tensor | None = None) -> TritonLinearWeight | TritonParts:
        bias = None if bias is None else bias.to(self._device, torch.float32)
        parts = [
            self._pack_part(joined(list(weight.pieces(run))), None if bias is None else bias[run.start : run.stop])
            for _, run in weight.runs
        ]
        return parts[0] if len(parts) == 1 else TritonParts(tuple(parts))

    def _pack_part(self, weight: GroupQuantized, bias: Tensor | None) -> TritonLinearWeight:
        form, codes = weight.format, weight.codes
        low = _LOW_BITS[form.bits]
        arrays = {
            "values": _plane(codes & np.uint8((1 << low) - 1), low),
            "high": _plane(codes >> np.uint8(low), form.bits - low) if form.bits > low else None,
            "scales": weight.scales,
            "minimums": weight.minimums,
            "factors": weight.factors,
            "minimum_factors": weight.minimum_factors,
        }
        tensors: dict[str, Any] = {
            name: None if array is None else torch.tensor(array, device=self._device) for name, array in arrays.items()
        }
        return _packed(form, weight.shape[1], bias=bias, **tensors)

    def linear(self, x: Tensor, w: LinearWeight) -> Tensor:
        if isinstance(w, TritonParts):
            return torch.cat([self.linear(x, part) for part in w.parts], dim=1)
        assert isinstance(w, TritonLinearWeight), type(w)
        if w.form is None and not w.by_rows:
            return F.linear(x, w.values, w.bias)
        return _own_product(x, w, x.dtype)

    def linear_f32(self, x: Tensor, w: LinearWeight) -> Tensor:
        if isinstance(w, TritonParts):
            return torch.cat([self.linear_f32(x, part) for part in w.parts], dim=1)
        assert isinstance(w, TritonLinearWeight), type(w)
        if w.form is not None or w.by_rows:
            return _own_product(x, w, torch.float32)
        sums = _sums(x, w.values)
        return sums if w.bias is None else sums.add_(w.bias)

    def embedding(self, ids: Tensor, table: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        return table.index_select(0, ids).to(dtype or table.dtype)

    def embedding_packed(self, ids: Tensor, table: LinearWeight, dtype: torch.dtype) -> Tensor:
        assert isinstance(table, TritonLinearWeight), type(table)
        assert table.form is not None, "a table that is not quantized"
        low = _LOW_BITS[table.form.bits]
        codes = _fields(table.values.index_select(0, ids), low).int()
        if table.high is not None:
            codes |= _fields(table.high.index_select(0, ids), table.form.bits - low).int() << low
        form = table.form
        levels = _levels(form.levels, codes.device)[codes] if form.levels else codes - form.zero
        scales, minimums = (
            None if numbers is None else _numbers(numbers.index_select(0, ids), factors, ids)
            for numbers, factors in ((table.scales, table.factors), (table.minimums, table.minimum_factors))
        )
        assert scales is not None
        rows = levels.view(*scales.shape, -1) * scales.unsqueeze(-1)
        return (rows if minimums is None else rows + minimums.unsqueeze(-1)).flatten(1).to(dtype)


def _plane(fields: U8, bits: int) -> U8:
    """fields [N, K] of `bits` bits -> [N, K * bits / 8]: of 32, i is in byte i % (4 * bits), above those before it."""
    packed = fields.reshape(len(fields), -1, 8 // bits, 4 * bits)
    shifts = np.arange(0, 8, bits, dtype=np.uint8)[:, None]
    plane: U8 = np.bitwise_or.reduce(packed << shifts, axis=2).reshape(len(fields), -1)
    return plane


def _fields(plane: Tensor, bits: int) -> Tensor:
    """The fields of a plane, [N, K]."""
    shifts = torch.arange(0, 8, bits, device=plane.device).unsqueeze(-1)
    return (plane.unflatten(1, (-1, 1, 4 * bits)) >> shifts & (1 << bits) - 1).flatten(1)


def _numbers(numbers: Tensor, factors: Tensor | None, ids: Tensor) -> Tensor:
    """Scales or minimums [rows, groups] float32 of the smallest groups."""
    if numbers.dtype == torch.uint8:
        return torch.ldexp(torch.ones_like(numbers, dtype=torch.float32), numbers.int() - (E8M0_BIAS + 1))
    if factors is None:
        return numbers.float()
    chosen = factors.index_select(0, ids)
    floats = chosen.view(torch.float8_e4m3fn).float() if chosen.dtype == torch.uint8 else chosen
    return (floats.view(*numbers.shape, -1) * numbers.float().unsqueeze(-1)).flatten(1)


@functools.cache
def _levels(levels: Levels, device: torch.device) -> Tensor:
    """Return the numbers that codes stand for, float32."""
    table = E4M3 if levels is Levels.E4M3 else LEVELS[levels] - np.float32(_LEVELS_ZERO)
    return torch.tensor(table, device=device)


def _packed(form: CodeFormat | None, in_features: int, *, values: Tensor, **parts: Tensor | None) -> TritonLinearWeight:
    everything: dict[str, Any] = {"values": values, **{name: parts.get(name) for name in _PARTS[1:]}}
    levels = _levels(form.levels, values.device) if form is not None and form.levels else None
    addresses = [0 if part is None else part.data_ptr() for part in (*everything.values(), levels)]
    where = torch.tensor(addresses, dtype=torch.int64, device=values.device)
    return TritonLinearWeight(**everything, form=form, in_features=in_features, addresses=where)


def rows_agree(product: Callable[[Tensor], Tensor], rows: Tensor) -> bool:
    """Whether `product` of the first rows has the same bits for each of PROBED_ROWS, in the first row and the last."""
    whole = product(rows)
    parts = ((count, product(rows[:count])) for count in PROBED_ROWS if count <= len(rows))
    return all(torch.equal(part[at], whole[at]) for count, part in parts for at in (0, count - 1))


def _sums(x: Tensor, values: Tensor) -> Tensor:
    """x @ values.T, float32."""
    if not x.is_cuda or x.dtype == torch.float32:
        return F.linear(x, values).float()
    return torch.mm(x, values.t(), out_dtype=torch.float32)


def _own_product(x: Tensor, w: TritonLinearWeight, dtype: torch.dtype) -> Tensor:
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
    """out[i] = x[i] @ weight.T + bias for `num_rows` rows, on the weights at `addresses` [G, 8].

    Rows `starts[g]..starts[g + 1]` (int32) have the g-th weight; `starts` None: there is one, for all. `x_rows` and
    `out_rows` [num_rows] int64 say which rows of x and `out` these are, None that they lie in order. `like` says what
    all the weights have in common.
    """
    num_groups = addresses.numel() // 8
    form = like.form
    low = 16 if form is None else _LOW_BITS[form.bits]
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
        0 if form is None else form.zero,
        BITS=low,
        HIGH=0 if form is None else form.bits - low,
        SPAN=GROUP if form is None else form.group,
        FACTORS=0 if form is None else form.factors,
        LEVELS=form is not None and form.levels is not Levels.NONE,
        SCALES=0 if form is None else int(form.scales),
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
