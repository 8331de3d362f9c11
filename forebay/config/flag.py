"""One flag as data: its name, kind, bounds and help. The command line, the environment, the TOML file and
`/server_info` all derive from it."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from typing import Final, NamedTuple

from forebay.base.errors import ConfigError
from forebay.base.units import parse_bytes, parse_count

Value = str | int | float | bool | tuple[str, ...]


class Auto:
    """The type of AUTO: `resolve` decides by a rule and says why. Never leaves this package."""

    def __repr__(self) -> str:
        return "auto"


AUTO: Final = Auto()


class Decision(NamedTuple):
    """The resolved value of a flag, and the reason that start-up logs for it."""

    value: Value
    reason: str


class Settled(dict[str, Value]):
    """Values by flag name that are decided already."""

    def number(self, name: str) -> int:
        """Return the flag's integer value; raise TypeError if it has none."""
        value = self[name]
        if not isinstance(value, int):
            raise TypeError(f"{name} is {value!r}")
        return value

    def share(self, name: str) -> float:
        """Return the flag's value as a float; raise TypeError if it is no number."""
        value = self[name]
        if not isinstance(value, int | float):
            raise TypeError(f"{name} is {value!r}")
        return float(value)


@dataclass(frozen=True, slots=True)
class Kind:
    """How a value is written: the word for it in the help, and the reader of its text. `unit` ends the name of its
    field in the resolved config (`queue_timeout` -> `queue_timeout_s`). With `several` a command line may have words
    in a row."""

    metavar: str
    parse: Callable[[str], Value]
    type: type
    unit: str = ""
    several: bool = False


def _parse_float(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        raise ConfigError(f"{text!r} is not a number") from None
    if not math.isfinite(value):
        raise ConfigError(f"{text!r} is not a finite number")
    return value


def _parse_fraction(text: str) -> float:
    if text.strip().endswith("%"):
        return _parse_float(text.strip().removesuffix("%")) / 100
    return _parse_float(text)


_TRUE: Final = ("1", "true", "yes", "on")
_FALSE: Final = ("0", "false", "no", "off")


def _parse_bool(text: str) -> bool:
    word = text.strip().lower()
    if word in _TRUE:
        return True
    if word in _FALSE:
        return False
    raise ConfigError(f"{text!r} is neither true nor false: write true or false")


def _parse_list(text: str) -> tuple[str, ...]:
    return tuple(item.strip() for item in text.split(",") if item.strip())


def _parse_pairs(text: str) -> tuple[str, ...]:
    """Read NAME=PATH pairs between commas, or one as the JSON object that vLLM takes."""
    if not text.lstrip().startswith("{"):
        return _parse_list(text)
    try:
        given = json.loads(text)
        return (f"{given['name']}={given['path']}",)
    except (ValueError, KeyError, TypeError, RecursionError):
        raise ConfigError(f"{text[:200]!r} is not NAME=PATH") from None


TEXT: Final = Kind("TEXT", str, str)
PATH: Final = Kind("PATH", str, str)
SECRET: Final = Kind("KEY", str, str)
COUNT: Final = Kind("N", parse_count, int)
BYTES: Final = Kind("SIZE", parse_bytes, int)
FLOAT: Final = Kind("X", _parse_float, float)
FRACTION: Final = Kind("FRACTION", _parse_fraction, float)
SECONDS: Final = Kind("SECONDS", _parse_float, float, unit="s")
BOOL: Final = Kind("", _parse_bool, bool)
LIST: Final = Kind("A,B", _parse_list, tuple)
PAIRS: Final = Kind("NAME=PATH", _parse_pairs, tuple, several=True)


@dataclass(frozen=True, slots=True)
class Flag:
    """One setting. `name` is its key in TOML and for library callers; everything else is generated from it.

    `low` and `high` are inclusive, and `off` is taken though it is below `low`. `aliases` are other projects'
    spellings, taken and not advertised; `also_auto` what these write for "auto", `synonyms` what they write for other
    values; `absent` are values that the field knows and we do not have, with the line that says so.
    """

    name: str
    kind: Kind
    help: str
    _: KW_ONLY
    default: Value | Auto = AUTO
    group: str = ""  # of settings that are listed together
    aliases: tuple[str, ...] = ()
    choices: tuple[str, ...] = ()
    also_auto: tuple[str, ...] = ()
    synonyms: Mapping[str, str] = field(default_factory=dict)
    absent: Mapping[str, str] = field(default_factory=dict)
    low: float | None = None
    high: float | None = None
    off: float | None = None

    @property
    def option(self) -> str:
        return "--" + self.name.replace("_", "-")

    @property
    def variable(self) -> str:
        return "FOREBAY_" + self.name.upper()

    @property
    def field(self) -> str:
        return f"{self.name}_{self.kind.unit}" if self.kind.unit else self.name

    @property
    def options(self) -> tuple[str, ...]:
        return (self.option, *self.aliases)

    @property
    def metavar(self) -> str:
        return "{" + ",".join(self.choices) + "}" if self.choices else self.kind.metavar

    def read(self, raw: object, origin: str) -> Value | Auto:
        """Return the value of `raw`: text, as on a command line, or a TOML or Python value.

        `origin` names its place in error messages. ConfigError for a value of another type, or out of bounds.
        """
        automatic = self.default is AUTO or "auto" in self.choices
        if automatic and isinstance(raw, str) and raw.strip() in ("auto", *self.also_auto):
            return AUTO
        try:
            value = self.kind.parse(self.synonyms.get(raw, raw)) if isinstance(raw, str) else self._typed(raw)
            self._check(value)
        except ConfigError as error:
            raise ConfigError(f"{origin}: {error.message}") from None
        return value

    def _items(self, texts: list[str]) -> Value:
        if self.kind is LIST:
            return tuple(texts)
        return tuple(pair for text in texts for pair in _parse_pairs(text))

    def _typed(self, raw: object) -> Value:
        if self.kind in (LIST, PAIRS) and isinstance(raw, Sequence):
            return self._items([str(item) for item in raw])
        if self.kind.type is float and type(raw) in (int, float):
            return self.kind.parse(str(raw))
        if type(raw) is self.kind.type and isinstance(raw, int | bool):
            return raw
        if self.kind.type is str and hasattr(raw, "__fspath__"):
            return str(raw)
        raise ConfigError(f"{raw!r} is not the kind of value this setting has ({self.metavar or 'true or false'})")

    def _check(self, value: Value) -> None:
        if str(value) in self.absent:
            raise ConfigError(self.absent[str(value)])
        if self.choices and value not in self.choices:
            raise ConfigError(f"{value!r} is not one of {', '.join(self.choices)}")
        if isinstance(value, int | float) and not isinstance(value, bool):
            self._check_bounds(value)
        if self.kind.type is str and value == "":
            raise ConfigError("the value is empty")

    def _check_bounds(self, value: float) -> None:
        if self.low is not None and value < self.low and value != self.off:
            least = f"{self.low:.12g}" if self.off is None else f"{self.low:.12g}, or {self.off:g}"
            raise ConfigError(f"{value:.12g} is too small: at least {least}")
        if self.high is not None and value > self.high:
            raise ConfigError(f"{value:.12g} is too large: at most {self.high:.12g}")


def in_group(group: str, *flags: Flag) -> tuple[Flag, ...]:
    """Return the flags with their help group set."""
    return tuple(replace(flag, group=group) for flag in flags)
