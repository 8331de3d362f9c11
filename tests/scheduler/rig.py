"""A scheduler with a counting runner: sampled tokens are 1000, 1001, ... unless a test says otherwise."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from forebay.base.errors import ForebayError
from forebay.config.engine_config import Ledger, SchedulerConfig
from forebay.requests.pictures import Picture
from forebay.requests.request import Request
from forebay.requests.sampling_params import SamplingParams
from forebay.requests.step_plan import StepPlan, StepResult
from forebay.requests.updates import FinishReason, Update
from forebay.scheduler.handoff import Handoff
from forebay.scheduler.proposer import Proposer
from forebay.scheduler.scheduler import NO_LIMIT, Scheduler


def config(**changes: Any) -> SchedulerConfig:
    asked: dict[str, Any] = {
        "page_size": 4,
        "num_pages": 64,
        "max_running_requests": 8,
        "context_length": 64,
        "chunked_prefill_size": 64,
        "max_queued_requests": 16,
        "ledger": Ledger.RAISE,
    }
    return SchedulerConfig(**{**asked, **changes})


class Rig:
    """With a `proposer` decodes are `width` wide, and guesses are accepted where they are what is sampled."""

    def __init__(
        self,
        sample: Callable[[int], int] | None = None,
        depth: int = 0,
        width: int = 1,
        proposer: Proposer | None = None,
        handoff: Handoff | None = None,
        **changes: Any,
    ) -> None:
        self.scheduler = Scheduler(config(**changes), proposer, handoff)
        self.depth, self.width = depth, width
        self.now = 0.0
        self.mixed_limit = NO_LIMIT
        self.flights: deque[StepPlan] = deque()
        self.plans: list[StepPlan] = []
        self.updates: list[Update] = []
        self.reqs: dict[int, Request] = {}
        self._sample = sample or (lambda row: 1000)

    def add(self, prompt: list[int] | int, max_new: int = 4, pictures: Sequence[Picture] = (), **kw: Any) -> Request:
        """Submit a request of `prompt` tokens (a list, or how many of a prompt of its own)."""
        id = len(self.reqs) + 1
        tokens = prompt if isinstance(prompt, list) else [id * 100 + i for i in range(prompt)]
        params = kw.pop("params", None) or SamplingParams(max_tokens=max_new, stop_token_ids=(7,))
        req = Request(id, tokens, params, **kw)
        self.scheduler.add(req, self.now, pictures)
        self.reqs[id] = req
        return req

    def launch(self) -> StepPlan | None:
        plan = self.scheduler.plan(self.now, self.width, self.mixed_limit)
        self.updates += self.scheduler.take_updates()
        if plan:
            self.flights.append(plan)
            self.plans.append(StepPlan.decode(plan.encode()))
            assert self.plans[-1] == plan, "a plan is not what arrives where it is sent"
        return plan

    def commit(self, **result: Any) -> list[Update]:
        plan = self.flights.popleft()
        guesses, tokens, num_new = deque(plan.drafts.tolist()), [], []
        for row, q_len, i in zip(plan.rows.tolist(), plan.q_lens.tolist(), range(plan.num_seqs), strict=True):
            if plan.sample_mask[i]:
                drafts = [guesses.popleft() for _ in range(q_len - 1 if i >= plan.num_extends else 0)]
                right = next((j for j, token in enumerate(drafts) if token != self._sample(row)), len(drafts))
                tokens += [self._sample(row)] * (right + 1)
                num_new.append(right + 1)
        wide: dict[str, Any] = {"num_new": num_new} if plan.width > 1 else {}
        self.scheduler.commit(plan, StepResult(token_ids=tokens, **wide, **result), self.now)
        updates = self.scheduler.take_updates()
        self.updates += updates
        self.scheduler.audit()
        return updates

    def abort(self, request_id: int) -> list[Update]:
        self.scheduler.abort(request_id)
        return self.scheduler.take_updates()

    def expire(self, now: float) -> list[Update]:
        self.scheduler.expire(now)
        return self.scheduler.take_updates()

    def fail(self, error: ForebayError) -> list[Update]:
        """The oldest step fails."""
        self.scheduler.fail(self.flights.popleft(), error)
        return self.scheduler.take_updates()

    def step(self) -> StepPlan | None:
        plan = self.launch()
        if self.flights and (len(self.flights) > self.depth or plan is None):
            self.commit()
        return plan

    def run(self, limit: int = 500) -> None:
        for _ in range(limit):
            if self.scheduler.idle:
                return
            self.step()
        raise AssertionError(f"not idle after {limit} steps: {list(self.scheduler.requests.values())}")

    def finish_of(self, req: Request) -> FinishReason | None:
        found = [u.finish for u in self.updates if u.request_id == req.id and u.finish]
        assert len(found) < 2, "a request ends once"
        return found[0] if found else None

    def tokens_of(self, req: Request) -> list[int]:
        return [token for u in self.updates if u.request_id == req.id for token in u.token_ids]

    @property
    def free_pages(self) -> int:
        return self.scheduler.pools.kv.num_free
