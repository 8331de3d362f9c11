"""Which models are served: one row for each family's folder."""

from __future__ import annotations

import importlib
import pkgutil

from forebay import families
from forebay.families import ASSISTANTS, HEADS, TYPES
from scripts.site.tables import code, codes, table


def page() -> str:
    rows = [(code(name), _gguf(name)) for name in TYPES]
    served = table(("`model_type` in config.json", "`general.architecture` in a GGUF file"), rows)
    drafting = f"Beside another model, as what drafts for it: {codes((*ASSISTANTS, *HEADS))}."
    return f"{len(TYPES)} types are served.\n\n{served}\n\n{drafting}"


def _gguf(name: str) -> str:
    """Those whose files are read as this type; empty where llama.cpp has none of it."""
    folder = importlib.import_module(f"{families.__name__}.{name}")
    if "gguf" not in {module.name for module in pkgutil.iter_modules(folder.__path__)}:
        return ""
    return codes(importlib.import_module(f"{families.__name__}.{name}.gguf").ARCHITECTURES)
