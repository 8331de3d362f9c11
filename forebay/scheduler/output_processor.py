"""Processing of step outputs: sampled tokens are appended, and each request ends exactly once (C27)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import compress, islice

import numpy as np

from forebay.config.engine_config import SchedulerConfig
from forebay.requests.request import Request, Status
from forebay.requests.step_plan import StepResult, TokenLogprob
from forebay.requests.updates import Failure, FinishReason, MemoryReport, Update
from forebay.scheduler.encoding import release_pictures, without_pictures
from forebay.scheduler.grammars import Constraints, Grammars
from forebay.scheduler.handoff import Handoff
from forebay.scheduler.proposer import Proposer
from forebay.scheduler.queues import Flight, Queues

Sampled = tuple[Request, list[int], list[TokenLogprob | None] | None]
"""A request, the tokens that a step sampled for it, and their log-probabilities if any were requested."""


class OutputProcessor(Queues):
    """Appends sampled tokens to requests, ends requests and records `updates`, in order, until they are taken.

    `proposer` and `handoff` are notified when a request ends.
    """

    def __init__(
        self, config: SchedulerConfig, proposer: Proposer | None, handoff: Handoff, grammars: Grammars | None
    ) -> None:
        super().__init__(config, Constraints(grammars))
        self.proposer, self.handoff = proposer, handoff
        self.updates: list[Update] = []
        handoff.bind(self)

    def take_updates(self) -> list[Update]:
        """Return the updates recorded since the last call, also those of calls that raised."""
        updates, self.updates = self.updates, []
        return updates

    def _take_tokens(self, sampled: list[Sampled], now: float) -> None:
        """Append each request's tokens; drop those of requests that ended while the step was in flight."""
        num_generated, num_updated = 0, 0
        for req, own, entries in sampled:
            if req.status is not Status.FINISHED:
                num_generated += self.append(req, own, entries, now)
                num_updated += 1
        self.counters["generated_tokens"] += num_generated
        self.counters["accepted_tokens"] += num_generated - num_updated

    def _count_partly_accepted(self, flight: Flight, num_new: list[int]) -> None:
        """Count the sequences whose step kept a draft token and rejected a later one. A prompt's last chunk samples one
        token, so that it is never counted."""
        sampled = np.flatnonzero(flight.plan.sample_mask)
        counts = np.array(num_new)
        partly = sampled[(counts > 1) & (counts < flight.plan.q_lens[sampled])]
        for index in partly.tolist():
            flight.reqs[index].num_partly_accepted += 1
        self.counters["partly_accepted_drafts"] += len(partly)

    def _take_vectors(self, flight: Flight, vectors: Mapping[int, bytes]) -> None:
        """End the pooled prompts of the step with their vectors, given by index in the step; retracted ones, too."""
        for index, vector in vectors.items():
            req = flight.reqs[index]
            if req.status is not Status.FINISHED:
                update = Update(req.id, [], cache=req.cache_report, weight_version=req.weight_version, vector=vector)
                self.updates.append(update)
                self.finish(req, FinishReason.STOP, update=update)

    def append(self, req: Request, tokens: list[int], logprobs: list[TokenLogprob | None] | None, now: float) -> int:
        """Append tokens to the request and to its update, up to the one that ends it, and return their number.

        If memory runs out, neither is changed, so that no token is sent twice: what allocates comes first."""
        left, end, ended = req.max_kv_len + 1 - len(req.tokens), 0, False
        for token in tokens:
            end += 1
            if ended := (token in req.stop_ids or end == left):
                tokens = tokens[:end]
                break
        requested = [entry for entry in logprobs[:end] if entry] if logprobs else None
        update = Update(req.id, tokens, logprobs=requested or None)
        if not req.num_output:
            update.cache, update.weight_version = req.cache_report, req.weight_version
            if req.params.prompt_logprobs >= 0:
                entries = [None, *req.prompt_logprobs[: req.num_prompt - 1]]
                update.prompt_logprobs = without_pictures(self.pools, req, entries)
        self.updates.append(update)
        try:
            req.tokens.fromlist(tokens)  # all or none
        except Exception:
            self.updates.pop()
            raise
        account = req.account
        account.generated_tokens += end
        account.service += end / account.weight
        req.last_progress = now
        if req.prompt_logprobs:
            req.prompt_logprobs = []
        if req.status is Status.WAITING:
            self.num_waiting_tokens += end
        if ended and tokens[-1] in req.stop_ids:
            update.matched_stop = tokens[-1]
            self.finish(req, FinishReason.STOP, update=update)
        elif ended:
            self.finish(req, FinishReason.LENGTH, update=update)
        return end

    def finish(
        self, req: Request, reason: FinishReason, failure: Failure | None = None, update: Update | None = None
    ) -> None:
        """End a request: release all that it holds, and record the reason in its last update. The update is recorded
        first, so that an error while releasing does not swallow it."""
        if self.handoff.keeps(req, reason, update):
            return
        if update is None:
            update = Update(req.id, [], cache=req.cache_report)
            self.updates.append(update)
        update.finish, update.failure = reason, failure
        was = req.status
        req.move(Status.FINISHED)
        del self.requests[req.id]
        self.room.leave(req.tenant)
        self.pools.adapters.leave(req.adapter)
        if req.pictures is not None:
            release_pictures(self.pools, req)
        self.counters[f"finished.{reason}"] += 1
        if self.proposer:
            self.proposer.ended(req)
        if req.params.grammar:
            self.constraints.ended(req)
        if self.suspects.groups:
            self.suspects.clear(req)
        self.handoff.ended(req, failure)
        self.remove(req, was)
        update.num_partly_accepted = req.num_partly_accepted
        update.memory = self._let_go(req, was, failed=reason is FinishReason.ERROR)

    def _let_go(self, req: Request, was: Status, *, failed: bool) -> MemoryReport | None:
        """Release all that a request holds, now or when its steps in flight have landed, and return the report of its
        memory."""
        held, checkpoints = req.held, []
        if held is None:
            self.memory.host_copies.drop(req.id, self.pools.draft)
        elif not failed and was is not Status.TRANSFERRING and self.memory.prefixes.is_finishing(req):
            checkpoints = [*self.memory.prefixes.checkpoints(held.pin), held.kv_bound]
            self.pools.table.move_out(held.row)
            self.finishing.append(req)
        else:
            self.memory.allocator.release(req, None if failed else held.kv_committed)
            checkpoints = self.memory.prefixes.checkpoints(held.pin)
        report = MemoryReport(req.num_retractions, req.num_recomputed, checkpoints)
        return report if req.num_retractions or checkpoints else None


def by_request(flight: Flight, result: StepResult) -> list[Sampled]:
    """Split a step's flat result by request: each with its new tokens, and their logprobs if some were requested."""
    reqs = compress(flight.reqs, flight.plan.sample_mask.tolist()) if flight.plan.num_extends else flight.reqs
    if not (result.num_new or result.logprobs):
        return [(req, [token], None) for req, token in zip(reqs, result.token_ids, strict=True)]
    counts = result.num_new or [1] * len(result.token_ids)
    tokens, logprobs = iter(result.token_ids), iter(result.logprobs or ())
    each = zip(reqs, counts, strict=True)
    return [(req, list(islice(tokens, count)), list(islice(logprobs, count)) or None) for req, count in each]


def charge_step(cost: float, sampled: Sequence[Sampled], flight: Flight, result: StepResult) -> None:
    """Charge the requests for which a step sampled or pooled with equal parts of its fixed cost (C32): a prompt's other
    chunks fill their steps, so that the cost does not count there."""
    accounts = [req.account for req, *_ in sampled] + [flight.reqs[i].account for i in result.vectors or ()]
    for account in accounts:
        part = cost / len(accounts)
        account.step_tokens += part
        account.service += part / account.weight
