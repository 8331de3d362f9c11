"""What pictures cost: a tile's encoding, the first token behind one, and the tokens of others meanwhile.

    python -m benchmarks.pictures                 # SmolVLM-256M's shape, random weights
    python -m benchmarks.pictures --rounds 3 --only gaps

One engine, everything in this process. A tile's encoding is compared with the machine's rate of multiply-adds
(`benchmarks.floors`). First tokens: of a prompt with a picture that was encoded before, behind another text, and of
text of its length. Gaps: those of four streams while prompts with pictures arrive, and while text arrives whose tokens
cost as much, in medians of the gaps of either.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch

from benchmarks.floors import measure_peaks
from forebay import LLM, SamplingParams
from forebay.base.cpu import this_cpu
from forebay.engine.frames import AddRequest
from forebay.families.checkpoint import open_checkpoint
from forebay.families.config.model_config import ModelConfig, config_from_folder
from forebay.formats.gguf import GgufFile
from forebay.formats.store import find_model
from forebay.models.encoder import layer_costs, vision_config
from forebay.models.encoders.encoder import Encoder
from forebay.models.random_weights import write_random_weights
from forebay.requests.pictures import Picture
from forebay.text.tokenizer_saving import save_tokenizer

TEXT: Final = {
    "model_type": "llama",
    "vocab_size": 49_280,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
}
VISION: Final = {
    "model_type": "smolvlm_vision",
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "image_size": 512,
    "patch_size": 16,
    "hidden_act": "gelu_pytorch_tanh",
}
CONFIG: Final = {
    "model_type": "smolvlm",
    "text_config": TEXT,
    "vision_config": VISION,
    "image_token_id": 49_190,
    "scale_factor": 4,
    "tie_word_embeddings": False,
    "dtype": "bfloat16",
}
STREAMS: Final = 4
ARRIVALS: Final = 3
WORDS: Final = 16  # text in front of a picture
READ_BYTES: Final = 256 << 20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", choices=tuple(PARTS), nargs="+", default=list(PARTS))
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        (folder / "config.json").write_text(json.dumps(CONFIG))
        save_tokenizer(GgufFile(find_model(None)).metadata, folder)
        config = config_from_folder(folder)
        path = folder / "model.safetensors"
        write_random_weights(config, path, dtype="bfloat16", seed=0, progress=lambda done, total: None)
        flags: dict[str, Any] = {"context_length": 4096, "max_running_requests": 16, "speculative_algorithm": "off"}
        with LLM(str(folder), **flags) as llm:
            bench = Bench(llm, open_checkpoint(folder).config)
            for name in arguments.only:
                PARTS[name](bench, arguments.rounds)


class Bench:
    """An engine of this process, and prompts for it."""

    def __init__(self, llm: LLM, config: ModelConfig) -> None:
        self.llm, self.core, self.config = llm, llm._core, config
        self.vision = vision_config(config)
        self._rng = np.random.default_rng(0)

    @property
    def encoder(self) -> Encoder:
        runner = self.core._runner
        encodings = getattr(runner, "_runner", runner).encodings
        assert encodings is not None
        return encodings.encoder

    def words(self, count: int) -> list[int]:
        return self._rng.integers(100, 40_000, count).tolist()

    def picture(self) -> Callable[[int], Picture]:
        """Return a new picture of one tile, which stands at the place that it is given."""
        side = self.vision.max_edge
        pixels = self._rng.integers(0, 256, (side, side, 3), dtype=np.uint8).tobytes()
        digest = hashlib.sha256(pixels).digest()
        return lambda at: Picture(
            digest=digest, grid=(1, 1), sizes=((side, side),), pixels=pixels, runs=((at, self.vision.max_tokens),)
        )

    def add(self, prompt: list[int], *pictures: Picture, count: int = 1) -> int:
        params = SamplingParams(max_tokens=count, temperature=0.0, ignore_eos=True).with_seed()
        request_id = next(self.llm._engine.ids)
        add = AddRequest(request_id=request_id, prompt_token_ids=prompt, params=params, pictures=pictures)
        refused = self.core.add(add)
        assert not refused, refused
        return request_id

    def shown(self, picture: Callable[[int], Picture], count: int = 1) -> int:
        """Add a prompt of its own text with a picture behind it."""
        words = self.words(WORDS)
        prompt = [*words, *[self.vision.placeholder] * self.vision.max_tokens, *self.words(4)]
        return self.add(prompt, picture(len(words)), count=count)

    def until_idle(self) -> float:
        """Run everything, and return the seconds that it took."""
        start = time.perf_counter()
        while not self.core.idle:
            self.core.step()
        return time.perf_counter() - start


def encoding(bench: Bench, rounds: int) -> None:
    """One tile, against the products of its matrices at the machine's rate."""
    side, encoder, vision = bench.vision.max_edge, bench.encoder, bench.vision
    patches = vision.max_patches
    per_patch, per_pair = vision.layer_products
    seen = sum(vision.seen_tokens or [vision.max_tokens] * vision.num_layers) * vision.merge**2
    layers = patches * (vision.num_layers * per_patch + seen * per_pair)
    products = layers + patches * vision.outer_products(bench.config.hidden_size)
    times = []
    for number in range(rounds + 1):
        pixels = torch.randint(0, 256, (side, side, 3), dtype=torch.uint8)
        start = time.perf_counter()
        with torch.inference_mode():
            encoder.finish(encoder.layers(encoder.begin(pixels), 0, encoder.num_layers))
        times += [time.perf_counter() - start] * (number > 0)
    peaks = measure_peaks(this_cpu().variants[0], READ_BYTES, of_bytes=False)
    floor, taken = products / peaks.products, statistics.median(times)
    print(
        f"one tile: {2e-9 * products:.0f} GFLOP, {taken:.3f} s; at {2e-9 * peaks.products:.0f} GFLOP/s "
        f"({peaks.products_by}) {floor:.3f} s: {taken / floor:.2f}x",
        flush=True,
    )


def first_tokens(bench: Bench, rounds: int) -> None:
    """Behind a picture that was encoded before, and behind text of its length."""
    length = WORDS + bench.vision.max_tokens + 4
    picture = bench.picture()
    bench.shown(picture)
    bench.until_idle()
    ratios, times = [], []
    for number in range(2 * rounds + 1):
        bench.shown(picture)
        seen = bench.until_idle()
        bench.add(bench.words(length))
        text = bench.until_idle()
        if number:
            ratios.append(seen / text)
            times.append((seen, text))
    seen, text = (statistics.median(column) for column in zip(*times, strict=True))
    print(
        f"first token: {1e3 * seen:.1f} ms with a picture seen before, {1e3 * text:.1f} ms of text: "
        f"{statistics.median(ratios):.2f}x",
        flush=True,
    )


def gaps(bench: Bench, rounds: int) -> None:
    """Of streams, while pictures arrive and while text of equal cost arrives."""
    linear, squared = layer_costs(bench.config)
    count = bench.vision.max_tokens
    seen = sum(bench.vision.seen_tokens or [count] * bench.vision.num_layers)
    cost = int(count * (linear * bench.vision.num_layers + squared * seen)) + count
    kinds: dict[str, Callable[[], int]] = {
        "pictures": lambda: bench.shown(bench.picture()),
        "text": lambda: bench.add(bench.words(min(cost, 3000))),
    }
    found: dict[str, list[float]] = {name: [] for name in kinds}
    for number in range(rounds + 1):
        for name, arrive in kinds.items():
            times = gaps_beside(bench, arrive)
            found[name] += times if number else []
    p99 = {name: float(np.quantile(times, 0.99)) for name, times in found.items()}
    medians = {name: statistics.median(times) for name, times in found.items()}
    print(
        f"gaps of {STREAMS} streams: p99 {1e3 * p99['pictures']:.1f} ms while pictures arrive (median "
        f"{1e3 * medians['pictures']:.1f}), {1e3 * p99['text']:.1f} ms while text of {cost} tokens arrives (median "
        f"{1e3 * medians['text']:.1f}): {p99['pictures'] / p99['text']:.2f}x",
        flush=True,
    )


def gaps_beside(bench: Bench, arrive: Callable[[], int]) -> list[float]:
    """Return the gaps between the tokens of streams, from their first tokens on, until what arrives is done."""
    streams = [bench.add(bench.words(32), count=4000) for _ in range(STREAMS)]
    waiting, latest, times = set(streams), dict[int, float](), list[float]()
    while waiting:
        waiting -= {update.request_id for update in bench.core.step() if update.token_ids}
    for _ in range(ARRIVALS):
        asked = arrive()
        while asked:
            updates, now = bench.core.step(), time.perf_counter()
            for update in updates:
                if update.request_id in streams and update.token_ids:
                    times.append(now - latest.get(update.request_id, now))
                    latest[update.request_id] = now
                elif update.request_id == asked and update.finish is not None:
                    asked = 0
    for request_id in streams:
        bench.core.abort(request_id)
    bench.until_idle()
    return times[STREAMS:]


PARTS: Final[dict[str, Callable[[Bench, int], None]]] = {
    "encoding": encoding,
    "first-token": first_tokens,
    "gaps": gaps,
}


if __name__ == "__main__":
    main()
