"""What follows a step's tokens, and the tokens that a head drafts: by hand, and native as in torch."""

from __future__ import annotations

import torch

from forebay.ops.reference.accept import Known
from tests.together import together

PAD, VOCAB, NUM_ROWS = 0, 50, 9


def ints(*values: int) -> torch.Tensor:
    return torch.tensor(values)


def known(last_tokens: torch.Tensor, kv_lens: torch.Tensor) -> Known:
    return Known(kv_lens, last_tokens, torch.zeros(NUM_ROWS, 0, dtype=torch.int64))


def test_behind_each_token_stands_the_next_one_and_behind_the_last_that_stays_what_was_sampled(each_ops):
    """A decode of which two of four tokens stay, a whole chunk, and a token alone."""
    last_tokens, kv_lens = torch.zeros(NUM_ROWS, dtype=torch.int64), torch.zeros(NUM_ROWS, dtype=torch.int64)
    last_tokens[[3, 1, 7]], kv_lens[[3, 1, 7]] = ints(33, 11, 17), ints(12, 3, 1)
    next_ids, ends = each_ops.drafting.follow(
        ints(20, 21, 22, 23, 4, 5, 6, 9),
        ints(10, 11, 12, 13, 0, 1, 2, 0),
        ints(3, 1, 7).int(),
        ints(0, 4, 7, 8).int(),
        known(last_tokens, kv_lens),
        VOCAB,
    )
    assert next_ids.tolist() == [21, 33, 23, 33, 5, 6, 11, 17]
    assert ends.tolist() == [1, 6, 7]


def test_what_is_no_token_follows_as_token_zero(each_ops):
    last_tokens = torch.full((NUM_ROWS,), 10**12)
    for ids in (ints(-1, -7), ints(VOCAB, 2**40)):
        bounds = ints(0, 2).int()
        rows = known(last_tokens, torch.full((NUM_ROWS,), 6))
        next_ids, _ = each_ops.drafting.follow(ids, ints(4, 5), ints(2).int(), bounds, rows, VOCAB)
        assert next_ids.tolist() == [0, 0]


def test_lengths_that_are_not_true_stay_inside_the_step(each_ops):
    for length in (-(2**40), 0, 3, 2**40):
        kv_lens = torch.full((NUM_ROWS,), length)
        batch = ints(2, 5).int(), ints(0, 2, 3).int()
        rows = known(torch.ones(NUM_ROWS).long(), kv_lens)
        _, ends = each_ops.drafting.follow(ints(1, 2, 3), ints(4, 5, 9), *batch, rows, VOCAB)
        assert 0 <= ends[0] < 2
        assert ends[1] == 2


def test_each_row_keeps_as_many_drafts_as_it_wants(each_ops):
    draft_tokens = torch.full((NUM_ROWS, 3), -5)
    rows, counts = ints(4, 2, 8, PAD).int(), ints(3, 1, 2, 0).int()
    left = rows
    for column in range(3):
        left = each_ops.drafting.keep_drafts(ints(10, 20, 30, 40) + column, left, counts, column, draft_tokens)
    assert draft_tokens[[4, 2, 8]].tolist() == [[10, 11, 12], [20, -5, -5], [30, 31, -5]]
    assert left.tolist() == [PAD] * 4
    assert (draft_tokens[[1, 3, 5, 6, 7]] == -5).all()


def test_rows_are_moved_as_they_are(each_ops, dtype):
    table = torch.randn(NUM_ROWS, 12, generator=torch.Generator().manual_seed(0)).to(dtype)
    rows = ints(3, 1, 3, 8).int()
    assert torch.equal(each_ops.drafting.gather_rows(table, rows), table[rows.long()])
    values = torch.randn(3, 12).to(dtype)
    expected = table.clone()
    expected[[5, 0, 2]] = values
    each_ops.drafting.scatter_rows(table, ints(5, 0, 2).int(), values)
    assert torch.equal(table, expected)


def test_rows_become_zeros_where_they_are_not_to_stay(each_ops, dtype):
    table = torch.randn(NUM_ROWS, 2, 3).to(dtype)
    expected = table.clone()
    expected[[5, 8]] = 0
    each_ops.drafting.clear_rows(table, ints(3, 5, PAD, 8), torch.tensor([True, False, True, False]))
    assert torch.equal(table, expected)


@together("seed", range(20))
def test_native_ops_follow_as_torch_does(native, reference, seed):
    """Ragged sequences, some without tokens, rows with any lengths."""
    generator = torch.Generator().manual_seed(seed)

    def random(low: int, high: int, *shape: int) -> torch.Tensor:
        return torch.randint(low, high, shape, generator=generator)

    num_seqs = seed % 7
    counts = random(0, 5, num_seqs)
    q_start = torch.cat([counts.new_zeros(1), counts.cumsum(0)]).int()
    num_tokens, rows = int(q_start[-1]), random(0, NUM_ROWS, num_seqs).int()
    of_rows = known(random(-3, VOCAB + 3, NUM_ROWS), random(0, 30, NUM_ROWS))
    step = random(-3, VOCAB + 3, num_tokens), random(0, 30, num_tokens), rows, q_start
    (ids, ends), (expected_ids, expected_ends) = (
        made.drafting.follow(*step, of_rows, VOCAB) for made in (native, reference)
    )
    assert torch.equal(ids, expected_ids)
    if num_tokens:
        assert torch.equal(ends, expected_ends)
