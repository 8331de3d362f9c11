"""The path of one step through the scheduler: every function that it goes through, indented by who calls whom.

    python scripts/trace_step.py [--hybrid] [--prefill]

Three requests of 40 tokens decode one more each (with --prefill: begin), without a model: `plan` decides the step,
`commit` learns what came of it. With --hybrid layers keep windows and recurrent states too.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from forebay.config.engine_config import KindConfig, SchedulerConfig
from forebay.requests.request import Request
from forebay.requests.sampling_params import SamplingParams
from forebay.requests.step_plan import StepResult
from forebay.scheduler.scheduler import Scheduler

PACKAGE = Path(__file__).resolve().parent.parent / "forebay"
NUM_REQUESTS = 3
PROMPT_LEN = 40
HYBRID = KindConfig(num_slots={"state": 64, "window": 512}, num_read={"window": 32}, track_interval=16)


@dataclass
class Call:
    """A function of the package that was entered `times` times in a row, from `depth` others."""

    depth: int
    file: str
    function: str
    times: int = 1

    def __str__(self) -> str:
        times = f"  x{self.times}" if self.times > 1 else ""
        return f"{'  ' * self.depth}{self.function}  {self.file}{times}"


class Trace:
    """What was called, in order. Comprehensions count as part of the function that they stand in."""

    def __init__(self) -> None:
        self.calls: list[Call] = []
        self._depth = 0

    @property
    def functions(self) -> set[tuple[str, str]]:
        return {(call.file, call.function) for call in self.calls}

    @property
    def files(self) -> set[str]:
        return {call.file for call in self.calls}

    @contextmanager
    def recording(self) -> Iterator[None]:
        sys.setprofile(self.see)
        try:
            yield
        finally:
            sys.setprofile(None)

    def see(self, frame: FrameType, event: str, arg: Any) -> None:
        """Count the call of a function of the package; for `sys.setprofile`."""
        code = frame.f_code
        path = Path(code.co_filename)
        if event not in ("call", "return") or code.co_name.startswith("<") or PACKAGE not in path.parents:
            return
        if event == "return":
            self._depth -= 1
            return
        call = Call(self._depth, str(path.relative_to(PACKAGE)), code.co_qualname)
        same = next((earlier for earlier in reversed(self.calls) if earlier.depth <= self._depth), None)
        if same and (same.depth, same.file, same.function) == (call.depth, call.file, call.function):
            same.times += 1
        else:
            self.calls.append(call)
        self._depth += 1


def steps(*, hybrid: bool) -> tuple[Trace, Trace]:
    """The step that computes the prompts, and the one that decodes a token of each request."""
    config = SchedulerConfig(
        num_pages=64, max_running_requests=8, context_length=256, kinds=HYBRID if hybrid else KindConfig()
    )
    scheduler = Scheduler(config)
    for i in range(1, NUM_REQUESTS + 1):
        prompt = list(range(100 * i, 100 * i + PROMPT_LEN))
        scheduler.add(Request(i, prompt, SamplingParams(max_tokens=8)), now=0.0)
    return trace_one(scheduler), trace_one(scheduler)


def trace_one(scheduler: Scheduler) -> Trace:
    trace = Trace()
    with trace.recording():
        plan = scheduler.plan(0.0)
    assert plan is not None, "there is something to do"
    with trace.recording():
        scheduler.commit(plan, StepResult(token_ids=[1] * NUM_REQUESTS), 0.0)
    return trace


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hybrid", action="store_true")
    parser.add_argument("--prefill", action="store_true")
    args = parser.parse_args()
    prefill, decode = steps(hybrid=args.hybrid)
    trace = prefill if args.prefill else decode
    print(*trace.calls, sep="\n")
    print(f"\n{len(trace.functions)} functions in {len(trace.files)} files, {sum(c.times for c in trace.calls)} calls")


if __name__ == "__main__":
    main()
