"""The pictures of docs/guide/memory.md: `python -m scripts.site.drawings` writes them into docs/figures.

Each brings its own paper and follows the reader's choice of light or dark.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Final

FIGURES: Final = Path(__file__).resolve().parents[2] / "docs" / "figures"
_STYLE: Final = """
  .paper { fill: #fbfbf9; stroke: #dcded8 }
  text { font: 13px system-ui, sans-serif; fill: #1d2426 }
  .faint { fill: #5b6668; font-size: 12px }
  .mid { text-anchor: middle }
  .line { stroke: #5b6668; fill: none; stroke-width: 1.5 }
  .free { fill: #ffffff; stroke: #b9beb8 }
  .pad { fill: #e3e6e0; stroke: #b9beb8 }
  .one { fill: #9fd0d8; stroke: #12606d }
  .two { fill: #f0cf9a; stroke: #96660a }
  .cached { fill: #b7d8bb; stroke: #2b7a4b }
  .state { fill: #c9463b; stroke: none }
  @media (prefers-color-scheme: dark) {
    .paper { fill: #14181a; stroke: #2c3438 }
    text { fill: #e3e8e8 }
    .faint { fill: #97a3a6 }
    .line { stroke: #97a3a6 }
    .free { fill: #1b2124; stroke: #4a5559 }
    .pad { fill: #2c3438; stroke: #4a5559 }
    .one { fill: #1d5863; stroke: #7cc9d4 }
    .two { fill: #6a4d16; stroke: #e0b45c }
    .cached { fill: #2d5239; stroke: #7fcf9c }
    .state { fill: #f19a8e }
  }
"""


class Drawing:
    """A canvas of `width` x `height` pixels; `about` is what it shows, for who cannot see it."""

    def __init__(self, width: int, height: int, about: str) -> None:
        self._parts = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
            f'role="img" aria-label="{escape(about)}">',
            f"<style>{_STYLE}</style>",
            f'<rect class="paper" x="0.5" y="0.5" width="{width - 1}" height="{height - 1}" rx="10"/>',
        ]

    def box(self, x: float, y: float, width: float, height: float, kind: str, label: str = "") -> None:
        self._parts.append(f'<rect class="{kind}" x="{x}" y="{y}" width="{width}" height="{height}" rx="3"/>')
        if label:
            self.text(x + width / 2, y + height / 2 + 4.5, label, "mid")

    def text(self, x: float, y: float, text: str, kind: str = "") -> None:
        self._parts.append(f'<text class="{kind}" x="{x}" y="{y}">{escape(text)}</text>')

    def line(self, *points: tuple[float, float]) -> None:
        path = " ".join(f"{x},{y}" for x, y in points)
        self._parts.append(f'<polyline class="line" points="{path}"/>')

    def curve(self, x: float, y: float, to_x: float, to_y: float) -> None:
        middle = (y + to_y) / 2
        self._parts.append(f'<path class="line" d="M{x},{y} C{x},{middle} {to_x},{middle} {to_x},{to_y}"/>')

    def dot(self, x: float, y: float) -> None:
        self._parts.append(f'<circle class="state" cx="{x}" cy="{y}" r="5"/>')

    def legend(self, y: float, entries: Sequence[tuple[str, str]], x: float = 24) -> None:
        for kind, label in entries:
            if kind == "state":
                self.dot(x + 7, y + 7)
            else:
                self.box(x, y, 14, 14, kind)
            self.text(x + 20, y + 11.5, label, "faint")
            x += 34 + 6.6 * len(label)

    def svg(self) -> str:
        return "\n".join([*self._parts, "</svg>\n"])


def pages() -> Drawing:
    """Two requests, their rows, and the pool that the pages in them are of."""
    drawing = Drawing(720, 330, "Two rows that list pages of one pool; the first two pages of both are the same.")
    rows = {
        "A": [(3, "cached"), (4, "cached"), (7, "one"), (9, "one")],
        "B": [(3, "cached"), (4, "cached"), (6, "two")],
    }
    drawing.text(24, 34, "rows: which pages a request's tokens lie in, in order")
    for place, (name, row) in enumerate(rows.items()):
        y = 48 + 40 * place
        drawing.text(24, y + 20, f"request {name}")
        for column in range(6):
            number, kind = row[column] if column < len(row) else (0, "free")
            drawing.box(110 + 56 * column, y, 50, 30, kind, str(number) if number else "")
    drawing.text(440, 164, "pages: 16 tokens each, of all layers")
    owners = {0: "pad", 3: "cached", 4: "cached", 6: "two", 7: "one", 9: "one", 1: "cached", 11: "cached"}
    for page in range(12):
        drawing.box(24 + 56 * page, 178, 50, 44, owners.get(page, "free"), str(page))
    for column, (page, _) in enumerate(rows["B"]):
        drawing.curve(135 + 56 * column, 118, 49 + 56 * page, 178)
    drawing.text(24, 250, "Pages 3 and 4 hold what both prompts begin with: computed once, listed twice.", "faint")
    drawing.text(24, 270, "Page 0 is nobody's: what must be written nowhere goes there.", "faint")
    kinds = [("one", "of request A"), ("two", "of request B"), ("cached", "of the prefix cache"), ("free", "free")]
    drawing.legend(292, [*kinds, ("pad", "page 0")])
    return drawing


def tree() -> Drawing:
    """The radix tree over one system prompt and two conversations."""
    drawing = Drawing(720, 400, "A tree of token runs: one system prompt, two questions behind it, and states as dots.")
    nodes = {
        "system": (250, 24, 220, "system prompt · 96 tokens"),
        "weather": (90, 124, 210, "“What is the weather…” · 48"),
        "recipe": (430, 124, 210, "“A recipe with…” · 32"),
        "answer": (24, 224, 200, "answer, then “And in Lima?”"),
        "retry": (236, 224, 140, "another answer"),
    }
    for parent, child in (("system", "weather"), ("system", "recipe"), ("weather", "answer"), ("weather", "retry")):
        (x, y, width, _), (to_x, to_y, to_width, _) = nodes[parent], nodes[child]
        drawing.curve(x + width / 2, y + 44, to_x + to_width / 2, to_y)
    for name, (x, y, width, label) in nodes.items():
        drawing.box(x, y, width, 44, "one" if name == "recipe" else "cached", label)
    for name in ("system", "weather", "answer", "recipe"):
        x, y, width, _ = nodes[name]
        drawing.dot(x + width, y + 44)
    drawing.text(430, 190, "in use: pinned, not evicted", "faint")
    drawing.text(24, 300, "A new prompt walks down from the root as far as its tokens are the same.", "faint")
    drawing.text(
        24, 320, "A model with attention alone goes on from there; a hybrid from the last state on its way.", "faint"
    )
    drawing.text(24, 340, "Where memory is short, what was used longest ago goes first, from the leaves up.", "faint")
    drawing.legend(364, [("cached", "cached"), ("one", "held by a running request"), ("state", "a state is kept here")])
    return drawing


def states() -> Drawing:
    """A prompt of a hybrid, the states kept along it, and a second prompt that parts from it."""
    drawing = Drawing(
        720, 300, "Two token bands; the second equals the first for 80 tokens and resumes from a state at 64."
    )
    scale = 4.0
    drawing.text(24, 34, "first prompt, 128 tokens: states are kept at its marks")
    drawing.box(24, 46, 128 * scale, 34, "cached")
    for token in (64, 128):
        drawing.dot(24 + token * scale, 63)
        drawing.text(24 + token * scale, 100, str(token), "faint mid")
    drawing.text(24, 136, "second prompt, the same for its first 80 tokens")
    drawing.box(24, 148, 64 * scale, 34, "cached", "reused: 64")
    drawing.box(24 + 64 * scale, 148, 16 * scale, 34, "two", "16")
    drawing.box(24 + 80 * scale, 148, 56 * scale, 34, "one", "new: 56")
    drawing.line((24 + 80 * scale, 140), (24 + 80 * scale, 190))
    drawing.text(24 + 80 * scale, 206, "parts here", "faint mid")
    drawing.text(
        24,
        232,
        "A recurrence has one state for all that it has read, and no way back: 16 tokens are computed again",
        "faint",
    )
    drawing.text(
        24, 250, "although their KV is there. A state is then left at 80, since others may part there too.", "faint"
    )
    drawing.legend(270, [("cached", "reused"), ("two", "computed again"), ("one", "computed"), ("state", "a state")])
    return drawing


def life() -> Drawing:
    """Where a page stands over its life."""
    drawing = Drawing(720, 190, "A page goes from free to a request, to the cache, and back to free when evicted.")
    places = [("free", "free"), ("one", "a request's"), ("cached", "the cache's"), ("free", "free")]
    steps = ["admitted, or the next token opens it", "step committed: whole pages", "evicted: memory is wanted"]
    for index, (kind, label) in enumerate(places):
        drawing.box(24 + 188 * index, 40, 104, 44, kind, label)
        if index < len(steps):
            x = 132 + 188 * index
            drawing.line((x, 62), (x + 76, 62), (x + 68, 56))
            drawing.line((x + 76, 62), (x + 68, 68))
            first, _, rest = steps[index].partition(": " if ": " in steps[index] else ", ")
            drawing.text(x + 38, 108, first, "faint mid")
            drawing.text(x + 38, 126, rest, "faint mid")
    drawing.text(
        24,
        162,
        "A page that a step in flight may still write is not handed out again before that step has committed.",
        "faint",
    )
    return drawing


DRAWINGS: Final = {"memory-pages": pages, "memory-tree": tree, "memory-states": states, "memory-life": life}


def main() -> None:
    for name, draw in DRAWINGS.items():
        (FIGURES / f"{name}.svg").write_text(draw().svg())


if __name__ == "__main__":
    main()
