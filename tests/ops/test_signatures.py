"""What Python hands to a kernel is what C++ takes: ctypes would not notice, and memory would be corrupted.

The preprocessor opens the macros. It is given the sources without the headers of the compiler, which are many and
declare none of ours.
"""

from __future__ import annotations

import ctypes
import re
import subprocess
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from forebay.base.toolchain import find_compiler
from forebay.base.variants import VARIANTS
from forebay.ops.compiler import SOURCES, _text
from forebay.ops.native.kernels import RESULTS, SIGNATURES

Signature = tuple[Any, list[Any]]  # what it returns and takes

BY_VALUE = {
    "void": None,
    "int": ctypes.c_int,
    "long": ctypes.c_long,
    "float": ctypes.c_float,
    "uint64_t": ctypes.c_uint64,
}
SUFFIXES = "(?:f32|bf16|f16|i8)"
# C++ calls these by their addresses, which it is given.
NOT_FROM_PYTHON = re.compile(rf"fb_linear_panels_(?:q_)?{SUFFIXES}(?:_of_bf16)?")
FUNCTION = re.compile(r"\b([\w ]+?[ *]+)(fb_\w+)\s*\(([^()]*)\)\s*\{")

pytestmark = pytest.mark.skipif(find_compiler() is None, reason="no C++ compiler")


def opened(folder: Path, source: str, flags: tuple[str, ...] = ()) -> str:
    """The source in `folder` without macros and comments."""
    command = [str(find_compiler()), "-E", "-P", "-std=c++20", *flags, str(folder / source)]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def signatures(text: str) -> dict[str, Signature]:
    """Of the functions that are defined in it."""
    return {
        name: (ctype(result), [ctype(parameter) for parameter in parameters.split(",") if parameter.strip()])
        for result, name, parameters in FUNCTION.findall(text)
    }


def ctype(declared: str) -> Any:
    words = [word for word in declared.replace("*", " * ").split() if word not in ("const", "extern", '"C"')]
    return ctypes.c_void_p if "*" in words else BY_VALUE[words[0]]


@pytest.fixture(scope="module")
def signatures_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, tuple[str, ...]], dict[str, Signature]]:
    """Return the signatures of a source with these macros. Macros that it does not name make no difference."""
    folder = tmp_path_factory.mktemp("sources")
    for path in SOURCES.iterdir():
        (folder / path.name).write_text(re.sub(r"#include <.*>", "", path.read_text()))

    @cache
    def of_named(source: str, macros: tuple[str, ...]) -> dict[str, Signature]:
        return signatures(opened(folder, source, tuple(f"-D{macro}" for macro in macros)))

    def of(source: str, macros: tuple[str, ...]) -> dict[str, Signature]:
        text = _text(SOURCES / source)
        return of_named(source, tuple(macro for macro in macros if macro in text))

    return of


@cache
def declared(name: str) -> Signature | None:
    """How Python calls the function of that name; None if it does not."""
    for pattern, takes in SIGNATURES.items():
        if re.fullmatch(pattern.replace("{}", SUFFIXES), name):
            return RESULTS.get(pattern), takes
    return None


def test_a_function_is_found_in_a_macro_with_its_types_in_order(tmp_path: Path) -> None:
    (tmp_path / "a.cpp").write_text(
        "#define BATCH const int* slots, long num_seqs\n"
        "#define MAKE(T, suffix) \\\n"
        "    T* fb_made_##suffix(Pool *pool, const T* x, float scale, \\\n"
        "        BATCH) { fb_other(pool); }\n"
        'extern "C" {\n'
        "MAKE(float, f32)\n"
        "}\n"
        'extern "C" void fb_seed(uint64_t seed, int n /* a comment */) {}\n'
    )
    pointer, long = ctypes.c_void_p, ctypes.c_long
    assert signatures(opened(tmp_path, "a.cpp")) == {
        "fb_made_f32": (pointer, [pointer, pointer, ctypes.c_float, pointer, long]),
        "fb_seed": (None, [ctypes.c_uint64, ctypes.c_int]),
    }


@pytest.mark.quick(2)
@pytest.mark.parametrize("variant", VARIANTS, ids=lambda variant: variant.name)
def test_each_kernel_takes_what_python_gives(
    variant: Any, signatures_of: Callable[[str, tuple[str, ...]], dict[str, Signature]]
) -> None:
    # What the processor's flags define, which not every compiler has.
    defines = {"-mavx512f": "__AVX512F__", "-march=armv8-a": "__aarch64__"}
    flags = (*(defines.get(flag, flag) for flag in variant.flags), *(macro for macro, _ in variant.options))
    macros = tuple(flag.removeprefix("-D") for flag in flags if not flag.startswith("-m"))
    found: dict[str, Signature] = {}
    for path in SOURCES.glob("*.cpp"):
        found |= signatures_of(path.name, macros)
    called = {name: signature for name, signature in found.items() if not NOT_FROM_PYTHON.fullmatch(name)}
    assert called == {name: declared(name) for name in called}
    unused = [p for p in SIGNATURES if not any(re.fullmatch(p.replace("{}", SUFFIXES), name) for name in called)]
    assert unused == []
