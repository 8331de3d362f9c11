"""Adapters that are made for the comparison, and the questions that name them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

from forebay.base.errors import ConfigError
from forebay.config.flag import Value
from forebay.engine.lifecycle.model_shape import adaptable_layers
from forebay.formats.random_adapter import write_random_adapter
from forebay.verify.questions import Question

RANKS: Final = {"one": 3, "two": 8}  # by name
_SLOTS: Final = 2 * len(RANKS)  # one that is loaded anew has another slot, while its requests end with the old one

SETTINGS: Final = ("enable_lora", "lora_modules", "max_loras", "max_lora_rank")


def adapted(questions: Sequence[Question]) -> list[Question]:
    """Return each question for an adapter, and then each for the model. Those that begin alike are of both adapters."""
    names = [*RANKS]
    return [*(q._replace(adapter=names[i // 2 % len(names)]) for i, q in enumerate(questions)), *questions]


@contextmanager
def made_adapters(model_path: str, seed: int) -> Iterator[dict[str, Path]]:
    """Random adapters of all layers that can have one, in folders that are there meanwhile. Raises ConfigError for a
    model without such layers."""
    layers = adaptable_layers(Path(model_path))
    if not layers:
        raise ConfigError("no layer of this model can have an adapter")
    with TemporaryDirectory(prefix="forebay-adapters-") as root:
        found = {name: Path(root) / name for name in RANKS}
        for number, (name, folder) in enumerate(found.items()):
            write_random_adapter(folder, layers, rank=RANKS[name], seed=seed * len(RANKS) + number)
        yield found


def settings(paths: dict[str, Path]) -> dict[str, Value]:
    """Return the settings of engines with these adapters."""
    modules = tuple(f"{name}={path}" for name, path in paths.items())
    values: tuple[Value, ...] = True, modules, _SLOTS, max(RANKS.values())
    return dict(zip(SETTINGS, values, strict=True))
