"""The target table: a Forebay server, by itself or beside peers, under the loads of `rows.py`.

    make bench                                            # Forebay alone
    make bench-peers                                      # install the peers, then run side by side
    python -m benchmarks.targets --only streams-1 --peers llamacpp --repeats 5

Runs alternate: of each row each repeat goes to one server after the other, with the same prompts, by the same client
(`forebay bench serve`). A row's figure is the median of its repeats; no prompt is used twice, so nothing but the shared
prefixes comes from a cache. Writes targets.json (every run), targets.md and targets.svg.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from itertools import product
from pathlib import Path
from typing import Any

from benchmarks import kinds, machine
from benchmarks.kinds import VOCAB_SIZE, Kind
from benchmarks.plot import svg
from benchmarks.report import Report, Run, number, put_between_marks, source
from benchmarks.rows import ROWS, Load, Row
from benchmarks.servers import OtherWork, Server, start_figures

ROOT = Path(__file__).parent.parent
# A load of this length is not repeated: it averages over enough, and a slow peer would take the whole evening.
LONG_RUN_S = 60.0
NOISE = 0.05


def main() -> None:
    arguments = parse()
    servers = [kinds.forebay(arguments.model, arguments.serve), *(kinds.PEERS[name]() for name in arguments.peers)]
    if missing := [kind.title for kind in servers if not kind.is_installed]:
        raise SystemExit(f"{', '.join(missing)}: not installed; python -m benchmarks.peers.install")
    rows = [row for row in ROWS if row.name in arguments.only]
    caption = machine.caption(arguments.repeats, quick=arguments.quick)
    runs: list[Run] = []
    for run in measure(servers, rows, arguments):
        say(run, rows)
        runs.append(run)
        write(
            arguments.out, Report(rows, runs), runs, servers, caption
        )  # after each: a run cut short leaves what it has
    table = Report(rows, runs).markdown()
    print(f"{caption}\n\n{table}")
    if arguments.record:
        picture = "![Tokens per second by streams, and each row's share of its target](figures/targets.svg)"
        put_between_marks(ROOT / "docs" / "benchmarks.md", f"{caption}\n\n{table}\n{picture}")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [row.name for row in ROWS]
    parser.add_argument("--only", nargs="+", choices=names, default=names, metavar="ROW", help=", ".join(names))
    parser.add_argument("--peers", nargs="+", choices=list(kinds.PEERS), default=[], metavar="PEER",
                        help=", ".join(kinds.PEERS))  # fmt: skip
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--model", help="for Forebay: a path or a name, instead of the default model")
    parser.add_argument("--serve", nargs=argparse.REMAINDER, default=[], help="flags for forebay serve; must come last")
    parser.add_argument("--quick", action="store_true", help="tiny loads, once: does everything work?")
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "bench", help="folder of the results")
    parser.add_argument("--record", action="store_true",
                        help="write the results into docs/figures, and the table into docs/benchmarks.md")  # fmt: skip
    arguments = parser.parse_args()
    if arguments.record:
        arguments.out = ROOT / "docs" / "figures"
    if arguments.quick:
        arguments.repeats = 1
    return arguments


def measure(servers: Sequence[Kind], rows: Sequence[Row], arguments: argparse.Namespace) -> Iterator[Run]:
    """Starts first, one server at a time: their memory must not be shared, nor their cores."""
    if any(row.load is None for row in rows):
        for repeat, kind in product(range(arguments.repeats), servers):
            other = OtherWork()
            result = start_figures(kind)
            yield Run(server=kind.title, row="start", repeat=repeat, other_cpu_share=other.share(), result=result)
    with Fleet(servers) as fleet:
        for number, row in enumerate(rows):
            if row.load is not None:
                load = row.load.shrunk() if arguments.quick else row.load
                yield from alternate(fleet, row.name, load, arguments.repeats, seed=int(time.time()) + 1000 * number)


def alternate(fleet: Fleet, name: str, load: Load, repeats: int, seed: int) -> Iterator[Run]:
    """A server that fails a load has no figure of that repeat: the others' hour is not lost for it."""
    taken_s: dict[Kind, float] = {}
    for repeat, kind in product(range(repeats), fleet.kinds):
        if taken_s.get(kind, 0.0) < LONG_RUN_S:
            server = fleet.server(kind, load.concurrency)
            other = OtherWork(server)
            try:
                result = client(server, load, seed + repeat)
            except LoadFailed as error:
                print(f"{kind.title}, {name}, run {repeat + 1}: {error}", file=sys.stderr, flush=True)
                continue
            taken_s[kind] = result["duration"]
            yield Run(server=kind.title, row=name, repeat=repeat, other_cpu_share=other.share(), result=result)


class LoadFailed(Exception):
    """Not every request was answered; says what the client printed."""


class Fleet:
    """The servers under load, all there at once: who waits for its turn computes nothing."""

    def __init__(self, servers: Sequence[Kind]) -> None:
        self.kinds = servers
        self._running: dict[Kind, tuple[Server, ExitStack]] = {}

    def __enter__(self) -> Fleet:
        return self

    def __exit__(self, *_: object) -> None:
        for _, stack in self._running.values():
            stack.close()

    def server(self, kind: Kind, streams: int) -> Server:
        """Started at the first call, and again when it must be told of more streams."""
        if kind in self._running:
            server, stack = self._running[kind]
            if server.suits(streams):
                return server
            del self._running[kind]
            stack.close()
        with ExitStack() as stack:
            server = stack.enter_context(Server(kind, streams))
            self._running[kind] = server, stack.pop_all()
            return server


def client(server: Server, load: Load, seed: int) -> dict[str, Any]:
    """What `forebay bench serve` saw. LoadFailed where a request failed: figures over the others would flatter."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "result.json"
        command = [
            *(Path(sys.executable).parent / "forebay", "bench", "serve", "--base-url", server.url),
            *("--ignore-eos", "--disable-tqdm", "--seed", seed, "--save-result", "--result-filename", file),
            *([] if server.kind.tells_vocabulary else ["--vocab-size", VOCAB_SIZE]),
            *load.flags(),
        ]
        done = subprocess.run([str(word) for word in command], check=False, capture_output=True, text=True)
        result: dict[str, Any] = json.loads(file.read_text()) if file.is_file() else {"failed": load.num_prompts}
    if done.returncode or result["failed"]:
        raise LoadFailed(f"{result['failed']} requests failed\n{done.stdout}{done.stderr}")
    return result


def say(run: Run, rows: Sequence[Row]) -> None:
    figures = [f"{row.title} {number(row.figure(run.result))} {row.unit}" for row in rows if source(row) == run.row]
    noise = f"; other work took {run.other_cpu_share:.0%} of the cores" if run.other_cpu_share > NOISE else ""
    print(f"{run.server}, run {run.repeat + 1}: {', '.join(figures)}{noise}", file=sys.stderr, flush=True)


def write(folder: Path, report: Report, runs: Sequence[Run], servers: Sequence[Kind], caption: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    versions = {kind.title: kind.version for kind in servers}
    record = {"machine": machine.facts(), "versions": versions, "runs": [asdict(run) for run in runs]}
    (folder / "targets.json").write_text(json.dumps(record, indent=1) + "\n")
    (folder / "targets.md").write_text(f"{caption}\n\n{report.markdown()}")
    (folder / "targets.svg").write_text(svg(report, caption))


if __name__ == "__main__":
    main()
