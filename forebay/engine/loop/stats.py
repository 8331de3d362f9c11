"""The engine's own counters beside the scheduler's, and the forms in which both are reported.

Counters are declared in `scheduler.counters`; these have names that begin with `engine.`."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from typing import Final

from msgspec.structs import asdict, replace

from forebay.base.log import event
from forebay.base.values import values_of
from forebay.engine.frames import Checked, LoadedAdapter, Occupied, Speculating, State
from forebay.engine.loop.exchange import Exchange
from forebay.requests.updates import Failure
from forebay.scheduler.counters import OF_ENGINE, STEP_TOKENS, zeros
from forebay.scheduler.scheduler import Scheduler
from forebay.speculation.adaptive import Widths

_MOST_TENANTS: Final = 8  # in a line
_NOTHING: Final = Occupied()


class Stats:
    """Counters of one engine; `core` adds to them, having the clock. `widths`: where something is guessed; `exchange`:
    in a role."""

    def __init__(self, now: float, widths: Widths | None = None, exchange: Exchange | None = None) -> None:
        self._widths, self._exchange = widths, exchange
        self.counters = zeros(OF_ENGINE)
        self.last_step_at = now
        self._line_busy_s = 0.0
        self._line_tokens = (0.0, 0.0)

    def frame(
        self,
        scheduler: Scheduler,
        now: float,
        *,
        answers: int = 0,
        refused: Failure | None = None,
        checked: Checked | None = None,
        memory: Occupied = _NOTHING,
        adapters: Sequence[LoadedAdapter] = (),
    ) -> State:
        """Return the engine's state as a frame."""
        state = scheduler.state(now)
        age_s = 0.0 if scheduler.idle else now - self.last_step_at
        whole = replace(state, counters={**state.counters, **self.counters})
        widths = self._widths
        speculation = None if widths is None else Speculating(width=widths.current, recent=widths.recent)
        return State(
            **values_of(whole),
            last_step_age_s=age_s,
            answers=answers,
            refused=refused,
            memory=memory,
            speculation=speculation,
            transfers=self._exchange.state() if self._exchange else None,
            checked=checked,
            adapters=[*adapters],
        )

    def committed(self, num_tokens: int, now: float, *, on_ranks: bool = False) -> None:
        """Count a step that computed `num_tokens` tokens and ended at `now`, on one rank or several."""
        self.last_step_at = now
        self.counters["engine.steps"] += 1
        self.counters["engine.steps_on_ranks"] += on_ranks
        self.counters["engine.step_tokens"] += num_tokens
        for bound in STEP_TOKENS[bisect_left(STEP_TOKENS, num_tokens) :]:
            self.counters[f"engine.step_tokens_{bound}"] += 1

    def worked(self, seconds: float, *, for_check: bool) -> None:
        """Count the time of a turn: work, unless it was for a check of the prefix cache."""
        self.counters["engine.check_seconds" if for_check else "engine.busy_seconds"] += seconds

    def worked_s(self) -> float:
        """Seconds of work since the last `line`."""
        return self.counters["engine.busy_seconds"] - self._line_busy_s

    def line(self, scheduler: Scheduler, now: float) -> str:
        """The log line of the work since the last one; rates are over that work, not over the idle time in between."""
        state = scheduler.state(now)
        counters = state.counters
        tokens = (counters["computed_prompt_tokens"], counters["generated_tokens"])
        elapsed = max(self.worked_s(), 1e-9)
        prefill, decode = ((new - old) / elapsed for new, old in zip(tokens, self._line_tokens, strict=True))
        self._line_busy_s, self._line_tokens = self.counters["engine.busy_seconds"], tokens
        kv = state.pools[0]
        busy = [tenant for tenant in state.tenants if tenant.num_running or tenant.num_waiting][:_MOST_TENANTS]
        tenants = ",".join(f"{tenant.name or '-'}:{tenant.num_running}+{tenant.num_waiting}" for tenant in busy)
        return event(
            "working",
            running=state.num_running,
            waiting=state.num_waiting,
            kv_used=f"{(kv.running + kv.cached) / kv.total:.0%}",
            hit_rate=f"{counters['cached_tokens'] / max(1, counters['prompt_tokens']):.0%}",
            prefill_tok_s=prefill,
            decode_tok_s=decode,
            **({"tenants": tenants} if len(busy) > 1 else {}),
            **({"spec_net_speedup": self._widths.recent.net_speedup} if self._widths else {}),
            **(asdict(self._exchange.state()) if self._exchange else {}),
        )
