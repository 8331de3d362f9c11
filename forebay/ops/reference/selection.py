"""The selection of tokens that sparse attention reads: the ops of every backend, and their definition in torch.

Shape letters: T tokens, S sequences, Hi heads of the indexer, Di their size, L token locations, N tokens that are
selected at most.
"""

from __future__ import annotations

from typing import Final

import torch
import torch.nn.functional as F
from torch import Tensor

from forebay.ops.reference.accept import by_token
from forebay.ops.reference.attention import KvCache, PagedKv, keys_of, visible_keys

_QUERIES: Final = 64  # that are scored at once


class SelectionOps:
    """An indexer's choice of the best tokens, and the pages that attention reads of them."""

    def select_tokens(
        self, q: Tensor, weights: Tensor, keys: KvCache, paged: PagedKv, top_k: int
    ) -> tuple[Tensor, Tensor]:
        """Select the `top_k` best tokens that each query sees -> positions [T, N] int32, ascending and -1 behind them,
        and counts [T] int32. N is `top_k`, or what a row of the page table holds if that is less.

        q [T, Hi, Di]; weights [T, Hi] float32, or [1, Hi] for all tokens; keys.k [L, 1, Di]. The score of a key k is
        the sum over heads of weight * max(0, q . k), in float32; of equal scores the earlier position is better, and
        NaN counts as infinity. A query whose own key is not finite, so NaN as it is kept, selects nothing, which makes
        its attention NaN; so does one whose score of itself is NaN, if it sees more than `top_k` tokens. Scores are
        computed for some queries at a time: there is no [T, context]. A query of a sequence without tokens selects
        nothing. DeepSeek-V3.2-Exp, section 2.1, without the constant factor of its scores."""
        most, weights = num_selected(paged, top_k), weights.expand(q.shape[:2])
        positions = torch.full((len(q), most), -1, dtype=torch.int32)
        counts = torch.zeros(len(q), dtype=torch.int32)
        starts, lens = paged.q_start.tolist(), paged.seq_lens.tolist()
        for i, row in enumerate(paged.rows.tolist()):
            if not lens[i]:
                continue
            k, end = keys_of(keys.k, keys.k_scale, paged, row, lens[i])[:, 0].float(), starts[i + 1]
            for first in range(starts[i], end, _QUERIES):
                block = slice(first, min(end, first + _QUERIES))
                at = torch.arange(block.start, block.stop) + lens[i] - end
                scores = torch.einsum("nhd,ld->nhl", q[block].float(), k).relu_().mul_(weights[block].unsqueeze(-1))
                seen = scores.sum(dim=1).masked_fill_(~visible_keys(at, lens[i], 0), -torch.inf)
                fails = k[at, 0].isnan() | (seen.gather(1, at.unsqueeze(1))[:, 0].isnan() & (at >= most))
                counts[block] = (at + 1).clamp(max=most).masked_fill(fails, 0).int()
                order = seen.nan_to_num_(nan=torch.inf, posinf=torch.inf, neginf=-torch.inf)
                order = order.sort(dim=-1, descending=True, stable=True).indices
                for query in range(block.start, block.stop):
                    count = int(counts[query])
                    positions[query, :count] = order[query - block.start, :count].sort().values.int()
        return positions, counts

    def block_tokens(
        self, blocks: Tensor, counts: Tensor, positions: Tensor, paged: PagedKv, rate: int
    ) -> tuple[Tensor, Tensor]:
        """Return the tokens of selected blocks and, behind them, those of the open block. positions [T, N * rate + rate
        - 1] and counts [T] are as `select_tokens` returns them.

        It returned blocks [T, N] and counts [T] for the entries of whole blocks of `rate` tokens. The queries are at
        positions [T]. A query with whole blocks of which it selected none failed, and so it does here: it
        selects nothing. GLM-5.3-Flash and Qwen 3.8, as transformers has them.
        """
        seqs, _ = by_token(paged.q_start, len(positions))
        ends, whole = (positions + 1).int(), counts * rate
        selects = (paged.seq_lens.index_select(0, seqs) > 0) & ((counts > 0) | (ends < rate))
        totals = torch.where(selects, whole + ends % rate, 0)
        columns = torch.arange(blocks.shape[1] * rate + rate - 1, dtype=torch.int32, device=blocks.device)
        of_blocks = F.pad(blocks.repeat_interleave(rate, dim=1) * rate, (0, rate - 1)) + columns % rate
        of_open = (ends - ends % rate - whole).unsqueeze(1) + columns
        tokens = torch.where(columns < whole.unsqueeze(1), of_blocks, of_open)
        return tokens.masked_fill_(columns >= totals.unsqueeze(1), -1), totals

    def token_pages(self, positions: Tensor, counts: Tensor, paged: PagedKv) -> PagedKv:
        """Return each token as a sequence of its own, whose KV is that of the selected positions of its sequence, in
        their order: entry j of its page table is the location of positions[t, j], on pages of one token.

        On a CPU, attention adds up the selected tokens in blocks, as it adds up positions where it reads all tokens.
        So with everything selected it gives the bits of that.
        """
        tokens = torch.arange(len(positions) + 1, dtype=torch.int32, device=positions.device)
        queries = paged.q_start[1:] - paged.q_start[:-1]
        rows = paged.rows.repeat_interleave(queries, output_size=len(positions))
        at = positions.clamp(min=0)
        pages = paged.page_table[rows.unsqueeze(1), at // paged.page_size]
        pages = pages if paged.page_map is None else paged.page_map[pages.long()]
        locations = pages * paged.page_size + at % paged.page_size
        return token_sequences(locations.masked_fill_(positions < 0, 0), tokens[:-1], tokens, counts, paged)


def num_selected(paged: PagedKv, top_k: int) -> int:
    """Return the columns of a selection: no row has more tokens than its pages hold."""
    return min(top_k, paged.page_table.shape[1] * paged.page_size)


def token_sequences(locations: Tensor, rows: Tensor, q_start: Tensor, counts: Tensor, paged: PagedKv) -> PagedKv:
    """Return tokens as sequences of one query: see `SelectionOps.token_pages`."""
    return PagedKv(
        page_table=locations,
        rows=rows,
        q_start=q_start,
        seq_lens=counts,
        page_size=1,
        out_cache_loc=paged.out_cache_loc,
        one_each=True,
    )
