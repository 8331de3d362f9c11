"""How the layers of a checkpoint of safetensors are packed, as its configuration says it."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

from forebay.formats.file_array import FileArray
from forebay.formats.quantized import CodeFormat
from forebay.formats.stored_tensor import StoredTensor

# Arrays of layers whose inputs other engines round with these scales, which nothing here does.
ACTIVATION_SCALES: Final = frozenset(
    {"input_scale", "input_global_scale", "output_scale", "activation_scale", "q_scale", "k_scale", "v_scale"}
)
_SIMPLE: Final = re.compile(r"[\w\-/^$]*(?:(?:\\\.|\.\*?)[\w\-/^$]*){0,12}")
_MOST_WILDCARDS: Final = 3  # a match then takes at most the cube of a name's length


Parts = Mapping[str, FileArray]
"""The arrays of one layer, by the last parts of their names."""

Aliases = tuple[tuple[str, str], ...]


class LayerPacking(Protocol):
    """Layers in parts: what arrays stand for one, and what it is.

    `packs_heads`: embedding and head are packed as well, if `format` has one for them.
    """

    @property
    def packs_heads(self) -> bool: ...

    def has(self, part: str, dtype: str) -> bool:
        """Return whether that is an array of a packed layer: `weight` is the name of others, too."""
        ...

    def layer(self, parts: Parts, where: str) -> StoredTensor:
        """Return the weight that these arrays stand for. ModelError, which begins with `where`, if they do not go
        together."""
        ...

    def format(self, name: str, width: int) -> CodeFormat | None:
        """Return the format of the matrix `name`, by its name and inputs alone; None if it is not in codes."""
        ...


@dataclass(frozen=True, slots=True)
class IgnoredModules:
    """Names of modules that are not packed: a module or what contains it, with `*` for anything, or a regular
    expression behind `re:`. Expressions that are more than literals and three wildcards match nothing. `aliases` are
    beginnings of our names, each with one that files may have instead."""

    patterns: tuple[str, ...] = ()
    aliases: Aliases = ()

    @staticmethod
    def of(*lists: Any) -> IgnoredModules:
        """Return those that any of a configuration's fields lists."""
        found = [entry for entries in lists if isinstance(entries, Sequence) for entry in entries]
        return IgnoredModules(tuple(entry for entry in found if isinstance(entry, str)))

    def matches(self, module: str) -> bool:
        """Return whether the module is not packed."""
        theirs = [new + module.removeprefix(old) for old, new in self.aliases if module.startswith(old)]
        return any(_matches(pattern, name) for pattern in self.patterns for name in (module, *theirs))


NONE_IGNORED: Final = IgnoredModules()


def _matches(pattern: str, module: str) -> bool:
    expression = pattern.removeprefix("re:")
    if pattern.count("*") > _MOST_WILDCARDS:
        return False
    if expression != pattern:
        simple = _SIMPLE.fullmatch(expression) is not None
        return simple and re.match(expression, module) is not None
    return fnmatch.fnmatchcase(module, pattern) or module.startswith(f"{pattern}.")
