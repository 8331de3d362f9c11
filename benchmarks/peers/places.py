"""Where the peers are, and which versions: known to what installs them and to what starts them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from forebay.base.paths import cache_folder
from forebay.base.variants import Variant

HERE = Path(__file__).parent
EXPORT = HERE / "export_checkpoint.py"
BARRIERS = HERE / "amx_barriers.h"
OPENVINO_SERVER = HERE / "openvino_server.py"
TRANSFORMERS_SERVER = HERE / "transformers_server.py"

TRANSFORMERS = "5.23.0"
OPENVINO = "2026.4.1.0"
LLAMACPP = "11434.0.0"  # b11434

LLAMA_BINARIES = ("llama-server", "llama-bench", "llama-quantize")


@dataclass(frozen=True, kw_only=True, slots=True)
class RandomModel:
    """A random model with the default model's tokenizer: the options of `forebay models make`, and those of llama.cpp's
    converter. The converter rejects an option that the architecture does not have. `codes` is a type of llama.cpp's
    quantizer. A `large` one takes minutes and `disk_gib` while it is made: it is made only if it is named."""

    make: str
    convert: tuple[str, ...] = ()
    codes: str = "Q4_K_M"
    disk_gib: int = 0

    @property
    def large(self) -> bool:
        return self.disk_gib > 0


# The layers of Llama-3.2-1B, and of Qwen3.5-0.8B, a hybrid (three gated delta nets for each attention). The
# configuration of the hybrid declares a draft head, which the random weights do not have. Then the layers of Qwen3-4B
# and of Llama-3.1-8B, a sixth of the layers of Qwen3-30B-A3B, and a third of those of gpt-oss-20b, published in MXFP4:
# a step computes them as it would the whole. "long" is one layer of Qwen3-1.7B, whose prompts of 32,000 tokens take
# minutes.
RANDOM_MODELS = {
    "1b": RandomModel(
        make="--like llama --hidden-size 2048 --num-layers 16 --set intermediate_size=8192 --set num_attention_heads=32"
        ' --set num_key_value_heads=8 --set head_dim=64 --set architectures=["LlamaForCausalLM"]',
    ),
    "hybrid": RandomModel(
        make="--like qwen3_5_text --hidden-size 1024 --num-layers 24 --set intermediate_size=3584 --set head_dim=256"
        " --set num_attention_heads=8 --set num_key_value_heads=2 --set linear_num_key_heads=16 --set"
        " linear_num_value_heads=16 --set linear_key_head_dim=128 --set linear_value_head_dim=128"
        ' --set architectures=["Qwen3_5ForCausalLM"]',
        convert=("--no-mtp",),
    ),
    "4b": RandomModel(
        make="--like qwen3 --hidden-size 2560 --num-layers 36 --set intermediate_size=9728"
        " --set num_attention_heads=32 --set num_key_value_heads=8 --set head_dim=128"
        ' --set architectures=["Qwen3ForCausalLM"]',
        disk_gib=20,
    ),
    "8b": RandomModel(
        make="--like llama --hidden-size 4096 --num-layers 32 --set intermediate_size=14336"
        " --set num_attention_heads=32 --set num_key_value_heads=8 --set head_dim=128"
        ' --set architectures=["LlamaForCausalLM"]',
        disk_gib=38,
    ),
    "moe": RandomModel(
        make="--like qwen3_moe --hidden-size 2048 --num-layers 8 --set intermediate_size=6144"
        " --set num_attention_heads=32 --set num_key_value_heads=4 --set head_dim=128 --set num_experts=128"
        " --set num_experts_per_tok=8 --set moe_intermediate_size=768"
        ' --set architectures=["Qwen3MoeForCausalLM"]',
        disk_gib=26,
    ),
    "long": RandomModel(
        make="--like qwen3 --hidden-size 2048 --num-layers 1 --set intermediate_size=6144"
        " --set num_attention_heads=16 --set num_key_value_heads=8 --set head_dim=128"
        ' --set architectures=["Qwen3ForCausalLM"]',
        disk_gib=1,
    ),
    "gpt-oss": RandomModel(
        make="--like gpt_oss --hidden-size 2880 --num-layers 8 --set intermediate_size=2880"
        " --set num_attention_heads=64 --set num_key_value_heads=8 --set head_dim=64 --set num_local_experts=32"
        " --set num_experts_per_tok=4 --set sliding_window=128 --set tie_word_embeddings=false"
        ' --set architectures=["GptOssForCausalLM"]',
        codes="MXFP4_MOE",
        disk_gib=31,
    ),
}
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
    """Its programs, and libraries but for the one with the kernels, of which there is one for each instruction set."""
    return peers_folder() / "llamacpp"


def llama_kernels(isa: Variant | None) -> Path:
    return llama_folder() / (isa.name if isa else "native")


def llama_tree() -> Path:
    """Its sources and objects: kernels for another instruction set take a minute then."""
    return peers_folder() / "llamacpp-source"


def q4_0() -> Path:
    return peers_folder() / "models" / "default.Q4_0.gguf"


def random_models() -> dict[str, Path]:
    return {
        name: peers_folder() / "models" / f"random-{name}.{model.codes}.gguf" for name, model in RANDOM_MODELS.items()
    }
