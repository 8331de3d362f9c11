from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from forebay.requests.step_plan import TokenLogprob
from forebay.runtime.sampling import prompt_logprobs
from forebay.runtime.sampling.logprobs import block_size, token_logprobs, unpack
from forebay.runtime.sampling.prompt_logprobs import PromptChunk, targets_of


def entries(logits: torch.Tensor, tokens: list[int], k: int, num_top: list[int]) -> list[TokenLogprob | None]:
    return unpack(token_logprobs(logits, torch.tensor(tokens), k).numpy(), tokens, num_top)


@settings(max_examples=80)
@given(
    vocab=st.sampled_from([1, 5, 97, 2000]),
    levels=st.sampled_from([1, 2, 4, 1000]),
    num_top=st.lists(st.integers(0, 20), min_size=1, max_size=5),
    seed=st.integers(0, 999),
)
def test_values_ranks_and_alternatives_are_those_of_a_sort(vocab, levels, num_top, seed):
    """Few levels make many ties: those come in the order of ids, however many the others in the batch ask for."""
    rng = np.random.default_rng(seed)
    x = (rng.integers(0, levels, (len(num_top), vocab)) - levels / 2).astype(np.float32) * 8 / levels
    tokens = rng.integers(0, vocab, len(num_top)).tolist()
    for i, entry in enumerate(entries(torch.from_numpy(x), tokens, max(num_top), num_top)):
        wide = x[i].astype(np.float64)
        logprobs = wide - wide.max() - np.log(np.exp(wide - wide.max()).sum())
        order = sorted(range(vocab), key=lambda token, row=wide: (-row[token], token))[: num_top[i]]
        assert entry is not None
        assert entry.token_id == tokens[i]
        assert entry.rank == 1 + int((wide > wide[tokens[i]]).sum())
        assert entry.logprob == pytest.approx(logprobs[tokens[i]], abs=1e-5)
        assert entry.top_ids == order
        assert entry.top_logprobs == pytest.approx(logprobs[order].tolist(), abs=1e-5)


@pytest.mark.parametrize("vocab", [97, 8193])
def test_a_rows_entry_is_the_same_in_any_batch(vocab):
    """By a bit: by itself, and beside rows that ask for more."""
    logits = torch.randn(17, vocab, generator=torch.Generator().manual_seed(1)).round(decimals=1)
    tokens = list(range(17))
    together = entries(logits, tokens, 20, [3] * 17)
    assert [entries(logits[i : i + 1], [i], 3, [3])[0] for i in range(17)] == together


def test_impossible_tokens_are_impossible_and_known():
    logits = torch.tensor([[0.0, float("-inf"), float("-inf")]])
    (entry,) = entries(logits, [1], 3, [3])
    assert entry == TokenLogprob(1, float("-inf"), 2, [0, 1, 2], [0.0, float("-inf"), float("-inf")])


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_position_that_is_not_finite_has_no_entry_and_changes_no_other(bad):
    logits = torch.randn(3, 97, generator=torch.Generator().manual_seed(2))
    clean = entries(logits, [1, 2, 3], 5, [5, 5, 5])
    for at in (0, 2, 96):
        poisoned = logits.clone()
        poisoned[1, at] = bad
        assert entries(poisoned, [1, 2, 3], 5, [5, 5, 5]) == [clean[0], None, clean[2]]
    poisoned[1] = float("-inf")
    assert entries(poisoned, [1, 2, 3], 5, [5, 5, 5]) == [clean[0], None, clean[2]]


@pytest.mark.parametrize(("vocab", "positions"), [(100, 256), (49_152, 42), (262_144, 8), (1 << 24, 1)])
def test_block_size_any_vocabulary_bounds_the_bytes_of_the_logits(vocab, positions):
    assert block_size(vocab) == positions


def test_prompt_logprobs_in_blocks_are_those_of_the_whole_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two chunks of the same step, one of which ends its prompt, in blocks of 2 and of 64 positions."""
    rng = np.random.default_rng(0)
    # Small integers: products are exact, whatever the shapes.
    hidden, weight = (torch.from_numpy(rng.integers(-3, 4, shape).astype(np.float32)) for shape in ((14, 6), (30, 6)))
    chunks = [
        PromptChunk(extend=0, first=1, num_tokens=5, targets=rng.integers(0, 30, 5), num_top=2),
        PromptChunk(extend=2, first=8, num_tokens=6, targets=rng.integers(0, 30, 5), num_top=0),
    ]
    targets = torch.from_numpy(targets_of(chunks))
    assert targets.tolist() == [*chunks[0].targets, *chunks[1].targets]

    def scored(positions: int) -> list[list[TokenLogprob | None]]:
        monkeypatch.setattr(prompt_logprobs, "block_size", lambda vocab: positions)
        found = prompt_logprobs.score(chunks, hidden, targets, lambda rows: rows @ weight.T, 30)
        assert [len(each.blocks) for each in found] == [-(-5 // positions)] * 2
        return [each.entries() for each in found]

    whole = scored(64)
    assert scored(2) == whole
    for chunk, listed in zip(chunks, whole, strict=True):
        logprobs = torch.log_softmax(hidden @ weight.T, dim=1)
        expected = [logprobs[chunk.first + i, token].item() for i, token in enumerate(chunk.targets.tolist())]
        assert [entry.logprob for entry in listed if entry] == pytest.approx(expected, abs=1e-5)
        assert [entry.token_id for entry in listed if entry] == chunk.targets.tolist()
        assert len(listed) == chunk.num_tokens
