"""How tenants share an engine, reckoned apart from the scheduler's own books (C32)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence

from forebay.config.engine_config import SchedulePolicy, SchedulerConfig
from forebay.requests import account as accounts
from forebay.requests.request import Request, Status
from forebay.requests.step_plan import StepPlan, StepResult
from forebay.requests.updates import Update
from forebay.scheduler.admission import growth
from forebay.scheduler.handoff import Handoff
from forebay.scheduler.queues import by_rank
from forebay.scheduler.scheduler import Scheduler
from tests.simulation.violation import require


class Fairness:
    """Told of every call of the scheduler; raises Violation.

    Remembered here: which tokens of prompts were computed for the first time, how many were generated, and for how many
    plans each tenant has been kept from places within its share.
    """

    def __init__(self, config: SchedulerConfig, scheduler: Scheduler) -> None:
        self._config, self._scheduler = config, scheduler
        self._computes_all = type(scheduler.handoff) is Handoff  # in a role, what others compute is charged for, too
        self._computed: dict[int, int] = {}  # by request: up to here its prompt was cached or computed
        self._charged: Counter[str] = Counter()  # by tenant
        self._service: dict[str, float] = dict.fromkeys(scheduler.queues.accounts, 0.0)
        self._books: Counter[str] = Counter()  # what had been charged at the last look
        # Of pictures and of steps, in tokens.
        self._others: dict[str, float] = dict.fromkeys(scheduler.queues.accounts, 0.0)
        self._step_costs = 0.0  # of steps that brought a token or a vector, beside their tokens
        self._tenant_of: dict[int, str] = {}
        self._in_line: set[str] = set()
        self._denied: Counter[str] = Counter()  # plans in a row
        self._started_at: dict[str, int] = {}
        self._ever_started: set[int] = set()
        self.num_turns = self.num_displaced = self.longest_denial = 0

    @property
    def slack(self) -> int:
        """Plans beyond the scheduler's patience: until memory that was taken is free, which may be taken piece by
        piece."""
        return (self._config.overlap_depth + 3) * (1 + self._config.max_running_requests)

    # -- what happens -------------------------------------------------------------------------------------------------

    def added(self, req: Request) -> None:
        self._tenant_of[req.id] = req.tenant

    def heard(self, update: Update) -> None:
        self._charged[self._tenant_of[update.request_id]] += len(update.token_ids)

    def completed(self, result: StepResult) -> None:
        self._step_costs += self._scheduler.queues.step_cost if result.token_ids or result.vectors else 0.0

    def launched(self, plan: StepPlan) -> Counter[str]:
        """By tenant, the tokens of prompts that this plan computes for the first time."""
        new: Counter[str] = Counter()
        rows = {req.allocation.row: req for req in self._scheduler.requests.values() if req.maybe_allocation}
        for i in range(plan.num_extends):
            req, start, end = rows[int(plan.rows[i])], int(plan.starts[i]), int(plan.ends[i])
            before = max(self._computed.get(req.id, 0), start)
            new[req.tenant] += max(0, min(end, req.num_prompt) - before)
            self._computed[req.id] = max(self._computed.get(req.id, 0), end)
        self._charged += new
        return new

    def planned(self, plan: StepPlan | None, started: Sequence[Request], startable: Sequence[Request]) -> None:
        """`startable` wait, and neither a step in flight nor a prompt under way is to be awaited for them."""
        new = self.launched(plan) if plan else Counter()
        if self._computes_all:
            self._check_books()
        if started:
            self._check_turns(started, startable, new)
        self._check_wait(plan, startable)

    def refused(self, req: Request, living: Iterable[str], num_own_tokens: int, num_tokens: int) -> bool:
        """Whether the queue has no room for the request: all of it is taken, and of that its tenant has its share."""
        here = Counter(living)
        most = self._config.max_running_requests + self._config.max_queued_requests
        if here.total() >= most and here[req.tenant] + 1 > self._share(req.tenant, most, here):
            return True
        limit = self._config.max_queued_tokens
        too_many = num_tokens + req.num_prompt > limit and num_own_tokens > 0
        return too_many and num_own_tokens + req.num_prompt > self._share(req.tenant, limit, here)

    def displaced(
        self,
        victim: Request,
        by: Request,
        ranked: Sequence[Request],
        decoding: Collection[Request],
        held: Mapping[str, tuple[int, int]],
    ) -> None:
        """`victim` was one of those that ran, `ranked`, which `held` so much, and gives its place to `by`: `decoding`
        ones do so before prompts of their priority."""
        self.num_displaced += 1
        scheduler = self._scheduler
        own = [req for req in ranked if req.tenant == victim.tenant]
        waited = scheduler.pools.steps.launched - self._started_at.get(by.tenant, 0)
        require(waited >= accounts.PATIENCE, f"{victim} is displaced after {waited} steps")
        require(victim.tenant != by.tenant, f"{by} displaces one of its own tenant")
        last = [req for req in own[1:] if req.rank[0] == own[-1].rank[0]]
        expected = [req for req in last if req in decoding] or last
        require(victim in expected[-1:], f"{victim} is displaced, of {own}")
        require(any(held[victim.tenant][i] > self._shares(victim.tenant)[i] for i in (0, 1)), f"{victim} had its share")
        require(self._stays_within(by, held), f"{by} displaces another although its tenant has its share")

    # -- the rules ----------------------------------------------------------------------------------------------------

    def _check_books(self) -> None:
        """Each tenant is charged for just that, and the charge is divided by its weight. When it joins others in line
        its service rises besides: to that of one of them at least, and of any tenant at most."""
        in_line = {req.tenant for req in self._scheduler.queues.waiting}
        before = [self._service[name] for name in self._in_line]
        for name, account in self._scheduler.queues.accounts.items():
            mine = account.computed_tokens + account.generated_tokens
            require(mine == self._charged[name], f"{name} is charged for {mine} tokens and got {self._charged[name]}")
            others = account.encoded_tokens + account.step_tokens - self._others[name]
            least = self._service[name] + (mine - self._books[name] + others) / account.weight
            require(account.service >= least - 1e-6, f"{name}: service is {account.service} and not {least}")
            level = account.service - least + self._service[name]  # to which it was raised, before its charges
            services = (other.service for other in self._scheduler.queues.accounts.values() if other is not account)
            most = max(services, default=0.0)
            raised = account.service > least + 1e-6
            require(not raised or level <= most + 1e-6, f"{name} is raised to {level}, above {most}")
            if name in in_line - self._in_line and before:
                require(account.service >= min(before) - 1e-6, f"{name} comes with credit: {account.service}, {before}")
        self._in_line = in_line
        for name, account in self._scheduler.queues.accounts.items():
            self._service[name], self._books[name] = account.service, self._charged[name]
            self._others[name] = account.encoded_tokens + account.step_tokens
        charged = sum(account.step_tokens for account in self._scheduler.queues.accounts.values())
        costs = self._step_costs
        require(charged >= costs - 1e-6, f"steps cost {costs} tokens beside their own, and {charged} are charged")

    def _check_turns(self, started: Sequence[Request], startable: Sequence[Request], new: Mapping[str, int]) -> None:
        """Whoever starts is of the tenant that has been served least, of those whose first in rank needs no more."""
        accounts = self._scheduler.queues.accounts
        before_now = set(self._ever_started)
        for req in started:
            self._started_at[req.tenant] = self._scheduler.pools.steps.launched - 1
            self._ever_started.add(req.id)
        if self._config.schedule_policy is SchedulePolicy.LPM:
            return
        first: dict[str, Request] = {}
        for req in sorted(startable, key=by_rank):
            first.setdefault(req.tenant, req)
        for starter in started:
            if starter.id in before_now:
                continue  # its report is of the first start: this one may have found more
            before = accounts[starter.tenant].service - new[starter.tenant] / accounts[starter.tenant].weight
            for tenant, req in first.items():
                if tenant == starter.tenant or req in started or not self._needs_no_more(req, starter):
                    continue
                self.num_turns += 1
                behind = accounts[tenant].service
                require(
                    before <= behind + 1e-6, f"{starter} starts at {before}, and {req} of {tenant} waits at {behind}"
                )

    def _needs_no_more(self, req: Request, starter: Request) -> bool:
        report = starter.cache_report
        if req.num_retractions or req.resume_after or starter.num_retractions or starter.resume_after or not report:
            return False
        return (
            0 in (report.kv_tokens, *report.resumable.values())
            and len(req.tokens) <= len(starter.tokens)
            and req.params.max_tokens <= starter.params.max_tokens
        )

    def _check_wait(self, plan: StepPlan | None, startable: Sequence[Request]) -> None:
        """A tenant whose turn it is, and that wants no more than its share, gets it within a bound (see `slack`) from
        one that has more, whatever that one still has to do."""
        scheduler = self._scheduler
        blocked = scheduler.queues.blocked
        running = sorted([*scheduler.queues.running.reqs, *scheduler.queues.extending], key=by_rank)
        held = self.held(running)
        denied = None
        if blocked and blocked.req in startable and not blocked.returning and self._stays_within(blocked.req, held):
            i = 0 if blocked.lacks_row else 1
            above = [t for t in held if held[t][i] > self._shares(t)[i] and held[t][0] > 1]
            guessed = any(req.allocation.num_drafts for req in running)
            denied = blocked.req.tenant if above and not guessed else None
        for tenant in list(self._denied):
            if tenant != denied:
                del self._denied[tenant]
        if denied is not None and plan is not None:
            self._denied[denied] += 1
            self.longest_denial = max(self.longest_denial, self._denied[denied])
            limit = accounts.PATIENCE + self.slack
            require(self._denied[denied] <= limit, f"{denied} was denied its share in {self._denied[denied]} plans")

    # -- shares -------------------------------------------------------------------------------------------------------

    def held(self, running: Sequence[Request]) -> dict[str, tuple[int, int]]:
        """Rows and pages by tenant, with the pages that are expected to be needed."""
        held: dict[str, tuple[int, int]] = {}
        for req in running:
            rows, pages = held.get(req.tenant, (0, 0))
            more = growth(req, self._scheduler.ratio.value, self._config.page_size)
            held[req.tenant] = rows + 1, pages + req.allocation.num_pages + more
        return held

    def _stays_within(self, req: Request, held: Mapping[str, tuple[int, int]]) -> bool:
        rows, pages = held.get(req.tenant, (0, 0))
        need = -(-len(req.tokens) // self._config.page_size)
        need += growth(req, self._scheduler.ratio.value, self._config.page_size)
        most = self._shares(req.tenant)
        return rows + 1 <= most[0] and pages + need <= most[1]

    def _shares(self, tenant: str) -> tuple[int, int]:
        here = Counter(req.tenant for req in self._scheduler.requests.values() if req.status is not Status.FINISHED)
        limits = self._scheduler.pools.rows.size, self._config.num_pages
        rows, pages = (self._share(tenant, limit, here) for limit in limits)
        return rows, pages

    def _share(self, tenant: str, limit: int, here: Iterable[str]) -> int:
        weights = {"": 1, **self._config.tenants}
        return max(1, limit * weights[tenant] // sum(weights[other] for other in {tenant, *here}))
