"""From runs to the target table: medians, shares of the floors, and ratios to each peer pair by pair."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.rows import Bound, Row

OURS = "Forebay"
NOISE = 0.05


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """One measurement. `repeat` counts from 0: the last runs of equal number are a pair, which ran one after the other.
    `other_cpu_share` is what neither server nor client computed, of all cores. `ideal` is the result of a server that
    lost nothing of what the machine gave just before; empty where nobody knows."""

    server: str
    row: str
    repeat: int
    other_cpu_share: float
    result: Mapping[str, Any]
    ideal: Mapping[str, Any]

    @property
    def is_noisy(self) -> bool:
        """Somebody else computed: who waits by spinning then loses much, and who sleeps little."""
        return self.other_cpu_share > NOISE


@dataclass(frozen=True, slots=True)
class Failure:
    """A server that gave no figure for a row; `row` is None if it gave none for any."""

    server: str
    row: str | None
    reason: str


class Report:
    """`runs` may lack any row of any server. `rows` are all there could be, in the table's order; `needs` are the CPU
    flags of the kernels, which say what the goals are. A server with a failure has a column."""

    def __init__(
        self,
        rows: Sequence[Row],
        runs: Sequence[Run],
        needs: frozenset[str] = frozenset(),
        failures: Sequence[Failure] = (),
    ) -> None:
        self.runs, self._failures = runs, failures
        quietest_last = sorted(runs, key=lambda run: run.other_cpu_share, reverse=True)
        self._runs = {(run.row, run.server, run.repeat): run for run in quietest_last}
        self._needs = needs
        self.servers = list(dict.fromkeys(entry.server for entry in (*runs, *failures)))
        failed = {failure.row for failure in failures}
        self.rows = [
            row for row in rows if source(row) in failed or any(self._of(row, server) for server in self.servers)
        ]

    def _of(self, row: Row, server: str) -> dict[int, Run]:
        """The run of each repeat that counts, which is the least disturbed."""
        return {run.repeat: run for (name, by, _), run in self._runs.items() if (name, by) == (source(row), server)}

    def median(self, row: Row, server: str) -> float | None:
        """Of the quiet runs, where there are any."""
        runs = list(self._of(row, server).values())
        quiet = [run for run in runs if not run.is_noisy] or runs
        return statistics.median(row.figure(run.result) for run in quiet) if quiet else None

    def is_noisy(self, row: Row, server: str) -> bool:
        return all(run.is_noisy for run in self._of(row, server).values())

    def limit(self, row: Row) -> float | None:
        """The figure of a server that loses nothing; None for a row without a floor, as a start is."""
        limits = [row.figure(run.ideal) for run in self._with_floor(row)]
        return statistics.median(limits) if limits else None

    def share_of_floor(self, row: Row) -> float | None:
        """1 for a server that loses nothing; each run's by the machine of its own minute."""
        shares = [row.ratio(row.figure(run.result), row.figure(run.ideal)) for run in self._with_floor(row)]
        return statistics.median(shares) if shares else None

    def _of_bound(self, row: Row, bound: Bound) -> float | None:
        """Of our quiet runs; None where there are none."""
        runs = [run for run in self._of(row, OURS).values() if not run.is_noisy]
        return statistics.median(row.figure(run.result) / bound.of(run.result) for run in runs) if runs else None

    def _with_floor(self, row: Row) -> list[Run]:
        """Quiet runs, where there are any."""
        runs = [run for run in self._of(row, OURS).values() if run.ideal]
        return [run for run in runs if not run.is_noisy] or runs

    def ratios(self, row: Row, peer: str) -> list[float]:
        """How many times as good we were in each quiet pair."""
        ours, theirs = self._of(row, OURS), self._of(row, peer)
        pairs = [(ours[repeat], theirs[repeat]) for repeat in sorted(ours.keys() & theirs.keys())]
        return [
            row.ratio(row.figure(our.result), row.figure(their.result))
            for our, their in pairs
            if not (our.is_noisy or their.is_noisy)
        ]

    def markdown(self) -> str:
        peers = [server for server in self.servers if server != OURS]
        heads = ["", "Forebay", "of its floor", *peers, "goal"]
        lines = [heads, ["---"] * len(heads), *(self._cells(row, peers) for row in self.rows)]
        return "".join(f"| {' | '.join(cells)} |\n" for cells in lines) + self._failed() + self._machine()

    def _failed(self) -> str:
        """Each failure in a line of its own, with the first line of its reason."""
        lines = [
            f"- {failure.server}, {failure.row or 'all rows'}: {failure.reason.partition(chr(10))[0]}\n"
            for failure in self._failures
        ]
        return "".join(["\nFailed:\n\n", *lines]) if lines else ""

    def _machine(self) -> str:
        """What it gave before the repeats, from least to most."""
        peaks = [run.ideal["peaks"] for run in self._runs.values() if "peaks" in run.ideal]
        if not peaks:
            return ""
        read, products = ([peak[name] / 1e9 for peak in peaks] for name in ("read", "products"))
        by = ", ".join(sorted({peak["products_by"] for peak in peaks}))
        return f"\nThe machine read {span(read)} GB/s, and multiplied {span(products)} G/s ({by}).\n"

    def _cells(self, row: Row, peers: Sequence[str]) -> list[str]:
        ours = self.median(row, OURS)
        mark = "~" if self.is_noisy(row, OURS) else ""
        figure = "-" if ours is None else f"{mark}**{number(ours)}** {row.unit}"
        return [row.title, figure, self._floor(row), *(self._peer(row, peer) for peer in peers), self._goals(row)]

    def _floor(self, row: Row) -> str:
        share = self.share_of_floor(row)
        return "-" if share is None else f"{100 * share:.0f} % ({self._with_floor(row)[-1].ideal['bound_by']})"

    def _peer(self, row: Row, peer: str) -> str:
        """Its figure, and ours as a multiple, in quiet pairs: who was disturbed is not beaten."""
        value = self.median(row, peer)
        if value is None:
            failed = any(f.server == peer and f.row in (None, source(row)) for f in self._failures)
            return "failed" if failed else "-"
        figure = f"{'~' if self.is_noisy(row, peer) else ''}{number(value)}"
        if quiet := self.ratios(row, peer):
            ahead = sum(ratio > 1 for ratio in quiet)
            return f"{figure} ({statistics.median(quiet):.2f}x, ahead {ahead}/{len(quiet)})"
        return figure

    def _goals(self, row: Row) -> str:
        """Each with what it came to, of a peer against the best of its formats."""
        words = []
        if row.bound:
            value, limit = self._of_bound(row, row.bound), f"{row.bound.limit(self._needs):g}{row.bound.unit}"
            words.append(f"at most {limit}" if value is None else f"{value:.2f} of at most {limit}")
        for goal in row.goals:
            formats = [peer for peer in self.servers if peer.startswith(goal.peer) and self._of(row, peer)]
            found = [self.ratios(row, peer) for peer in formats]
            reached = f"{min(map(statistics.median, found)):.2f} of " if found and all(found) else ""
            words.append(f"{reached}{goal.ratio(self._needs):g}x {goal.peer}")
        return ", ".join(words) or "-"


def source(row: Row) -> str:
    """The name under which a row's runs are kept: what starts tell is measured together."""
    return row.name if row.load else "start"


def number(value: float) -> str:
    """Three figures that count, no more."""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def span(values: Sequence[float]) -> str:
    ends = dict.fromkeys(number(end(values)) for end in (min, max))
    return " to ".join(ends)


def put_between_marks(page: Path, name: str, text: str) -> None:
    """Replace what stands between the marks of that name in a page. ValueError where these are missing."""
    before, after = around_marks(page, name)
    page.write_text(f"{before}\n{text}\n{after}")


def around_marks(page: Path, name: str) -> tuple[str, str]:
    """The page up to the first mark of that name and from the second on, with both. ValueError where one is missing."""
    marks = f"<!-- {name}: begin -->", f"<!-- {name}: end -->"
    before, begin, rest = page.read_text().partition(marks[0])
    _, end, after = rest.partition(marks[1])
    if not begin or not end:
        raise ValueError(f"{page} lacks the lines {marks[0]} and {marks[1]} for the table")
    return before + begin, end + after
