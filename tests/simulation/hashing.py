"""The hash model's arithmetic, once for arrays (the runner) and once for Python's integers (the reference).

All sums are modulo 2**64. Position p of a sequence has the KV value

    chain[p] = chain[p - 1] + KEY[token[p]] * PLACE[p]          chain[-1] = salt of the namespace

and the next token is a hash of every chain value up to p, of the tokens' counts, and of the request's seed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

U64 = npt.NDArray[np.uint64]

MAX_VOCAB: Final = 1 << 12
MAX_LEN: Final = 1 << 13
_MASK: Final = (1 << 64) - 1
_RNG = np.random.Generator(np.random.PCG64(2026))
KEY: Final[U64] = _RNG.integers(0, 1 << 64, MAX_VOCAB, dtype=np.uint64) | np.uint64(1)
PLACE: Final[U64] = _RNG.integers(0, 1 << 64, MAX_LEN, dtype=np.uint64) | np.uint64(1)
WEIGHT: Final[U64] = _RNG.integers(0, 1 << 64, MAX_LEN, dtype=np.uint64) | np.uint64(1)
_KEY, _PLACE, _WEIGHT = KEY.tolist(), PLACE.tolist(), WEIGHT.tolist()


def mix(x: int) -> int:
    """The finaliser of splitmix64."""
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK
    return x ^ (x >> 31)


def mix_array(x: U64) -> U64:
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def salt_of(namespace: str) -> int:
    return mix(int.from_bytes(namespace.encode(), "little") + 1)


def logprob_of(value: int) -> float:
    """A log-probability that depends on everything a hash value depends on."""
    return -(value >> 11) * 2.0**-53


class Generated:
    """What the model says after a token list: the next token, and its log-probability."""

    def __init__(self, token_id: int, logprob: float) -> None:
        self.token_id, self.logprob = token_id, logprob


def naive_generation(prompt: Sequence[int], *, salt: int, seed: int, vocab: int) -> Iterator[Generated]:
    """The reference: the tokens that follow `prompt`, one after the other, from the token list alone."""
    tokens = list(prompt)
    chain, digest, counts = salt, 0, 0
    position = 0
    while True:
        for token in tokens[position:]:
            chain = (chain + _KEY[token] * _PLACE[position]) & _MASK
            digest += chain * _WEIGHT[position]
            counts += _KEY[token]
            position += 1
        value = mix((digest + counts + seed) & _MASK)
        tokens.append(value % vocab)
        yield Generated(tokens[-1], logprob_of(value))


def chain_values(tokens: npt.NDArray[np.int32], start: int, before: int) -> U64:
    """Chain values of `tokens` at positions from `start` on; `before` is the value of position start - 1."""
    return np.uint64(before) + np.cumsum(KEY[tokens] * PLACE[start : start + len(tokens)], dtype=np.uint64)
