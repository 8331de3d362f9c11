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


def cells() -> list[dict[str, Any]]:
    return [cell for cell in json.loads(NOTEBOOK.read_text())["cells"] if cell["cell_type"] == "code"]


def compiled(number: int, text: str, *flags: int) -> Any:
    return compile(text, f"cell {number}", "exec", sum(flags, ast.PyCF_ALLOW_TOP_LEVEL_AWAIT))


def test_each_cell_of_the_notebook_imports_what_there_is_and_none_has_kept_its_output() -> None:
    assert not any(cell["outputs"] or cell["execution_count"] for cell in cells())
    trees = [compiled(number, "".join(cell["source"]), ast.PyCF_ONLY_AST) for number, cell in enumerate(cells())]
    imports = [node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom)]
    assert len(imports) >= 2
    exec("\n".join(map(ast.unparse, imports)), {})


@pytest.mark.slow  # programs with an LLM run every time: tests/docs/test_programs.py
@pytest.mark.usefixtures("embedded_model")
def test_each_cell_of_the_notebook_runs() -> None:
    names: dict[str, Any] = {"__name__": "__main__"}
    with contextlib.redirect_stdout(io.StringIO()) as told:
        for number, cell in enumerate(cells()):
            made = eval(compiled(number, "".join(cell["source"])), names)
            if inspect.iscoroutine(made):
                asyncio.run(made)
    said = told.getvalue()
    for shown in ("' Paris", "temperature is -1", "did you mean max_tokens?", "context_length_exceeded", "Hello"):
        assert shown in said, said
    assert len(names["pieces"]) > 2
    assert repr(names["llm"]) == "LLM(closed)"
    assert set(json.loads(names["answer"])) == {"name", "age"}
