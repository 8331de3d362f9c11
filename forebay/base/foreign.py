"""Names of other engines and of other providers' APIs, as `foreign.toml` declares them.

An option or a field that changes nothing is accepted; any other is refused with a line that names the equivalent.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

from forebay.base.sampling import DRAWS

_FILE: Final = Path(__file__).with_suffix(".toml")
_DECLARED: Final[dict[str, Any]] = tomllib.loads(_FILE.read_text(encoding="utf-8"))
_FIELDS: Final = _DECLARED["fields"]
_FLAGS: Final = _DECLARED["flags"]
_DRAWS: Final = f"{', '.join(number.name for number in DRAWS[:-1])} and {DRAWS[-1].name}"


def _by_name(lines: Mapping[str, Sequence[str]]) -> MappingProxyType[str, str]:
    """Return the line of each name, in the file's order. Raises ValueError for a name with two lines."""
    found: dict[str, str] = {}
    for line, names in lines.items():
        if twice := found.keys() & set(names):
            raise ValueError(f"{_FILE.name} has two lines for {', '.join(sorted(twice))}: leave one")
        found |= dict.fromkeys(names, line.format(draws=_DRAWS))
    return MappingProxyType(found)


# -- fields of requests ------------------------------------------------------------------------------------------------

ABSENT_FIELDS: Final = _by_name(_FIELDS["absent"])
OTHER_ROUTES: Final = _by_name(_FIELDS["other_routes"])
"""Fields that some routes have, for the other routes."""


def passed_fields(*sources: str) -> frozenset[str]:
    """Return the fields of these `sources` (keys of its table `passed`) whose value cannot change an answer."""
    return frozenset[str]().union(*(_FIELDS["passed"][source] for source in sources))


PASSED: Final = passed_fields("openai", "vllm", "sglang", "llama")
"""Fields without effect in every body that generates: hints about caches, ids and timings."""


def neutral_values(body: str) -> dict[str, list[Any]]:
    """Return the values beside null that change nothing, by field, for a key of the table `neutral`."""
    found: dict[str, list[Any]] = _FIELDS["neutral"][body]
    return found


def why_field_is_absent(name: str) -> str:
    """Return the line about a field that another engine or another route has; "" for all others."""
    return ABSENT_FIELDS.get(name) or OTHER_ROUTES.get(name, "")


# -- options of the command line ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Accepted:
    """An option that is accepted and changes nothing. `values` are the accepted ones, any value if the tuple is
    empty."""

    option: str
    line: str
    takes_value: bool = False
    optional: bool = False
    values: tuple[str, ...] = ()

    @classmethod
    def parse(cls, written: str, line: str) -> Accepted:
        """Read one entry: `--a`, `--a=*` (any value), `--a=1|2` (these), or `--a=[on|off]` (or none)."""
        option, equals, values = written.partition("=")
        inner = values.strip("[]")
        chosen = () if inner in ("", "*") else tuple(inner.split("|"))
        return cls(option, line, takes_value=bool(equals), optional=values.startswith("["), values=chosen)

    def accepts(self, value: str | None) -> bool:
        """Return whether the flag may have this value; None stands for a flag without one, and case is ignored."""
        return value is None or not self.values or value.lower() in self.values


def _accepted() -> MappingProxyType[str, Accepted]:
    parsed = (Accepted.parse(written, line) for written, line in _by_name(_FLAGS["accepted"]).items())
    return MappingProxyType({accepted.option: accepted for accepted in parsed})


ACCEPTED_OPTIONS: Final = _accepted()
ABSENT_OPTIONS: Final = _by_name(_FLAGS["absent"])
"""Lines by key (underscores, no dashes); a trailing `*` is any ending."""
ABSENT_VALUES: Final = {option: _by_name(lines) for option, lines in _FLAGS["values"].items()}
"""Lines by the key of an option of Forebay, and by the value that another engine has for it."""
SYNONYMS: Final[dict[str, dict[str, str]]] = _FLAGS["synonyms"]
"""Values of Forebay by the key of an option, and by another engine's spelling of the value."""


def why_option_is_absent(spelling: str) -> str:
    """Return the line about an option, variable or key that another engine has; "" for all others.

    `spelling` is as the user wrote it, with dashes or underscores.
    """
    key = as_key(spelling)
    accepted = next((found.line for option, found in ACCEPTED_OPTIONS.items() if as_key(option) == key), "")
    return ABSENT_OPTIONS.get(key, accepted) or next(
        (line for name, line in ABSENT_OPTIONS.items() if name.endswith("*") and key.startswith(name[:-1])), ""
    )


def as_key(option: str) -> str:
    """Convert an option to a key: `--max-model-len` to `max_model_len`."""
    return option.lstrip("-").replace("-", "_").lower()
