from __future__ import annotations

import ctypes
import logging
import os
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from forebay.backends import BACKENDS, default_backend, make_ops, native
from forebay.backends.backend import Backend, Here
from forebay.base.cpu import Cpu, this_cpu
from forebay.base.errors import ConfigError
from forebay.base.variants import VARIANTS, X86_VARIANTS, Variant
from forebay.ops import build, compiler
from forebay.ops.compiler import BuildError, library
from forebay.ops.interface import Ops
from tests.deadlines import HANGS_S


def sources(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, **files: str) -> None:
    """The kernels are these files of C++, and what is compiled of them is kept under `tmp_path`."""
    (tmp_path / "sources").mkdir(exist_ok=True)
    for name, text in files.items():
        (tmp_path / "sources" / f"{name}.cpp").write_text(text)
    monkeypatch.setattr(compiler, "SOURCES", tmp_path / "sources")
    monkeypatch.setattr(compiler, "CACHE", tmp_path / "cache")
    monkeypatch.setattr(compiler, "PREBUILT", tmp_path / "prebuilt")


needs_native = pytest.mark.skipif(not this_cpu().variants, reason="no x86-64 CPU with AVX2, or aarch64, under Linux")


@needs_native
def test_native_takes_the_best_instruction_set_of_this_machine() -> None:
    assert make_ops("native", 1).name == f"native-{this_cpu().variants[0].name}"


@pytest.mark.parametrize("name", [variant.name for variant in this_cpu().variants])
def test_an_instruction_set_that_is_asked_for_is_taken(name: str) -> None:
    assert make_ops(name, 1).name == f"native-{name}"


@needs_native
def test_every_op_has_a_native_twin() -> None:
    """What had none would run in torch, and could not be recorded."""
    ops, native_ops = vars(Ops(1)), vars(make_ops("native", 1))
    groups = {name: type(group) for name, group in ops.items() if type(group).__module__.startswith("forebay.ops.")}
    assert len(groups) >= 15
    assert not {
        f"{name}.{op}"
        for name, group in groups.items()
        for op in vars(group)
        if not op.startswith("_") and callable(getattr(group, op))
        if getattr(type(native_ops[name]), op) is getattr(group, op)
    }


def test_an_instruction_set_that_the_cpu_has_not_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Asking for one and being given another would be a measurement or a test of something else."""
    only = X86_VARIANTS[-1]
    monkeypatch.setattr(native, "this_cpu", lambda: Cpu(flags=only.needs))
    what = "does not run the avx512vnni kernels, which need avx512_vnni, .*avx512vl too: use native, avx2, torch"
    with pytest.raises(ConfigError, match=what):
        make_ops("avx512vnni", 1)


@needs_native
def test_an_instruction_set_asked_for_is_not_replaced_by_torch(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(compiler, "find_compiler", lambda machine: None)
    monkeypatch.setattr(compiler, "CACHE", tmp_path)
    monkeypatch.setattr(compiler, "PREBUILT", tmp_path)
    with pytest.raises(ConfigError, match=r"the avx2 kernels cannot be had: no C\+\+ compiler found"):
        make_ops("avx2", 1)


def test_every_instruction_set_can_be_asked_for_by_its_name() -> None:
    assert {variant.name for variant in VARIANTS} <= BACKENDS.keys()


@pytest.mark.parametrize(("backend", "num_threads"), [("cuda", 1), ("native", 0), ("torch", -1)])
def test_what_cannot_be_made_is_a_configuration_error(backend: str, num_threads: int) -> None:
    with pytest.raises(ConfigError, match="use "):
        make_ops(backend, num_threads)


def test_without_a_compiler_torch_is_used_with_one_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    monkeypatch.setattr(compiler, "find_compiler", lambda machine: None)
    monkeypatch.setattr(compiler, "CACHE", tmp_path)
    ops = make_ops("native", 1)
    assert ops.name == "torch"
    warnings = [record for record in caplog.records if record.levelno == logging.WARNING]
    assert len(warnings) == 1
    x = torch.ones(1, 4)
    assert torch.equal(ops.linear.apply(x, ops.linear.pack(torch.ones(2, 4))), torch.full((1, 2), 4.0))


@pytest.mark.parametrize("backend", BACKENDS.values(), ids=BACKENDS)
def test_backend_by_its_name_multiplies_as_the_reference_does(backend: Backend) -> None:
    """What a file of `forebay.backends` declares is made through its name alone."""
    try:
        ops = make_ops(backend.name, 1)
    except ConfigError as error:
        pytest.skip(str(error))
    x, weight = torch.randn(3, 64, generator=torch.Generator().manual_seed(0)), torch.eye(64)
    found = ops.linear.apply(x, ops.linear.pack(weight.to(backend.device)))
    torch.testing.assert_close(found.cpu(), x, rtol=1e-2, atol=1e-2)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_make_ops_without_a_gpu_refuses_each_backend_for_one(monkeypatch: pytest.MonkeyPatch) -> None:
    def make(*_: object) -> Ops:
        raise AssertionError("the backend was made")

    monkeypatch.setitem(BACKENDS, "another", Backend(name="another", about="", make=make, device="cuda"))
    for backend in (backend for backend in BACKENDS.values() if backend.device == "cuda"):
        with pytest.raises(ConfigError, match=r"there is no NVIDIA GPU that this torch .* can use.*--device cpu"):
            make_ops(backend.name, 1)


def test_require_gpu_old_driver_or_old_gpu_is_one_line_with_a_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    def init() -> None:
        raise RuntimeError("The NVIDIA driver on your system is too old (found version 11040). Please update it.\nMore")

    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "init", init)
    for available, capability, expected in (
        (False, (0, 0), r"can use \(The NVIDIA driver .* too old \(found version 11040\)\): install a newer driver"),
        (
            True,
            (7, 5),
            r"^Tesla T4 has compute capability 7\.5, and these kernels need 8\.0: use a newer GPU, or --device",
        ),
    ):
        monkeypatch.setattr(torch.cuda, "is_available", lambda found=available: found)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda found=capability: found)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "Tesla T4")
        with pytest.raises(ConfigError, match=expected) as raised:
            make_ops("triton", 1)
        assert "\n" not in raised.value.message


def test_default_backend_is_the_first_that_suits_and_names_its_reason_or_what_is_missing() -> None:
    for cpu, has_gpu, name, why in (
        (Cpu(flags=frozenset()), False, "torch", "the CPU has neither AVX2 nor NEON"),
        (Cpu(flags=frozenset()), True, "triton", "those for GPUs"),
    ):
        assert default_backend(Here(cpu, has_gpu)) == (name, why)


@needs_native
def test_a_compile_error_names_the_command_and_leaves_nothing_behind(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    sources(monkeypatch, tmp_path, pool="this is not C++")
    variant = Variant(name="broken", needs=frozenset(), flags=())
    with pytest.raises(BuildError, match=r"pool\.cpp .*failed with"):
        library(variant)
    assert [path.name for path in (tmp_path / "cache").rglob("*")] == ["objects"]


@needs_native
def test_build_of_every_variant_names_the_one_that_fails_and_compiles_the_others(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sources(monkeypatch, tmp_path, pool="#ifdef BROKEN\n#error no such thing\n#endif\nint answer() { return 42; }")
    broken, right = (
        Variant(name=name, needs=frozenset(), flags=flags) for name, flags in (("a", ("-DBROKEN",)), ("b", ()))
    )
    monkeypatch.setattr(build, "this_cpu", lambda: SimpleNamespace(variants=[broken, right]))
    monkeypatch.setattr(build, "setup_logging", lambda *_, **__: None)
    monkeypatch.setattr(sys, "argv", ["build", "--every"])
    assert build.main() == 1
    out, err = capsys.readouterr()
    assert out == f"native ops ready: {library(right)}\n"
    [line] = [line for line in err.splitlines() if "variant a " in line]
    assert line.startswith("the kernel variant a cannot be compiled: pool.cpp:2:")
    assert line.endswith("#error no such thing")


@needs_native
def test_what_a_wheel_brings_needs_no_compiler_and_is_not_compiled_again(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    sources(monkeypatch, tmp_path, pool="int answer() { return 42; }")
    variant = Variant(name="small", needs=frozenset(), flags=())
    brought = compiler.prebuild(variant, tmp_path / "prebuilt")
    assert library(variant) == brought
    monkeypatch.setattr(compiler, "find_compiler", lambda machine: None)
    assert library(variant) == brought
    assert list((tmp_path / "cache").glob("*.so")) == [tmp_path / "cache" / brought.name]  # made there, and once


@needs_native
def test_prebuild_of_kernels_that_need_newer_libraries_raises_with_their_versions(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    sources(monkeypatch, tmp_path, pool='extern "C" const char needs[] = "\\0GLIBC_2.28\\0GLIBCXX_3.4.29";')
    with pytest.raises(BuildError, match=r"need GLIBCXX_3.4.29; a wheel may need GLIBC_2.28, .*, not newer"):
        compiler.prebuild(Variant(name="small", needs=frozenset(), flags=()), tmp_path / "prebuilt")


def test_library_for_another_machine_without_its_compiler_names_the_package(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    sources(monkeypatch, tmp_path, pool="int answer() { return 42; }")
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(
        BuildError, match=r"looked for sparc64-linux-gnu-g\+\+\): install Debian's g\+\+-sparc64-linux-gnu"
    ):
        library(Variant(name="pool", needs=frozenset(), flags=(), machine="sparc64"))


@needs_native
def test_compiling_twice_at_once_gives_one_library(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    sources(monkeypatch, tmp_path, pool="int answer() { return 42; }")
    variant = Variant(name="pool", needs=frozenset(), flags=())
    with ThreadPoolExecutor(2) as executor:
        paths = set(executor.map(lambda _: library(variant), range(2)))
    assert paths == set((tmp_path / "cache").glob("*.so"))
    assert list((tmp_path / "cache").glob(".build-*")) == []


@needs_native
def test_c31_variants_of_the_same_sources_have_libraries_of_their_own(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    sources(monkeypatch, tmp_path, pool='extern "C" int answer() { return ANSWER; }')
    answers = []
    for name, answer in (("small", 1), ("small", 2), ("large", 2)):
        flags = (f"-DANSWER={answer}",)
        path = library(Variant(name=name, needs=frozenset(), flags=flags))
        answers.append((path.name.partition("-")[0], ctypes.CDLL(str(path)).answer()))
    assert answers == [("small", 1), ("small", 2), ("large", 2)]


@needs_native
def test_a_change_compiles_the_files_that_it_touches_and_no_others(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    include = '#include "shared.h"\nint {}() {{ return SHARED; }}'
    sources(monkeypatch, tmp_path, one=include.format("one"), two="int two() { return 2; }")
    header = tmp_path / "sources" / "shared.h"
    header.write_text('#include "deeper.h"\n')
    (tmp_path / "sources" / "deeper.h").write_text("#define SHARED 1")
    variant = Variant(name="small", needs=frozenset(), flags=())
    compiled = []
    run = compiler._run
    monkeypatch.setattr(compiler, "_run", lambda leash, words: (compiled.append(words), run(leash, words)))

    def files() -> list[str]:
        compiled.clear()
        library(variant)
        return sorted(Path(word).name for words in compiled for word in words if word.endswith(".cpp"))

    assert files() == ["one.cpp", "two.cpp"]
    assert files() == []
    (tmp_path / "sources" / "deeper.h").write_text("#define SHARED 2")
    assert files() == ["one.cpp"]
    (tmp_path / "sources" / "two.cpp").write_text("int two() { return 3; }")
    assert files() == ["two.cpp"]
    (tmp_path / "sources" / "two.cpp").write_text("int two() { return 2; }")
    assert files() == []


@needs_native
def test_a_file_without_integer_products_is_compiled_once_for_variants_with_and_without(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    products = "#ifdef FOREBAY_VNNI\nint two() { return 2; }\n#else\nint two() { return 3; }\n#endif"
    sources(monkeypatch, tmp_path, one="int one() { return 1; }", two=products)
    for name, options in (("with", (("FOREBAY_VNNI", ()),)), ("without", ())):
        library(Variant(name=name, needs=frozenset(), flags=(), options=options))
    objects = [path.name.partition("-")[0] for path in (tmp_path / "cache/objects").iterdir()]
    assert sorted(objects) == ["one", "two", "two"]


@needs_native
def test_what_was_compiled_once_needs_no_compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    sources(monkeypatch, tmp_path, pool="int answer() { return 42; }")
    variant = Variant(name="pool", needs=frozenset(), flags=())
    compiled = library(variant)
    monkeypatch.setattr(compiler, "find_compiler", lambda machine: None)
    assert library(variant) == compiled
    compiled.unlink()
    with pytest.raises(BuildError, match="no C\\+\\+ compiler found"):
        library(variant)


def damage(path: Path) -> None:
    """Change a byte in the middle, as a disk may; the name stays. Who has loaded the library keeps the whole one."""
    whole, mode = bytearray(path.read_bytes()), path.stat().st_mode
    whole[len(whole) // 2] ^= 1
    path.unlink()
    path.write_bytes(whole)
    path.chmod(mode)


def open_to_all(path: Path) -> None:
    path.chmod(0o777)


@needs_native
@pytest.mark.parametrize("spoil", [damage, open_to_all])
def test_library_that_is_damaged_or_open_to_others_is_compiled_again(
    spoil: Callable[[Path], None], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    sources(monkeypatch, tmp_path, pool='extern "C" int answer() { return 42; }')
    variant = Variant(name="pool", needs=frozenset(), flags=())
    path = library(variant)
    whole = path.read_bytes()
    spoil(path)
    with caplog.at_level(logging.WARNING, logger="forebay"):
        again = library(variant)
    assert again.read_bytes() == whole
    assert again.stat().st_mode & 0o022 == 0
    assert ctypes.CDLL(str(again)).answer() == 42
    assert ["compiled_file_ignored" in record.message for record in caplog.records] == [True]
    spoil(again)
    monkeypatch.setattr(compiler, "find_compiler", lambda machine: None)
    with pytest.raises(BuildError, match="no C\\+\\+ compiler found"):
        library(variant)


@pytest.mark.quick(1)
@needs_native
@pytest.mark.parametrize("spoil", [damage, open_to_all])
def test_object_that_is_damaged_or_open_to_others_is_compiled_again(
    spoil: Callable[[Path], None], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    sources(monkeypatch, tmp_path, one="int one() { return 1; }", two='extern "C" int two() { return 2; }')
    variant = Variant(name="pool", needs=frozenset(), flags=())
    library(variant).unlink()
    for path in (tmp_path / "cache" / "objects").glob("two-*.o"):
        spoil(path)
    assert ctypes.CDLL(str(library(variant))).two() == 2


@needs_native
def test_library_of_a_group_umask_is_the_users_alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    sources(monkeypatch, tmp_path, pool="int answer() { return 42; }")
    variant = Variant(name="pool", needs=frozenset(), flags=())
    before = os.umask(0o002)
    try:
        path = library(variant)
        made = path.stat().st_mtime_ns
        os.utime(path, ns=(made - 10**9, made - 10**9))
        assert library(variant) == path
    finally:
        os.umask(before)
    assert [each.stat().st_mode & 0o022 for each in (path, path.parent, path.parent / "objects")] == [0, 0, 0]


@needs_native
def test_library_in_the_folder_of_another_user_is_not_compiled(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    sources(monkeypatch, tmp_path, pool="int answer() { return 42; }")
    monkeypatch.setattr("forebay.base.trust.has_trusted_writers", lambda file, folder: False)
    with pytest.raises(BuildError, match=r"belongs to user .*: set XDG_CACHE_HOME to a folder of your own"):
        library(Variant(name="pool", needs=frozenset(), flags=()))


@needs_native
def test_who_compiles_drops_what_nobody_has_used_for_long(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    sources(monkeypatch, tmp_path, pool="int answer() { return 42; }")
    cache, now = tmp_path / "cache", time.time()
    (cache / "objects").mkdir(parents=True)

    def left(name: str, days: float) -> Path:
        path = cache / name
        path.mkdir() if name.startswith(".build") else path.touch()
        os.utime(path, (now - days * compiler.DAY_S,) * 2)
        return path

    old = [left("avx2-old.so", 31), left("objects/old.o", 8), left(".build-killed", 2)]
    recent = [left("avx2-recent.so", 29), left("objects/recent.o", 6), left(".build-running", 0.5)]
    variant = Variant(name="pool", needs=frozenset(), flags=())
    used = library(variant)
    assert [path for path in old + recent if path.exists()] == recent
    many = [left(f"avx2-{i}.so", 0.5) for i in range(compiler.MANY_LIBRARIES)]
    os.utime(used, (now - 2 * compiler.DAY_S,) * 2)
    assert library(variant) == used  # which is a use
    library(Variant(name="another", needs=frozenset(), flags=("-DANOTHER",)))
    assert [path for path in [*many, used, *recent] if path.exists()] == [*many, used, *recent[1:]]


@pytest.mark.slow  # each engine process of the short tier ends with such threads, too
@needs_native
def test_a_process_with_idle_threads_ends_by_itself() -> None:
    script = "from forebay.backends import make_ops; ops = make_ops('native', 4); print(ops.num_threads)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=HANGS_S, check=True)
    assert done.stdout.strip() == "4"
