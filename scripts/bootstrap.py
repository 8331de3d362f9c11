"""Make this checkout runnable: `python3 scripts/bootstrap.py [--dev]`, with nothing but Python 3.11 or later.

Creates .venv, installs torch in its CPU build, the pinned requirements, this package (editable), the default model and
the native kernels, and shows how far each is. A second call finds its stamp and returns at once.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import subprocess
import sys
import threading
import time
import venv
from collections.abc import Callable, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
PYTHON = VENV / ("Scripts/python.exe" if os.name == "nt" else "bin/python")
TORCH = "torch==2.13.0"
# Where the PyTorch project keeps builds without CUDA: asked only where the usual index would bring CUDA.
TORCH_CPU_INDEX = "https://download.pytorch.org/whl/cpu"
# What torch 2.13 for CUDA brings along. Beside torch's CPU build, tests run the GPU's kernels in its interpreter.
TRITON = "triton==3.7.1"
CUDA_PACKAGES = ("nvidia-", "cuda-", "triton")
REQUIREMENTS = {"run": "requirements.txt", "dev": "requirements-dev.txt"}
STEPS = ("virtual environment", "torch", "packages", "model", "native kernels")
LINE_S = 20.0  # between lines about one step where nobody looks at a screen


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dev", action="store_true", help="also what the tests and checks need")
    kinds = ["run", "dev"] if parser.parse_args().dev else ["run"]
    if sys.version_info < (3, 11):  # noqa: UP036 - whoever has an older Python starts this with it
        print(f"Python 3.11 or later is needed; this is {sys.version.split()[0]} ({sys.executable})", file=sys.stderr)
        return 2
    started = time.monotonic()
    try:
        worked = install(kinds)
    except subprocess.CalledProcessError as error:
        command = " ".join(map(str, error.cmd))
        print(f"\nbootstrap: `{command}` failed with code {error.returncode}; its message is above", file=sys.stderr)
        return 1
    if worked:
        print(f"bootstrap: all installed after {time.monotonic() - started:.0f} s", flush=True)
    return 0


def install(kinds: list[str]) -> bool:
    """Bring everything up to date; whether there was anything to do."""
    missing = [kind for kind in kinds if not is_current(kind)]
    if missing:
        make_venv()
        if "run" in missing:
            install_torch()
            install_packages("run")
    kernels = Watched(PYTHON, "-m", "forebay.ops.build") if "run" in missing else None
    if "dev" in missing:
        install_packages("dev")
        install_triton()
    model_came = fetch_model()
    if kernels is not None:
        kernels.show(STEPS[4], of_compiler, must=False)  # without a compiler torch's are used, which it says
    for kind in missing:
        stamp(kind).write_text(fingerprint(kind))
    return bool(missing) or model_came


class Watched:
    """A command whose output becomes one line of progress, and is printed whole where it fails."""

    def __init__(self, *command: str | Path) -> None:
        self._lines: list[str] = []
        self._process = subprocess.Popen(
            command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace",
            env={**os.environ, "PYTHONUNBUFFERED": "1"},
        )  # fmt: skip
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        with self._process.stdout as lines:
            self._lines += lines

    def show(self, step: str, news: Callable[[Sequence[str]], str], *, must: bool = True) -> None:
        """Until it ends, what `news` makes of its lines. Raises CalledProcessError if it fails and `must` not."""
        line = Line(step)
        while self._process.poll() is None:
            line.show(news(self._lines))
            self._reader.join(0.5)
        self._reader.join()
        if self._process.returncode and must:
            line.end("failed")
            print("".join(self._lines), end="")
            raise subprocess.CalledProcessError(self._process.returncode, self._process.args)
        line.end(news(self._lines))


class Line:
    """Of one step: written anew on a screen, elsewhere now and then."""

    def __init__(self, step: str) -> None:
        self._head = f"[{STEPS.index(step) + 1}/{len(STEPS)}] {step}"
        self._began = self._shown_at = time.monotonic()

    def show(self, text: str) -> None:
        now = time.monotonic()
        if sys.stdout.isatty():
            columns = os.get_terminal_size().columns - 1
            print(f"\r\033[K{self._text(text)[:columns]}", end="", flush=True)
        elif now - self._shown_at >= LINE_S:
            self._shown_at = now
            print(self._text(text), flush=True)

    def end(self, text: str) -> None:
        print(("\r\033[K" if sys.stdout.isatty() else "") + self._text(text), flush=True)

    def _text(self, text: str) -> str:
        return f"{self._head}: {text} ({time.monotonic() - self._began:.0f} s)"


def of_pip(total: int) -> Callable[[Sequence[str]], str]:
    """How many of `total` packages pip has looked at, and what it does now."""

    def news(lines: Sequence[str]) -> str:
        words = [line.split() for line in lines if line.strip()]
        seen = sum(first in ("Collecting", "Requirement", "Processing", "Obtaining") for first, *_ in words)
        steps = [said for said in words if said[0] in ("Downloading", "Installing", "Successfully")]
        if steps and steps[-1][0] == "Downloading":
            return f"{min(seen, total)} of {total}, fetching {Path(steps[-1][1]).name} {' '.join(steps[-1][2:])}"
        if steps and steps[-1][0] == "Installing":
            return f"writing {len(steps[-1]) - 3} packages"
        return f"{len(steps[-1]) - 2} packages" if steps else f"{min(seen, total)} of {total} looked up"

    return news


def of_compiler(lines: Sequence[str]) -> str:
    """`12 of 34 files`, as the build logs them."""
    done = [found[1] for line in lines if (found := re.search(r'done="?(\d+ of \d+)', line))]
    ready = lines and ("ready" in lines[-1] or "cannot" in lines[-1])
    return (
        lines[-1].strip() if ready else f"compiled {done[-1]} files" if done else "looking for what is compiled already"
    )


def stamp(kind: str) -> Path:
    return VENV / f".forebay-{kind}"


def fingerprint(kind: str) -> str:
    """Changes with what would be installed, the interpreter, or the place of the checkout."""
    digest = hashlib.sha256(f"{ROOT} {sys.version_info[:2]}".encode())
    for name in (REQUIREMENTS[kind], "pyproject.toml", "scripts/bootstrap.py"):
        digest.update((ROOT / name).read_bytes())
    return digest.hexdigest()


def is_current(kind: str) -> bool:
    try:
        return PYTHON.exists() and stamp(kind).read_text() == fingerprint(kind)
    except OSError:
        return False


def make_venv() -> None:
    line = Line(STEPS[0])
    if works(PYTHON):
        line.end("there already")
        return
    line.show(f"creating .venv with Python {sys.version.split()[0]}")
    try:
        venv.create(VENV, with_pip=True, clear=True)
    except (subprocess.CalledProcessError, OSError) as error:
        raise SystemExit(
            f"bootstrap: .venv cannot be created ({error}). On Debian and Ubuntu: apt-get install python3-venv"
        ) from None
    line.end(f".venv with Python {sys.version.split()[0]}")


def works(python: Path) -> bool:
    """Whether a virtual environment is there, has pip, and its interpreter is still the one we run."""
    test = f"import sys, pip; sys.exit(sys.version_info[:2] != {tuple(sys.version_info[:2])})"
    return python.exists() and subprocess.run([python, "-c", test], capture_output=True, check=False).returncode == 0


def install_torch() -> None:
    """The CPU build. Most platforms' usual index has it; for Linux it has the CUDA build, gigabytes of libraries."""
    line = Line(STEPS[1])
    if subprocess.run([PYTHON, "-c", "import torch"], capture_output=True, cwd=ROOT, check=False).returncode == 0:
        found = capture("-c", "import torch; print(torch.__version__)")
        if found.split("+")[0] == TORCH.partition("==")[2]:
            line.end(f"{found.strip()} there already")
            return
    line.show(f"asking the index about {TORCH}")
    planned = planned_packages(TORCH)
    if any(name.startswith(CUDA_PACKAGES) for name in planned):
        cpu = ["--retries", "0", "--timeout", "10", "--no-deps", "--index-url", TORCH_CPU_INDEX]
        try:
            pip(STEPS[1], 1, *cpu, TORCH)
        except subprocess.CalledProcessError:
            line.end(
                "PyTorch's CPU builds cannot be reached: the CUDA build comes, several GB; it runs on CPUs as well"
            )
    pip(STEPS[1], len(planned), TORCH)  # where the CPU build is there: its dependencies, without those of CUDA


def install_packages(kind: str) -> None:
    name = REQUIREMENTS[kind]
    with (ROOT / name).open() as lines:
        total = sum(line[:1] not in "#\n" for line in lines)
    pip(STEPS[2], total, "-r", name)
    if kind == "run":
        ours = ("install", "--disable-pip-version-check", "--no-deps", "--no-build-isolation", "--editable", ".")
        Watched(PYTHON, "-m", "pip", *ours).show(STEPS[2], lambda lines: "this checkout")


def install_triton() -> None:
    """200 MB, for Linux alone. Without it the tests of the GPU's kernels are skipped, and say so."""
    there = subprocess.run([PYTHON, "-c", "import triton"], capture_output=True, cwd=ROOT, check=False).returncode == 0
    if there or not sys.platform.startswith("linux"):
        return
    try:
        pip(STEPS[2], 1, "--no-deps", "--only-binary", ":all:", TRITON)
    except subprocess.CalledProcessError:
        print("there is no Triton for this machine: the tests of the GPU's kernels will be skipped", flush=True)


def planned_packages(requirement: str) -> list[str]:
    """What pip would install for a requirement, by name."""
    report = capture("-m", "pip", "install", "--quiet", "--dry-run", "--report", "-", requirement)
    return [item["metadata"]["name"].lower() for item in json.loads(report)["install"]]


def fetch_model() -> bool:
    """Put the default model into the user's cache; whether it was not there yet."""
    sys.path.insert(0, str(ROOT))
    from forebay.formats.store import DEFAULT_MODEL, models_folder

    if (models_folder() / DEFAULT_MODEL.file).is_file():
        return False
    line = Line(STEPS[3])
    subprocess.run(
        [PYTHON, "-m", "forebay.cli.main", "models", "pull"], cwd=ROOT, check=True, stdout=subprocess.DEVNULL
    )
    line.end(DEFAULT_MODEL.name)
    return True


def pip(step: str, total: int, *arguments: str) -> None:
    Watched(PYTHON, "-m", "pip", "install", "--disable-pip-version-check", *arguments).show(step, of_pip(total))


def capture(*arguments: str) -> str:
    return subprocess.run([PYTHON, *arguments], cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True).stdout


if __name__ == "__main__":
    sys.exit(main())
