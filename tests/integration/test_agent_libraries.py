"""Tool loops of agent libraries against the server, with a model that answers as large ones do: `make clients`.

Each library does ten turns with three tools in each dialect that it speaks, whole and streamed.
"""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any, Final

import pytest

from tests.deadlines import HANGS_S
from tests.integration.clients.command_line import call
from tests.integration.clients.install import installed
from tests.integration.clients.model import FAMILIES, Turn, scripted
from tests.integration.clients.recorder import recorded
from tests.text.answers.spellings import Answer

pytestmark = [pytest.mark.clients, pytest.mark.slow]

CLIENTS: Final = Path(__file__).parent / "clients"
BEGUN: Final = 40  # characters with which a template begins an answer, and which it may not repeat
NUM_LOOPS: Final = {"openai-agents": 4, "pydantic-ai": 6, "langgraph": 6, "vercel": 8}
SEARCH: Final = call("search", query='step-2 "ä" {}', limit=2, tags=["a", "b {}"])
STEPS: Final[list[Turn]] = [
    (Answer("", "First I look.", (call("weather", city="step-0"),)),),
    (Answer("Both.", "Two of them.", (call("weather", city="step-1"), call("weather", city='Lima "ä"'))),),
    (Answer("", "Add.", (call("add", a=1, b=2.5), SEARCH)),),
    (Answer("", "", (call("weather", city="step-3"), call("weather", city="b"), call("add", a=1, b=1))),),
    (
        Answer("", "One.", (call("weather", city="step-4"),)),
        Answer("", "And one more.", (call("search", query="more"),)),
    ),
    *((Answer("", "Next.", (call("weather", city=f"step-{i}"),)),) for i in range(5, 8)),
    (Answer("One more.", "", (call("search", query="step-8"),)),),
    (Answer("All done, step-9.", "Nothing is left."),),
]
NUM_CALLS: Final = sum(len(part.calls) for turn in STEPS for part in turn)


def command(library: str, url: str, folder: Path) -> list[str]:
    """Return the command line of a library's loops; those of Node find their modules beside themselves."""
    if library != "vercel":
        return [str(installed("agents") / "bin" / "python"), str(CLIENTS / "python_loops.py"), url, library]
    node = installed("node")
    shutil.copy(CLIENTS / "vercel_loops.mjs", node)
    return [str(node / "node_modules" / ".bin" / "node"), str(node / "vercel_loops.mjs"), url]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("library", NUM_LOOPS)
def test_library_does_ten_steps_without_a_retry(library: str, family: str, tmp_path: Path) -> None:
    with scripted(family, STEPS) as model, recorded(model.server.url) as recorder:
        argv = command(library, recorder.url, tmp_path)
        done = subprocess.run(
            argv, cwd=tmp_path, capture_output=True, text=True, timeout=8 * HANGS_S, check=False
        )  # fmt: skip
        assert recorder.refused() == []
        assert done.returncode == 0, done.stderr[-4000:]
        found: dict[str, Any] = json.loads(done.stdout)
        assert len(found) == NUM_LOOPS[library]
        assert {name: loop for name, loop in found.items() if loop != ["All done, step-9.", NUM_CALLS]} == {}
        assert len(model.prompts) == len(found) * len(STEPS), "a request was asked twice"
        starts = [i for i in range(len(model.prompts)) if i % len(STEPS)]
        changed = [i for i in starts if not model.prompts[i].startswith(model.prompts[i - 1][:-BEGUN])]
        assert changed == [], "prompts that do not go on from the one before"
