"""Where tokens stand, what they are, and what is accepted, against loops over them."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor

from forebay.ops import Ops
from forebay.ops.reference.accept import Known
from forebay.ops.reference.steps import Pages
from tests.together import together

pytestmark = pytest.mark.quick(12)

NUM_ROWS, PAGES, PAGE_SIZE, VOCAB = 7, 5, 4, 50
END = PAGES * PAGE_SIZE
WIDTHS = [0, 1, 3]


class Rows(NamedTuple):
    """A step's sequences and the tables that it finds, made of a seed; sequences of the padding row stand last."""

    rows: Tensor
    q_start: Tensor
    kv_lens: Tensor
    pages: Pages
    draft_tokens: Tensor
    last_tokens: Tensor

    @property
    def num_tokens(self) -> int:
        return int(self.q_start[-1])


def step_of(seed: int, *, width: int = 3) -> Rows:
    rng = np.random.default_rng(seed)
    num_seqs, padded = int(rng.integers(0, NUM_ROWS)), int(rng.integers(0, 3))
    q_lens = rng.integers(1, width + 2, num_seqs).tolist() + [int(rng.integers(0, 9)), 0][:padded]
    table = torch.from_numpy(rng.integers(1, 90, (NUM_ROWS + 1, PAGES))).int()
    table[0] = 0
    drafts = torch.from_numpy(rng.integers(0, VOCAB, (NUM_ROWS + 1, width)))
    drafts[torch.from_numpy(rng.random((NUM_ROWS + 1, width)) < 0.2)] = -1
    drafts[torch.from_numpy(rng.random((NUM_ROWS + 1, width)) < 0.1)] = VOCAB
    rows = [*(rng.permutation(NUM_ROWS)[:num_seqs] + 1).tolist(), *[0] * padded]
    return Rows(
        torch.tensor(rows, dtype=torch.int32),
        torch.tensor([0, *np.cumsum(q_lens)], dtype=torch.int32),
        torch.from_numpy(rng.integers(0, END - width, NUM_ROWS + 1)),
        Pages(table, PAGE_SIZE),
        drafts,
        torch.from_numpy(rng.integers(0, VOCAB, NUM_ROWS + 1)),
    )


def sequences(step: Rows) -> list[tuple[int, range]]:
    """The row of each, and which of the tokens are its."""
    bounds = step.q_start.tolist()
    return [(row, range(bounds[i], bounds[i + 1])) for i, row in enumerate(step.rows.tolist())]


@together("seed", range(30))
def test_tokens_stand_behind_what_their_rows_have(each_ops: Ops, seed: int) -> None:
    step = step_of(seed)
    table = step.pages.table
    placed = each_ops.steps.place_tokens(step.rows, step.q_start, step.kv_lens, step.pages, step.num_tokens)
    positions, lens, locations = [], [], []
    for row, tokens in sequences(step):
        start = int(step.kv_lens[row]) if row else 0
        lens.append(start + len(tokens))
        for position in range(start, start + len(tokens)) if row else [0] * len(tokens):
            page = int(table[row, position // PAGE_SIZE])
            positions.append(position)
            locations.append(page * PAGE_SIZE + position % PAGE_SIZE)
    assert placed.positions.tolist() == positions
    assert placed.seq_lens.tolist() == lens
    assert placed.out_cache_loc.tolist() == locations
    assert [tensor.dtype for tensor in placed] == [torch.int64, torch.int32, torch.int64]


@pytest.mark.parametrize("has_given", [False, True])
@together("seed", range(20))
def test_rope_positions_are_given_or_follow_from_the_rows_delta(each_ops: Ops, seed: int, has_given: bool) -> None:
    """C13: a padded token belongs to row 0, whose delta is 0."""
    step, rng = step_of(seed), np.random.default_rng(seed)
    positions = torch.from_numpy(rng.integers(0, END, step.num_tokens))
    deltas = torch.from_numpy(rng.integers(-END, 1, NUM_ROWS + 1))
    deltas[0] = 0
    given = torch.from_numpy(rng.integers(0, END, (step.num_tokens, 3)))
    given[torch.from_numpy(rng.random(step.num_tokens) < 0.5)] = -1
    found = each_ops.steps.rope_positions(positions, given if has_given else None, step.rows, step.q_start, deltas)
    expected = [
        given[t].tolist() if has_given and given[t, 0] >= 0 else [max(0, int(positions[t] + deltas[row]))] * 3
        for row, tokens in sequences(step)
        for t in tokens
    ]
    assert found.T.tolist() == expected
    assert found.is_contiguous()


@pytest.mark.parametrize("count", [0, 1, 9, 300])
@together("seed", range(10))
def test_map_locations_pages_move_and_offsets_stay(each_ops: Ops, count: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    page_map = torch.from_numpy(rng.integers(0, 9, 90)).int()
    page_map[0] = 5  # page 0 is padding in every cache, whatever the map says
    loc = torch.from_numpy(rng.integers(0, 90 * PAGE_SIZE, count))
    mapped = each_ops.steps.map_locations(loc, page_map, PAGE_SIZE)
    pages = [int(page_map[at // PAGE_SIZE]) if at >= PAGE_SIZE else 0 for at in loc.tolist()]
    assert mapped.tolist() == [page * PAGE_SIZE + at % PAGE_SIZE for page, at in zip(pages, loc.tolist(), strict=True)]
    assert mapped.dtype == torch.int64


@pytest.mark.parametrize("length", [END - 1, END, END + 1, 2**40, -1, -(2**40)])
def test_a_length_beyond_the_page_table_leads_nowhere(each_ops: Ops, length: int) -> None:
    """Reads end with the table, and writes go to page 0; positions have an angle."""
    step = step_of(5)
    kv_lens = torch.full_like(step.kv_lens, length)
    placed = each_ops.steps.place_tokens(step.rows, step.q_start, kv_lens, step.pages, step.num_tokens)
    for i, (row, tokens) in enumerate(sequences(step)):
        assert len(tokens) <= placed.seq_lens[i] <= END
        start = min(max(length, 0), END) if row else 0
        for j, t in enumerate(tokens):
            assert placed.positions[t] == (min(start + j, END - 1) if row else 0)
            if start + j >= END:
                assert placed.out_cache_loc[t] < PAGE_SIZE


@together("seed", range(10))
def test_rows_come_further_by_all_of_a_steps_tokens(each_ops: Ops, seed: int) -> None:
    step = step_of(seed)
    expected = step.kv_lens.tolist()
    for row, tokens in sequences(step):
        expected[row] += len(tokens)
    each_ops.steps.advance(step.kv_lens, step.rows, step.q_start)
    assert step.kv_lens.tolist()[1:] == expected[1:]


def test_a_snapshot_is_due_at_its_length_alone(each_ops: Ops) -> None:
    positions = torch.tensor([4, 5, 6, 9])
    ends = torch.tensor([1, 2, 3, 4, 4, 0], dtype=torch.int32)
    lens = torch.tensor([5, 5, 7, 10, 9, 0])
    slots = torch.tensor([3, 4, 5, 6, 7, 8], dtype=torch.int32)
    due = each_ops.steps.due(slots, ends, lens, positions)
    assert due.tolist() == [3, 0, 5, 6, 0, 0]
    assert due.dtype == torch.int32
    assert each_ops.steps.due(slots[:0], ends[:0], lens[:0], positions[:0]).tolist() == []


@pytest.mark.parametrize("width", WIDTHS)
@together("seed", range(8))
def test_decodes_compute_their_last_token_and_drafts_that_are_tokens(each_ops: Ops, seed: int, width: int) -> None:
    step = step_of(seed, width=width)
    known_rows = Known(step.kv_lens, step.last_tokens, step.draft_tokens)
    ids = each_ops.steps.decode_ids(step.rows, step.q_start, known_rows, step.num_tokens, VOCAB).tolist()
    for row, tokens in sequences(step):
        known = [int(step.last_tokens[row]), *step.draft_tokens[row].tolist()]
        known = [token if 0 <= token < VOCAB else 0 for token in known] + [0] * 9
        assert [ids[t] for t in tokens] == known[: len(tokens)]


@pytest.mark.parametrize("width", WIDTHS)
@together("seed", range(25))
def test_drafts_are_accepted_while_they_are_what_was_chosen_before_them(each_ops: Ops, seed: int, width: int) -> None:
    """C17: said again with other tokens, it is as if it had been said so at once."""
    rng, step = np.random.default_rng(seed), step_of(seed, width=width)
    placed = Ops(1).steps.place_tokens(step.rows, step.q_start, step.kv_lens, step.pages, step.num_tokens)
    token_ids = torch.from_numpy(rng.integers(0, VOCAB, step.num_tokens))
    finite = torch.from_numpy(rng.random(step.num_tokens) < 0.9)
    for row, tokens in sequences(step):
        for j, t in enumerate(tokens[:-1]):
            if j < width and rng.random() < 0.8 and 0 <= step.draft_tokens[row, j] < VOCAB:
                token_ids[t] = step.draft_tokens[row, j]
    token_ids[~finite] = 0  # as argmax leaves it
    known = Known(step.kv_lens.clone(), step.last_tokens.clone(), step.draft_tokens)
    last, lens = known.last_tokens.tolist(), known.kv_lens.tolist()
    expected = []
    for row, tokens in sequences(step):
        drafts = step.draft_tokens[row].tolist()
        num_new = min(1, len(tokens))
        while 0 < num_new < len(tokens) and num_new <= width:
            before = tokens[num_new - 1]
            if not finite[before] or token_ids[before] != drafts[num_new - 1]:
                break
            num_new += 1
        expected.append(num_new)
        if num_new:
            last[row] = int(token_ids[tokens[num_new - 1]])
            lens[row] += num_new
    for ids in (torch.zeros_like(token_ids), token_ids):
        chosen = (ids, finite, placed.positions)
        num_new = each_ops.steps.accept(*chosen, step.rows, step.q_start, known)
    assert num_new.tolist() == expected
    assert known.last_tokens.tolist()[1:] == last[1:]
    assert known.kv_lens.tolist()[1:] == lens[1:]


def test_what_is_no_token_is_never_accepted(each_ops: Ops) -> None:
    """Not even where nothing could be chosen, whatever stands there instead."""
    rows, q_start = torch.tensor([1, 2], dtype=torch.int32), torch.tensor([0, 3, 6], dtype=torch.int32)
    drafts = torch.tensor([[0, 0], [0, -1], [-1, -1]])
    token_ids = torch.tensor([0, -1, 5, -1, -1, -1])
    finite = torch.tensor([True, False, True, False, False, False])
    last_tokens, kv_lens = torch.zeros(3, dtype=torch.int64), torch.zeros(3, dtype=torch.int64)
    num_new = each_ops.steps.accept(
        token_ids, finite, torch.arange(6), rows, q_start, Known(kv_lens, last_tokens, drafts)
    )
    assert num_new.tolist() == [2, 1]
    assert kv_lens.tolist() == [0, 2, 4]


@pytest.mark.parametrize("rows", [[], [3], [2, 5, 1], [0, 4, 0]])
def test_tokens_are_read_and_written_by_row(each_ops: Ops, rows: list[int]):
    table, which = torch.arange(7) * 10, torch.tensor(rows, dtype=torch.int32)
    assert each_ops.steps.gather(table, which).tolist() == [10 * row for row in rows]
    each_ops.steps.scatter(table, which, torch.arange(len(rows)) + 100)
    for row in range(7):
        written = [100 + i for i, other in enumerate(rows) if other == row]
        assert int(table[row]) in (written or [10 * row])
