"""Linear layers: cuBLAS through torch for dense weights, and the kernel of `products` for weights in codes.

The kernel also computes dense layers of a shape for which cuBLAS has other bits by the number of rows.

Shape letters: T tokens, N and K a layer's outputs and inputs, G groups of rows.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

from forebay.formats.quantized import LEVELS, CodeFormat, GroupQuantized, Levels, StoredCodes, joined
from forebay.formats.small_floats import E4M3, E8M0_BIAS
from forebay.ops.linear import LinearWeight
from forebay.ops.reference.linear import TorchLinear
from forebay.ops.triton.choices import FEW_ROWS, Choice, Choices, Product, choose, fastest
from forebay.ops.triton.products import LOW_BITS, in_fp8, product
from forebay.ops.uploads import Uploads
from forebay.ops.weight_memory import WeightMemory

_PROBE_BYTES: Final = 1 << 30  # that a product of so many rows may take: caches come later
_TIMED_CALLS: Final = 9
_LEVELS_ZERO: Final = 128  # of whole numbers that codes stand for


@dataclass(frozen=True, slots=True, eq=False)
class TritonLinearWeight:
    """The tensors that were packed, and where they lie: `addresses` [7] int64 on the device, of what `_PARTS` names, 0
    for none.

    `form` None: `values` [N, K] in the model's dtype, and `bias` in the same. These ops' own kernel computes up to
    `own_rows` rows, as `Choice` says.

    Otherwise `values` are the lower bits of the codes and `high` the others, both in planes (see `_plane`). `scales`,
    `minimums` and factors are those of `GroupQuantized`, but [K / group, N], and `bias` is float32.
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
    own_rows: int = 0

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


class TritonLinear(TorchLinear):
    """See `LinearOps`. A dense tensor keeps its order: on a GPU no other is read faster. Without a `memory` it is not
    copied, so the caller must not change it after packing it.

    Weights in codes are multiplied by x as it is, not by x in codes as on a CPU: a GPU waits for the weights.
    """

    def __init__(
        self,
        device: torch.device,
        choices: Choices | None = None,
        memory: WeightMemory | None = None,
        *,
        fp8_inputs: bool = False,
    ) -> None:
        """Without `choices` torch computes dense products, whatever their bits. `memory`: where packed weights lie.
        `fp8_inputs`: inputs of weights in FP8 are rounded to FP8."""
        super().__init__()
        self._memory = memory
        self._device, self._choices, self._fp8_inputs = device, choices, fp8_inputs
        self._uploads = Uploads.to(device)

    def pack(
        self, weight: Tensor, bias: Tensor | None = None, *, inputs: torch.dtype | None = None
    ) -> TritonLinearWeight:
        weight = weight.to(inputs or weight.dtype).contiguous()
        packed = self._placed(None, weight.shape[1], values=weight, bias=bias)
        if self._choices is None:
            return packed
        own_rows = self._choices.of(weight).own_rows
        # The probe compares products without a bias.
        return replace(packed, own_rows=0 if bias is not None and own_rows == FEW_ROWS else own_rows)

    def pack_quantized(self, weight: StoredCodes, bias: Tensor | None = None) -> TritonLinearWeight | TritonParts:
        bias = None if bias is None else bias.to(self._device, torch.float32)
        parts = [
            self._pack_part(joined(list(weight.pieces(run))), None if bias is None else bias[run.start : run.stop])
            for _, run in weight.runs
        ]
        return parts[0] if len(parts) == 1 else TritonParts(tuple(parts))

    def _pack_part(self, weight: GroupQuantized, bias: Tensor | None) -> TritonLinearWeight:
        form, codes = weight.format, self._on_device(weight.codes)
        low = LOW_BITS[form.bits]
        arrays = {
            "scales": _by_inputs(weight.scales),
            "minimums": _by_inputs(weight.minimums),
            "factors": _by_inputs(weight.factors),
            "minimum_factors": _by_inputs(weight.minimum_factors),
        }
        tensors: dict[str, Any] = {
            name: None if array is None else self._on_device(array) for name, array in arrays.items()
        }
        high = _plane(codes >> low, form.bits - low) if form.bits > low else None
        return self._placed(
            form, weight.shape[1], values=_plane(codes & (1 << low) - 1, low), high=high, bias=bias, **tensors
        )

    def _placed(self, form: CodeFormat | None, in_features: int, **parts: Tensor | None) -> TritonLinearWeight:
        """Pack tensors, in the memory of the weights if there is one."""
        memory = self._memory
        if memory is not None:
            parts = {name: None if part is None else memory.placed(part) for name, part in parts.items()}
        return _packed(form, in_features, **parts)

    def _on_device(self, array: npt.NDArray[Any]) -> Tensor:
        return torch.tensor(array) if self._uploads is None else self._uploads.array(array)

    def apply(self, x: Tensor, w: LinearWeight) -> Tensor:
        if isinstance(w, TritonParts):
            return torch.cat([self.apply(x, part) for part in w.parts], dim=1)
        assert isinstance(w, TritonLinearWeight), type(w)
        if w.form is None and len(x) > w.own_rows:
            return F.linear(x, w.values, w.bias)
        return own_product(x, w, x.dtype, fp8_inputs=self._fp8_inputs)

    def apply_f32(self, x: Tensor, w: LinearWeight) -> Tensor:
        if isinstance(w, TritonParts):
            return torch.cat([self.apply_f32(x, part) for part in w.parts], dim=1)
        assert isinstance(w, TritonLinearWeight), type(w)
        if w.form is not None or len(x) <= w.own_rows:
            return own_product(x, w, torch.float32, fp8_inputs=self._fp8_inputs)
        sums = _sums(x, w.values)
        return sums if w.bias is None else sums.add_(w.bias)

    def embedding(self, ids: Tensor, table: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        return table.index_select(0, ids).to(dtype or table.dtype)

    def embedding_packed(self, ids: Tensor, table: LinearWeight, dtype: torch.dtype) -> Tensor:
        assert isinstance(table, TritonLinearWeight), type(table)
        return opened(table, ids, dtype)


def opened(table: TritonLinearWeight, ids: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Return the numbers of rows `ids` [T] of a weight in codes, or of all rows, [T, K]; torch computes them."""
    form = table.form
    assert form is not None, "a weight that is not quantized"
    if ids is None:
        ids = torch.arange(table.out_features, device=table.values.device)
    low = LOW_BITS[form.bits]
    codes = _fields(table.values.index_select(0, ids), low).int()
    if table.high is not None:
        codes |= _fields(table.high.index_select(0, ids), form.bits - low).int() << low
    levels = _levels(form.levels, codes.device)[codes] if form.levels else codes - form.zero
    scales, minimums = (
        None if numbers is None else _numbers(_of_rows(numbers, ids), factors, ids)
        for numbers, factors in ((table.scales, table.factors), (table.minimums, table.minimum_factors))
    )
    assert scales is not None
    rows = levels.view(*scales.shape, -1) * scales.unsqueeze(-1)
    return (rows if minimums is None else rows + minimums.unsqueeze(-1)).flatten(1).to(dtype)


def _plane(fields: Tensor, bits: int) -> Tensor:
    """Pack fields [N, K] uint8 of `bits` bits -> [N, K * bits / 8], on their device.

    Of 32, i is in byte i % (4 * bits), above those before it. Bytes of planes of four and eight bits are reordered by
    16: as pairs 0, 4, 1, 5, 2, 6, 3, 7, since a thread of a matrix unit multiplies pairs t and t + 4 (`codes.fields`).
    """
    apart = fields.unflatten(1, (-1, 8 // bits, 4 * bits)).unbind(2)
    plane = apart[0].clone()
    for i, field in enumerate(apart[1:], start=1):
        plane |= field << i * bits
    plane = plane.flatten(1)
    return plane.unflatten(1, (-1, 2, 4, 2)).transpose(2, 3).flatten(1) if bits >= 4 else plane


def _fields(plane: Tensor, bits: int) -> Tensor:
    """The fields of a plane, [N, K]."""
    if bits >= 4:
        plane = plane.unflatten(1, (-1, 4, 2, 2)).transpose(2, 3).flatten(1)
    shifts = torch.arange(0, 8, bits, device=plane.device).unsqueeze(-1)
    return (plane.unflatten(1, (-1, 1, 4 * bits)) >> shifts & (1 << bits) - 1).flatten(1)


def _by_inputs(numbers: npt.NDArray[Any] | None) -> npt.NDArray[Any] | None:
    """Numbers [N, groups] -> [groups, N]: programs for several outputs then load those of a group together."""
    return None if numbers is None else np.ascontiguousarray(numbers.T)


def _of_rows(numbers: Tensor, ids: Tensor) -> Tensor:
    """The numbers [groups, N] of rows `ids`, [rows, groups]."""
    return numbers.index_select(1, ids).t().contiguous()


def _numbers(numbers: Tensor, factors: Tensor | None, ids: Tensor) -> Tensor:
    """Scales or minimums [rows, groups] float32 of the smallest groups."""
    if numbers.dtype == torch.uint8:
        return torch.ldexp(torch.ones_like(numbers, dtype=torch.float32), numbers.int() - (E8M0_BIAS + 1))
    if factors is None:
        return numbers.float()
    chosen = _of_rows(factors, ids)
    floats = chosen.view(torch.float8_e4m3fn).float() if chosen.dtype == torch.uint8 else chosen
    return (floats.view(*numbers.shape, -1) * numbers.float().unsqueeze(-1)).flatten(1)


@functools.cache
def _levels(levels: Levels, device: torch.device) -> Tensor:
    """Return the numbers that codes stand for, float32."""
    table = E4M3 if levels is Levels.E4M3 else LEVELS[levels] - np.float32(_LEVELS_ZERO)
    return torch.tensor(table, device=device)


def _packed(form: CodeFormat | None, in_features: int, **parts: Tensor | None) -> TritonLinearWeight:
    values = parts["values"]
    assert values is not None, "a weight without values"
    addresses = [0 if part is None else part.data_ptr() for part in map(parts.get, _PARTS)]
    where = torch.tensor(addresses, dtype=torch.int64, device=values.device)
    return TritonLinearWeight(
        values=values,
        scales=parts.get("scales"),
        minimums=parts.get("minimums"),
        bias=parts.get("bias"),
        high=parts.get("high"),
        factors=parts.get("factors"),
        minimum_factors=parts.get("minimum_factors"),
        form=form,
        in_features=in_features,
        addresses=where,
    )


def probe_times(weight: Tensor, most_rows: int) -> Choice:
    """Choose the product of a dense weight on a GPU by its times there, whatever its bits."""
    return probe(weight, most_rows, fastest)


def probe(weight: Tensor, most_rows: int, chooses: Callable[..., Choice] = choose) -> Choice:
    """Choose the product of a dense weight on a GPU, by its bits and times there.

    Bits are compared with those among `most_rows` rows, as far as their result in float32 takes no more than a GiB.
    """
    most = max(1, min(most_rows, _PROBE_BYTES // (4 * len(weight))))
    rows = torch.randn(most, weight.shape[1], device=weight.device).to(weight.dtype)
    packed = _packed(None, weight.shape[1], values=weight)
    theirs = (lambda x: F.linear(x, weight), lambda x: _sums(x, weight))
    ours = (lambda x: own_product(x, packed, x.dtype), lambda x: own_product(x, packed, torch.float32))
    return chooses(theirs, ours, rows, _time_us)


def _time_us(product: Product, rows: Tensor) -> float:
    """Return the median time of a product on the GPU."""
    product(rows)
    times = []
    for _ in range(_TIMED_CALLS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        product(rows)
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end))
    return 1000 * sorted(times)[_TIMED_CALLS // 2]


def _sums(x: Tensor, values: Tensor) -> Tensor:
    """x @ values.T, float32."""
    if not x.is_cuda or x.dtype == torch.float32:
        return F.linear(x, values).float()
    return torch.mm(x, values.t(), out_dtype=torch.float32)


def own_product(x: Tensor, w: TritonLinearWeight, dtype: torch.dtype, *, fp8_inputs: bool = False) -> Tensor:
    """x @ weight.T + bias by these ops' kernel, in `dtype`; x is rounded to FP8 first if it may be."""
    out = torch.empty(len(x), w.out_features, dtype=dtype, device=x.device)
    rows, scales = in_fp8(x) if fp8_inputs and w.form is not None and w.form.multiplies_fp8 else (x, None)
    product(rows, out, w.addresses, w, len(x), None, scales)
    return out
