"""`forebay replay FILE`: what a flight recorder has, decided again plan by plan."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Final

from forebay.base.errors import ConfigError
from forebay.base.exit_codes import EXIT_FAILED
from forebay.base.units import human_bytes
from forebay.cli.arguments import Parser, whole
from forebay.engine.recorder import file
from forebay.engine.recorder.file import Recording
from forebay.engine.recorder.mark import NoMark
from forebay.engine.recorder.replay import Difference, Outcome, Replay, first_mark, lines
from forebay.scheduler.journal import Marked, Planned

MOST_SLOTS: Final = 1 << 26  # of a pool: a file that names more was altered
_WIDTH: Final = 48


def run(words: Sequence[str]) -> int:
    """Replay a file and print the result. Return 0 if all plans are the same, 1 if one differs."""
    summary = (
        "Give the recorded inputs to the same scheduler again, and compare each plan with the recorded one. The first "
        "plan that differs is printed beside the recorded one."
    )
    parser = Parser("replay", summary, "FILE [options]", ["flight-1.bin", "flight-1.bin --step 1200"])
    parser.option("file", nargs="?", help="what a server wrote when its engine failed, on SIGUSR1 or when asked")
    parser.option("--step", type=whole(0), metavar="N", help="print the plan of this step, and stop there")
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
    outcome, replay = repeat(path, recording, -1 if own.step is None else own.step)
    if own.step is not None and outcome.difference is None:
        if replay.last is None or replay.last.step != own.step:
            raise ConfigError(f"{path}: there is no step {own.step}; {outcome.num_plans} plans were repeated")
        print("\n".join(lines(Planned.of(replay.last))))
        return 0
    print("\n".join(result_lines(outcome, len(recording.records))))
    return EXIT_FAILED if outcome.difference else 0


def repeat(path: Path, recording: Recording, stop_at: int = -1) -> tuple[Outcome, Replay]:
    """Replay a recording. Raises ConfigError if its content cannot be given to a scheduler."""
    config = recording.origin.config
    slots = (config.num_pages, config.max_running_requests, config.context_length, *config.kinds.num_slots.values())
    if not all(0 <= count <= MOST_SLOTS for count in slots) or config.page_size < 1:
        raise ConfigError(f"{path}: it was altered: its pools have {max(slots)} slots")
    try:
        replay = Replay(
            origin=recording.origin,
            records=recording.records,
            stop_at=stop_at,
            begins_at_mark=recording.header.num_lost_bytes > 0,
        )
        return replay.run(), replay
    except (NoMark, ArithmeticError, AssertionError, LookupError, TypeError, ValueError, MemoryError) as error:
        raise ConfigError(f"{path}: its records cannot be repeated: {type(error).__name__}: {error!s:.200}") from error


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
        steps = f"steps {plans[0].step} to {plans[-1].step}" if plans else "no step"
        raise ConfigError(
            f"{path}: {lost} of older records were overwritten, and the engine was never idle for long enough in the "
            f"rest, so that nothing can be repeated: --step prints the recorded plans ({steps}); a larger "
            "--flight-recorder keeps more"
        )
    print("\n".join(lines(found)))
    return 0


def result_lines(outcome: Outcome, num_records: int) -> Iterator[str]:
    """Yield the result of a replay."""
    if outcome.difference is not None:
        yield f"{outcome.num_plans:,} plans are the same; the next one differs, record {outcome.difference.number:,}"
        yield from beside(outcome.difference)
        return
    yield f"{outcome.num_plans:,} plans are the same"
    if outcome.ended:
        yield f"the replay ends before record {num_records:,}, the last: {outcome.ended}"


def beside(difference: Difference) -> Iterator[str]:
    """Yield the lines of both plans, side by side."""
    left, right = ["recorded", *lines(difference.recorded)], ["replayed", *lines(difference.replayed)]
    for one, other in zip_longest(left, right, fillvalue=""):
        mark = " " if one == other else "|"
        yield f"{one:<{_WIDTH}} {mark} {other}".rstrip()
