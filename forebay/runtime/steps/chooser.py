"""Choice of tokens for rows that want other than the most likely one.

Shape letters: N positions that are sampled from, S sequences, V vocabulary."""

from __future__ import annotations

import torch
from torch import Tensor

from forebay.base.units import ceil_div
from forebay.ops import Ops
from forebay.ops.exchange import ALONE, READER, Exchange
from forebay.pools.request_rows import RequestRows
from forebay.runtime.host.bounds import IndexOutOfPool
from forebay.runtime.host.packing import Sections
from forebay.runtime.host.to_host import ToHost
from forebay.runtime.sampling.logprobs import token_logprobs
from forebay.runtime.sampling.masks import Masked
from forebay.runtime.sampling.penalties import Penalties, Span
from forebay.runtime.sampling.row_options import Sampling
from forebay.runtime.sampling.sampler import Wants, draw
from forebay.runtime.steps.forward import GreedyTokens
from forebay.runtime.steps.shape import Computed, Step, StepShape


class Chooser:
    """Chooses at rank 0; other ranks of `exchange` have no logits, and take what it has chosen."""

    def __init__(self, ops: Ops, rows: RequestRows, penalties: Penalties, exchange: Exchange = ALONE) -> None:
        self._ops, self._rows, self._penalties, self._exchange = ops, rows, penalties, exchange

    def choose(self, step: Step, shape: StepShape, computed: Computed) -> GreedyTokens:
        """Choose tokens in place of the greedy ones, and write them."""
        wants, spans = step.sampling.wants, shape.spans(step) if step.sampling.wants & Wants.ADJUST else []
        is_reader = self._exchange.rank == READER
        chosen = self._chosen(step, shape, computed, spans) if is_reader else _copied(computed.greedy)
        for of_rank_0 in (chosen.token_ids, chosen.finite):
            self._exchange.spread(of_rank_0)
        shape.accept(chosen, step, computed)
        if is_reader and wants & Wants.ADJUST:
            self._penalties.record(chosen.token_ids, spans, computed.num_new)
        return chosen

    def _chosen(self, step: Step, shape: StepShape, computed: Computed, spans: list[Span]) -> GreedyTokens:
        sampling, masked, wants = step.sampling, step.masked, step.sampling.wants
        raw = computed.greedy
        ids, finite, logits = raw
        if wants & Wants.ADJUST:
            drafts = None if computed.num_new is None else computed.input_ids
            logits = self._penalties.apply(logits, spans, drafts)
        if masked is not None:
            if logits is raw.logits and len(sampling.reporting):  # log-probabilities are reported from these
                logits = logits.clone()
            self._mask(logits, masked)
        if masked is not None or logits is not raw.logits:
            ids, finite = self._ops.sampling.argmax_rows(logits)
        if wants & Wants.DRAW:
            ids = self._draw(logits, ids, shape.next_positions(step, computed), step.inputs, wants)
        return GreedyTokens(ids, finite, logits)

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
        self._ops.sampling.mask_logits(logits, at, words)

    def _draw(self, logits: Tensor, greedy: Tensor, lens: Tensor, inputs: Sections, wants: Wants) -> Tensor:
        rows, which = inputs["sample_rows"], inputs["drawing"]
        if len(which) == len(greedy):
            return draw(self._ops, logits, rows, lens, self._rows, wants)
        logits, rows, lens = (of_all.index_select(0, which) for of_all in (logits, rows, lens))
        return greedy.index_copy(0, which, draw(self._ops, logits, rows, lens, self._rows, wants))


def _copied(chosen: GreedyTokens) -> GreedyTokens:
    """Return a copy, to be overwritten: a captured step has the memory of the original."""
    return GreedyTokens(chosen.token_ids.clone(), chosen.finite.clone(), chosen.logits)
