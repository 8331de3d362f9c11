"""The servers that the target table compares, as the commands that start them."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from benchmarks.peers import places
from forebay.base.cpu import CPU_VARIABLE, ONEDNN_ISA, this_cpu
from forebay.base.package import __version__
from forebay.base.variants import Variant
from forebay.formats.store import find_model

# For servers that divide their memory among a fixed number of streams: how many there are, and the tokens of each.
FEW_SLOTS, MANY_SLOTS, SLOT_TOKENS = 16, 64, 1280
# Of the default model, which all peers serve. A Forebay server says its own, the same: prompts are then the same, too.
VOCAB_SIZE = 49152


@dataclass(frozen=True, kw_only=True, slots=True)
class Kind:
    """A server that can be started: `{port}` in its command stands for the port, `{model}` for what it serves of
    `models` (by `Row.model`), `{slots}` and `{context}` for the streams it is to hold and their tokens together."""

    title: str
    version: str
    command: tuple[str, ...]
    models: Mapping[str, Path]
    environment: Mapping[str, str] = field(default_factory=dict)
    tells_vocabulary: bool = False

    def words(self, *, port: int, streams: int, model: str = "default", tokens: int = SLOT_TOKENS) -> tuple[str, ...]:
        """`tokens` of the longest request; one longer than a slot's has a server with no more slots than streams."""
        slots = streams if tokens > SLOT_TOKENS else FEW_SLOTS if streams <= FEW_SLOTS else MANY_SLOTS
        context = slots * max(tokens, SLOT_TOKENS)
        values = {"port": port, "slots": slots, "context": context, "model": self.models[model]}
        return tuple(word.format_map(values) for word in self.command)

    @property
    def missing(self) -> list[str]:
        """Of what must be installed."""
        libraries = self.environment.get("LD_LIBRARY_PATH", self.command[0])
        return [
            str(path) for path in (Path(self.command[0]), Path(libraries), self.models["default"]) if not path.exists()
        ]

    def serves(self, model: str) -> bool:
        return model in self.models and self.models[model].exists()


# A step gives each row one token: what guesses gain has a benchmark of its own, `speculation.py`.
NO_GUESSES = ("--speculative-algorithm", "off")


def forebay(model: str | None, flags: Sequence[str], isa: Variant | None = None) -> Kind:
    return Kind(
        title="Forebay",
        version=__version__,
        command=(
            *(str(Path(sys.executable).parent / "forebay"), "serve", "{model}", "--port", "{port}"),
            # `offline` asks for everything at once, and waits for it.
            *("--log-level", "warning", "--queue-timeout", "600"),
            *flags,
        ),
        models={"default": find_model(model), **places.random_models()},
        environment={CPU_VARIABLE: isa.name} if isa else {},
        tells_vocabulary=True,
    )


def forebay_8bit(isa: Variant | None) -> Kind:
    """Forebay with activations as llama.cpp and OpenVINO's quantized models have them."""
    flags = (*NO_GUESSES, "--activation-bits", "8")
    return replace(forebay(None, flags, isa), title="Forebay, 8-bit activations")


def llamacpp(title: str, models: Callable[[], Mapping[str, Path]]) -> Callable[[Variant | None], Kind]:
    threads = str(len(os.sched_getaffinity(0)))

    def kind(isa: Variant | None = None) -> Kind:
        command = (
            *(str(places.llama_folder() / "llama-server"), "--model", "{model}", "--port", "{port}"),
            *("--threads", threads, "--threads-batch", threads),
            *("--parallel", "{slots}", "--ctx-size", "{context}", "--flash-attn", "on"),
            *("--threads-http", "260"),  # it holds one for each open connection
        )
        kernels = {"LD_LIBRARY_PATH": str(places.llama_kernels(isa))}
        return Kind(title=title, version=places.LLAMACPP, command=command, models=models(), environment=kernels)

    return kind


def in_python(kind: Kind, isa: Variant | None) -> Kind:
    """A peer of Python's, held to an instruction set: oneDNN's products obey, in it and in torch; what OpenVINO
    computes besides takes the best that the CPU has, up to 2026.4."""
    limits = dict.fromkeys(("ONEDNN_MAX_CPU_ISA", "OV_CPU_MAX_ISA"), ONEDNN_ISA[isa.name]) if isa else {}
    return replace(kind, environment=limits)


def openvino(weights: str) -> Callable[[Variant | None], Kind]:
    def kind(isa: Variant | None) -> Kind:
        # float16 is computed in bfloat16 where there is that; asked for without it, answers are empty.
        narrow = weights == "fp16" and "avx512_bf16" in (isa.needs if isa else this_cpu().flags)
        server = str(places.python("openvino")), str(places.OPENVINO_SERVER), "{model}", "--port", "{port}"
        peer = Kind(
            title=f"OpenVINO {weights}",
            version=places.OPENVINO,
            command=(*server, "--precision", "bf16" if narrow else "f32"),
            models={"default": places.openvino_model(weights)},
        )
        return in_python(peer, isa)

    return kind


def transformers(isa: Variant | None) -> Kind:
    server = str(places.python("transformers")), str(places.TRANSFORMERS_SERVER), "{model}", "--port", "{port}"
    models = {"default": places.checkpoint()}
    return in_python(Kind(title="transformers", version=places.TRANSFORMERS, command=server, models=models), isa)


# Of OpenVINO, float16 weights with bfloat16 activations are the fastest for many streams, and quantized weights with
# float32 activations, which it then quantizes as it goes, for one.
PEERS: dict[str, Callable[[Variant | None], Kind]] = {
    "forebay-8bit": forebay_8bit,
    "llamacpp": llamacpp("llama.cpp", lambda: {"default": find_model(None), **places.random_models()}),
    "llamacpp-q4_0": llamacpp("llama.cpp Q4_0", lambda: {"default": places.q4_0()}),
    "openvino": openvino("fp16"),
    "openvino-int8": openvino("int8"),
    "openvino-int4": openvino("int4"),
    "transformers": transformers,
}
