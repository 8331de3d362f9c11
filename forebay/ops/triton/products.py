"""One kernel for products by weights: of few rows and of many, dense, in codes, and of experts.

Its weights are the left operand, so that few rows of x are a matrix unit's columns. The sum over the inputs is never
divided: one program adds up an output in the order of the inputs. So the bits of a row do not depend on the tile, and
the tile may depend on the number of rows.

Shape letters: N and K a layer's outputs and inputs, G groups of rows with a weight each.
"""

from __future__ import annotations

import functools
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any, Final, Protocol

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.runtime import driver

from forebay.formats.quantized import FP8_GROUP, GROUP, CodeFormat
from forebay.ops.triton.codes import as_floats, fields, floats, load_numbers, numbers, steps
from forebay.ops.triton.common import INTERPRETED, dot, dot_add
from forebay.ops.triton.launch import kernel

LOW_BITS: Final = {2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 8: 8, 16: 16}  # by the bits of a code: of its first plane
_TOGETHER = tl.constexpr(8)  # blocks of rows whose programs run side by side: they read the same weights


@triton.jit
def _place(tile, row_blocks, col_blocks):
    """The block of rows and that of outputs of a program."""
    per = _TOGETHER * col_blocks
    first = tile // per * _TOGETHER
    size = tl.minimum(row_blocks - first, _TOGETHER)
    inside = tile % per
    return first + inside % size, inside // size


@kernel
@triton.jit(do_not_specialize=["num_rows"])
def _in_fp8(x, codes, scales, num_rows, x_stride, k, ROWS: tl.constexpr, DEPTH: tl.constexpr):
    """Codes of DEPTH inputs of each row, whose largest has the largest code, in the order of a plane's bytes."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    live = row < num_rows
    at = (tl.program_id(1) * DEPTH + tl.arange(0, DEPTH))[None, :]
    values = tl.load(x + row[:, None] * x_stride + at, mask=live[:, None], other=0.0).to(tl.float32)
    broken = tl.max((values != values).to(tl.int32), 1) > 0  # which the maximum passes over
    scale = tl.where(broken, float("nan"), tl.max(tl.abs(values), 1) / 448.0)
    numbers = tl.where(scale > 0.0, 1.0, 0.0)[:, None] * values / tl.where(scale > 0.0, scale, 1.0)[:, None]
    numbers = tl.minimum(tl.maximum(tl.where(numbers == numbers, numbers, 0.0), -448.0), 448.0)
    pair = at % 16 // 2
    place = at // 16 * 16 + (pair % 4 * 2 + pair // 4) * 2 + at % 2
    tl.store(codes + row[:, None] * k + place, as_floats(numbers), mask=live[:, None])
    tl.store(scales + row * (k // DEPTH) + tl.program_id(1), scale, mask=live)


@kernel
@triton.jit(do_not_specialize=["num_rows", "x_shares", "row_blocks"])
def _product(
    x,
    x_scales,
    x_rows,
    out,
    out_rows,
    starts,
    owners,
    addresses,
    num_rows,
    x_shares,
    row_blocks,
    x_stride,
    n,
    k,
    low_pitch,
    high_pitch,
    BITS: tl.constexpr,
    HIGH: tl.constexpr,
    ZERO: tl.constexpr,
    SPAN: tl.constexpr,
    UNIT: tl.constexpr,
    FACTORS: tl.constexpr,
    LEVELS: tl.constexpr,
    SCALES: tl.constexpr,
    GROUPED: tl.constexpr,
    BLOCK_BY_ROW: tl.constexpr,
    HAS_X_ROWS: tl.constexpr,
    HAS_OUT_ROWS: tl.constexpr,
    HAS_MINIMUMS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    IN_FP8: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    DEPTH: tl.constexpr,
):
    """out[i] = x[i] @ weight.T + bias, rows starts[g]..starts[g + 1] with the weight at addresses[g].

    Row i is row x_rows[i] // x_shares of x and row out_rows[i] of `out` if these are given. owners[block] is the group
    of a block of rows, as `Runs` says. The planes of codes have rows of `low_pitch` and `high_pitch` words.

    IN_FP8: x are codes as of `_in_fp8`, with `x_scales` for each DEPTH inputs. A matrix unit multiplies codes by codes;
    the sum of DEPTH inputs is multiplied by both scales, and added in float32.
    """
    block, col_block = _place(tl.program_id(0), row_blocks, tl.cdiv(n, COLS))
    group = block * 0
    first = group
    count = group + num_rows
    if GROUPED:
        group = tl.load(owners + block)
        first = tl.load(starts + group)
        count = tl.load(starts + group + 1) - first
    if BLOCK_BY_ROW:
        begin = block - first
        if begin % ROWS != 0:
            return
    else:
        begin = (block - first // ROWS - group) * ROWS
        if begin >= count:
            return
    row = begin + tl.arange(0, ROWS)
    live = row < count
    source = (first + row).to(tl.int64)
    target = source
    if HAS_X_ROWS:
        source = (tl.load(x_rows + source, mask=live, other=0) // x_shares).to(tl.int64)
    if HAS_OUT_ROWS:
        target = tl.load(out_rows + target, mask=live, other=0).to(tl.int64)
    x_at = x + source[:, None] * x_stride
    col = col_block * COLS + tl.arange(0, COLS)
    live_col = col < n
    col_at = col.to(tl.int64)[:, None]
    dtype = x.dtype.element_ty
    here = addresses + group * 7
    inner = tl.arange(0, DEPTH)
    acc = tl.zeros([COLS, ROWS], tl.float32)
    if BITS == 16:
        weight = tl.multiple_of(tl.load(here).to(tl.pointer_type(dtype)), 16) + col_at * k
        for start in range(0, k, DEPTH):
            at = (start + inner)[None, :]
            values = tl.load(x_at + at, mask=live[:, None] & (at < k), other=0.0)
            tile = tl.load(weight + at, mask=live_col[:, None] & (at < k), other=0.0)
            acc = dot_add(tile, tl.trans(values), acc)
    elif IN_FP8:
        # Loaded as FP8, codes need no instruction on their way from shared memory to a matrix unit.
        code_type = tl.uint8 if INTERPRETED else tl.float8e4nv
        weight = tl.multiple_of(tl.load(here).to(tl.pointer_type(code_type)), 16) + col_at * k
        codes_at = x.to(tl.pointer_type(code_type), bitcast=True) + source[:, None] * x_stride
        scales_at = tl.multiple_of(tl.load(here + 1).to(tl.pointer_type(tl.float32)), 16) + col
        x_scales_at = x_scales + source * (k // DEPTH)
        for start in range(0, k, DEPTH):
            at = (start + inner)[None, :]
            values = tl.load(codes_at + at, mask=live[:, None], other=0.0)
            tile = tl.load(weight + at, mask=live_col[:, None], other=0.0)
            x_scale = tl.load(x_scales_at + start // DEPTH, mask=live, other=0.0)
            scale = tl.load(scales_at + start // SPAN * n, mask=live_col, other=0.0)
            if INTERPRETED:
                part = dot(floats(tile), floats(tl.trans(values)))
            else:
                part = tl.dot(tile, tl.trans(values))
            # One rounding in every tile: a compiler may join a product and a sum, or not.
            acc = tl.fma(part, scale[:, None] * x_scale[None, :], acc)
    else:
        scale_type = tl.float16 if SCALES == 0 else tl.uint8 if SCALES == 1 else tl.float32
        low_at = (
            tl.multiple_of(tl.load(here).to(tl.pointer_type(tl.int32 if BITS >= 4 else tl.uint8)), 16)
            + col_at * low_pitch
        )
        scales_at = tl.multiple_of(tl.load(here + 1).to(tl.pointer_type(scale_type)), 16)
        minimums_at = tl.multiple_of(tl.load(here + 2).to(tl.pointer_type(tl.float16)), 16)
        high_at = tl.multiple_of(tl.load(here + 4).to(tl.pointer_type(tl.uint8)), 16) + col_at * high_pitch
        factors_at = tl.multiple_of(tl.load(here + 5).to(tl.pointer_type(tl.uint8 if SCALES == 2 else tl.int8)), 16)
        minimum_factors_at = tl.multiple_of(tl.load(here + 6).to(tl.pointer_type(tl.int8)), 16)
        LOW_WORD: tl.constexpr = 32 // BITS if BITS >= 4 else 8 // BITS
        PER: tl.constexpr = FACTORS if FACTORS > 0 else UNIT
        scale, factor = load_numbers(scales_at, factors_at, col, live_col, 0, n, k, DEPTH, SPAN, UNIT, FACTORS)
        least, least_factor = scale, factor
        if HAS_MINIMUMS:
            least, least_factor = load_numbers(
                minimums_at, minimum_factors_at, col, live_col, 0, n, k, DEPTH, SPAN, UNIT, FACTORS
            )
        for start in range(0, k, DEPTH):
            at = (start + inner)[None, :]
            values = tl.load(x_at + at, mask=live[:, None] & (at < k), other=0.0)
            word = start // LOW_WORD + tl.arange(0, DEPTH // LOW_WORD)[None, :]
            low = tl.load(low_at + word, mask=live_col[:, None] & (word < low_pitch), other=0)
            code = fields(low, COLS, DEPTH, BITS)
            if HIGH > 0:
                word = start // (8 // HIGH) + tl.arange(0, DEPTH // 8 * HIGH)[None, :]
                high = tl.load(high_at + word, mask=live_col[:, None] & (word < high_pitch), other=0)
                code += fields(high, COLS, DEPTH, HIGH) << BITS
            number = tl.reshape(numbers(code, ZERO, LEVELS), (COLS, DEPTH // PER, PER))
            step = steps(scale, factor, COLS, DEPTH, UNIT, FACTORS, SCALES)[:, :, None]
            # Too narrow to be copied ahead by the compiler: this step's are in registers, the next one's under way.
            next_at = start + DEPTH
            scale, factor = load_numbers(
                scales_at, factors_at, col, live_col, next_at, n, k, DEPTH, SPAN, UNIT, FACTORS
            )
            if HAS_MINIMUMS:
                # One rounding in every tile: a compiler may join a product and a sum, or not.
                base = steps(least, least_factor, COLS, DEPTH, UNIT, FACTORS, 0)[:, :, None]
                number = tl.fma(number, step, tl.broadcast_to(base, number.shape))
                least, least_factor = load_numbers(
                    minimums_at, minimum_factors_at, col, live_col, next_at, n, k, DEPTH, SPAN, UNIT, FACTORS
                )
            else:
                number *= step
            acc = dot_add(tl.reshape(number, (COLS, DEPTH)).to(dtype), tl.trans(values), acc)
    if HAS_BIAS:
        bias_at = tl.load(here + 3).to(tl.pointer_type(dtype if BITS == 16 else tl.float32))
        acc += tl.load(bias_at + col, mask=live_col, other=0.0).to(tl.float32)[:, None]
    place = out + target[None, :] * n + col_at
    tl.store(place, acc.to(out.dtype.element_ty), mask=live[None, :] & live_col[:, None])


@dataclass(frozen=True, slots=True)
class Tile:
    """Rows of x and outputs that one program computes together, and its warps."""

    rows: int
    cols: int
    warps: int


@dataclass(frozen=True, slots=True)
class Chip:
    """Limits of tiles: the shared memory of one program, in bytes, and the compute capability, 90 of an H100."""

    shared_memory: int
    arch: int

    @property
    def wide(self) -> bool:
        """Whether matrix units read operands from shared memory: of data centers from sm_90 on."""
        return 90 <= self.arch < 120


# For up to so many rows of one group; their bits are the same. Without codes 16 x 64 and 64 x 64 were the fastest of
# such a kernel on an H100 up to so many rows, and 256 x 128 beyond. With codes no tile is measured.
_TILES: Final = (Tile(16, 64, 4), Tile(64, 64, 4), Tile(128, 128, 8), Tile(256, 128, 8))
_NARROW: Final = (Tile(16, 32, 4), Tile(64, 64, 4))  # in float32, which no matrix unit multiplies exactly
# With sums of one step beside those of all, both in registers.
_IN_FP8: Final = (Tile(16, 64, 4), Tile(64, 64, 4), Tile(128, 64, 4))
# Before sm_90 a program holds its operands in registers: larger tiles do not fit.
_MOST_ROWS: Final = {"dense": 128, "codes": 64}
_STAGES: Final = 4  # steps whose loads are under way together, at most
_MEMORY_LEFT: Final = 16 << 10  # of a program's shared memory, for what else the compiler keeps there


def tiles_of(dtype: torch.dtype, form: CodeFormat | None, chip: Chip) -> tuple[Tile, ...]:
    """The tiles for rows in `dtype`, uint8 for FP8, the smallest first."""
    if dtype == torch.uint8:
        return _IN_FP8
    if dtype == torch.float32:
        return _NARROW
    most = _TILES[-1].rows if chip.wide else _MOST_ROWS["dense" if form is None else "codes"]
    return tuple(tile for tile in _TILES if tile.rows <= most)


def tile_of(num_rows: int, dtype: torch.dtype, form: CodeFormat | None, chip: Chip) -> Tile:
    """The smallest tile that takes `num_rows` rows at once, or the largest."""
    tiles = tiles_of(dtype, form, chip)
    return next((tile for tile in tiles if num_rows <= tile.rows), tiles[-1])


def depth_of(dtype: torch.dtype, form: CodeFormat | None) -> int:
    """Inputs of one step: whole lines of memory. The same for all tiles of a weight."""
    if dtype == torch.float32:
        return 32 if form is None else 64
    return 64 if form is None else 128


def stages_of(tile: Tile, depth: int, dtype: torch.dtype, bits: int, chip: Chip) -> int:
    """Steps whose loads are under way together, of weights of `bits` each and rows in `dtype`."""
    one = depth * (tile.rows * dtype.itemsize * 8 + tile.cols * bits) // 8
    return max(1, min(_STAGES, (chip.shared_memory - _MEMORY_LEFT) // one))


@functools.cache
def chip_of(device: torch.device) -> Chip:
    """The chip of a device; in the interpreter an H100."""
    if INTERPRETED:
        return Chip(227 << 10, 90)
    active = driver.active
    found = active.utils.get_device_properties(device.index or 0)
    return Chip(found["max_shared_mem"], active.get_current_target().arch)


class ProductWeight(Protocol):
    """A weight of a call, of which all have these in common."""

    @property
    def form(self) -> CodeFormat | None: ...

    @property
    def bias(self) -> Tensor | None: ...

    @property
    def minimums(self) -> Tensor | None: ...

    @property
    def in_features(self) -> int: ...

    @property
    def out_features(self) -> int: ...


@dataclass(frozen=True, slots=True)
class Runs:
    """Rows of x by weight: rows `starts[g]..starts[g + 1]` have the g-th of `num_groups`. All int32.

    Row i is row `x_rows[i] // x_shares` of x, and row `out_rows[i]` of the result; None: they lie in order.

    `owners`: the group of each block of `block_rows` rows. If there are fewer rows than groups, one begins at each row,
    and those within another's rows do nothing. Else group g has those from starts[g] // block_rows + g on.
    """

    starts: Tensor
    owners: Tensor
    num_groups: int
    block_rows: int
    x_rows: Tensor | None = None
    x_shares: int = 1
    out_rows: Tensor | None = None


def num_blocks(num_rows: int, num_groups: int, block_rows: int) -> int:
    """Enough blocks of rows, however the rows are divided among the groups."""
    return num_rows if num_rows <= num_groups else num_rows // block_rows + num_groups


_FP8_ROWS: Final = 8  # that a program rounds


def in_fp8(x: Tensor) -> tuple[Tensor, Tensor]:
    """x [T, K], K a multiple of FP8_GROUP -> its codes [T, K] uint8, in the order of a plane, and scales float32."""
    rows, k = x.shape
    codes = torch.empty(rows, k, dtype=torch.uint8, device=x.device)
    scales = torch.empty(rows, k // FP8_GROUP, dtype=torch.float32, device=x.device)
    grid = triton.cdiv(rows, _FP8_ROWS), k // FP8_GROUP
    _in_fp8[grid](x, codes, scales, rows, x.stride(0), k, ROWS=_FP8_ROWS, DEPTH=FP8_GROUP)
    return codes, scales


def product(
    x: Tensor,
    out: Tensor,
    addresses: Tensor,
    like: ProductWeight,
    num_rows: int,
    runs: Runs | None,
    x_scales: Tensor | None = None,
) -> None:
    """out[i] = x[i] @ weight.T + bias for `num_rows` rows, on the weights at `addresses` [G, 7]; `runs` None: on one.

    `like` is any of the weights. With `x_scales` x are codes of FP8.
    """
    form, chip = like.form, chip_of(x.device)
    tile = tile_of(num_rows if runs is None else runs.block_rows, x.dtype, form, chip)
    row_blocks = triton.cdiv(num_rows, tile.rows) if runs is None else len(runs.owners)
    if x.is_cuda:
        compile_tiles(x, out, addresses, like, runs, x_scales)
    args, options = _arguments(x, out, addresses, like, (num_rows, row_blocks), runs, tile, x_scales)
    _product[(row_blocks * triton.cdiv(like.out_features, tile.cols),)](*args, **options)


_COMPILED: Final[set[Hashable]] = set()


def compile_tiles(
    x: Tensor,
    out: Tensor,
    addresses: Tensor,
    like: ProductWeight,
    runs: Runs | None,
    x_scales: Tensor | None = None,
) -> None:
    """Compile the kernel for every tile of such a weight, once: a first prompt then waits for no compiler."""
    sizes = x.stride(0), like.out_features, like.in_features
    parts = runs is None, runs is not None and runs.x_rows is None, like.minimums is None, like.bias is None
    key = like.form, x.dtype, out.dtype, parts, tuple(size % 16 for size in sizes)
    if key in _COMPILED:
        return
    _COMPILED.add(key)
    for tile in tiles_of(x.dtype, like.form, chip_of(x.device)):
        args, options = _arguments(x, out, addresses, like, (1 << 30, 1), runs, tile, x_scales)
        _product.compile(*args, **options)


def _arguments(
    x: Tensor,
    out: Tensor,
    addresses: Tensor,
    like: ProductWeight,
    counts: tuple[int, int],
    runs: Runs | None,
    tile: Tile,
    x_scales: Tensor | None,
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The kernel's arguments for a tile, and its constants; `counts` are the rows and the blocks of rows."""
    form, chip = like.form, chip_of(x.device)
    bits = 16 if form is None else form.bits
    low = LOW_BITS[bits]
    depth = depth_of(x.dtype, form)
    group = GROUP if form is None else form.group
    args = (
        x,
        x_scales,
        None if runs is None else runs.x_rows,
        out,
        None if runs is None else runs.out_rows,
        None if runs is None else runs.starts,
        None if runs is None else runs.owners,
        addresses,
        counts[0],
        1 if runs is None else runs.x_shares,
        counts[1],
        x.stride(0),
        like.out_features,
        like.in_features,
        like.in_features // (32 // low if low >= 4 else 8 // low),
        like.in_features // 8 * (bits - low),
    )
    options = {
        "BITS": low,
        "HIGH": bits - low,
        "ZERO": 0 if form is None else form.zero,
        "SPAN": group,
        "UNIT": unit_of(group, depth),
        "FACTORS": 0 if form is None else form.factors,
        "LEVELS": 0 if form is None else int(form.levels),
        "SCALES": 0 if form is None else int(form.scales),
        "GROUPED": runs is not None,
        "BLOCK_BY_ROW": runs is not None and counts[0] <= runs.num_groups,
        "HAS_X_ROWS": runs is not None and runs.x_rows is not None,
        "HAS_OUT_ROWS": runs is not None and runs.out_rows is not None,
        "HAS_MINIMUMS": like.minimums is not None,
        "HAS_BIAS": like.bias is not None,
        "IN_FP8": x_scales is not None,
        "ROWS": tile.rows,
        "COLS": tile.cols,
        "DEPTH": depth,
        "num_warps": tile.warps,
        "num_stages": stages_of(tile, depth, x.dtype, 8 * x.element_size() if form is None else bits, chip),
    }
    return args, options


def unit_of(span: int, depth: int) -> int:
    """Inputs of a step for which one number is loaded, of groups of `span` inputs that share it.

    At most half of a step: of one number for a whole step Triton 3.7 brings the opened weights, not the codes, into
    the layout of the matrix unit, through shared memory.
    """
    most = depth // 2
    if most % span == 0:
        return span
    return most if span % most == 0 else GROUP
