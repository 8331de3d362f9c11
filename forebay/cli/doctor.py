"""`forebay doctor`: the problems of this machine or install, and the fix of each. Changes nothing."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import re
import shutil
import socket
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Final

from rich.console import Console
from rich.markup import escape

from forebay.base.cpu import Cpu, this_cpu
from forebay.base.package import ROOT
from forebay.base.paths import cache_folder
from forebay.base.toolchain import find_compiler
from forebay.base.trust import why_untrusted
from forebay.base.units import human_bytes
from forebay.base.variants import PREBUILT
from forebay.cli.arguments import Parser, whole
from forebay.cli.doctor_machine import Finding, Verdict, examine_machine, has_cuda
from forebay.formats.hub_names import hub_folder
from forebay.formats.store import DEFAULT_MODEL, checksum, models_folder

MIN_DISK_BYTES: Final = 1 << 30
STALE_AFTER_S: Final = 3600.0
MANY_LIBRARIES: Final = 8  # of one instruction set; each change of kernel or compiler leaves one behind
TORCH_CPU_INDEX: Final = "https://download.pytorch.org/whl/cpu"
_PIN: Final = re.compile(r"^([A-Za-z0-9_.-]+)==([^\s;]+)")


def run(words: Sequence[str]) -> int:
    """Print the findings and return 1 if one of them is a problem."""
    summary = (
        "Say what is wrong here, what slows this machine down, and the way out. Exit code 1 if something is broken."
    )
    parser = Parser("doctor", summary, "[options]")
    parser.option("--port", type=whole(1, 65535), default=30000, metavar="N", help="the port to look at")
    parser.option("--json", action="store_true", help="for programs")
    own = parser.parse(words).own
    findings = list(examine(own.port))
    if own.json:
        print(json.dumps([finding.as_dict() for finding in findings], indent=2))
    else:
        _print(findings)
    return int(any(finding.verdict is Verdict.PROBLEM for finding in findings))


def _print(findings: Sequence[Finding]) -> None:
    console = Console(highlight=False, soft_wrap=True)  # paths and fixes stay whole, to be copied
    colours = {Verdict.OK: "green", Verdict.NOTE: "yellow", Verdict.PROBLEM: "red"}
    for finding in findings:
        verdict = f"[{colours[finding.verdict]}]{finding.verdict:<7}[/]"
        console.print(f"{verdict} {finding.subject:<15} {escape(finding.what)}")
        if finding.fix:
            console.print(f"{'':<7} {'':<15} fix: {escape(finding.fix)}")


def examine(port: int) -> Iterator[Finding]:
    """Yield the findings, cheap checks first; a server on `port` is no problem by itself."""
    checks: tuple[Callable[[], Finding], ...] = (_python, torch, _packages, _compiler, kernels)
    for check in checks:
        yield check()
    yield from examine_machine()
    for check in (_model, _caches, _leftovers, _disk):
        yield check()
    yield _port(port)


def _python() -> Finding:
    found = f"{platform.python_version()} ({sys.executable})"
    if sys.version_info < (3, 11):  # noqa: UP036 - installed by hand, the package's own condition may be ignored
        return Finding("Python", Verdict.PROBLEM, found, "use Python 3.11 or later")
    return Finding("Python", Verdict.OK, found)


def torch(driver: Path = Path("/dev/nvidiactl")) -> Finding:
    """Check that torch is installed, and that its build fits the machine."""
    try:
        version = importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        fix = "make install" if (ROOT / "Makefile").is_file() else _cpu_torch(_wanted_torch())
        return Finding("torch", Verdict.PROBLEM, "not installed", fix)
    if has_cuda() and not driver.exists():
        fix = f"to save 5 GB: {_cpu_torch('torch==' + version.partition('+')[0])}"
        return Finding("torch", Verdict.NOTE, f"{version} for CUDA, and no NVIDIA GPU", fix)
    return Finding("torch", Verdict.OK, version)


def _wanted_torch() -> str:
    """As this package asks for it: another release would bring the next `pip install` to replace it."""
    return next(line for line in importlib.metadata.requires("forebay") or () if re.match(r"torch\b(?!-)", line))


def _cpu_torch(requirement: str) -> str:
    return f"{sys.executable} -m pip install --force-reinstall '{requirement}' --index-url {TORCH_CPU_INDEX}"


def _packages() -> Finding:
    """Installed versions against the pins of the checkout that we run from."""
    pins = ROOT / "requirements.txt"
    if not pins.is_file():
        return Finding("packages", Verdict.OK, "installed without a checkout: no pins to compare with")
    wrong = [problem for line in pins.read_text().splitlines() if (problem := _pin_problem(line))]
    if wrong:
        return Finding("packages", Verdict.PROBLEM, ", ".join(wrong[:4]), "make install")
    return Finding("packages", Verdict.OK, "as pinned in requirements.txt")


def _pin_problem(line: str) -> str:
    pin = _PIN.match(line)
    if pin is None:
        return ""
    name, wanted = pin.groups()
    try:
        found = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return f"{name} is missing"
    return "" if found == wanted else f"{name} is {found}, pinned {wanted}"


def _compiler() -> Finding:
    found = find_compiler()
    if found is None and any(PREBUILT.glob("*.so")):
        return Finding("compiler", Verdict.OK, "none, and none is needed: the kernels came with the package")
    if found is None:
        fix = "install g++ (Debian: apt-get install g++): the native kernels are several times faster"
        return Finding("compiler", Verdict.NOTE, "no C++ compiler", fix)
    return Finding("compiler", Verdict.OK, found)


def kernels() -> Finding:
    """Check that native kernels exist for the best instruction set of this CPU, and are not overridden."""
    asked, best = os.environ.get("FOREBAY_KERNELS", "native"), next(iter(this_cpu().variants), None)
    if best is not None and asked not in ("auto", "native", best.name):
        what = f"FOREBAY_KERNELS={asked}, where this CPU runs {best.name}"
        return Finding("native kernels", Verdict.NOTE, what, "unset FOREBAY_KERNELS")
    return kernels_finding(cache_folder("ops"), this_cpu(), PREBUILT)


def kernels_finding(folder: Path, cpu: Cpu, prebuilt: Path) -> Finding:
    """The library that a server on this CPU loads: of the best variant what came with the package, or the newest."""
    subject, build = "native kernels", f"{sys.executable} -m forebay.ops.build"
    usable = cpu.variants
    if not usable:
        return Finding(
            subject, Verdict.NOTE, "none for this CPU, torch is used", "a CPU with AVX2 or NEON is several times faster"
        )
    variant = usable[0].name
    if brought := list(prebuilt.glob(f"{variant}-*.so")):
        return Finding(subject, Verdict.OK, f"{brought[0]}, which came with the package")
    built = sorted(folder.glob(f"{variant}-*.so"), key=lambda path: path.stat().st_mtime)
    if not built:
        return Finding(
            subject,
            Verdict.NOTE,
            f"none for {variant} in {folder}",
            f"{build}, or the next start compiles them: minutes on two cores",
        )
    if reason := why_untrusted(built[-1]):
        return Finding(subject, Verdict.PROBLEM, reason, f"rm -r {folder}; {build}")
    if len(built) > MANY_LIBRARIES:
        every = list(folder.glob("*.so"))
        size = human_bytes(sum(path.stat().st_size for path in every))
        what = f"{built[-1]}, and {len(every) - 1} others, {size} in all: most are of older versions"
        return Finding(subject, Verdict.NOTE, what, f"with no server running: rm {folder}/*.so; {build}")
    return Finding(subject, Verdict.OK, str(built[-1]))


def _model() -> Finding:
    path = models_folder() / DEFAULT_MODEL.file
    if not path.is_file():
        return Finding("default model", Verdict.NOTE, f"not at {path}", "forebay models pull")
    if path.stat().st_size != DEFAULT_MODEL.num_bytes or checksum(path) != DEFAULT_MODEL.sha256:
        return Finding("default model", Verdict.PROBLEM, f"{path} is damaged", f"rm {path}; forebay models pull")
    return Finding("default model", Verdict.OK, f"{path}, sha256 as it should be")


def _caches() -> Finding:
    """Check the sizes of the store and of the hub's cache; both are the user's to clean."""
    sizes = {folder: _size(folder) for folder in (models_folder(), hub_folder())}
    what = ", ".join(f"{human_bytes(size)} in {folder}" for folder, size in sizes.items())
    return Finding("models", Verdict.OK, f"{what}: `forebay models list`, `forebay models rm`")


def _size(folder: Path) -> int:
    """On the disk: the hub's cache has every file once, and links to it."""
    files = (Path(at) / name for at, _, names in os.walk(folder) for name in names)
    return sum(file.lstat().st_size for file in files if not file.is_symlink())


def _leftovers() -> Finding:
    """Folders of downloads and builds that were killed; a running one is younger than an hour."""
    old = time.time() - STALE_AFTER_S
    places = [*models_folder().glob(".pull-*"), *cache_folder("ops").glob(".build-*")]
    stale = [str(place) for place in places if place.stat().st_mtime < old]
    if stale:
        return Finding("caches", Verdict.NOTE, f"{len(stale)} left by interrupted work", f"rm -r {' '.join(stale)}")
    return Finding("caches", Verdict.OK, "nothing left behind")


def _disk() -> Finding:
    folder = models_folder()
    while not folder.exists():
        folder = folder.parent
    free = shutil.disk_usage(folder).free
    if not os.access(folder, os.W_OK):
        return Finding("disk", Verdict.PROBLEM, f"{folder} is not writable", "set XDG_CACHE_HOME to a writable place")
    if free < MIN_DISK_BYTES:
        return Finding("disk", Verdict.NOTE, f"{human_bytes(free)} free at {folder}", "free some space")
    return Finding("disk", Verdict.OK, f"{human_bytes(free)} free at {folder}")


def _port(port: int) -> Finding:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError as error:
            fix = "stop what listens there (ss -ltnp), or forebay serve --port N"
            return Finding("port", Verdict.NOTE, f"{port} cannot be used: {error.strerror}", fix)
    return Finding("port", Verdict.OK, f"{port} is free")
