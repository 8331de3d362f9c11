"""Tables of n-grams: how many rows each head has, and the factors by which tokens are hashed to rows."""

from __future__ import annotations

import math
from typing import Final

from forebay.base.units import ceil_div
from forebay.families.base.fields import Fields
from forebay.families.base.mixers import Ngrams

_MASK: Final = (1 << 64) - 1
_STEP: Final = 0x9E3779B97F4A7C15  # of SplitMix64, as the two factors (Steele, Lea and Flood, 2014, figure 16)
_FACTORS: Final = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
_OF_LAYER: Final = 10_007  # added to the seed for each table
_MOST_TAPS: Final = 10  # the native convolution's
_MOST_PAST: Final = 8
_MOST_PARTS: Final = 4096
_MOST_HEADS: Final = 1024  # of all tables: the primes that are their sizes are searched for
_MOST_BASE: Final = 1 << 26


def ngrams(fields: Fields, *, num_layers: int, vocab_size: int, hidden_size: int) -> Ngrams | None:
    """Read the embeddings of n-grams; None if no layer has any. Raises ModelError for tables that cannot be."""
    given = [] if fields.get("ple_layer_ids") is None else fields.ints("ple_layer_ids", default=[])
    if not given:
        return None
    if not all(1 <= layer <= num_layers for layer in given):
        raise fields.wrong("ple_layer_ids", f"numbers of layers from 1 to {num_layers}")
    layers = tuple(layer - 1 for layer in sorted(set(given)))
    longest = fields.size("ngram_size", default=3, least=2, most=_MOST_PAST + 1)
    heads = fields.size("heads_per_ngram", default=8, most=_MOST_HEADS // ((longest - 1) * len(layers)))
    size = fields.size("ple_embed_dim", default=hidden_size)
    per_table = (longest - 1) * heads
    if size % per_table:
        raise fields.wrong("ple_embed_dim", f"a multiple of the {per_table} heads")
    width = fields.size("ple_conv_kernel_size", default=4, least=2)
    if (width - 1) * longest >= _MOST_TAPS:
        raise fields.wrong("ple_conv_kernel_size", f"so small that its {width} taps span at most {_MOST_TAPS} tokens")
    ends = fields.token_ids("eos_token_id", vocab_size)
    if not ends:
        raise fields.wrong("eos_token_id", "a token: n-grams begin anew behind it")
    base = fields.size("ngram_vocab_size_base", default=20_000_000, most=_MOST_BASE)
    primes = _primes(base, per_table * len(layers))
    sizes = tuple(tuple(primes[i : i + per_table]) for i in range(0, len(primes), per_table))
    multiple = fields.size("make_ngram_vocab_size_divisible_by", default=128)
    rows = tuple(ceil_div(sum(of_table), multiple) * multiple for of_table in sizes)
    seed = fields.size("seed", default=1234, least=0)
    return Ngrams(
        layers=layers,
        longest=longest,
        heads=heads,
        size=size,
        width=width,
        end=ends[0],
        num_parts=fields.size("split_ngram_parts", default=512, most=_MOST_PARTS),
        sizes=sizes,
        num_rows=rows,
        multipliers=tuple(
            tuple(_multipliers(seed + _OF_LAYER * table, vocab_size, longest)) for table in range(len(layers))
        ),
    )


def _primes(first: int, count: int) -> list[int]:
    """Return the first `count` primes from `first` on."""
    found: list[int] = []
    number = max(first, 2)
    while len(found) < count:
        if all(number % divisor for divisor in range(2, math.isqrt(number) + 1)):
            found.append(number)
        number += 1
    return found


def _multipliers(seed: int, vocab_size: int, count: int) -> list[int]:
    """Return odd numbers whose products with token ids have no more than 63 bits."""
    bound = max(1, ((1 << 63) - 1) // vocab_size // 2)
    return [2 * (_mixed((seed + _STEP * (i + 1)) & _MASK) % bound) + 1 for i in range(count)]


def _mixed(state: int) -> int:
    """Return the number that SplitMix64 makes of its state."""
    value = (state + _STEP) & _MASK
    for shift, factor in zip((30, 27), _FACTORS, strict=True):
        value = ((value ^ (value >> shift)) * factor) & _MASK
    return value ^ (value >> 31)
