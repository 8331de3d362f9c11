"""A model's log-probabilities by transformers, another implementation of it, for a comparison that a user asks for.

transformers is no dependency: import this module where a missing one is reported.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import AutoModelForCausalLM
from transformers.utils import logging


class Place(NamedTuple):
    """One place of an answer: transformers' likeliest token, how much likelier it is than ours, in nats, and the
    largest difference from the log-probabilities that we report there."""

    best: int
    margin: float
    apart: float


class TransformersModel:
    """The model at `path`, computed by transformers in float32. Raises OSError and ValueError for one that it does not
    read."""

    def __init__(self, path: Path) -> None:
        quiet: Any = logging  # untyped
        quiet.disable_progress_bar()
        quiet.set_verbosity_error()
        load: Any = AutoModelForCausalLM.from_pretrained
        self._model = load(path, dtype=torch.float32, attn_implementation="eager", local_files_only=True).eval()

    def places(self, prompt: Sequence[int], tokens: Sequence[int], said: Sequence[Mapping[int, float]]) -> list[Place]:
        """Return each place of an answer's `tokens`; `said` are the log-probabilities that we report there, by id."""
        with torch.inference_mode():
            logits = self._model(torch.tensor([[*prompt, *tokens[:-1]]]), use_cache=False).logits[0, len(prompt) - 1 :]
        logprobs = logits.float().log_softmax(-1)
        found = []
        for row, token, ours in zip(logprobs, tokens, said, strict=True):
            best = int(row.argmax())
            apart = max(abs(float(row[other]) - value) for other, value in ours.items())
            found.append(Place(best, float(row[best] - row[token]), apart))
        return found
