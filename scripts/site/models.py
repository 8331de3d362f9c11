"""Which models are served: one row for each family's folder."""

from __future__ import annotations

import importlib
import pkgutil

from forebay import families
from forebay.families import ASSISTANTS, HEADS, TYPES
from forebay.families.config.outer import OTHER_NAMES, OUTERS
from scripts.site.tables import code, codes, table


def page() -> str:
    rows = [(code(name), _gguf(name)) for name in TYPES]
    served = table(("`model_type` in config.json", "`general.architecture` in a GGUF file"), rows)
    drafting = f"Beside another model, as what drafts for it: {codes((*ASSISTANTS, *HEADS))}."
    inside = table(("around a language model", "whose type is"), [(code(name), _inside(name)) for name in OUTERS])
    others = "; ".join(f"{code(other)} is {code(ours)}" for other, ours in OTHER_NAMES.items())
    return (
        f"{len(TYPES)} types are served ({others}).\n\n{served}\n\n{drafting}\n\nOf models with images, audio or "
        f"video only the language model is served, for text:\n\n{inside}"
    )


def _inside(name: str) -> str:
    outer = OUTERS[name]
    if outer.types:
        return codes(dict.fromkeys(outer.types.values()))
    return f"any that is served; where the file is silent {code(outer.text_type)}"


def _gguf(name: str) -> str:
    """Those whose files are read as this type; empty where llama.cpp has none of it."""
    folder = importlib.import_module(f"{families.__name__}.{name}")
    if "gguf" not in {module.name for module in pkgutil.iter_modules(folder.__path__)}:
        return ""
    return codes(importlib.import_module(f"{families.__name__}.{name}.gguf").ARCHITECTURES)
