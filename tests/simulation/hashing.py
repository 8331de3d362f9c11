"""The hash model's arithmetic, once for arrays (the runner) and once for Python's integers (the reference).

All sums and products are modulo 2**64. Position p of a sequence has the KV value

    chain[p] = chain[p - 1] + KEY[token[p]] * PLACE[p]          chain[-1] = salt of the namespace

with a windowed layer another, chain[p] * WINDOW_FACTOR, and a recurrent layer's state after p + 1 tokens is

    state[p] = state[p - 1] * FACTOR + STATE_KEY[token[p]] * (salt | 1)          state[-1] = 0

which knows no positions, as a real one does not. At a picture's token a row of the picture's encoding stands for the
token's keys, `row_key` and `row_state_key`; its counts are those of the placeholder. With M-RoPE KEY is multiplied by
`turns_of` the three rotary positions less p, which is 1 where all are p. The next token is a hash of every
chain value up to p, of those in the window before it, of the state, of the tokens' counts, and of the request's seed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

import numpy as np
import numpy.typing as npt

from forebay.requests.sampling_params import PoolingKind, SamplingParams

U64 = npt.NDArray[np.uint64]
I64 = npt.NDArray[np.int64]

MAX_VOCAB: Final = 1 << 12
MAX_LEN: Final = 1 << 13
_MASK: Final = (1 << 64) - 1
_RNG = np.random.Generator(np.random.PCG64(2026))


def _odd(n: int) -> U64:
    return _RNG.integers(0, 1 << 64, n, dtype=np.uint64) | np.uint64(1)


def _powers(base: int) -> U64:
    powers = [1]
    for _ in range(MAX_LEN):
        powers.append(powers[-1] * base & _MASK)
    return np.array(powers, dtype=np.uint64)


KEY: Final = _odd(MAX_VOCAB)
PLACE: Final = _odd(MAX_LEN)
WEIGHT: Final = _odd(MAX_LEN)
WINDOW_WEIGHT: Final = _odd(MAX_LEN)
STATE_KEY: Final = _odd(MAX_VOCAB)
WINDOW_FACTOR: Final = 0x9E3779B97F4A7C15
STATE_WEIGHT: Final = 0xD1342543DE82EF95
FACTOR: Final = 0x5851F42D4C957F2D
_FACTOR_POWERS: Final = _powers(FACTOR)
_INVERSE_POWERS: Final = _powers(pow(FACTOR, -1, 1 << 64))
_WINDOW_INVERSE: Final = np.uint64(pow(WINDOW_FACTOR, -1, 1 << 64))
_KEY, _PLACE, _WEIGHT = KEY.tolist(), PLACE.tolist(), WEIGHT.tolist()
_WINDOW_WEIGHT, _STATE_KEY = WINDOW_WEIGHT.tolist(), STATE_KEY.tolist()


def mix(x: int) -> int:
    """The finaliser of splitmix64."""
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK
    return x ^ (x >> 31)


def turns_of(offsets: I64) -> U64:
    """What the keys of tokens are multiplied by that are rotated by `offsets` [3, T] more than by their positions."""
    folded = np.zeros(offsets.shape[1], dtype=np.uint64)
    for axis in offsets.astype(np.uint64):
        folded = mix_array(folded * np.uint64(FACTOR) + axis)
    return folded | np.uint64(1)


class Rows(dict[int, int]):
    """Of the positions of a prompt that are a picture's: the rows of its encoding there. With M-RoPE the prompt's first
    tokens are rotated by `offsets` [3, P] more than by their positions, and all behind them by `delta`."""

    def __init__(self, rows: Mapping[int, int], offsets: I64, delta: int = 0) -> None:
        super().__init__(rows)
        self.offsets, self.delta = offsets, delta

    def turns(self, count: int) -> U64:
        """What the keys of the first `count` tokens are multiplied by."""
        offsets = np.full((3, count), self.delta)
        known = min(count, self.offsets.shape[1])
        offsets[:, :known] = self.offsets[:, :known]
        return turns_of(offsets)


NO_OFFSETS: Final = np.zeros((3, 0), dtype=np.int64)
NO_ROWS: Final = Rows({}, NO_OFFSETS)


def row_key(row: int) -> int:
    """Key of a row of an encoding."""
    return mix(row ^ WINDOW_FACTOR) | 1


def row_state_key(row: int) -> int:
    """Key of a row of an encoding, for a state."""
    return mix(row ^ STATE_WEIGHT) | 1


def keys_of(tokens: npt.NDArray[np.int32], rows: Rows) -> U64:
    """Keys of a prompt's first tokens."""
    keys: U64 = KEY[tokens]
    for at, row in rows.items():
        if at < len(keys):
            keys[at] = row_key(row)
    return keys * rows.turns(len(keys))


def state_keys_of(tokens: npt.NDArray[np.int32], rows: Rows) -> U64:
    """Keys of a prompt's first tokens, for a state."""
    keys: U64 = STATE_KEY[tokens]
    for at, row in rows.items():
        if at < len(keys):
            keys[at] = row_state_key(row)
    return keys


def mix_array(x: U64) -> U64:
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def salt_of(namespace: str) -> int:
    return mix(int.from_bytes(namespace.encode(), "little") + 1)


def seed_of(params: SamplingParams) -> int:
    """The engine draws a seed where there is none; here is no engine."""
    return max(0, params.seed)


def logprob_of(value: int) -> float:
    """A log-probability that depends on everything a hash value depends on."""
    return -(value >> 11) * 2.0**-53


class Matches(Protocol):
    """Where an output stands in its grammar."""

    @property
    def allowed(self) -> I64: ...

    def read(self, token: int) -> None: ...


class Generated:
    """What the model says after a token list: a hash, the next token, and its log-probability."""

    def __init__(self, value: int, token_id: int, logprob: float) -> None:
        self.value, self.token_id, self.logprob = value, token_id, logprob


@dataclass(frozen=True, kw_only=True)
class HashModel:
    """What the next token depends on. `full`: layers that attend to all tokens; `window` in tokens, 0 for no windowed
    layer, else at least 2; `recurrent`: layers with a state."""

    vocab: int
    full: bool = True
    window: int = 0
    recurrent: bool = False

    def generate(
        self, prompt: Sequence[int], *, salt: int, seed: int, matcher: Matches | None = None, rows: Rows = NO_ROWS
    ) -> Iterator[Generated]:
        """The reference: the tokens that follow `prompt`, one after the other, from the token list and the `rows` of
        its pictures alone; of those that `matcher`, at the beginning of the output, allows."""
        tokens, window, scale = list(prompt), self.window, salt | 1
        *turns, behind = rows.turns(len(prompt) + 1).tolist()
        chain, digest, counts, state = salt, 0, 0, 0
        windowed: list[int] = []
        position = 0
        while True:
            for token in tokens[position:]:
                row = rows.get(position)
                key, state_key = _KEY[token], _STATE_KEY[token]
                if row is not None:
                    key, state_key = row_key(row), row_state_key(row)
                turn = turns[position] if position < len(turns) else behind
                chain = (chain + key * turn * _PLACE[position]) & _MASK
                digest += chain * _WEIGHT[position]
                counts += _KEY[token]
                state = (state * FACTOR + state_key * scale) & _MASK
                windowed.append(chain * _WINDOW_WEIGHT[position])
                position += 1
            value = counts + seed
            value += digest if self.full else 0
            value += sum(windowed[-window:]) * WINDOW_FACTOR if window else 0
            value += state * STATE_WEIGHT if self.recurrent else 0
            value = mix(value & _MASK)
            allowed = matcher.allowed if matcher else range(self.vocab)
            tokens.append(int(allowed[value % len(allowed)]))
            if matcher:
                matcher.read(tokens[-1])
            yield Generated(value, tokens[-1], logprob_of(value))

    def hidden(self, tokens: npt.NDArray[np.int32], salt: int, rows: Rows = NO_ROWS) -> U64:
        """What the model has at each position of a prompt before it is a log-probability."""
        if self.full or self.window:
            return chain_of(keys_of(tokens, rows), 0, salt)
        return states_after(state_keys_of(tokens, rows), 0, salt)

    def vector(self, prompt: Sequence[int], kind: PoolingKind, *, salt: int, rows: Rows = NO_ROWS) -> bytes:
        """What the prompt becomes: the hash behind it, or of what is at each position the first, or the sum."""
        if kind is PoolingKind.LAST:
            return vector_of(next(self.generate(prompt, salt=salt, seed=0, rows=rows)).value)
        hidden = self.hidden(np.array(prompt, dtype=np.int32), salt, rows)
        return vector_of(int(hidden[0] if kind is PoolingKind.CLS else hidden.sum(dtype=np.uint64)))


def vector_of(value: int) -> bytes:
    return value.to_bytes(8, "little")


def chain_values(tokens: npt.NDArray[np.int32], start: int, before: int) -> U64:
    """Chain values of `tokens` at positions from `start` on; `before` is the value of position start - 1."""
    return chain_of(KEY[tokens], start, before)


def chain_of(keys: U64, start: int, before: int) -> U64:
    """Chain values of tokens with these keys."""
    return np.uint64(before) + np.cumsum(keys * PLACE[start : start + len(keys)], dtype=np.uint64)


def state_values(tokens: npt.NDArray[np.int32], before: int, salt: int) -> U64:
    """The state after each of `tokens`, from `before` on."""
    return states_after(STATE_KEY[tokens], before, salt)


def states_after(keys: U64, before: int, salt: int) -> U64:
    """The state after each of the tokens with these keys."""
    inside = np.arange(len(keys), dtype=np.int64)
    one = np.zeros(len(keys), dtype=np.int64)
    return scan(keys * np.uint64(salt | 1), np.array([before], dtype=np.uint64), inside, one, np.array([len(keys)]))


def scan(keys: U64, before: U64, inside: I64, which: I64, ends: I64) -> U64:
    """The states of S sequences after each of their T tokens.

    keys [T] are what the tokens add, before [S] the states to go on from; token t is number inside[t] of sequence
    which[t], whose last token is in front of ends[which[t]]. Divided by the powers of FACTOR the recurrence is a sum.
    """
    if len(keys) == len(before):
        return before * np.uint64(FACTOR) + keys
    total = np.cumsum(keys * _INVERSE_POWERS[inside + 1], dtype=np.uint64)
    offset = before - np.concatenate([np.zeros(1, dtype=np.uint64), total[ends[:-1] - 1]])
    states: U64 = (total + offset[which]) * _FACTOR_POWERS[inside + 1]
    return states


def windowed(chain: U64) -> U64:
    """The KV values of a windowed layer."""
    return chain * np.uint64(WINDOW_FACTOR)


def unwindowed(kv: U64) -> U64:
    return kv * _WINDOW_INVERSE
