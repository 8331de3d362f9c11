"""`forebay replay FILE`: what a flight recorder has, decided again plan by plan."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Final

from forebay.base.errors import ConfigError
from forebay.base.exit_codes import EXIT_FAILED, EXIT_OK, EXIT_REFUSED
from forebay.base.units import human_bytes
from forebay.cli.arguments import Parser, whole
from forebay.engine.recorder import file
from forebay.engine.recorder.file import Recording
from forebay.engine.recorder.mark import NoMark
from forebay.engine.recorder.replay import Difference, Outcome, Replay, first_mark, lines
from forebay.scheduler.journal import Marked, Planned, Unmarked

if TYPE_CHECKING:
    from forebay.engine.recorder.tiny import Executed

MOST_SLOTS: Final = 1 << 26  # of a pool: a file that names more was altered
_WIDTH: Final = 48
_NEVER_IDLE: Final = "the engine was never idle for long enough in the rest"
_UNREPEATABLE: Final = (
    NoMark,
    ArithmeticError,
    AssertionError,
    LookupError,
    TypeError,
    ValueError,
    MemoryError,
)


def run(words: Sequence[str]) -> int:
    """Replay a file and print the result. Return 0 if all plans are the same, 1 if one differs, 2 if there was none."""
    summary = (
        "Give the recorded inputs to the same scheduler again, and compare each plan with the recorded one. The first "
        "plan that differs is printed beside the recorded one."
    )
    parser = Parser("replay", summary, "FILE [options]", ["flight-1.bin", "flight-1.bin --step 1200"])
    parser.option("file", nargs="?", help="what a server wrote when its engine failed, on SIGUSR1 or when asked")
    parser.option("--step", type=whole(0), metavar="N", help="print the plan of this step, and stop there")
    parser.option(
        "--on",
        choices=("tiny",),
        help="execute the plans on a small random model with the same layers, and compare requests with each one alone",
    )
    own = parser.parse(words).own
    if not own.file:
        raise ConfigError("which file? Give the path that the server has logged")
    path = Path(own.file)
    recording = file.read(path)
    print("\n".join(about(path, recording)), file=sys.stderr)
    if recording.header.num_lost_bytes:
        if own.step is not None or not any(isinstance(record, Marked) for record in recording.records):
            return _not_repeatable(path, recording, own.step)
        print(behind_mark(recording), file=sys.stderr)
    return _replayed(path, recording, own.step) if own.on is None else _on_tiny(path, recording, own.step)


def _replayed(path: Path, recording: Recording, step: int | None) -> int:
    """Replay, up to a step if one is given, and print the result."""
    outcome, replay = repeat(path, recording, -1 if step is None else step)
    if step is not None and outcome.difference is None:
        if replay.last is None or replay.last.step != step:
            raise ConfigError(f"{path}: there is no step {step}; {outcome.num_plans} plans were repeated")
        print("\n".join(lines(Planned.of(replay.last))))
        return EXIT_OK
    print("\n".join(result_lines(outcome, len(recording.records))))
    if outcome.difference:
        return EXIT_FAILED
    return EXIT_OK if outcome.num_plans else EXIT_REFUSED


def repeat(path: Path, recording: Recording, stop_at: int = -1) -> tuple[Outcome, Replay]:
    """Replay a recording. Raises ConfigError if its content cannot be given to a scheduler."""
    _check_sizes(path, recording)
    try:
        replay = Replay(
            origin=recording.origin,
            records=recording.records,
            stop_at=stop_at,
            begins_at_mark=recording.header.num_lost_bytes > 0,
        )
        return replay.run(), replay
    except _UNREPEATABLE as error:
        raise ConfigError(f"{path}: its records cannot be repeated: {type(error).__name__}: {error!s:.200}") from error


def _check_sizes(path: Path, recording: Recording) -> None:
    config = recording.origin.config
    slots = (config.num_pages, config.max_running_requests, config.context_length, *config.kinds.num_slots.values())
    if not all(0 <= count <= MOST_SLOTS for count in slots) or config.page_size < 1:
        raise ConfigError(f"{path}: it was altered: its pools have {max(slots)} slots")


def _on_tiny(path: Path, recording: Recording, step: int | None) -> int:
    """Execute the plans. Return 1 if one differs, cannot be executed, or changes what a request gets, and 2 if no token
    was compared."""
    if step is not None:
        raise ConfigError("--step prints a plan, and --on executes all of them: leave one of them out")
    if recording.header.num_lost_bytes:
        raise ConfigError(
            f"{path}: older records were overwritten, and with them what the prefix cache holds: replay without --on, "
            "or record with a larger --flight-recorder"
        )
    from forebay.engine.recorder.tiny import run_on_tiny  # brings torch, which nothing but this needs here

    _check_sizes(path, recording)
    model_type = str(recording.header.model.get("model_type", ""))
    try:
        executed = run_on_tiny(recording.origin, recording.records, model_type)
    except _UNREPEATABLE as error:
        raise ConfigError(f"{path}: its records cannot be repeated: {type(error).__name__}: {error!s:.200}") from error
    print("\n".join(result_lines(executed.outcome, len(recording.records))))
    print("\n".join(executed_lines(executed)))
    if executed.outcome.difference or executed.error or executed.fault:
        return EXIT_FAILED
    return EXIT_OK if executed.num_compared else EXIT_REFUSED


def executed_lines(executed: Executed) -> Iterator[str]:
    """Yield the result of an execution on a small model."""
    if executed.error:
        yield f"a plan cannot be executed: {executed.error}"
    if not executed.num_compared:
        yield "nothing was compared: no recorded step chose a token"
        return
    fault = executed.fault
    if fault is None:
        yield f"{executed.num_compared:,} tokens of {executed.num_requests:,} requests are those of each request alone"
        return
    subject = f"what was sent up to step {fault.step}" if fault.is_sent else f"step {fault.step}"
    yield (
        f"{subject} gives request {fault.request} at position {fault.position} token {fault.recorded.token} "
        f"with log-probability {fault.recorded.logprob:.6f}; alone it is {fault.alone.token} with "
        f"{fault.alone.logprob:.6f}. `--step {fault.step}` prints the plan"
    )


def about(path: Path, recording: Recording) -> Iterator[str]:
    """Yield the lines about a file."""
    header, config = recording.header, recording.origin.config
    tokens = "with tokens" if header.has_tokens else "without tokens"
    yield f"{path.name}: {header.reason or 'no reason'}; {len(recording.records):,} records {tokens}"
    model = header.model.get("model_type", "an unknown model")
    memory = f"{config.num_pages} pages of {config.page_size} tokens"
    yield f"{model}, {memory}, {config.max_running_requests} requests at once"


def behind_mark(recording: Recording) -> str:
    """Return the line about the place where the replay of a recording begins whose older records were overwritten."""
    number, marked = first_mark(recording.records)
    lost = human_bytes(recording.header.num_lost_bytes)
    return (
        f"{lost} of older records were overwritten: the replay begins behind step {marked.step:,}, record {number:,}, "
        "when the engine was idle"
    )


def _not_repeatable(path: Path, recording: Recording, step: int | None) -> int:
    lost = human_bytes(recording.header.num_lost_bytes)
    plans = [record for record in recording.records if isinstance(record, Planned)]
    found = next((plan for plan in plans if plan.step == step), None)
    if found is None:
        whys = [record.why for record in recording.records if isinstance(record, Unmarked)]
        idle = f"the state of the idle engine could not be kept ({whys[-1]})" if whys else _NEVER_IDLE
        steps = f"steps {plans[0].step} to {plans[-1].step}" if plans else "no step"
        raise ConfigError(
            f"{path}: {lost} of older records were overwritten, and {idle}, so that nothing can be repeated: --step "
            f"prints the recorded plans ({steps}); a larger --flight-recorder keeps more"
        )
    print("\n".join(lines(found)))
    return EXIT_OK


def result_lines(outcome: Outcome, num_records: int) -> Iterator[str]:
    """Yield the result of a replay."""
    if outcome.difference is not None:
        yield f"{outcome.num_plans:,} plans are the same; the next one differs, record {outcome.difference.number:,}"
        yield from beside(outcome.difference)
        return
    yield f"{outcome.num_plans:,} plans are the same" if outcome.num_plans else "no plan was compared"
    if outcome.ended:
        yield f"the replay ends before record {num_records:,}, the last: {outcome.ended}"


def beside(difference: Difference) -> Iterator[str]:
    """Yield the lines of both plans, side by side."""
    left, right = ["recorded", *lines(difference.recorded)], ["replayed", *lines(difference.replayed)]
    for one, other in zip_longest(left, right, fillvalue=""):
        mark = " " if one == other else "|"
        yield f"{one:<{_WIDTH}} {mark} {other}".rstrip()
