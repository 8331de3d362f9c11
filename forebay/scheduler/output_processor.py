"""Processing of step outputs: sampled tokens are appended, and each request ends exactly once (C27)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import compress, islice

import numpy as np

from forebay.base.errors import ForebayError, NumericalError
from forebay.requests.request import Request, Status
from forebay.requests.step_plan import StepResult, TokenLogprob
from forebay.requests.updates import Failure, FinishReason, History, MemoryReport, Update
from forebay.scheduler.encoding import forget_pictures, release_pictures, without_pictures
from forebay.scheduler.handoff import Handoff
from forebay.scheduler.limits import nothing_may_follow
from forebay.scheduler.proposer import Proposer
from forebay.scheduler.queues import Flight, Queues

Sampled = tuple[Request, list[int], list[TokenLogprob | None] | None]
"""A request, the tokens that a step sampled for it, and their log-probabilities if any were requested."""


class OutputProcessor:
    """Appends sampled tokens to the requests of `queues`, ends requests and records `updates`, in order, until they are
    taken.

    `proposer` and `handoff` are notified when a request ends.
    """

    def __init__(self, queues: Queues, proposer: Proposer | None, handoff: Handoff) -> None:
        self.queues, self.proposer, self.handoff = queues, proposer, handoff
        self.memory, self.pools, self.counters = queues.memory, queues.pools, queues.counters
        self.updates: list[Update] = []

    def take_updates(self) -> list[Update]:
        """Return the updates recorded since the last call, also those of calls that raised."""
        updates, self.updates = self.updates, []
        return updates

    def last_update(self, req: Request) -> Update | None:
        """Return the request's latest update that has not been taken, None for none."""
        return next((update for update in reversed(self.updates) if update.request_id == req.id), None)

    def take_tokens(
        self,
        sampled: list[Sampled],
        now: float,
        *,
        replayed: bool = False,
        padded: bool = False,
        ahead: bool = False,
        loaded: bool = False,
    ) -> None:
        """Append the tokens of each request, but for requests that ended while the step was in flight. `replayed`:
        whether the step ran from a captured graph; `padded`: whether it was of decodes alone, and had padded rows;
        `ahead`: whether it was launched while another was in flight; `loaded`: whether it was of decodes alone, and
        loaded tokens into hot buffers."""
        num_generated, num_updated = 0, 0
        for req, own, entries in sampled:
            if req.status is not Status.FINISHED:
                req.num_replayed += replayed
                req.num_padded += padded
                req.num_ahead += ahead
                req.num_hot_loads += loaded
                num_generated += self.append(req, own, entries, now)
                num_updated += 1
        self.counters["generated_tokens"] += num_generated
        self.counters["accepted_tokens"] += num_generated - num_updated

    def count_partly_accepted(self, flight: Flight, num_new: list[int]) -> None:
        """Count the sequences whose step kept a draft token and rejected a later one. A prompt's last chunk samples one
        token, so that it is never counted."""
        sampled = np.flatnonzero(flight.plan.sample_mask)
        counts = np.array(num_new)
        partly = sampled[(counts > 1) & (counts < flight.plan.q_lens[sampled])]
        for index in partly.tolist():
            flight.reqs[index].num_partly_accepted += 1
        self.counters["partly_accepted_drafts"] += len(partly)

    def take_vectors(self, flight: Flight, vectors: Mapping[int, bytes]) -> None:
        """End the pooled prompts of the step, retracted ones included, with their vectors by index in the step."""
        for index, vector in vectors.items():
            req = flight.reqs[index]
            if req.status is not Status.FINISHED:
                update = Update(req.id, [], cache=req.cache_report, weight_version=req.weight_version, vector=vector)
                self.updates.append(update)
                self.finish(req, FinishReason.STOP, update=update)

    def append(self, req: Request, tokens: list[int], logprobs: list[TokenLogprob | None] | None, now: float) -> int:
        """Append tokens to the request and to its update, up to the one that ends it, and return their number.

        If memory runs out, neither is changed, so that no token is sent twice: what allocates comes first."""
        num_known = len(req.tokens)
        num_allowed, num_taken, ended = req.max_kv_len + 1 - num_known, 0, False
        for token in tokens:
            num_taken += 1
            if ended := (token in req.stop_ids or num_taken == num_allowed):
                tokens = tokens[:num_taken]
                break
        requested = list(filter(None, logprobs[:num_taken])) if logprobs else []
        update = Update(req.id, tokens, logprobs=requested or None)
        if num_known == req.num_prompt:
            update.cache, update.memory, update.weight_version = req.cache_report, req.kept, req.weight_version
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
        account.generated_tokens += num_taken
        account.service += num_taken / account.weight
        req.last_progress = now
        if req.prompt_logprobs:
            req.prompt_logprobs = []
        if req.status is Status.WAITING:
            self.queues.num_waiting_tokens += num_taken
        if ended:
            self._finish_generated(req, update)
        return num_taken

    def _finish_generated(self, req: Request, update: Update) -> None:
        """End a request with its last token, which is in `update`: a stop token, or the one at its length limit."""
        last = update.token_ids[-1]
        if last in req.stop_ids:
            update.matched_stop = last
            self.finish(req, FinishReason.STOP, update=update)
        else:
            self.finish(req, FinishReason.LENGTH, update=update)

    def end_failed(self, failed: Sequence[Request], sampled: list[Sampled], now: float) -> None:
        """End the requests of a step for which a value was not finite, as if aborted: nothing of the step is kept.

        The tokens before that value count, and if one of them is a request's last, it ends as without draft tokens."""
        forget_pictures(self.pools, failed)
        before = [(req, own[:-1], logs) for req, own, logs in sampled if len(own) > 1 and req in failed]
        self.take_tokens(before, now)
        for req in failed:
            if req.status is not Status.FINISHED:
                error = self.queues.constraints.error(req) or nothing_may_follow(req) or _not_finite(req)
                self.finish(req, FinishReason.ERROR, Failure.of(error))

    def finish_each(self, ends: Iterable[tuple[Request, ForebayError]]) -> None:
        """End requests, each with its error."""
        for req, error in ends:
            self.finish(req, FinishReason.ERROR, Failure.of(error))

    def finish(
        self, req: Request, reason: FinishReason, failure: Failure | None = None, update: Update | None = None
    ) -> None:
        """End a request: release all that it holds, and record the reason in its last update, unless its role defers
        that. The update is recorded first, so that an error while releasing does not swallow it."""
        if self.handoff.defer_end(req, reason, update):
            return
        if update is None:
            update = Update(req.id, [], cache=req.cache_report)
            self.updates.append(update)
        update.finish, update.failure = reason, failure
        was = req.status
        req.move(Status.FINISHED)
        del self.queues.requests[req.id]
        self.queues.room.leave(req.tenant)
        self.pools.adapters.leave(req.adapter)
        if req.pictures is not None:
            release_pictures(self.pools, req)
        self.counters[f"finished.{reason}"] += 1
        if self.proposer:
            self.proposer.ended(req)
        if req.params.grammar:
            self.queues.constraints.ended(req)
        if self.queues.suspects.groups:
            self.queues.suspects.clear(req)
        self.handoff.ended(req, failure)
        self.queues.remove(req, was)
        update.num_partly_accepted = req.num_partly_accepted
        update.history = History(
            req.waited_s,
            req.waited_for,
            req.num_chunks,
            req.chunk_ends_s,
            req.num_replayed,
            req.num_ahead,
            req.num_hot_loads,
            req.num_padded,
        )
        update.memory = self._release(req, was, failed=reason is FinishReason.ERROR)

    def _release(self, req: Request, was: Status, *, failed: bool) -> MemoryReport | None:
        """Release all that a request holds, now or when its steps in flight have committed. Return the report of its
        memory, None if it has nothing to report."""
        allocation, checkpoints = req.maybe_allocation, []
        if allocation is None:
            self.memory.host_copies.drop(req.id, self.pools.draft)
        elif not failed and was is not Status.TRANSFERRING and self.memory.prefixes.is_finishing(req):
            checkpoints = [*self.memory.prefixes.checkpoints(allocation.pin), allocation.kv_bound]
            self.pools.table.move_out(allocation.row)
            self.queues.finishing.append(req)
        else:
            self.memory.allocator.release(req, None if failed else allocation.kv_committed)
            checkpoints = self.memory.prefixes.checkpoints(allocation.pin)
        self.memory.record_reuse(req)
        kept = self.memory.prefixes.retain_at_end(req, self.queues.now)
        if req.retentions:
            self.counters["prefixes_not_kept" if kept[-1] else "prefixes_kept"] += 1
        if not (req.num_retractions or checkpoints or kept[0] or req.retentions):
            return None
        return MemoryReport(req.num_retractions, req.num_recomputed, checkpoints, *kept)


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


def _not_finite(req: Request) -> NumericalError:
    return NumericalError(
        f"what the model computed after at most {len(req.tokens)} tokens of this request was not finite (NaN or "
        "infinite); other requests are not affected: check the checkpoint, or try --dtype float32"
    )
