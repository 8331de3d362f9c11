"""The ops around the model: the places of a step's tokens, their ids, and the progress of their rows.

Lengths are the device's to know: `kv_lens` says by request row how many tokens have KV, and a step computes all else
from it.

Shape letters: T tokens, S sequences, N snapshots, R request rows, P pages per row, G most drafts of a row.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import torch
from torch import Tensor

from forebay.ops.reference.accept import Known, accept_drafts, by_token, drafts_at

_PAD: Final = 0  # the padding row, page and slot


class Pages(NamedTuple):
    """`table` names the pages of each row."""

    table: Tensor  # [R, P] int32
    page_size: int


class Placement(NamedTuple):
    """The places of a step's tokens, and the lengths of their sequences with all of them."""

    positions: Tensor  # [T] int64
    seq_lens: Tensor  # [S] int32
    out_cache_loc: Tensor  # [T] int64


class StepOps:
    """Rows are [S] int32, `q_start` [S + 1] int32: sequence i has tokens q_start[i]..q_start[i + 1], which may be none.
    Of a row that is named twice (the padding row) either's value may stay."""

    def accept(
        self, token_ids: Tensor, finite: Tensor, positions: Tensor, rows: Tensor, q_start: Tensor, known: Known
    ) -> Tensor:
        """Return how many tokens each sequence has got: its accepted drafts and the token behind them -> [S] int64.

        Sequence i (rows [S] int32, q_start [S + 1] int32) computed the row's last token and its first drafts, at
        positions [T] int64; behind each of them token_ids [T] int64 were chosen, or nothing if not `finite` [T] bool. A
        draft is accepted if it is the token chosen before it and all drafts before it are accepted. The last of the
        sequence's tokens becomes last_tokens[row], and kv_lens[row] ends with the last accepted draft. Both are
        computed from the whole step, so the call may be repeated with other token_ids. Rows without a token do not
        change.
        """
        return accept_drafts(token_ids, finite, positions, rows, q_start, known)

    def gather(self, table: Tensor, rows: Tensor) -> Tensor:
        """table[rows]: table [R] int64 -> [S] int64."""
        return table.index_select(0, rows)

    def scatter(self, table: Tensor, rows: Tensor, values: Tensor) -> None:
        """table[rows] = values: table [R] and values [S] int64."""
        table.index_copy_(0, rows.long(), values)

    def of_tokens(self, table: Tensor, rows: Tensor, q_start: Tensor, num_tokens: int) -> Tensor:
        """Return the entry of each token's row, [T] int32: table [R] int32."""
        seqs, _ = by_token(q_start, num_tokens)
        return table.index_select(0, rows.index_select(0, seqs))

    def rope_positions(
        self, positions: Tensor, given: Tensor | None, rows: Tensor, q_start: Tensor, deltas: Tensor
    ) -> Tensor:
        """Return the temporal, vertical and horizontal rotary positions of a step's tokens, [3, T] int64: those `given`
        [T, 3] int64, or instead of a negative one the position [T] int64 plus the delta of the token's row.

        deltas [R] int64 are at most 0, and no position becomes less. `given` None: all are negative.
        """
        seqs, _ = by_token(q_start, len(positions))
        delta = deltas.index_select(0, rows.index_select(0, seqs))
        computed = (positions + delta).clamp(min=0).expand(3, -1)
        return (computed if given is None else torch.where(given.T < 0, computed, given.T)).contiguous()

    def place_tokens(self, rows: Tensor, q_start: Tensor, kv_lens: Tensor, pages: Pages, num_tokens: int) -> Placement:
        """Place the `num_tokens` tokens, which are q_start's last, behind the kv_lens [R] int64 tokens of their rows.

        For any values of kv_lens, all results are inside the pools: positions end with the table, and locations beyond
        it are in page 0. Of the padding row positions and locations are 0, and it has no tokens but the step's.
        """
        end = pages.table.shape[1] * pages.page_size
        seqs, offsets = by_token(q_start, num_tokens)
        starts = torch.where(rows == _PAD, 0, kv_lens.index_select(0, rows).clamp(0, end))
        positions = starts.index_select(0, seqs) + offsets
        row_of_token = rows.index_select(0, seqs).long()
        columns = (positions // pages.page_size).clamp(max=pages.table.shape[1] - 1)
        page_ids = torch.where(positions < end, pages.table[row_of_token, columns], _PAD)
        inside = positions % pages.page_size
        real = row_of_token != _PAD

        return Placement(
            positions=torch.where(real, positions.clamp(max=end - 1), 0),
            seq_lens=(starts + q_start.diff()).clamp(max=end).int(),
            out_cache_loc=torch.where(real, page_ids.long() * pages.page_size + inside, 0),
        )

    def map_locations(self, loc: Tensor, page_map: Tensor, page_size: int) -> Tensor:
        """Return the locations, in a cache that keeps page p as page page_map[p], of tokens at loc [T] int64; page_map
        [pages + 1] int32. Page 0 is page 0 there too."""
        pages, inside = loc // page_size, loc % page_size
        return torch.where(pages == _PAD, _PAD, page_map[pages].long()) * page_size + inside

    def due(self, slots: Tensor, ends: Tensor, lens: Tensor, positions: Tensor) -> Tensor:
        """Return which snapshots are taken: slots [N] int32 if the state behind token ends - 1 (ends [N] int32) is that
        of lens [N] int64 tokens, PAD otherwise; positions [T] are those of the tokens."""
        at = positions.index_select(0, (ends - 1).clamp(min=0)) if len(positions) else lens - 1
        return torch.where(at + 1 == lens, slots, _PAD)

    def accepted_stops(
        self,
        q_start: Tensor,
        num_new: Tensor,
        positions: Tensor,
        written: Tensor,
        snapshot_lens: Tensor,
        snapshot_slots: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the token before which the first num_new [S] int64 tokens of each sequence stop, [S] int32: the
        sequence's first if its state is `written` [S] int32, to a slot that is not PAD. And for the requested states
        behind snapshot_lens [S] int64 tokens: behind which of the T tokens each is, exclusive, and snapshot_slots [S]
        int32, PAD if the tokens that stay do not reach it. positions [T] are those of the tokens."""
        first = q_start[:-1]
        if not len(positions):
            return first, first, torch.zeros_like(snapshot_slots)
        wished = snapshot_lens - positions[first.clamp(max=len(positions) - 1).long()]
        come_to = (wished > 0) & (wished <= num_new)
        stops = torch.where(written == _PAD, first + num_new.int(), first)
        return stops, first + wished.int(), torch.where(come_to, snapshot_slots, _PAD)

    def advance(self, kv_lens: Tensor, rows: Tensor, q_start: Tensor) -> None:
        """kv_lens[rows] += the number of each sequence's tokens."""
        kv_lens.index_add_(0, rows, q_start.diff().long())

    def decode_ids(self, rows: Tensor, q_start: Tensor, known: Known, num_tokens: int, vocab: int) -> Tensor:
        """Return the ids that decodes compute, [T] int64: of each row its last token, then its first drafts. An id that
        is no token of the vocabulary becomes 0."""
        seqs, offsets = by_token(q_start, num_tokens)
        row_of_token = rows.index_select(0, seqs)
        ids = known.last_tokens.index_select(0, row_of_token)
        drafts = drafts_at(known.draft_tokens, row_of_token, offsets)
        ids = torch.where(offsets == 0, ids, drafts)
        return torch.where((ids >= 0) & (ids < vocab), ids, 0)
