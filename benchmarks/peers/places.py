"""Where the peers are, and which versions: known to what installs them and to what starts them."""

from __future__ import annotations

from pathlib import Path

from forebay.base.paths import cache_folder

HERE = Path(__file__).parent
EXPORT = HERE / "export_checkpoint.py"
BARRIERS = HERE / "amx_barriers.h"
OPENVINO_SERVER = HERE / "openvino_server.py"
TRANSFORMERS_SERVER = HERE / "transformers_server.py"

TRANSFORMERS = "5.23.0"
OPENVINO = "2026.4.1.0"
LLAMACPP = "11434.0.0"  # b11434

LLAMA_BINARIES = ("llama-server", "llama-bench", "llama-quantize")
# With the options of their export; the usual groups of 128 do not divide the default model's width.
OPENVINO_WEIGHTS: dict[str, tuple[str, ...]] = {"fp16": (), "int8": (), "int4": ("--group-size", "64")}


def peers_folder() -> Path:
    return cache_folder("peers")


def environment(name: str) -> Path:
    """The folder of a peer's virtual environment."""
    return peers_folder() / name


def python(name: str) -> Path:
    return environment(name) / "bin" / "python"


def checkpoint() -> Path:
    """The default model, dequantized to bfloat16, as transformers keeps models."""
    return peers_folder() / "models" / "checkpoint"


def openvino_model(weights: str) -> Path:
    return peers_folder() / "models" / f"openvino-{weights}"


def llama_folder() -> Path:
    return peers_folder() / "llamacpp"


def q4_0() -> Path:
    return peers_folder() / "models" / "default.Q4_0.gguf"
