"""The one rule by which drafts are accepted: a draft must be the token that was chosen at its position, as without
drafts. So drafts change no token, drawn ones included.

Shape letters: T tokens, S sequences, R request rows, G most drafts of a row.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Known(NamedTuple):
    """The device's columns of its rows: how many tokens have KV, the one behind these, and the drafts behind that."""

    kv_lens: Tensor  # [R] int64
    last_tokens: Tensor  # [R] int64
    draft_tokens: Tensor  # [R, G] int64


def accept_drafts(
    token_ids: Tensor, finite: Tensor, positions: Tensor, rows: Tensor, q_start: Tensor, known: Known
) -> Tensor:
    """Compute `StepOps.accept`."""
    seqs, offsets = by_token(q_start, len(token_ids))
    drafts = drafts_at(known.draft_tokens, rows.index_select(0, seqs), offsets)
    before = (torch.arange(len(token_ids), device=rows.device) - 1).clamp(min=0)
    wrong = (offsets > 0) & ~(finite[before] & (token_ids[before] == drafts))
    # The first draft that is wrong ends its sequence, and what stands behind it counts no more.
    num_wrong = torch.zeros(len(token_ids) + 1, dtype=torch.int64, device=rows.device)
    torch.cumsum(wrong, 0, out=num_wrong[1:])
    accepted = num_wrong[1:] == num_wrong.index_select(0, q_start[:-1]).index_select(0, seqs)
    num_new = torch.zeros(len(rows), dtype=torch.int64, device=rows.device).index_add_(0, seqs, accepted.long())
    if len(token_ids):
        at, live, wide = (q_start[:-1] + num_new - 1).clamp(min=0), num_new > 0, rows.long()
        for table, values in ((known.last_tokens, token_ids[at]), (known.kv_lens, positions[at] + 1)):
            table.index_copy_(0, wide, torch.where(live, values, table[wide]))
    return num_new


def by_token(q_start: Tensor, num_tokens: int) -> tuple[Tensor, Tensor]:
    """Return the sequence of each token, and the number of the sequence's tokens before it [T]."""
    tokens = torch.arange(num_tokens, dtype=torch.int32, device=q_start.device)
    seqs = torch.searchsorted(q_start, tokens, right=True) - 1
    return seqs, tokens.long() - q_start.index_select(0, seqs)


def drafts_at(draft_tokens: Tensor, row_of_token: Tensor, offsets: Tensor) -> Tensor:
    """The draft that each token is [T]; -1 for a sequence's first, and for those that a row has no room for."""
    width = draft_tokens.shape[1]
    if width == 0:
        return torch.full_like(offsets, -1)
    found = draft_tokens.index_select(0, row_of_token).gather(1, (offsets - 1).clamp(0, width - 1).unsqueeze(1))
    return torch.where((offsets > 0) & (offsets <= width), found.squeeze(1), -1)
