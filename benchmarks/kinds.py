"""The servers that the target table compares, as the commands that start them."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.peers import places
from forebay.base.package import __version__
from forebay.formats.store import find_model

# For servers that divide their memory among a fixed number of streams: how many there are, and the tokens of each.
FEW_SLOTS, MANY_SLOTS, SLOT_TOKENS = 16, 64, 1280
# Of the default model, which all peers serve. A Forebay server says its own, the same: prompts are then the same, too.
VOCAB_SIZE = 49152


@dataclass(frozen=True, slots=True)
class Kind:
    """A server that can be started: `{port}` in its command stands for the port, `{slots}` and `{context}` for the
    streams it is to hold and their tokens together."""

    title: str
    version: str
    command: tuple[str, ...]
    tells_vocabulary: bool = False

    def words(self, *, port: int, streams: int) -> tuple[str, ...]:
        slots = FEW_SLOTS if streams <= FEW_SLOTS else MANY_SLOTS
        return tuple(word.format(port=port, slots=slots, context=slots * SLOT_TOKENS) for word in self.command)

    @property
    def is_installed(self) -> bool:
        return Path(self.command[0]).is_file()


def forebay(model: str | None, flags: Sequence[str]) -> Kind:
    binary = Path(sys.executable).parent / "forebay"
    named = [model] if model else []
    return Kind(
        "Forebay",
        __version__,
        # `offline` asks for everything at once, and waits for it.
        (str(binary), "serve", *named, "--port", "{port}", "--log-level", "warning", "--queue-timeout", "600", *flags),
        True,
    )


def llamacpp(title: str, model: Callable[[], Path]) -> Callable[[], Kind]:
    threads = str(len(os.sched_getaffinity(0)))

    def kind() -> Kind:
        command = (
            *(str(places.llama_folder() / "llama-server"), "--model", str(model()), "--port", "{port}"),
            *("--threads", threads, "--threads-batch", threads),
            *("--parallel", "{slots}", "--ctx-size", "{context}", "--flash-attn", "on"),
            *("--threads-http", "260"),  # it holds one for each open connection
        )
        return Kind(title, places.LLAMACPP, command)

    return kind


def openvino(weights: str, precision: str) -> Callable[[], Kind]:
    def kind() -> Kind:
        server = places.python("openvino"), places.OPENVINO_SERVER, places.openvino_model(weights)
        command = (*map(str, server), "--port", "{port}", "--precision", precision)
        return Kind(f"OpenVINO {weights}", places.OPENVINO, command)

    return kind


def transformers() -> Kind:
    server = places.python("transformers"), places.TRANSFORMERS_SERVER, places.checkpoint()
    return Kind("transformers", places.TRANSFORMERS, (*map(str, server), "--port", "{port}"))


# Of OpenVINO, float16 weights with bfloat16 activations are the fastest for many streams, and quantized weights with
# float32 activations, which it then quantizes as it goes, for one.
PEERS: dict[str, Callable[[], Kind]] = {
    "llamacpp": llamacpp("llama.cpp Q4_1", lambda: find_model(None)),
    "llamacpp-q4_0": llamacpp("llama.cpp Q4_0", places.q4_0),
    "openvino": openvino("fp16", "bf16"),
    "openvino-int8": openvino("int8", "f32"),
    "openvino-int4": openvino("int4", "f32"),
    "transformers": transformers,
}
