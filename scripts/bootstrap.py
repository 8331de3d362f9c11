"""Make this checkout runnable: `python3 scripts/bootstrap.py [--dev]`, with nothing but Python 3.11 or later.

Creates .venv, installs torch in its CPU build, the pinned requirements, this package (editable), the default model and
the native kernels. A second call finds its stamp and returns at once.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import subprocess
import sys
import time
import venv
from contextlib import nullcontext
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
        say(f"ready after {time.monotonic() - started:.0f} s")
    return 0


def install(kinds: list[str]) -> bool:
    """Bring everything up to date; whether there was anything to do."""
    missing = [kind for kind in kinds if not is_current(kind)]
    if missing:
        make_venv()
        if "run" in missing:
            install_torch()
        files = [word for kind in missing for word in ("-r", REQUIREMENTS[kind])]
        say("installing " + " and ".join(REQUIREMENTS[kind] for kind in missing))
        pip("install", "--quiet", *files)
        pip("install", "--quiet", "--no-deps", "--no-build-isolation", "--editable", ".")
        if "dev" in missing:
            install_triton()
    with build_kernels() if "run" in missing else nullcontext():
        model_came = fetch_model()
    for kind in missing:
        stamp(kind).write_text(fingerprint(kind))
    return bool(missing) or model_came


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
    if works(PYTHON):
        return
    say(f"creating .venv with Python {sys.version.split()[0]}")
    try:
        venv.create(VENV, with_pip=True, clear=True)
    except (subprocess.CalledProcessError, OSError) as error:
        raise SystemExit(
            f"bootstrap: .venv cannot be created ({error}). On Debian and Ubuntu: apt-get install python3-venv"
        ) from None


def works(python: Path) -> bool:
    """Whether a virtual environment is there, has pip, and its interpreter is still the one we run."""
    test = f"import sys, pip; sys.exit(sys.version_info[:2] != {tuple(sys.version_info[:2])})"
    return python.exists() and subprocess.run([python, "-c", test], capture_output=True, check=False).returncode == 0


def install_torch() -> None:
    """The CPU build. Most platforms' usual index has it; for Linux it has the CUDA build, gigabytes of libraries."""
    if subprocess.run([PYTHON, "-c", "import torch"], capture_output=True, cwd=ROOT, check=False).returncode == 0:
        found = capture("-c", "import torch; print(torch.__version__)")
        if found.split("+")[0] == TORCH.partition("==")[2]:
            return
    planned = planned_packages(TORCH)
    if not any(name.startswith(CUDA_PACKAGES) for name in planned):
        say(f"installing {TORCH}")
        pip("install", "--quiet", TORCH)
        return
    say(f"installing {TORCH} from PyTorch's CPU builds")
    cpu = [PYTHON, "-m", "pip", "install", "--quiet", "--retries", "0", "--timeout", "10", "--no-deps"]
    if subprocess.run([*cpu, "--index-url", TORCH_CPU_INDEX, TORCH], cwd=ROOT, check=False).returncode == 0:
        pip("install", "--quiet", TORCH)  # its dependencies, now without those of CUDA
        return
    say("PyTorch's CPU builds cannot be reached: taking the CUDA build, several GB; it runs on the CPU as well")
    pip("install", TORCH)


def install_triton() -> None:
    """200 MB, for Linux alone. Without it the tests of the GPU's kernels are skipped, and say so."""
    there = subprocess.run([PYTHON, "-c", "import triton"], capture_output=True, cwd=ROOT, check=False).returncode == 0
    if there or not sys.platform.startswith("linux"):
        return
    say(f"installing {TRITON}")
    command = [PYTHON, "-m", "pip", "install", "--quiet", "--no-deps", "--only-binary", ":all:", TRITON]
    if subprocess.run(command, cwd=ROOT, check=False).returncode != 0:
        say("there is no Triton for this machine: the tests of the GPU's kernels will be skipped")


def planned_packages(requirement: str) -> list[str]:
    """What pip would install for a requirement, by name."""
    report = capture("-m", "pip", "install", "--quiet", "--dry-run", "--report", "-", requirement)
    return [item["metadata"]["name"].lower() for item in json.loads(report)["install"]]


def build_kernels() -> subprocess.Popen[bytes]:
    """Beside the model's download. Without a compiler it says so and the torch kernels are used: that is no failure."""
    say("building the native kernels")
    return subprocess.Popen([PYTHON, "-m", "forebay.ops.build"], cwd=ROOT)


def fetch_model() -> bool:
    """Put the default model into the user's cache; whether it was not there yet."""
    sys.path.insert(0, str(ROOT))
    from forebay.formats.store import DEFAULT_MODEL, models_folder

    if (models_folder() / DEFAULT_MODEL.file).is_file():
        return False
    subprocess.run([PYTHON, "-m", "forebay.cli.main", "models", "pull"], cwd=ROOT, check=True)
    return True


def pip(*arguments: str) -> None:
    subprocess.run([PYTHON, "-m", "pip", *arguments, "--disable-pip-version-check"], cwd=ROOT, check=True)


def capture(*arguments: str) -> str:
    return subprocess.run([PYTHON, *arguments], cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True).stdout


def say(text: str) -> None:
    print(f"bootstrap: {text}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
