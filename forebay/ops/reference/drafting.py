"""The ops of a draft head: what follows each of a step's tokens, a hidden state for each row, and the tokens it drafts.

Shape letters: T tokens, S sequences, R request rows, G most drafts of a row, H hidden size.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from forebay.ops.reference.accept import Known, by_token

_PAD: Final = 0  # the padding row


class DraftingOps:
    """Rows are [S] int32, `q_start` [S + 1] int32, as in `StepOps`."""

    def gather_rows(self, table: Tensor, rows: Tensor) -> Tensor:
        """table[rows]: table [R, H] -> [S, H]."""
        return table.index_select(0, rows)

    def scatter_rows(self, table: Tensor, rows: Tensor, values: Tensor) -> None:
        """table[rows] = values: table [R, H], values [S, H]. Either value may stay in a row that is named twice."""
        table.index_copy_(0, rows.long(), values)

    def clear_rows(self, table: Tensor, rows: Tensor, keep: Tensor) -> None:
        """table[row] = 0 of those rows [T] int64 that are not to `keep` [T] bool: table [L, ...]."""
        own = table.index_select(0, rows)
        kept = keep.view(-1, *(1,) * (table.dim() - 1))
        table.index_copy_(0, rows, torch.where(kept, own, torch.zeros_like(own)))

    def follow(
        self,
        input_ids: Tensor,
        positions: Tensor,
        rows: Tensor,
        q_start: Tensor,
        known: Known,
        vocab: int,
    ) -> tuple[Tensor, Tensor]:
        """Return the token behind each of a step's, [T] int64, and the last one of each sequence's that stay, [S]
        int32.

        input_ids [T] int64 are the step's, at positions [T]. The tokens that kv_lens counts stay, at least one of a
        sequence; behind the last of them comes last_tokens[row], and so it does behind a sequence's last token. An id
        that is no token of the vocabulary becomes 0. Of a sequence without tokens any is the last.
        """
        count = len(input_ids)
        if not count:
            return input_ids, torch.zeros_like(rows)
        seqs, _ = by_token(q_start, count)
        firsts = positions.index_select(0, q_start[:-1].clamp(max=count - 1))
        stay = (known.kv_lens.index_select(0, rows) - firsts).clamp(min=1)
        ends = q_start[:-1] + torch.minimum(stay, q_start.diff().long()) - 1
        tokens = torch.arange(count, device=rows.device)
        last = (tokens == ends.index_select(0, seqs)) | (tokens == (q_start[1:] - 1).index_select(0, seqs))
        sampled = known.last_tokens.index_select(0, rows.index_select(0, seqs))
        next_ids = torch.where(last, sampled, input_ids.roll(-1))
        next_ids = torch.where((next_ids >= 0) & (next_ids < vocab), next_ids, 0)
        return next_ids, ends.clamp(0, count - 1).int()

    def keep_drafts(self, ids: Tensor, rows: Tensor, counts: Tensor, column: int, draft_tokens: Tensor) -> Tensor:
        """Set draft_tokens[row, column] = id for the rows that draft more than `column` tokens -> the rows [S] that
        draft more than one more, PAD instead of others. ids [S] int64, draft_tokens [R, G] int64, counts [S] int32."""
        wanted = torch.where(counts > column, rows, _PAD).long()
        draft_tokens.index_put_((wanted, torch.full_like(wanted, column)), ids)
        return torch.where(counts > column + 1, rows, _PAD)
