"""The pages of the site: those of `docs/` as they are written, and what is made of declarations put into them.

A page says `<!-- made: flags -->` where a part of it is made. Nothing made is kept in the tree,
so nothing can be stale.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

from scripts.site import api, elsewhere, errors, flags, log_events, metrics, models, python, rules

ROOT: Final = Path(__file__).resolve().parents[2]
DOCS: Final = ROOT / "docs"
MADE: Final[Mapping[str, Callable[[], str]]] = {
    "flags": flags.page,
    "aliases": elsewhere.aliases,
    "absent": elsewhere.absent_flags,
    "accepted": elsewhere.accepted_flags,
    "fields": elsewhere.fields,
    "fields_by_route": elsewhere.fields_by_route,
    "commands": elsewhere.commands,
    "routes": api.page,
    "access": api.access,
    "forwarding": api.forwarding,
    "errors": errors.page,
    "metrics": metrics.page,
    "log_events": log_events.page,
    "families": models.page,
    "python": python.page,
    "rules": rules.page,
}
_MARK: Final = re.compile(r"^<!-- made: (\w+) -->$", re.MULTILINE)


def written() -> dict[Path, str]:
    """Every page, by its path in `docs/`. A notebook `x.ipynb` is the page `x-notebook.md`, which stands in no list."""
    found = {path.relative_to(DOCS): path.read_text() for path in sorted(DOCS.rglob("*.md"))}
    for path in sorted(DOCS.rglob("*.ipynb")):
        page = path.relative_to(DOCS).with_name(f"{path.stem}-notebook.md")
        found = {name: text.replace(f"({path.name})", f"({page.name})") for name, text in found.items()}
        found[page] = "---\norphan: true\n---\n\n" + from_notebook(json.loads(path.read_text()))
    return found


def complete(text: str) -> str:
    """With everything that is made. KeyError for a part that nobody makes."""
    return _MARK.sub(lambda mark: MADE[mark[1]](), text)


def from_notebook(notebook: Mapping[str, Any]) -> str:
    """Its cells as they stand in the file, with the text that code has written."""
    return "\n\n".join(part for cell in notebook["cells"] for part in _cell(cell))


def _cell(cell: Mapping[str, Any]) -> list[str]:
    source = "".join(cell["source"])
    if cell["cell_type"] != "code":
        return [source]
    said = ["".join(out.get("text", out.get("data", {}).get("text/plain", ""))) for out in cell["outputs"]]
    return [f"```python\n{source}\n```", *(f"```text\n{text.rstrip()}\n```" for text in said if text.strip())]
