"""The target table as a picture: tokens per second over the number of streams, and each row's share of its floor.

Written as SVG by hand, so that no plotting library is needed.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from xml.sax.saxutils import escape

from benchmarks.report import OURS, Report, number

WIDTH, HEIGHT = 960, 400
LEFT = (60, 50, 380, 290)  # x, y, width, height of each panel's inside
RIGHT = (690, 50, 220, 290)
OUR_COLOUR, FLOOR_COLOUR, GRID = "#0b6bcb", "#c2410c", "#d4d4d8"
PEER_COLOURS = ("#71717a", "#15803d", "#a16207", "#7e22ce", "#0f766e", "#9f1239")
STREAMS = (1, 4, 16, 64)


def svg(report: Report, caption: str) -> str:
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
        *throughput(report),
        *shares(report),
        text(LEFT[0], HEIGHT - 8, caption, colour="#52525b"),
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


def throughput(report: Report) -> Iterable[str]:
    """A line for each server and one for what the machine allows, both axes logarithmic."""
    rows = {row.name: row for row in report.rows}
    limits = {s: report.limit(row) for s in STREAMS if (row := rows.get(f"streams-{s}"))}
    series = {"floor": {s: value for s, value in limits.items() if value is not None}}
    for server in report.servers:
        found = {s: report.median(row, server) for s in STREAMS if (row := rows.get(f"streams-{s}"))}
        series[server] = {s: value for s, value in found.items() if value is not None}
    values = [value for line in series.values() for value in line.values()]
    if not values:
        return
    scale = Log(min(values), max(values))
    yield text(LEFT[0], 30, "Output tokens per second by streams (128 in, 128 out)", size=14)
    for tick in scale.ticks():
        y = down(LEFT, scale(tick))
        yield f'<path d="M{LEFT[0]} {y:.1f}h{LEFT[2]}" stroke="{GRID}"/>'
        yield text(LEFT[0] - 6, y + 4, number(tick), anchor="end")
    for streams in STREAMS:
        yield text(across(streams), LEFT[1] + LEFT[3] + 18, str(streams), anchor="middle")
    peers = iter(PEER_COLOURS * len(series))
    for place, (name, line) in enumerate(series.items()):
        colour = {"floor": FLOOR_COLOUR, OURS: OUR_COLOUR}.get(name) or next(peers)
        yield from curve([(across(s), down(LEFT, scale(v))) for s, v in line.items()], colour, dashed=name == "floor")
        yield text(LEFT[0] + 10, LEFT[1] + 16 + 16 * place, name, colour=colour)


def shares(report: Report) -> Iterable[str]:
    """A bar for each row that has a floor."""
    x, y, width, height = RIGHT
    yield text(x - 220, 30, "Share of what the machine allows", size=14)
    step = height / max(1, len(report.rows))
    for place, row in enumerate(report.rows):
        top = y + place * step
        yield text(x - 8, top + step / 2 + 4, row.title, anchor="end", size=10)
        share = report.share_of_floor(row)
        if share is not None:
            size = f'width="{width * min(share, 1.0):.1f}" height="{step - 6:.1f}"'
            yield f'<rect x="{x}" y="{top + 3:.1f}" {size} fill="{OUR_COLOUR}"/>'
            yield text(x + width + 6, top + step / 2 + 4, f"{100 * share:.0f} %", size=10)
    yield f'<path d="M{x + width} {y}v{height}" stroke="{FLOOR_COLOUR}" stroke-dasharray="4 3"/>'
    yield text(x + width, y + height + 18, "floor", colour=FLOOR_COLOUR, anchor="middle")


class Log:
    """Values to 0..1, on a logarithmic scale that begins and ends at one of 1, 2 or 5 times a power of ten."""

    def __init__(self, low: float, high: float) -> None:
        around = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
        steps = [factor * 10.0**power for power in around for factor in (1, 2, 5)]
        self.low = max(step for step in steps if step <= low)
        self.high = min(step for step in steps if step >= high and step > self.low)
        self._steps = steps

    def __call__(self, value: float) -> float:
        return math.log(value / self.low) / math.log(self.high / self.low)

    def ticks(self) -> list[float]:
        return [step for step in self._steps if self.low <= step <= self.high]


def across(streams: int) -> float:
    return LEFT[0] + LEFT[2] * (0.05 + 0.9 * math.log(streams / STREAMS[0]) / math.log(STREAMS[-1] / STREAMS[0]))


def down(panel: tuple[int, int, int, int], share: float) -> float:
    return panel[1] + panel[3] * (1 - share)


def curve(points: Sequence[tuple[float, float]], colour: str, *, dashed: bool) -> Iterable[str]:
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    yield f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"{dash(dashed)}/>'
    yield from (f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{colour}"/>' for x, y in points)


def dash(dashed: bool) -> str:
    return ' stroke-dasharray="4 3"' if dashed else ""


def text(x: float, y: float, words: str, *, colour: str = "#18181b", anchor: str = "start", size: int = 12) -> str:
    place = f'x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"'
    return f'<text {place} fill="{colour}" font-size="{size}">{escape(words)}</text>'
