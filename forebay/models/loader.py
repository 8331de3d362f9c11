"""Weights from a checkpoint to the layers: checked by name and shape first, then converted and packed."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

from forebay.base.errors import ModelError
from forebay.families.checkpoint import Checkpoint, PlainTensor
from forebay.formats.gguf_tensor import GgufStored
from forebay.formats.quantization import Quantization
from forebay.formats.quantized import NOT_FINITE
from forebay.formats.stored_tensor import read_tensor
from forebay.layers.params import Change, TensorParam, unchanged
from forebay.models.weight_codes import codes_of, stays_bfloat16
from forebay.ops import LinearWeight, Ops
from forebay.ops.reference.tables import STORED, RowTable
from forebay.ops.uploads import Uploads

Progress = Callable[[int, int], None]
"""Called with the bytes of weights done and in total."""

_SHOWN = 5
_DERIVED = ".rotary_emb.inv_freq"  # in some checkpoints, although it follows from the configuration

# Below the size from which torch uses threads for a copy. Where other processes keep the cores busy, as the server does
# during start-up, waiting for them made loading the embedded model take 4 to 7 s instead of 0.6 (two cores, bfloat16).
_COPY_ELEMENTS = (1 << 15) - 1


def check_names(checkpoint: Checkpoint, params: Iterable[TensorParam]) -> None:
    """ModelError unless the checkpoint has exactly the declared tensors in the declared shapes."""
    wanted = dict(part for param in params for part in param.parts())
    where, tensors = checkpoint.path, checkpoint.tensors
    missing = [name for name in wanted if name not in tensors]
    if missing:
        raise ModelError(f"{where}: {len(missing)} weights are missing: {_shown(missing)}")
    unused = [name for name in tensors if name not in wanted and not _changes_nothing(name, checkpoint)]
    if unused:
        raise ModelError(
            f"{where}: {len(unused)} weights have no use in a {checkpoint.config.model_type} model "
            f"of this configuration: {_shown(unused)}"
        )
    for name, shape in wanted.items():
        if tensors[name].shape != shape:
            raise ModelError(f"{where}: {name} has the shape {tensors[name].shape} instead of {shape}")


def _changes_nothing(name: str, checkpoint: Checkpoint) -> bool:
    """Return whether a tensor can be ignored: it follows from others, or is a bias of zeros. The packing of layers in
    codes gives each of them a bias, of zeros if the model has none."""
    if checkpoint.config.packing is None or not name.endswith(".bias"):
        return name.endswith(_DERIVED)
    return not read_tensor(checkpoint.tensors[name]).any()


def _shown(names: Sequence[str]) -> str:
    more = len(names) - _SHOWN
    return ", ".join(names[:_SHOWN]) + (f" and {more} more" if more > 0 else "")


class Loader:
    """The `Weights` of one load: besides the result, one weight and one piece of a stored one are in memory.

    One thread does it all: the embedded model takes 0.13 s of one core in its own codes. One or two threads that read
    ahead gained nothing with weights dequantized to bfloat16 (0.43 s each way on an idle machine).
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        params: Iterable[TensorParam],
        *,
        ops: Ops,
        dtype: torch.dtype,
        device: torch.device | str,
        progress: Progress,
        quantization: Quantization = Quantization.NONE,
    ) -> None:
        self._checkpoint = checkpoint
        self._ops = ops
        self.dtype = dtype
        self.device = device
        self._progress = progress
        self._codes = {
            param: codes_of(param, checkpoint.tensors, quantization, ops.linear.quantize_into)
            for param in params
            if not param.by_row
        }
        self._widened = {param for param in self._codes if self._is_widened(param)}
        self.held_bytes = Counter[str]()  # by the name of what the weights are held in
        for param, codes in self._codes.items():
            if codes is None:
                held = self._held_dtype(param)
                self.held_bytes[str(held).removeprefix("torch.")] += param.num_elements * held.itemsize
            else:
                for form, rows in codes.runs:
                    self.held_bytes[f"{form.bits} bits"] += form.num_bytes(len(rows) * codes.shape[1])
        self.numbers: list[float] = []  # weights that are single numbers, which layers and graphs have as such
        self._done_bytes = 0
        self._uploads = Uploads.to(device)

    def tensor(self, param: TensorParam, *, float32: bool = False, change: Change = unchanged) -> Tensor:
        """Load a tensor, apply `change`, and place it in the region of the weights."""
        return self._placed(change(self.values(param, float32=float32)))

    def _placed(self, values: Tensor) -> Tensor:
        """Move values to the region of the weights, if the kernels have one."""
        return values if self._ops.memory is None else self._ops.memory.placed(values)

    def _is_widened(self, param: TensorParam) -> bool:
        """Return whether a matrix is held in bfloat16 and multiplied in float32."""
        widens = self.dtype == torch.float32 and self._ops.linear.widens_bfloat16
        return widens and self._codes[param] is None and stays_bfloat16(param, self._checkpoint.tensors)

    def _held_dtype(self, param: TensorParam) -> torch.dtype:
        """The dtype of a matrix that is not held in codes."""
        return torch.bfloat16 if param in self._widened else self.dtype

    def values(self, param: TensorParam, *, float32: bool = False) -> Tensor:
        """Read a tensor into new memory: its parts joined, scaled and reordered; ModelError for NaN, and for infinities
        unless it is a bound."""
        return self._read(param, torch.float32 if float32 else self.dtype)

    def _read(self, param: TensorParam, dtype: torch.dtype) -> Tensor:
        changed = bool(param.offset or param.scales)
        result = self._joined(param, torch.float32 if changed else dtype)
        if param.rows:
            result = torch.cat([result[rows.start : rows.stop : rows.step] for rows in param.rows])
        if changed:
            _change(result, param)
        if param.own:
            result = torch.cat([result[rows.start : rows.stop] for rows in param.own])
        result = result.to(dtype)
        self._report(param)
        return result

    def _joined(self, param: TensorParam, dtype: torch.dtype) -> Tensor:
        """Read the parts of a tensor, one below the other. If a rank has some rows of them, the memory of rows far from
        these is neither read nor written."""
        result = torch.empty(param.joined_shape, dtype=dtype, device=self.device)
        copy, own = _copy_bound if param.bound else _copy, param.own_entries
        flat, done = result.view(-1), 0
        for name in param.names:
            stored = self._checkpoint.tensors[name]
            for piece in stored.pieces():
                values = torch.from_numpy(piece).view(-1)
                source = values.view(torch.bfloat16) if stored.bfloat16 else values
                first, end = _overlap(range(done, done + len(source)), own)
                part, target = source[first - done : end - done], flat[first:end]
                if not (copy(part, target) if self._uploads is None else self._uploads.send(part, target, copy)):
                    raise ModelError(f"{self._checkpoint.path}: {name} {NOT_FINITE}")
                done += len(source)
        assert done == len(flat), (param.names, done, len(flat))
        return result

    def number(self, param: TensorParam) -> float:
        """Read a tensor of one element, which kernels take as a scalar argument."""
        value = self.values(param, float32=True).item()
        self.numbers.append(value)
        return value

    def linear(self, weight: TensorParam, bias: TensorParam | None) -> LinearWeight:
        """Load a linear layer in the kernels' packed format, quantized if the checkpoint or the configuration says
        so."""
        loaded = None if bias is None else self._to_pack(bias)
        return self._packed(weight, loaded) or self._ops.linear.pack(self._to_pack(weight), loaded, inputs=self.dtype)

    def _to_pack(self, param: TensorParam) -> Tensor:
        """Read a tensor; where its packed form is there already, return memory that is not written."""
        if self._ops.memory is None or not self._ops.memory.filled:
            return self._read(param, self._held_dtype(param))
        self._report(param)
        return torch.empty(param.shape, dtype=self._held_dtype(param))

    def row_table(self, param: TensorParam) -> RowTable:
        """Return where a table's rows are in the files, which stay open."""
        if torch.device(self.device).type != "cpu":
            raise ModelError(f"{self._checkpoint.path}: {param.names[0]} is read by row, on a CPU alone: --device cpu")
        files, places = [], []
        for name in param.names:
            stored = self._checkpoint.tensors[name]
            if not isinstance(stored, PlainTensor | GgufStored) or stored.storage not in STORED:
                raise ModelError(
                    f"{self._checkpoint.path}: {name} is {stored.storage}, whose rows cannot be read alone"
                )
            file, offset = stored.array().place
            files.append(file)
            places.append((file.descriptor, offset, STORED[stored.storage]))
        (width,) = param.inner
        placed = self._placed(torch.tensor(places, dtype=torch.int64))
        return RowTable(places=placed, part_rows=param.sizes[0], width=width, files=tuple(files))

    def table(self, param: TensorParam) -> Tensor | LinearWeight:
        """Load an embedding table: packed codes if it is quantized, else a tensor [V, H]."""
        return self._packed(param, None) or self._placed(self._read(param, self._held_dtype(param)))

    def _packed(self, param: TensorParam, bias: Tensor | None) -> LinearWeight | None:
        """Return the weight packed in codes, None if it is not held in codes."""
        codes = self._codes[param]
        if codes is None:
            return None
        try:
            packed = self._ops.linear.pack_quantized(codes, bias)
        except ModelError as error:
            raise ModelError(f"{self._checkpoint.path}: {', '.join(param.names)}: {error.message}") from None
        self._report(param)
        return packed

    def _report(self, param: TensorParam) -> None:
        codes = self._codes[param]
        own = param.num_elements * self._held_dtype(param).itemsize
        self._done_bytes += own if codes is None else codes.num_bytes
        self._progress(self._done_bytes, self.held_bytes.total())


def _overlap(piece: range, own: Sequence[range]) -> tuple[int, int]:
    """Return the first entry of a piece that is one of `own`, and the one behind the last; own () for all entries."""
    if not own:
        return piece.start, piece.stop
    within = [(max(piece.start, run.start), min(piece.stop, run.stop)) for run in own]
    found = [(first, end) for first, end in within if first < end]
    return (min(found)[0], max(end for _, end in found)) if found else (piece.start, piece.start)


def _change(values: Tensor, param: TensorParam) -> None:
    first = 0
    for rows, factor in param.scales:
        values[first : first + rows] *= factor
        first += rows
    values += param.offset


def _copy(source: Tensor, target: Tensor) -> bool:
    """Convert source [n] into target [n] in this thread. Return whether all of target is finite."""
    finite = True
    for first in range(0, len(source), _COPY_ELEMENTS):
        part = target[first : first + _COPY_ELEMENTS]
        part.copy_(source[first : first + _COPY_ELEMENTS])
        # One pass without a temporary: no sum with NaN or infinity in it is finite.
        finite &= math.isfinite(part.sum(dtype=torch.float32).item()) or bool(part.isfinite().all())
    return finite


def _copy_bound(source: Tensor, target: Tensor) -> bool:
    """As `_copy`, of numbers that may be infinities."""
    return _copy(source, target) or not bool(target.isnan().any())
