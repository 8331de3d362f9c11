"""Small files of tensors that `torch.save` wrote: a zip of a pickle and of the tensors' bytes.

A pickle is a program, and Python's module runs it. Here its instructions are only read: those by which torch writes a
dictionary of tensors are carried out, and any other is refused. Nothing is imported or called.
"""

from __future__ import annotations

import io
import math
import pickletools
import struct
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from forebay.base.errors import ModelError, brief
from forebay.formats.files import read_bytes

MAX_BYTES: Final = 64 << 20
_MAX_PROGRAM_BYTES: Final = 1 << 16
_MAX_DIMENSIONS: Final = 4
_DTYPES: Final[dict[str, np.dtype[Any]]] = {
    "torch FloatStorage": np.dtype("<f4"),
    "torch HalfStorage": np.dtype("<f2"),
    "torch BFloat16Storage": np.dtype("<u2"),
}
_DICT: Final = "collections OrderedDict"
_REBUILD: Final = "torch._utils _rebuild_tensor_v2"
_KNOWN: Final = {*_DTYPES, _DICT, _REBUILD}
_PUSHED: Final = {
    *("BINUNICODE", "SHORT_BINUNICODE", "BININT", "BININT1", "BININT2", "LONG1", "BINUNICODE8"),
    *("NEWTRUE", "NEWFALSE", "NONE"),
}
_CONSTANTS: Final[dict[str, Any]] = {"NEWTRUE": True, "NEWFALSE": False, "NONE": None, "EMPTY_TUPLE": ()}

# What zipfile, the reader of instructions and the steps on a stack of anything raise about bytes of anybody.
_UNSOUND: Final = (
    *(ArithmeticError, AttributeError, EOFError, LookupError, OSError, RuntimeError, TypeError, ValueError),
    *(struct.error, zipfile.BadZipFile),
)


class _Mark:
    """The beginning of the items of a tuple or a dictionary."""


class _Storage(NamedTuple):
    dtype: np.dtype[Any]
    key: str


class _View(NamedTuple):
    storage: _Storage
    offset: int
    shape: tuple[int, ...]


class TorchTensor:
    """A tensor of such a file, which is small and in memory."""

    codes = None

    def __init__(self, values: npt.NDArray[Any]) -> None:
        self._values = values
        self.shape: tuple[int, ...] = values.shape
        self.bfloat16 = values.dtype == np.uint16
        self.num_bytes: int = values.nbytes
        self.storage = {2: "BF16" if self.bfloat16 else "F16", 4: "F32"}[values.itemsize]

    def pieces(self) -> Iterator[npt.NDArray[Any]]:
        """Yield the tensor as one block of rows."""
        yield self._values.reshape(-1, self.shape[-1]) if self._values.ndim else self._values.reshape(1, 1)


def read_torch_file(path: Path) -> dict[str, TorchTensor]:
    """Return the tensors of a file of at most `MAX_BYTES`, by name. Raises ModelError for a file that holds anything
    else."""
    data = read_bytes(path, MAX_BYTES)
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            (program,) = (name for name in archive.namelist() if name.endswith("/data.pkl"))
            root = program.removesuffix("data.pkl")
            views = _run(_stored(archive, program, _MAX_PROGRAM_BYTES))
            return {name: TorchTensor(_values(archive, root, view)) for name, view in views.items()}
    except ModelError as error:
        raise ModelError(f"{path}: {error.message}") from None
    except _UNSOUND as error:
        raise ModelError(f"{path}: not a file of tensors that torch.save wrote ({brief(str(error))})") from None


def _stored(archive: zipfile.ZipFile, name: str, most: int) -> bytes:
    """Return a member that is stored as it is: a compressed one may be of any size."""
    found = archive.getinfo(name)
    if found.compress_type != zipfile.ZIP_STORED or found.file_size > most:
        raise ModelError(f"{brief(name)} is compressed or has more than {most} bytes")
    return archive.read(found)


def _values(archive: zipfile.ZipFile, root: str, view: _View) -> npt.NDArray[Any]:
    count, dtype = math.prod(view.shape), view.storage.dtype
    data = _stored(archive, f"{root}data/{view.storage.key}", MAX_BYTES)
    return np.frombuffer(data, dtype, count, view.offset * dtype.itemsize).reshape(view.shape).copy()


def _run(program: bytes) -> dict[str, _View]:
    """Carry out a program that makes a dictionary of tensors."""
    stack: list[Any] = []
    memo: dict[Any, Any] = {}
    for opcode, argument, _ in pickletools.genops(program):
        name = opcode.name
        if name in ("BINPUT", "LONG_BINPUT", "MEMOIZE"):
            memo[len(memo) if name == "MEMOIZE" else argument] = stack[-1]
        elif name in ("BINGET", "LONG_BINGET"):
            stack.append(memo[argument])
        elif name in _PUSHED or name == "EMPTY_TUPLE":
            stack.append(_CONSTANTS.get(name, argument))
        elif name == "STOP":
            return _tensors(stack.pop())
        elif name not in ("PROTO", "FRAME"):
            _step(name, argument, stack)
    raise ModelError("its program does not end")


def _step(name: str, argument: Any, stack: list[Any]) -> None:
    """Carry out an instruction that makes something of what is on the stack."""
    if name == "MARK":
        stack.append(_Mark)
    elif name == "EMPTY_DICT":
        stack.append({})
    elif name in ("GLOBAL", "STACK_GLOBAL"):
        stack.append(_known(argument if name == "GLOBAL" else " ".join(reversed([stack.pop(), stack.pop()]))))
    elif name in ("TUPLE", "TUPLE1", "TUPLE2", "TUPLE3"):
        stack.append(tuple(_items(stack) if name == "TUPLE" else _last(stack, int(name[-1]))))
    elif name == "BINPERSID":
        stack.append(_storage(stack.pop()))
    elif name == "REDUCE":
        arguments, function = stack.pop(), stack.pop()
        stack.append(_made(function, arguments))
    elif name in ("SETITEMS", "SETITEM"):
        items = _items(stack) if name == "SETITEMS" else _last(stack, 2)
        stack[-1].update(zip(items[::2], items[1::2], strict=True))
    elif name == "BUILD":
        stack.pop()  # what torch notes of a module's versions
    else:
        raise ModelError(f"its pickle has the instruction {name}, which no dictionary of tensors needs")


def _known(name: str) -> str:
    if name not in _KNOWN:
        raise ModelError(f"its pickle names {brief(name)}, and only tensors are read")
    return name


def _items(stack: list[Any]) -> list[Any]:
    at = len(stack) - 1 - stack[::-1].index(_Mark)
    items, stack[at:] = stack[at + 1 :], []
    return items


def _last(stack: list[Any], count: int) -> list[Any]:
    items, stack[-count:] = stack[-count:], []
    return items


def _storage(given: Any) -> _Storage:
    _, kind, key, *_ = given
    dtype: np.dtype[Any] = _DTYPES[kind]
    return _Storage(dtype, str(key))


def _made(function: Any, arguments: Any) -> Any:
    if function == _DICT and not arguments:
        return {}
    if function != _REBUILD:
        raise ModelError(f"its pickle calls {brief(function)}")
    storage, offset, shape, stride, *_ = arguments
    if not isinstance(storage, _Storage) or not _are_sizes([*shape, *stride, offset]) or len(shape) > _MAX_DIMENSIONS:
        raise ModelError("its pickle makes a tensor of something else")
    dense = [math.prod(shape[i + 1 :]) for i in range(len(shape))]
    if any(step != own for step, own, size in zip(stride, dense, shape, strict=True) if size > 1):
        raise ModelError("a tensor of it is not stored row by row")
    return _View(storage, offset, tuple(shape))


def _are_sizes(values: list[Any]) -> bool:
    return all(type(value) is int and value >= 0 for value in values)


def _tensors(found: Any) -> dict[str, _View]:
    if not isinstance(found, dict) or not all(isinstance(view, _View) for view in found.values()):
        raise ModelError("it holds something else than a dictionary of tensors")
    return {str(name): view for name, view in found.items()}
