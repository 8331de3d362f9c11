"""The target table: a Forebay server, by itself or beside peers, under the loads of `rows.py`.

    make bench                                            # Forebay alone
    make bench-peers ISA=avx512vnni                       # install the peers, then run side by side
    python -m benchmarks.targets --only streams-1 --peers llamacpp --repeats 5

Runs alternate: of each row each repeat goes to one server after the other, with the same prompts, by the same client
(`forebay bench serve`); before each repeat the machine itself is measured, for the floors. A run during which others
computed is tried again with other prompts, and if that does not help, marked. No prompt is used twice, so nothing but
the shared prefixes comes from a cache. Writes targets-ISA.json (every run), .md and .svg.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

from benchmarks import kinds, machine
from benchmarks.floors import Peaks, Work, measure_peaks, work_of
from benchmarks.kinds import VOCAB_SIZE, Kind
from benchmarks.plot import svg
from benchmarks.report import NOISE, Failure, Report, Run, around_marks, number, put_between_marks, source
from benchmarks.rows import ROWS, Load, Row
from benchmarks.servers import OtherWork, Server, StartFailed, start_figures, wait_until_quiet
from forebay.base.cpu import this_cpu
from forebay.base.variants import X86_VARIANTS, Variant

ROOT = Path(__file__).parent.parent
# A load of this length is not repeated: it averages over enough, and a slow peer would take the whole evening.
LONG_RUN_S = 60.0

QUIET_LIMIT_S = 20.0  # of waiting until others leave the machine alone

# Runs a server for the attempt of a repeat. Raises StartFailed and LoadFailed.
Measure = Callable[[Kind, int, int], Run]


def main() -> None:
    arguments = parse()
    isa = next((variant for variant in X86_VARIANTS if variant.name == arguments.isa), None)
    # Floors are those of steps that give a row one token, and the peers do not guess.
    flags = [*kinds.NO_GUESSES, *arguments.serve]
    wanted = [kinds.forebay(arguments.model, flags, isa), *(kinds.PEERS[name](isa) for name in arguments.peers)]
    servers, failures = installed(wanted, arguments.isa)
    page, name = ROOT / "docs" / "benchmarks.md", f"targets-{arguments.isa}"
    if arguments.record:
        around_marks(page, name)  # a table without a place is told of before it is measured
    rows = [row for row in ROWS if row.name in arguments.only and servers[0].serves(row.model)]
    if left_out := set(arguments.only) - {row.name for row in rows}:
        print(f"left out, as `make bench-peers` has yet to make their models: {', '.join(left_out)}", file=sys.stderr)
    used = isa or next(iter(this_cpu().variants), None)
    caption = machine.caption(arguments.repeats, used.name if used else "no", quick=arguments.quick)
    stem = arguments.out / name
    runs = kept(stem, rows) if arguments.keep else []
    needs = used.needs if used else frozenset()
    for run in measure(servers, rows, Floors(servers[0], used, flags), arguments, failures):
        say(run, rows)
        runs.append(run)
        write(stem, Report(ROWS, runs, needs, failures), servers, caption)  # after each: a run cut short leaves results
    report = Report(ROWS, runs, needs, failures)
    write(stem, report, servers, caption)
    print(f"{caption}\n\n{report.markdown()}")
    if arguments.record:
        picture = f"![Tokens per second by streams, and each row's share of its floor](figures/{stem.name}.svg)"
        text = f"{caption}\n\n{report.markdown()}\n{picture}"
        put_between_marks(page, name, text)
    if failures:
        raise SystemExit(f"{len(failures)} failures, which the table lists")


def installed(servers: Sequence[Kind], isa: str) -> tuple[list[Kind], list[Failure]]:
    """Return the servers that can start, and a failure for each other peer. SystemExit if Forebay cannot start."""
    how = f"not installed; python -m benchmarks.peers.install --isa {isa}"
    failures = [Failure(kind.title, None, f"{', '.join(kind.missing)}: {how}") for kind in servers if kind.missing]
    for failure in failures:
        print(f"{failure.server}: {failure.reason}", file=sys.stderr, flush=True)
    if servers[0].missing:
        raise SystemExit(f"{servers[0].title} cannot start: without it there is nothing to compare")
    return [kind for kind in servers if not kind.missing], failures


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [row.name for row in ROWS]
    isas = ["native", *(variant.name for variant in this_cpu().variants)]
    parser.add_argument("--only", nargs="+", choices=names, default=names, metavar="ROW", help=", ".join(names))
    parser.add_argument("--peers", nargs="+", choices=list(kinds.PEERS), default=[], metavar="PEER",
                        help=", ".join(kinds.PEERS))  # fmt: skip
    parser.add_argument("--isa", choices=isas, default="native", help="all servers use no more than this")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--attempts", type=int, default=3, help="at each, until others leave the machine alone")
    parser.add_argument("--model", help="for Forebay: a path or a name, instead of the default model")
    parser.add_argument("--serve", nargs=argparse.REMAINDER, default=[], help="flags for forebay serve; must come last")
    parser.add_argument("--quick", action="store_true", help="tiny loads, once: does everything work?")
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "bench", help="folder of the results")
    parser.add_argument("--keep", action="store_true", help="of the last results what these rows do not replace")
    parser.add_argument("--record", action="store_true",
                        help="write the results into docs/figures, and the table into docs/benchmarks.md")  # fmt: skip
    arguments = parser.parse_args()
    if arguments.record:
        arguments.out = ROOT / "docs" / "figures"
    if arguments.quick:
        arguments.repeats = arguments.attempts = 1
    return arguments


def kept(stem: Path, rows: Sequence[Row]) -> list[Run]:
    """The runs of other rows, as the last call wrote them."""
    path = stem.with_suffix(".json")
    runs = json.loads(path.read_text())["runs"] if path.is_file() else []
    return [Run(**run) for run in runs if run["row"] not in {source(row) for row in rows}]


class Floors:
    """What a server that loses nothing would do on this machine, now; `variant` is None where there are no kernels."""

    def __init__(self, kind: Kind, variant: Variant | None, flags: Sequence[str]) -> None:
        self._variant = variant
        self._work: Callable[[str], Work] = cache(lambda model: work_of(kind.models[model], flags, kind.environment))

    def ideal(self, row: Row, load: Load, attempts: int) -> dict[str, Any]:
        """Empty where a machine that others use would make the floor too high to say anything."""
        if self._variant is None:
            return {}
        work = self._work(row.model)
        for _ in range(attempts):
            if attempts > 1:
                wait_until_quiet(QUIET_LIMIT_S)
            other = OtherWork()
            peaks = measure_peaks(self._variant, work.weight_bytes)
            if other.share() <= NOISE or attempts == 1:
                break
        else:
            return {}
        return {**work.ideal(load, peaks), "peaks": asdict(peaks), "bound_by": bound(work, row, load, peaks)}


def bound(work: Work, row: Row, load: Load, peaks: Peaks) -> str:
    """What the floor of a row would be lower without: the read, or which instruction's products."""
    reading, multiplying = replace(peaks, products=math.inf), replace(peaks, read=math.inf)
    ratio = row.ratio(row.figure(work.ideal(load, reading)), row.figure(work.ideal(load, multiplying)))
    return "read" if ratio < 1 else peaks.products_by


def measure(
    servers: Sequence[Kind],
    rows: Sequence[Row],
    floors: Floors,
    arguments: argparse.Namespace,
    failures: list[Failure],
) -> Iterator[Run]:
    """Appends to `failures`. Starts first, one server at a time: their memory must not be shared, nor their cores."""
    if any(row.load is None for row in rows):
        for kind in () if arguments.quick else servers:  # the first compiles, and reads files that then are in memory
            with contextlib.suppress(StartFailed):  # the measured start reports it
                start_figures(kind)
        yield from rounds(servers, arguments.repeats, arguments.attempts, lambda: measure_start, "start", failures)
    with Fleet() as fleet:
        for number, row in enumerate(rows):
            if row.load is not None:
                load = row.load.shrunk() if arguments.quick else row.load
                seed = int(time.time()) + 1000 * number

                def prepare(row: Row = row, load: Load = load, seed: int = seed) -> Measure:
                    return partial(measure_load, fleet, row, load, seed, floors.ideal(row, load, arguments.attempts))

                able = [kind for kind in servers if kind.serves(row.model)]
                yield from rounds(able, arguments.repeats, arguments.attempts, prepare, row.name, failures)


def rounds(
    servers: Sequence[Kind],
    repeats: int,
    attempts: int,
    prepare: Callable[[], Measure],
    row: str,
    failures: list[Failure],
) -> Iterator[Run]:
    """Run each server once per repeat, and again if other work disturbed it. A slow server runs once.

    A server that fails is appended to `failures` and has no further turn in this row; the other servers go on."""
    waiting = list(servers)
    for repeat in range(repeats):
        measure_one = prepare()
        for kind in list(waiting):
            for attempt in range(attempts):
                if attempts > 1:
                    wait_until_quiet(QUIET_LIMIT_S)
                try:
                    run = measure_one(kind, repeat, attempt)
                except (LoadFailed, StartFailed) as error:
                    print(f"{kind.title}, {row}, run {repeat + 1}: {error}", file=sys.stderr, flush=True)
                    failures.append(Failure(kind.title, row, str(error)))
                    waiting.remove(kind)
                    break
                yield run
                if run.result.get("duration", 0.0) >= LONG_RUN_S:
                    waiting.remove(kind)
                    break
                if not run.is_noisy:
                    break


def measure_start(kind: Kind, repeat: int, attempt: int) -> Run:
    other = OtherWork()
    result = start_figures(kind)
    return Run(server=kind.title, row="start", repeat=repeat, other_cpu_share=other.share(), result=result, ideal={})


def measure_load(
    fleet: Fleet, row: Row, load: Load, seed: int, ideal: dict[str, Any], kind: Kind, repeat: int, attempt: int
) -> Run:
    """Raises StartFailed and LoadFailed."""
    server = fleet.server(kind, load.concurrency, row.model, load.longest)
    other = OtherWork(server)
    result = client(server, load, seed + repeat + 100 * attempt)
    share = other.share()
    return Run(server=kind.title, row=row.name, repeat=repeat, other_cpu_share=share, result=result, ideal=ideal)


class LoadFailed(Exception):
    """Not every request was answered; says what the client printed."""


class Fleet:
    """The servers under load, all there at once: who waits for its turn computes nothing."""

    def __init__(self) -> None:
        self._running: dict[str, tuple[Server, ExitStack]] = {}

    def __enter__(self) -> Fleet:
        return self

    def __exit__(self, *_: object) -> None:
        for _, stack in self._running.values():
            stack.close()

    def server(self, kind: Kind, streams: int, model: str, tokens: int) -> Server:
        """Started at the first call, and again for another model, or where it must be told of more streams or tokens
        of each."""
        if kind.title in self._running:
            server, stack = self._running[kind.title]
            if server.suits(streams, model, tokens):
                return server
            del self._running[kind.title]
            stack.close()
        with ExitStack() as stack:
            server = stack.enter_context(Server(kind, streams, model, tokens))
            self._running[kind.title] = server, stack.pop_all()
            return server


def client(server: Server, load: Load, seed: int, *, model: str | None = None) -> dict[str, Any]:
    """What `forebay bench serve` saw, asking for `model` or for what the server names first. LoadFailed where a
    request failed: figures over the others would flatter."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "result.json"
        command = [
            *(Path(sys.executable).parent / "forebay", "bench", "serve", "--base-url", server.url),
            *("--ignore-eos", "--disable-tqdm", "--seed", seed, "--save-result", "--result-filename", file),
            *([] if server.kind.tells_vocabulary else ["--vocab-size", VOCAB_SIZE]),
            *(["--model", model] if model else []),
            *load.flags(),
        ]
        done = subprocess.run([str(word) for word in command], check=False, capture_output=True, text=True)
        result: dict[str, Any] = json.loads(file.read_text()) if file.is_file() else {"failed": load.num_prompts}
    if done.returncode or result["failed"]:
        raise LoadFailed(f"{result['failed']} requests failed\n{done.stdout}{done.stderr}")
    return result


def say(run: Run, rows: Sequence[Row]) -> None:
    figures = [f"{row.title} {number(row.figure(run.result))} {row.unit}" for row in rows if source(row) == run.row]
    noise = f"; other work took {run.other_cpu_share:.0%} of the cores" if run.is_noisy else ""
    print(f"{run.server}, run {run.repeat + 1}: {', '.join(figures)}{noise}", file=sys.stderr, flush=True)


def by_lines(facts: Mapping[str, Any], versions: Mapping[str, str], runs: Sequence[Run]) -> str:
    """As JSON with a line for each run, so that what a new one changes can be seen; six digits of a figure count."""
    lines = ",\n".join(json.dumps(rounded(asdict(run))) for run in runs)
    return f'{{"machine": {json.dumps(facts)},\n"versions": {json.dumps(versions)},\n"runs": [\n{lines}\n]}}\n'


def rounded(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: rounded(part) for name, part in value.items()}
    return float(f"{value:.6g}") if isinstance(value, float) else value


def write(stem: Path, report: Report, servers: Sequence[Kind], caption: str) -> None:
    stem.parent.mkdir(parents=True, exist_ok=True)
    versions = {kind.title: kind.version for kind in servers}
    stem.with_suffix(".json").write_text(by_lines(machine.facts(), versions, report.runs))
    stem.with_suffix(".md").write_text(f"{caption}\n\n{report.markdown()}")
    stem.with_suffix(".svg").write_text(svg(report, caption))


if __name__ == "__main__":
    main()
