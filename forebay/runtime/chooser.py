"""Choice of tokens for rows that want other than the most likely one.

Shape letters: N positions that are sampled from, S sequences, V vocabulary."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from forebay.base.parts import I32
from forebay.base.units import ceil_div
from forebay.memory.slots import inside
from forebay.ops import Ops
from forebay.pools.request_rows import RequestRows
from forebay.requests.step_plan import StepPlan
from forebay.runtime.bounds import IndexOutOfPool
from forebay.runtime.forward import GreedyTokens
from forebay.runtime.logprobs import token_logprobs
from forebay.runtime.packing import Sections
from forebay.runtime.penalties import Penalties, Span
from forebay.runtime.row_options import Sampling
from forebay.runtime.sampler import Wants, draw
from forebay.runtime.to_host import ToHost


class Masked(NamedTuple):
    """Positions [M] of those that are sampled from, and the source of their words [M, V / 32, rounded up]."""

    at: Tensor
    take: Callable[[], I32]

    @classmethod
    def of(cls, plan: StepPlan, take: Callable[[int], I32]) -> Masked | None:
        """None if no sequence is under a grammar. Call it before the model runs: afterwards the CPU's caches hold the
        model's weights, and the interpreter takes a multiple of the time."""
        if not len(plan.masked):
            return None
        if plan.num_seqs == plan.num_tokens and not plan.num_extends:
            return cls(torch.from_numpy(plan.masked.copy()), partial(take, plan.step))
        counts = plan.sample_mask.astype(np.int64)
        counts[plan.num_extends :] *= plan.q_lens[plan.num_extends :]
        firsts, counts = (np.cumsum(counts) - counts)[plan.masked], counts[plan.masked]
        return cls(torch.from_numpy(np.repeat(firsts, counts) + inside(counts)), partial(take, plan.step))


class Chooser:
    def __init__(self, ops: Ops, rows: RequestRows, penalties: Penalties) -> None:
        self._ops, self._rows, self._penalties = ops, rows, penalties

    def choose(
        self,
        raw: GreedyTokens,
        inputs: Sections,
        sampling: Sampling,
        lens: Tensor,
        *,
        settle: Callable[[GreedyTokens], Tensor | None],
        spans: Sequence[Span],
        input_ids: Tensor | None = None,
        masked: Masked | None = None,
    ) -> tuple[GreedyTokens, Tensor | None]:
        """Choose tokens in place of `raw`, and return them with the result of `settle`: the number of each span's
        tokens [S] that stay, or None if each span has one. lens [N] are the positions of the tokens chosen; `spans` and
        `input_ids` as for `Penalties.apply`; `masked` are the positions under a grammar."""
        (ids, finite, logits), wants = raw, sampling.wants
        if wants & Wants.ADJUST:
            logits = self._penalties.apply(logits, spans, input_ids)
        if masked is not None:
            if logits is raw.logits and len(sampling.reporting):  # of whom log-probabilities are told
                logits = logits.clone()
            self._mask(logits, masked)
        if masked is not None or logits is not raw.logits:
            ids, finite = self._ops.argmax_rows(logits)
        if wants & Wants.DRAW:
            ids = self._draw(logits, ids, lens, inputs, wants)
        num_new = settle(chosen := GreedyTokens(ids, finite, logits))
        if wants & Wants.ADJUST:
            self._penalties.record(ids, spans, num_new)
        return chosen, num_new

    def logprobs(self, raw: Tensor, chosen: GreedyTokens, inputs: Sections, sampling: Sampling) -> ToHost | None:
        """Return the log-probabilities of the chosen tokens for requests that asked, by the model's own logits `raw`
        [N, V]."""
        if not len(sampling.reporting):
            return None
        which, k = inputs["reporting"], int(sampling.num_top.max())
        return ToHost(token_logprobs(raw.index_select(0, which), chosen.token_ids.index_select(0, which), k))

    def _mask(self, logits: Tensor, masked: Masked) -> None:
        """Mask the logits after penalties and bias, so that neither allows a forbidden token; waits for the words."""
        at, words = masked.at, torch.from_numpy(masked.take())
        if words.shape != (expected := (len(at), ceil_div(logits.shape[1], 32))):
            raise IndexOutOfPool(f"masks are {list(words.shape)}, and the step's are {list(expected)}")
        if logits.is_cuda:
            at, words = (each.pin_memory().to(logits.device, non_blocking=True) for each in (at, words))
        self._ops.mask_logits(logits, at, words)

    def _draw(self, logits: Tensor, greedy: Tensor, lens: Tensor, inputs: Sections, wants: Wants) -> Tensor:
        rows, which = inputs["sample_rows"], inputs["drawing"]
        if len(which) == len(greedy):
            return draw(self._ops, logits, rows, lens, self._rows, wants)
        logits, rows, lens = (of_all.index_select(0, which) for of_all in (logits, rows, lens))
        return greedy.index_copy(0, which, draw(self._ops, logits, rows, lens, self._rows, wants))
