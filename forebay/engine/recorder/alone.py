"""Each request alone, on the small model of a recorded engine: what its tokens are, and what layers keep of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import msgspec

from forebay.base.units import ceil_div
from forebay.config.engine_config import DisaggregationOptions, SchedulerConfig
from forebay.engine.recorder.small_engine import GREEDY, Chosen, Forced, SmallEngine
from forebay.models.network import Network
from forebay.ops import Ops
from forebay.pools.mover import Rows
from forebay.requests.pictures import Picture
from forebay.requests.request import Request
from forebay.requests.step_plan import StepResult
from forebay.requests.transfers import Span
from forebay.scheduler.scheduler import Scheduler

Sent = tuple[Mapping[str, Span], Rows]
"""Places by kind of cache, and what was read from them."""


class Alone:
    """Computes one request after the other, each in memory that is cleared, prompts of up to `longest` tokens in one
    step. Roles and tiers of the prefix cache are off."""

    def __init__(self, model: Network, ops: Ops, config: SchedulerConfig, longest: int) -> None:
        num_pages = ceil_div(longest, config.page_size) + 1
        num_slots = {name: max(2 * num_pages + 16, num) for name, num in config.kinds.num_slots.items()}
        config = replace(
            config,
            radix_cache=False,
            overlap_depth=0,
            num_pages=num_pages,
            max_running_requests=1,
            chunked_prefill_size=longest,
            kinds=replace(config.kinds, num_slots=num_slots),
            tiers={},
        )
        self._engine = SmallEngine(model, ops, config)
        self._config = replace(config, disaggregation=DisaggregationOptions())

    def choices(self, prompt: list[int], outputs: list[int], pictures: Sequence[Picture]) -> dict[int, Chosen]:
        """Return by position what is chosen if the request goes on with these outputs: step by step, and the last one
        from all of them in one step."""
        found = self._decoded(prompt, outputs, pictures)
        return found | self._decoded(prompt + outputs[:-1], outputs[-1:], pictures)

    def caches(self, prompt: list[int], token: int, pictures: Sequence[Picture], start: int) -> Sent:
        """Return what layers keep of a prompt from token `start` on, behind which `token` comes."""
        scheduler, found = self._begun(prompt, [token, 0], pictures), dict[int, Chosen]()
        self._step(scheduler, [token], found)
        places = _places(scheduler, start)
        return places, self._engine.read(places)

    def behind(
        self, prompt: list[int], token: int, pictures: Sequence[Picture], start: int, sent: Sequence[Sent] | None
    ) -> Chosen:
        """Return what is chosen behind a prompt and `token`. Unless None was sent, layers keep what was sent of the
        prompt from token `start` on, and poison of what is missing there."""
        scheduler, found = self._begun(prompt, [token, 0], pictures), dict[int, Chosen]()
        self._step(scheduler, [token], found)
        if sent is not None:
            places = _places(scheduler, start)
            self._engine.poison(places)
            for spans, rows in sent:
                self._engine.write(places, spans, rows)
        self._step(scheduler, [0], found)
        return found[len(prompt) + 1]

    def _decoded(self, prompt: list[int], outputs: list[int], pictures: Sequence[Picture]) -> dict[int, Chosen]:
        scheduler, found = self._begun(prompt, outputs, pictures), dict[int, Chosen]()
        while not scheduler.idle and self._step(scheduler, outputs[len(found) :], found):
            pass
        return found

    def _begun(self, prompt: list[int], outputs: list[int], pictures: Sequence[Picture]) -> Scheduler:
        """Return a scheduler with the request, in cleared memory."""
        self._engine.clear()
        scheduler = Scheduler(self._config)
        params = msgspec.structs.replace(GREEDY, max_tokens=len(outputs))
        scheduler.add(Request(1, prompt, params), 0.0, pictures)
        return scheduler

    def _step(self, scheduler: Scheduler, outputs: list[int], found: dict[int, Chosen]) -> bool:
        """Execute a step that chooses the first of these outputs, and add to `found` what the model would. Return
        whether there was one."""
        plan = scheduler.plan(0.0)
        if plan is None:
            return False
        tokens = outputs[: int(plan.sample_mask.sum())]
        sampled = self._engine.run(plan, Forced(tokens, [1] * len(tokens)))
        found.update((length, choice) for _, length, choice in sampled)
        scheduler.commit(plan, StepResult(token_ids=tokens), 0.0)
        scheduler.take_updates()
        return True


def _places(scheduler: Scheduler, start: int) -> Mapping[str, Span]:
    """Return the places of all that layers keep of the one request from token `start` on."""
    (req,) = scheduler.requests.values()
    return scheduler.pools.places(req.allocation, start, start)
