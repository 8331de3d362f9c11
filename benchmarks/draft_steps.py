"""How long the steps take that guessing needs, by the tokens that one request has in them: verifying, and drafting
where a head or an assistant does that.

    python -m benchmarks.draft_steps                    # the table; about a minute
    python -m benchmarks.draft_steps --record           # and put it into docs/benchmarks.md

Heads and the models of two of them are random, of the proportions that are published, so most guesses are wrong and
every step has its whole width. Times are those of the engine's own steps, the least of some fifty each.
"""

from __future__ import annotations

import argparse
import functools
import json
import math
import random
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from benchmarks import machine
from benchmarks.hybrid_decode import MODELS
from benchmarks.report import put_between_marks
from forebay.config.resolve import resolve
from forebay.engine.frames import AddRequest
from forebay.engine.loop.build import build_engine
from forebay.engine.loop.core import EngineCore
from forebay.families.checkpoint import open_checkpoint
from forebay.families.config.model_config import config_from_folder
from forebay.formats.safetensors import SINGLE_NAME
from forebay.formats.store import find_model
from forebay.models.random_weights import write_random_weights
from forebay.requests.sampling_params import SamplingParams
from forebay.runtime.graphs.runner import GraphRunner
from tests.models.assistants import TEXT, make_assistant
from tests.models.tiny import make_random

ROOT = Path(__file__).parent.parent
PROMPT_LEN, OUTPUT_LEN = 128, 64
TOLD = ("plain", "verify", "draft", "follow", "follow of 1")


def next_of_qwen(folder: Path) -> dict[str, Any]:
    fields = {"model_type": "qwen3_next", "dtype": "bfloat16", **MODELS["qwen3_next"]}
    (folder / "config.json").write_text(json.dumps(fields))
    config, path = config_from_folder(folder), folder / SINGLE_NAME
    write_random_weights(config, path, dtype="bfloat16", seed=0, progress=lambda done, total: None, draft_head=True)
    return {"model": str(folder), "speculative_algorithm": "NEXTN"}


def eagle3(folder: Path) -> dict[str, Any]:
    """For the default model, with a quarter of its vocabulary."""
    config = open_checkpoint(find_model(None)).config
    size, inner, heads = config.hidden_size, config.intermediate_size, config.num_heads * config.head_dim
    kv, drafted = config.num_kv_heads * config.head_dim, config.vocab_size // 4
    shapes: dict[str, tuple[int, ...]] = {
        "fc.weight": (size, 3 * size),
        "midlayer.self_attn.q_proj.weight": (heads, 2 * size),
        "midlayer.self_attn.k_proj.weight": (kv, 2 * size),
        "midlayer.self_attn.v_proj.weight": (kv, 2 * size),
        "midlayer.self_attn.o_proj.weight": (size, heads),
        "midlayer.mlp.gate_proj.weight": (inner, size),
        "midlayer.mlp.up_proj.weight": (inner, size),
        "midlayer.mlp.down_proj.weight": (size, inner),
        "midlayer.input_layernorm.weight": (size,),
        "midlayer.hidden_norm.weight": (size,),
        "midlayer.post_attention_layernorm.weight": (size,),
        "norm.weight": (size,),
        "lm_head.weight": (drafted, size),
    }
    tensors = {name: torch.randn(shape) / math.sqrt(shape[-1]) for name, shape in shapes.items()}
    tensors["d2t"] = 3 * torch.arange(drafted)
    save_file(tensors, folder / SINGLE_NAME)
    fields = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "hidden_size": size,
        "intermediate_size": inner,
        "num_hidden_layers": 1,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "vocab_size": config.vocab_size,
        "draft_vocab_size": drafted,
        "max_position_embeddings": config.max_position_embeddings,
        "rms_norm_eps": config.rms_norm_eps,
    }
    (folder / "config.json").write_text(json.dumps(fields))
    return {"speculative_algorithm": "EAGLE3", "speculative_draft_model_path": str(folder)}


def assistant(folder: Path) -> dict[str, Any]:
    text = {**TEXT, "vocab_size": 32768, "max_position_embeddings": 2048, "sliding_window": 512}
    heads = {"num_attention_heads": 8, "head_dim": 64, "global_head_dim": 128}
    kinds = TEXT["layer_types"][:1] * 5 + TEXT["layer_types"][-1:]
    target = {**text, **heads, "hidden_size": 640, "intermediate_size": 2048}
    target |= {"num_hidden_layers": 12, "layer_types": kinds * 2}
    del target["model_type"]
    make_random("gemma4_text", target, seed=0).save_pretrained(folder / "model")
    own = {**text, **heads, "hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 4}
    own |= {"layer_types": [*kinds[:3], kinds[-1]]}
    make_assistant(folder / "draft", backbone_hidden_size=640, text_config=own)
    return {
        "model": str(folder / "model"),
        "speculative_algorithm": "FROZEN_KV_MTP",
        "speculative_draft_model_path": str(folder / "draft"),
    }


MAKERS: dict[str, Callable[[Path], dict[str, Any]]] = {
    "EAGLE-3 head, default model": eagle3,
    "MTP head, qwen3_next-like": next_of_qwen,
    "frozen-KV MTP, gemma4_text-like": assistant,
}


class Times:
    """Of each kind of step, in ms, where all of so many requests have their whole width."""

    def __init__(self, core: EngineCore, width: int, num_requests: int) -> None:
        self.core, self.taken = core, defaultdict[str, list[float]](list)
        runner, num_tokens = core._runner, width * num_requests
        self._time(runner.decode.captured, {num_requests: "plain"})
        self._time(runner.verify.captured, {num_tokens: "verify"})
        self._time_settling(runner.verify.captured)
        drafts = getattr(runner.proposer, "drafts", None) or runner.proposer.runners
        self._time(drafts[width - 2], {num_requests: "draft"})
        if hasattr(runner.proposer, "follow"):
            self._time(runner.proposer.follow, {num_tokens: "follow", num_requests: "follow of 1"})

    def _time(self, runner: GraphRunner[Any, Any], kinds: Mapping[int, str]) -> None:
        """By the rows of a run: others do not count."""
        run = runner.run

        @functools.wraps(run)
        def timed(values: Any, n: int) -> Any:
            begin = time.perf_counter()
            outputs = run(values, n)
            self.taken[kinds.get(n, "")].append(1000 * (time.perf_counter() - begin))
            return outputs

        runner.run = timed  # type: ignore[method-assign]

    def _time_settling(self, runner: GraphRunner[Any, Any]) -> None:
        """Of states, behind a step that verifies, and part of it."""
        settle = runner.settle

        def timed() -> None:
            begin = time.perf_counter()
            settle()
            if self.taken["verify"]:
                self.taken["verify"][-1] += 1000 * (time.perf_counter() - begin)

        runner.settle = timed  # type: ignore[method-assign]

    def of(self, kind: str) -> str:
        return f"{min(self.taken[kind]):.2f}" if self.taken[kind] else "-"

    def run(self, num_requests: int) -> None:
        core, numbers = self.core, random.Random(0)
        params = SamplingParams(max_tokens=OUTPUT_LEN, temperature=0.0, ignore_eos=True)
        for request_id in range(1, 1 + num_requests):
            prompt = [numbers.randrange(3, 8000) for _ in range(PROMPT_LEN)]
            assert not core.add(AddRequest(request_id=request_id, prompt_token_ids=prompt, params=params))
        while not core.idle:
            core.step()


@contextmanager
def serving(flags: dict[str, Any], width: int, num_requests: int) -> Iterator[EngineCore]:
    config = resolve(
        {
            **flags,
            "dtype": "bfloat16",
            "speculative_num_draft_tokens": width,
            "max_running_requests": num_requests,
            "kv_cache_bytes": 1 << 29,
            "log_level": "error",
        }
    )
    core, _ = build_engine(replace(config.engine))
    yield core


def steps(flags: dict[str, Any], width: int, num_requests: int) -> Times:
    with serving(flags, width, num_requests) as core:
        times = Times(core, width, num_requests)
        times.run(num_requests)
        core._widths = None  # from here on all steps have width 1
        times.run(num_requests)
    return times


def table(names: list[str], widths: list[int], numbers: list[int]) -> Iterator[str]:
    yield "| ms | requests | W | step without guesses | target verify | draft | draft-extend | the same of 1 token |"
    yield "|---|---|---|---|---|---|---|---|"
    for name in names:
        with tempfile.TemporaryDirectory() as scratch:
            flags = MAKERS[name](Path(scratch))
            for num_requests in numbers:
                for width in widths:
                    times = steps(flags, width, num_requests)
                    cells = [times.of(kind) for kind in TOLD]
                    yield f"| {name} | {num_requests} | {width} | {' | '.join(cells)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", choices=[*MAKERS], default=[*MAKERS], metavar="WHO")
    parser.add_argument("--widths", type=int, nargs="*", default=[2, 4, 8], metavar="W")
    parser.add_argument("--requests", type=int, nargs="*", default=[1, 4], metavar="N")
    parser.add_argument("--record", action="store_true", help="put the table into docs/benchmarks.md")
    arguments = parser.parse_args()
    lines = []
    for line in table(arguments.only, arguments.widths, arguments.requests):
        print(line, flush=True)
        lines.append(line)
    if arguments.record:
        text = f"{machine.caption(1, 'random heads', quick=False)}\n\n" + "\n".join(lines)
        put_between_marks(ROOT / "docs" / "benchmarks.md", "draft-steps", text)


if __name__ == "__main__":
    main()
