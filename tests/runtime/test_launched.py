"""What a step's ids become on the host: those outside the vocabulary have failed, exactly those."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from forebay.memory.slots import PAD
from forebay.runtime.steps.launched import LaunchedStep

VOCAB = 5
OUTSIDE = [-2, -1, VOCAB, VOCAB + 1]


def launched(ids: list[int], **others: Any) -> LaunchedStep:
    values: dict[str, Any] = {"sample_mask": None, "sampling": None, "logprobs": None} | others
    return LaunchedStep(vocab_size=VOCAB, token_ids=SimpleNamespace(wait=lambda: np.array(ids)), **values)


@pytest.mark.parametrize("outside", OUTSIDE)
def test_step_samples_outside_the_vocabulary_fail_their_sequences(outside: int) -> None:
    assert launched([0, VOCAB - 1]).result().failed == ()
    result = launched([0, outside, VOCAB - 1, outside]).result()
    assert (result.token_ids, result.failed) == ([0, PAD, VOCAB - 1, PAD], (1, 3))


def test_step_sequences_that_do_not_sample_return_no_token() -> None:
    result = launched([1, 2, 3], sample_mask=np.array([True, False, True])).result()
    assert (result.token_ids, result.failed) == ([1, 3], ())


@pytest.mark.parametrize("outside", OUTSIDE)
def test_step_drafts_end_behind_the_first_id_outside_the_vocabulary(outside: int) -> None:
    """Ids behind those that count are not looked at; the first one outside counts, and fails its sequence."""
    lens = np.array([3, 2, 3])
    kept = launched([1, 2, outside, 3, 4, 0, 1, 2, *(2, 2, 3)], q_lens=lens).result()
    assert (kept.token_ids, kept.num_new, kept.failed) == ([1, 2, 3, 4, 0, 1, 2], [2, 2, 3], ())
    ended = launched([1, outside, 2, 3, 4, outside, 1, 2, *(3, 2, 3)], q_lens=lens).result()
    assert (ended.token_ids, ended.num_new, ended.failed) == ([1, PAD, 3, 4, PAD], [2, 2, 1], (0, 2))
