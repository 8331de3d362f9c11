"""The notebook of the library runs, and shows what it says."""

from __future__ import annotations

import ast
import asyncio
import contextlib
import inspect
import io
import json
from pathlib import Path
from typing import Any

import pytest

NOTEBOOK = Path(__file__).parents[2] / "docs" / "guide" / "library.ipynb"


@pytest.mark.long
@pytest.mark.usefixtures("embedded_model")
def test_each_cell_of_the_notebook_runs_and_none_has_kept_its_output() -> None:
    cells = [cell for cell in json.loads(NOTEBOOK.read_text())["cells"] if cell["cell_type"] == "code"]
    assert not any(cell["outputs"] or cell["execution_count"] for cell in cells)
    names: dict[str, Any] = {"__name__": "__main__"}
    with contextlib.redirect_stdout(io.StringIO()) as told:
        for number, cell in enumerate(cells):
            code = compile("".join(cell["source"]), f"cell {number}", "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
            made = eval(code, names)
            if inspect.iscoroutine(made):
                asyncio.run(made)
    said = told.getvalue()
    for shown in ("' Paris", "temperature is -1", "did you mean max_tokens?", "context_length_exceeded", "Hello"):
        assert shown in said, said
    assert len(names["pieces"]) > 2
    assert repr(names["llm"]) == "LLM(closed)"
    assert set(json.loads(names["answer"])) == {"name", "age"}
