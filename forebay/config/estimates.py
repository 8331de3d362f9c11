"""Estimates of what engines take of a CPU's memory beside weights and caches: the one place of these numbers.

Two other parts of that memory are decided elsewhere, with more knowledge. `memory.division` takes verify logits off the
caches, since it decides by them how many draft tokens a step verifies; a rule decides the host copies.

The numbers are of this command, on two cores with AVX2: `forebay serve` of the embedded model, and `LLM` over models of
`forebay models make --hidden-size 2048` with prompts of 1,500 tokens, then 64 of 32 tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from forebay.families.config.model_config import ModelConfig
from forebay.families.config.vision.base import VisionConfig
from forebay.formats.held_format import held_format
from forebay.formats.quantization import Quantization
from forebay.formats.quantized import HEAD_BITS
from forebay.formats.weight_shapes import ValueBytes, WeightShapes

# Left for the system, for other programs that grow, and for what these estimates miss.
RESERVE_BYTES: Final = 1 << 30
RESERVE_SHARE: Final = 0.08
# Resident without weights and caches, libraries included: 258 MiB of the engine process, 91 of the server, 23 of the
# process that renders chat templates. The rest is for what grows with use: radix tree, n-grams, bodies of requests.
PROCESS_BYTES: Final = 448 << 20
# Of each token of the vocabulary: 500 bytes of the tokenizer in the server, 600 of that of grammars in the engine.
VOCABULARY_BYTES: Final = 1280
# float32 values that a step holds of each of its tokens, in multiples of the widest input of a layer: 8.3 to 10 were
# measured. Freed blocks are kept, and chunks of several lengths leave some of each length.
ACTIVATION_WIDTHS: Final = 10
LOGITS_COPIES: Final = 2  # of a row that samples: logits, and their probabilities
ROPE_TABLES: Final = 2  # of a model with windows; others have one
# Part of what is left for caches that keeps copies of retracted requests instead, of which there are few.
HOST_SHARE: Final = 16
FLOAT32_BYTES: Final = 4


@dataclass(frozen=True, kw_only=True, slots=True)
class StepShape:
    """The largest step: tokens of a prompt, rows that decode with `width` tokens each, and positions of a row."""

    chunk_tokens: int
    num_rows: int
    width: int
    context_length: int

    @property
    def num_tokens(self) -> int:
        return max(self.chunk_tokens + self.num_rows, self.num_rows * self.width)


def reserve_bytes(memory: int) -> int:
    """Return the bytes of the available memory that no default takes."""
    return max(RESERVE_BYTES, int(memory * RESERVE_SHARE))


def most_prompt_tokens(chunk_tokens: int, model: ModelConfig) -> int:
    """Return the most prompt tokens of one step: a chunk, or a longer run of tokens that must not be cut."""
    return max(chunk_tokens, 0 if model.vision is None else model.vision.longest_span)


def process_bytes(model: ModelConfig) -> int:
    """Return the bytes of one engine's processes without weights, caches and activations."""
    return PROCESS_BYTES + model.vocab_size * VOCABULARY_BYTES


def activation_bytes(model: ModelConfig, weights: WeightShapes, step: StepShape) -> int:
    """Return the bytes that steps compute in, with the tables of rotary embeddings. A tile of a picture is encoded
    before the step's tokens, and has as many rows as patches."""
    widest = max((kind.in_features for kind in weights.counts), default=model.hidden_size)
    if model.experts is not None:
        widest = max(widest, model.experts.per_token * model.experts.intermediate_size)
    tile = 0 if model.vision is None else _of_tile(model.vision)
    activations = max(step.num_tokens * widest * ACTIVATION_WIDTHS, tile)
    logits = step.num_rows * model.vocab_size * LOGITS_COPIES
    rope = step.context_length * model.head_dim * ROPE_TABLES
    return (activations + logits + rope) * FLOAT32_BYTES


def _of_tile(vision: VisionConfig) -> int:
    """Return the numbers that an encoder's layer holds for the largest tile: a gated MLP's three intermediate ones, the
    stream, its norm, queries, keys, values and what attention makes of them."""
    return vision.max_patches * (3 * vision.intermediate_size + 2 * vision.hidden_size + 4 * vision.heads_width)


def adapter_bytes(model: ModelConfig, *, num_slots: int, rank: int, itemsize: int) -> int:
    """Return the bytes of slots for adapters: A and B of attention's four layers and of an MLP's three, in each layer.
    Experts have none. Of layers with recurrent states this is about the size."""
    hidden, heads, kv = model.hidden_size, model.num_heads * model.head_dim, model.num_kv_heads * model.head_dim
    inner = model.intermediate_size if model.experts is None else model.experts.intermediate_size
    inputs, outputs = 3 * hidden + heads + 2 * hidden + inner, heads + 2 * kv + hidden + 2 * inner + hidden
    return (num_slots + 1) * model.num_layers * (inputs + outputs) * rank * itemsize


def tied_head_bytes(model: ModelConfig, weights: WeightShapes, quantization: Quantization, values: ValueBytes) -> int:
    """Return the bytes of the head that kernels pack from an embedding that is not held in codes: both are held."""
    if not model.tie_word_embeddings:
        return 0
    tables = (kind for kind in weights.counts if (kind.in_features, kind.min_bits) == (model.hidden_size, HEAD_BITS))
    plain = [
        kind
        for kind in tables
        if held_format(quantization, kind.own, in_features=kind.in_features, min_bits=HEAD_BITS) is None
    ]
    itemsize = max((values.bfloat16 if kind.bfloat16 else values.own for kind in plain), default=0)
    return model.vocab_size * model.hidden_size * itemsize
