"""Methods of transformers' processors whose modules cannot be imported without torchvision, and do not need it."""

from __future__ import annotations

import ast
import importlib.util
import itertools
import math
from collections.abc import Collection
from functools import lru_cache
from pathlib import Path
from typing import Any


def extracted(module: str, owner: str, names: Collection[str]) -> Any:
    """Return a class like `owner` of that module, with these of its methods and of the module's functions alone."""
    package, _, file = f"transformers.models.{module}".rpartition(".")
    spec = importlib.util.find_spec(package)
    assert spec is not None
    assert spec.origin is not None
    tree = ast.parse((Path(spec.origin).parent / f"{file}.py").read_text())
    functions = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name in names]
    own = next(node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == owner)
    own.bases, own.decorator_list = [], []
    own.body = [node for node in own.body if isinstance(node, ast.FunctionDef) and node.name in names]
    found: dict[str, Any] = {"itertools": itertools, "math": math, "lru_cache": lru_cache}
    exec(compile(ast.Module(body=[*functions, own], type_ignores=[]), module, "exec"), found)
    return found[owner]
