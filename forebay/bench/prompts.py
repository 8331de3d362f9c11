"""Prompts of a load: random token ids, and the questions of a file of conversations."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeAlias

import numpy as np

from forebay.base.errors import ConfigError

COMPLETIONS: Final = "/v1/completions"
CHAT: Final = "/v1/chat/completions"


class Text(NamedTuple):
    """A prompt that the server cuts into tokens, and how many it is to answer with."""

    text: str
    output_length: int


Prompt: TypeAlias = list[int] | Text


class Turn(NamedTuple):
    """The first question of a conversation, and the answer it had."""

    question: str
    answer: str


def random_prompts(
    *, count: int, length: int, prefix_length: int, vocab_size: int, seed: int, max_length: int | None = None
) -> list[list[int]]:
    """Token ids drawn evenly, so that lengths are exact whatever the tokenizer; the first `prefix_length` are shared.
    With `max_length`, lengths are drawn evenly from `length` to that.

    The lowest ids are left out: that is where most vocabularies keep their control tokens.
    """
    longest = length if max_length is None else max_length
    if length < 1 or not 0 <= prefix_length <= length <= longest:
        raise ConfigError(
            f"a prompt of {length} to {longest} tokens with a shared prefix of {prefix_length} is not possible"
        )
    draw = np.random.default_rng(seed)
    low = min(256, vocab_size // 2)
    prefix = draw.integers(low, vocab_size, prefix_length).tolist()
    lengths = [length] * count if longest == length else draw.integers(length, longest + 1, count).tolist()
    return [prefix + draw.integers(low, vocab_size, size - prefix_length).tolist() for size in lengths]


def conversations(path: Path, count: int, seed: int) -> list[Turn]:
    """Return `num` conversations of a file, drawn. Raises ConfigError for a file that has fewer, or is none."""
    try:
        turns = list(_turns(json.loads(path.read_bytes())))
    except (OSError, ValueError, TypeError, AttributeError, KeyError) as error:
        raise ConfigError(f"--dataset-path {path}: no list of conversations ({error})") from None
    if len(turns) < count:
        raise ConfigError(f"{path} has {len(turns)} conversations with an answer, and {count} are asked for "
                          "(--num-prompts and --num-warmups)")  # fmt: skip
    return random.Random(seed).sample(turns, count)


def _turns(entries: list[dict[str, Any]]) -> Iterator[Turn]:
    for entry in entries:
        said = [turn["value"].strip() for turn in entry.get("conversations") or entry.get("conversation") or ()][:2]
        if len(said) == 2 and all(said):
            yield Turn(*said)
