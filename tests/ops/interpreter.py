"""Triton's interpreter without work that it repeats in each call of a function, two thirds of the time of tests in it.

It lists the members of Triton's modules to patch those that are built in, patches them again for each function that a
kernel calls, makes a table of NumPy's types to read one entry, and makes the shape of each type and tensor anew. All
are kept here. It computes whether each sum overflows, too, and says nothing of it unless a kernel is debugged. What a
kernel computes stays the same.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import math
from typing import Any, Final

import triton.language
from triton.language import core
from triton.runtime import interpreter

_numpy_type: Final = interpreter._get_np_dtype
_numpy_types: Final[dict[str, Any]] = {}
_plain_block: Final = core.block_type.__init__
_plain_patch: Final = interpreter._patch_lang
_plain_unwrap: Final = core._unwrap_if_constexpr
_PlainScope: Any = interpreter._LangPatchScope
_PLAIN: Final = frozenset({core.tensor, core.dtype, core.pointer_type, core.block_type, int, float, bool, str})
_patched: Final[set[str]] = set()
_scopes: Final[list[Any]] = []
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
        scope.set_attr(package, name, _interpreted(getattr(member, "__wrapped__", member)))


def _interpreted(builtin: Any) -> Any:
    def call(*args: Any, **kwargs: Any) -> Any:
        kwargs["_semantic"] = interpreter.interpreter_semantic
        return builtin(*args, **kwargs)

    return call


class _Scope(_PlainScope):  # type: ignore[misc]
    """What a kernel and the functions that it calls have patched, until it is restored.

    Triton forgets the scopes of functions. What these patched stayed so, and kernels of the process that were compiled
    later failed, unless Triton's cache had them.
    """

    def restore(self) -> None:
        while _scopes:
            super(_Scope, _scopes.pop()).restore()
        _patched.clear()


@functools.cache
def _languages(fn: Any) -> frozenset[str]:
    """Return which of Triton's two modules a function names."""
    modules = {id(triton.language): "language", id(core): "core"}
    return frozenset(modules[id(value)] for value in fn.__globals__.values() if id(value) in modules)


def _patch_lang(fn: Any) -> Any:
    """Patch for a kernel. For a function that it calls all is patched."""
    languages = _languages(fn)
    if languages <= _patched:
        return _Scope()
    scope = _plain_patch(fn)
    _scopes.append(scope)
    _patched.update(languages)
    return scope


def _unwrap(value: Any) -> Any:
    """Unwrap as Triton does, what most values are first."""
    kind = type(value)
    if kind is core.constexpr:
        return value.value
    return value if kind in _PLAIN else _plain_unwrap(value)


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
    interpreter._patch_lang, interpreter._LangPatchScope = _patch_lang, _Scope
    core._unwrap_if_constexpr = _unwrap
    options = interpreter.interpreter_builder.options
    interpreter.interpreter_builder.options = dataclasses.replace(options, sanitize_overflow=options.debug)
    core.block_type.__init__, core.tensor.__init__ = _make_block, _make_tensor
