"""What one adapter (LoRA) costs a server, beside llama.cpp with the same adapter: output tokens per second.

    python -m benchmarks.adapter_peers
    python -m benchmarks.adapter_peers --streams 1 --rounds 3

The default model, as its file is, with a random adapter of rank 16 on all attention and MLP layers. Each server runs
alone; servers take turns, and a ratio is of one server with the adapter and without it in the same round.
`python -m benchmarks.peers.install llamacpp` installs the peer.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Final

import numpy as np
from gguf import GGUFWriter

from benchmarks.adapters import make
from benchmarks.kinds import NO_GUESSES, PEERS, Kind, forebay
from benchmarks.rows import Load, output_rate
from benchmarks.servers import Server
from benchmarks.targets import client
from forebay.families.checkpoint import open_checkpoint
from forebay.formats.safetensors import SafetensorsFile
from forebay.formats.store import find_model
from forebay.models import AdapterSlots, needs_of

NAME: Final = "benchmark"
# llama.cpp's names of layers by ours, of a llama.
GGUF_NAMES: Final = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 16])
    parser.add_argument("--tokens", type=int, default=128, help="that each request generates")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        needs = needs_of(open_checkpoint(find_model(None)).config, adapters=AdapterSlots())
        folder = make(Path(scratch) / "adapter", dict(needs.adaptable), arguments.rank, seed=0)
        measure(servers(folder, as_gguf(folder, Path(scratch) / "adapter.gguf"), arguments.rank), arguments)


def servers(folder: Path, gguf: Path, rank: int) -> Mapping[tuple[str, bool], Kind]:
    """The servers by engine, and by whether the adapter is used."""
    lora = ("--enable-lora", "--max-lora-rank", str(rank), "--lora-modules", f"{NAME}={folder}")
    peer = PEERS["llamacpp"](None)
    return {
        ("Forebay", False): forebay(None, NO_GUESSES),
        ("Forebay", True): forebay(None, (*NO_GUESSES, *lora)),
        ("llama.cpp", False): peer,
        ("llama.cpp", True): replace(peer, command=(*peer.command, "--lora", str(gguf))),
    }


def as_gguf(folder: Path, path: Path) -> Path:
    """Write the adapter as llama.cpp reads it. Rotary pairs are not reordered: what it says differs, not what it
    costs."""
    writer = GGUFWriter(path, "llama")
    writer.add_type("adapter")
    writer.add_string("adapter.type", "lora")
    writer.add_float32("adapter.lora.alpha", 1.0)
    file = SafetensorsFile(folder / "adapter_model.safetensors")
    for name in file.tensors:
        _, _, part = name.removesuffix(".weight").partition("layers.")
        number, _, rest = part.partition(".")
        module, _, factor = rest.rpartition(".lora_")
        peer_name = f"blk.{number}.{GGUF_NAMES[module]}.weight.lora_{factor.lower()}"
        writer.add_tensor(peer_name, np.array(file.values(name).read(), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def measure(kinds: Mapping[tuple[str, bool], Kind], arguments: argparse.Namespace) -> None:
    for streams in arguments.streams:
        rates: defaultdict[tuple[str, bool], list[float]] = defaultdict(list)
        load = Load(num_prompts=4 * streams, concurrency=streams, output_len=arguments.tokens)
        for number in range(arguments.rounds):
            for which, kind in kinds.items():
                with Server(kind, streams) as server:
                    model = NAME if which == ("Forebay", True) else None
                    rates[which].append(output_rate(client(server, load, seed=number, model=model)))
        for engine in dict.fromkeys(engine for engine, _ in kinds):
            alone, adapted = rates[engine, False], rates[engine, True]
            ratio = statistics.median(own / other for own, other in zip(adapted, alone, strict=True))
            print(
                f"{streams:3} streams, {engine:10} {statistics.median(alone):8.1f} tok/s alone, "
                f"{statistics.median(adapted):8.1f} with the adapter, {ratio:.2f}x",
                flush=True,
            )


if __name__ == "__main__":
    main()
