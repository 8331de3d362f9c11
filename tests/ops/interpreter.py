"""Triton's interpreter without work that it repeats in each call of a function, half of the time of tests in it.

It lists the members of Triton's modules to patch those that are built in, makes a table of NumPy's types to read one
entry, and makes the shape of each type and tensor anew. All are kept here. What a kernel computes stays the same.
"""

from __future__ import annotations

import functools
import inspect
import math
from typing import Any, Final

from triton.language import core
from triton.runtime import interpreter

_numpy_type: Final = interpreter._get_np_dtype
_numpy_types: Final[dict[str, Any]] = {}
_plain_block: Final = core.block_type.__init__
_blocks: Final[dict[tuple[str, tuple[int, ...]], tuple[Any, Any, str]]] = {}
_shapes: Final[dict[tuple[int, ...], tuple[Any, Any]]] = {}


@functools.cache
def _builtins_of(package: Any) -> tuple[str, ...]:
    return tuple(name for name, member in inspect.getmembers(package) if core.is_builtin(member))


def _patch_builtin(package: Any, builder: Any, scope: Any) -> None:
    """Patch as the interpreter does. A function that a kernel calls finds the members patched."""
    for name in _builtins_of(package):
        member = getattr(package, name)
        if not core.is_builtin(member):
            return
        interpreter._patch_attr(package, name, member, builder, scope)


def _get_np_dtype(kind: Any) -> Any:
    name = kind.scalar.name
    found = _numpy_types.get(name)
    if found is None:
        found = _numpy_types[name] = _numpy_type(kind)
    return found


def _make_block(block: Any, element: Any, shape: Any) -> None:
    sizes = tuple([size.value if isinstance(size, core.constexpr) else size for size in shape])
    block.element_ty, block.sizes = element, sizes
    key = element.name, sizes
    made = _blocks.get(key)
    if made is None:
        _plain_block(block, element, shape)
        made = _blocks[key] = block.shape, block.numel, block.name
    block.shape, block.numel, block.name = made


def _make_tensor(tensor: Any, handle: Any, kind: Any) -> None:
    sizes = kind.sizes if kind.is_block() else ()
    shape = _shapes.get(sizes)
    if shape is None:
        count = core.constexpr(math.prod(sizes))
        shape = _shapes[sizes] = count, core.tuple([core.constexpr(size) for size in sizes])
    tensor.numel, tensor.shape = shape
    tensor.handle, tensor.type, tensor.dtype = handle, kind, kind.scalar


def speed_up() -> None:
    """Let the interpreter of this process keep what it would find again."""
    interpreter._patch_builtin, interpreter._get_np_dtype = _patch_builtin, _get_np_dtype
    core.block_type.__init__, core.tensor.__init__ = _make_block, _make_tensor
