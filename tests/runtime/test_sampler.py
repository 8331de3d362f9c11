"""The sampler against a plain one that sorts, on both kernel backends."""

from __future__ import annotations

from dataclasses import dataclass
from functools import reduce
from operator import or_

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from forebay.ops import Draws, Ops
from forebay.pools.request_rows import RequestRows
from forebay.requests.sampling_params import SamplingParams
from forebay.runtime.sampling.row_options import wants_of
from forebay.runtime.sampling.sampler import COLUMNS, Wants, draw, uniforms

VOCABS = [1, 97, 8193]
SLACK = 1e-5  # of a probability: float32 weights against the oracle's float64


@dataclass(frozen=True)
class Row:
    """One row's parameters; `table` puts several into request rows."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0

    def params(self) -> SamplingParams:
        return SamplingParams(
            temperature=self.temperature, top_k=self.top_k, top_p=self.top_p, min_p=self.min_p, seed=self.seed
        )


def table(rows: list[Row]) -> RequestRows:
    made = RequestRows(len(rows), 1)
    for i, row in enumerate(rows, start=1):
        for name, value in vars(row).items():
            made[name][i] = value
    return made


def sample(ops: Ops, logits: Tensor, rows: list[Row], position: int = 7, wants: Wants | None = None) -> list[int]:
    if wants is None:
        wants = Wants(0)
        for row in rows:
            wants |= wants_of(row.params())
    n = len(rows)
    ids = draw(ops, logits, torch.arange(1, n + 1), torch.full((n,), position), table(rows), wants)
    return ids.tolist()


def oracle(logits: Tensor, row: Row) -> tuple[np.ndarray, np.ndarray]:
    """Probabilities in float64 and the set that is kept, by sorting; ties with the least kept are kept."""
    x = logits.double().numpy()
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        scaled = np.where(x == x.max(), 0.0, (x - x.max()) / max(row.temperature, 1e-38))
        p = np.exp(scaled)
    p /= p.sum()
    least, ranked = 0.0, np.sort(p)[::-1]
    if row.top_k:
        least = ranked[min(row.top_k, len(p)) - 1]
    if row.top_p < 1:
        left = ranked[ranked >= least]
        sums = left.cumsum()
        least = left[min(np.searchsorted(sums, np.float32(row.top_p) * sums[-1]), len(left) - 1)]
    least = max(least, row.min_p * p.max())
    return p, p >= least


def frequencies(ops: Ops, logits: Tensor, row: Row, count: int) -> np.ndarray:
    """How often each token comes in `count` draws of one row's distribution."""
    rows = RequestRows(1, 1)
    for name, value in vars(row).items():
        rows[name][1] = value
    ones = torch.ones(count, dtype=torch.int64)
    ids = draw(ops, logits.expand(count, -1).contiguous(), ones, torch.arange(count), rows, wants_of(row.params()))
    return np.bincount(ids.numpy(), minlength=len(logits))


def distinct(vocab: int, seed: int, scale: float = 3.0) -> Tensor:
    """Logits of which no two are so close that rounding could order them otherwise."""
    generator = torch.Generator().manual_seed(seed)
    return torch.linspace(-scale, scale, vocab)[torch.randperm(vocab, generator=generator)]


ROWS = st.builds(
    Row,
    temperature=st.sampled_from([0.05, 0.5, 1.0, 3.0, 100.0]),
    top_k=st.sampled_from([0, 1, 2, 40, 96, 97, 98, 600, 2049, 8193, 2**31 - 1]),
    top_p=st.sampled_from([1e-30, 1e-3, 0.1, 0.5, 0.9, 0.999, 1.0]),
    min_p=st.sampled_from([0.0, 1e-6, 0.05, 0.7, 1.0]),
    seed=st.integers(0, 2**63 - 1),
)


@pytest.mark.quick(1)
@settings(max_examples=80)
@given(row=ROWS, vocab=st.sampled_from(VOCABS), seed=st.integers(0, 99), position=st.integers(1, 2**20))
def test_the_token_is_where_the_oracles_running_sum_passes_the_random_number(ops, row, vocab, seed, position):
    logits = distinct(vocab, seed)
    (token,) = sample(ops, logits.unsqueeze(0), [row], position)
    p, kept = oracle(logits, row)
    assert kept[token] or np.isclose(p[token], p[kept].min(), rtol=SLACK, atol=0)
    sums = np.where(kept, p, 0).cumsum() / p[kept].sum()
    aim = float(uniforms(torch.tensor([row.seed]), torch.tensor([position])))
    # The kept set may differ by one token at its border, whose weight then moves all sums.
    slack = SLACK + (p[kept].min() / p[kept].sum())
    assert (sums[token - 1] if token else 0) - slack <= aim <= sums[token] + slack


@pytest.mark.quick(1)
@settings(max_examples=6)
@given(
    top_k=st.integers(0, 120),
    top_p=st.sampled_from([1e-45, 0.2, 0.55, 1.0]),
    min_p=st.sampled_from([0.0, 0.3]),
    seed=st.integers(0, 99),
)
def test_exactly_the_oracles_tokens_can_come(ops, top_k, top_p, min_p, seed):
    row = Row(top_k=top_k, top_p=top_p, min_p=min_p, seed=seed)
    logits = distinct(97, seed, scale=1.0)
    _, kept = oracle(logits, row)
    grid = (torch.arange(400).double() + 0.5) / 400
    columns = [torch.full((400,), value) for value in (row.top_k, row.top_p, row.min_p)]
    came = ops.sampling.sample_rows(
        logits.expand(400, -1).contiguous(), Draws(grid, torch.ones(400), *columns)
    ).unique()
    assert set(came.tolist()) == set(np.flatnonzero(kept).tolist())


@pytest.mark.parametrize("vocab", [97, 8193])
@pytest.mark.parametrize(("top_k", "top_p"), [(1, 1.0), (3, 1.0), (0, 0.01), (2, 0.5), (0, 1e-45), (0, 1e-60)])
def test_ties_at_the_cut_all_stay_and_nothing_else(ops, vocab, top_k, top_p):
    logits = torch.zeros(vocab)
    best = [3, vocab // 2, vocab - 1, 50]
    logits[best] = 20.0
    counts = frequencies(ops, logits, Row(top_k=top_k, top_p=top_p), 200)
    assert np.flatnonzero(counts).tolist() == sorted(best)


@pytest.mark.parametrize("vocab", [97, 8193])
def test_a_flat_distribution_is_kept_whole_by_any_cut(ops, vocab):
    for row in (Row(top_k=1), Row(top_p=0.3), Row(min_p=1.0), Row(top_k=5, top_p=0.5, min_p=0.9)):
        counts = frequencies(ops, torch.full((vocab,), -2.5), row, 40)
        assert (counts > 0).sum() > 20


@pytest.mark.parametrize("top_k", [97, 98, 10_000, 2**31 - 1])
def test_a_top_k_of_the_whole_vocabulary_or_more_changes_nothing(ops, top_k):
    logits = distinct(97, 5).expand(300, -1).contiguous()
    plain = [Row(seed=seed) for seed in range(300)]
    limited = [Row(seed=seed, top_k=top_k) for seed in range(300)]
    assert sample(ops, logits, limited) == sample(ops, logits, plain)


@pytest.mark.parametrize("temperature", [2e-5, 1e-8, 1e-37, 1e-45, 1e-300])
def test_a_tiny_temperature_is_greedy(ops, temperature):
    logits = distinct(8193, 1)
    rows = [Row(temperature=temperature, seed=seed) for seed in range(20)]
    assert sample(ops, logits.expand(20, -1).contiguous(), rows) == [int(logits.argmax())] * 20


def test_tokens_that_are_impossible_never_come(ops):
    logits = distinct(97, 2)
    logits[::2] = float("-inf")
    counts = frequencies(ops, logits, Row(temperature=100.0), 1000)
    assert (counts[::2] == 0).all()
    assert (counts[1::2] > 0).all()


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_row_that_is_not_finite_gives_token_zero_and_changes_no_other(ops, bad):
    logits = torch.stack([distinct(8193, seed) for seed in range(3)])
    rows = [Row(seed=1, top_k=9), Row(seed=2, top_p=0.7), Row(seed=3, min_p=0.2)]
    clean = sample(ops, logits, rows)
    for at in (0, 4000, 8192):
        poisoned = logits.clone()
        poisoned[1, at] = bad
        assert sample(ops, poisoned, rows) == [clean[0], 0, clean[2]]
    poisoned[1] = float("-inf")
    assert sample(ops, poisoned, rows) == [clean[0], 0, clean[2]]


@pytest.mark.parametrize(
    "row",
    [Row(), Row(temperature=0.5), Row(top_k=20), Row(top_p=0.8), Row(min_p=0.1), Row(0.8, 40, 0.9, 0.02)],
    ids=str,
)
def test_frequencies_are_those_of_the_distribution(ops, row):
    """Chi-square: with n - 1 degrees of freedom it is below n - 1 + 5 sqrt(2 (n - 1)) but once in 100,000 times."""
    logits, count = distinct(97, 11), 20_000 if ops.name.startswith("native") else 1000
    p, kept = oracle(logits, row)
    expected = np.where(kept, p, 0) / p[kept].sum() * count
    observed = frequencies(ops, logits, row, count)
    often = expected >= 5
    rest_observed, rest_expected = observed[~often].sum(), expected[~often].sum()
    chi2 = ((observed[often] - expected[often]) ** 2 / expected[often]).sum()
    chi2 += (rest_observed - rest_expected) ** 2 / max(rest_expected, 1.0)
    freedom = often.sum()
    assert chi2 < freedom + 5 * np.sqrt(2 * freedom)


@pytest.mark.parametrize("vocab", [97, 8193])
def test_a_rows_token_depends_on_that_row_alone(ops, vocab):
    """C28: by itself, in any order, among any others, and whatever those others want."""
    generator = np.random.default_rng(vocab)
    num_rows = 20  # more than one block of the reference
    logits = torch.stack([distinct(vocab, seed, scale=1 + seed % 7) for seed in range(num_rows)])
    rows = [
        Row(
            temperature=float(generator.choice([0.3, 1.0, 2.0])),
            top_k=int(generator.choice([0, 5, 3000])),
            top_p=float(generator.choice([0.4, 0.95, 1.0])),
            min_p=float(generator.choice([0.0, 0.01])),
            seed=seed,
        )
        for seed in range(num_rows)
    ]
    together = sample(ops, logits, rows)
    assert [sample(ops, logits[i : i + 1], [row])[0] for i, row in enumerate(rows)] == together
    everything = reduce(or_, COLUMNS.values())
    assert [sample(ops, logits[i : i + 1], [row], wants=everything)[0] for i, row in enumerate(rows)] == together
    order = generator.permutation(num_rows)
    shuffled = sample(ops, logits[torch.from_numpy(order)].contiguous(), [rows[i] for i in order])
    assert shuffled == [together[i] for i in order]


def test_nobody_draws_nothing(ops):
    assert sample(ops, torch.empty(0, 97), [], wants=Wants.DRAW) == []


def test_uniforms_lie_in_the_unit_interval_and_fill_it():
    seeds = torch.tensor([0, 1, 2**63 - 1, 2**62]).repeat_interleave(5000)
    drawn = uniforms(seeds, torch.arange(5000).repeat(4)).view(4, 5000)
    assert drawn.min() >= 0
    assert drawn.max() < 1
    for row in drawn:
        counts = row.histc(20, 0, 1)
        assert ((counts - 250) ** 2 / 250).sum() < 19 + 5 * (2 * 19) ** 0.5
        assert abs(np.corrcoef(row[1:], row[:-1])[0, 1]) < 0.07


def test_uniforms_differ_for_each_seed_and_position():
    seeds, positions = torch.meshgrid(torch.arange(200), torch.arange(300), indexing="ij")
    drawn = uniforms(seeds.flatten(), positions.flatten())
    assert len(drawn.unique()) == 200 * 300
    assert torch.equal(drawn, uniforms(seeds.flatten(), positions.flatten()))


def test_the_largest_random_number_is_below_one():
    """53 bits: the largest is 1 - 2^-53, which float32 would round up to 1."""
    assert float(torch.tensor(2**53 - 1).double() * 2.0**-53) < 1.0
