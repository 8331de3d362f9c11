"""From runs to the target table: medians, shares of the targets, and who was ahead pair by pair."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.rows import Row

OURS = "Forebay"
BEGIN, END = "<!-- targets: begin -->", "<!-- targets: end -->"


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """One measurement. `repeat` counts from 0: runs of equal number are a pair, which saw the same prompts one after
    the other. `other_cpu_share` is what neither server nor client computed, of all cores: above a few per cent the
    machine was not quiet."""

    server: str
    row: str
    repeat: int
    other_cpu_share: float
    result: dict[str, Any]


class Report:
    """`runs` may lack any row of any server. `rows` are all there could be, in the table's order."""

    def __init__(self, rows: Sequence[Row], runs: Sequence[Run]) -> None:
        self._runs = runs
        self.rows = [row for row in rows if any(self.values(row, run.server) for run in runs)]
        self.servers = list(dict.fromkeys(run.server for run in runs))

    def values(self, row: Row, server: str) -> dict[int, float]:
        """The figure of each repeat."""
        name = source(row)
        return {run.repeat: row.figure(run.result) for run in self._runs if (run.row, run.server) == (name, server)}

    def median(self, row: Row, server: str) -> float | None:
        values = self.values(row, server)
        return statistics.median(values.values()) if values else None

    def pairs_ahead(self, row: Row, peer: str) -> tuple[int, int]:
        """In how many of the repeats that both ran we were better, and how many those were."""
        ours, theirs = self.values(row, OURS), self.values(row, peer)
        both = ours.keys() & theirs.keys()
        return sum(row.is_better(ours[repeat], theirs[repeat]) for repeat in both), len(both)

    def markdown(self) -> str:
        peers = [server for server in self.servers if server != OURS]
        heads = ["", "target", "Forebay", "of the target", "best peer before", *peers]
        lines = [heads, ["---"] * len(heads), *(self._cells(row, peers) for row in self.rows)]
        return "".join(f"| {' | '.join(cells)} |\n" for cells in lines)

    def _cells(self, row: Row, peers: Sequence[str]) -> list[str]:
        ours = self.median(row, OURS)
        return [
            row.title,
            f"{number(row.target)} {row.unit}",
            "-" if ours is None else f"**{number(ours)}**",
            "-" if ours is None else f"{100 * row.share_of_target(ours):.0f} %",
            f"{number(row.best)} ({row.best_peer})",
            *(self._peer_cell(row, peer) for peer in peers),
        ]

    def _peer_cell(self, row: Row, peer: str) -> str:
        value = self.median(row, peer)
        if value is None:
            return "-"
        ahead, pairs = self.pairs_ahead(row, peer)
        return f"{number(value)} (ahead {ahead}/{pairs})" if pairs else number(value)


def source(row: Row) -> str:
    """The name under which a row's runs are kept: what starts tell is measured together."""
    return row.name if row.load else "start"


def number(value: float) -> str:
    """Three figures that count, no more."""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def put_between_marks(page: Path, text: str) -> None:
    """Replace what stands between BEGIN and END in a page. ValueError where these are missing."""
    before, begin, rest = page.read_text().partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"{page} lacks the lines {BEGIN} and {END} for the table")
    page.write_text(f"{before}{BEGIN}\n{text}\n{END}{after}")
