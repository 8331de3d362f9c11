"""The three places a setting can be written, each read into plain `Given`s by flag name: the command line (through
argparse), the environment, a TOML file."""

from __future__ import annotations

import argparse
import difflib
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from forebay.base.cpu import CPU_VARIABLE
from forebay.base.errors import ConfigError
from forebay.base.fault import FAULT_VARIABLES
from forebay.base.foreign import ABSENT_OPTIONS, ACCEPTED_OPTIONS, Accepted, as_key, why_option_is_absent
from forebay.config.flag import AUTO, BOOL, SECRET, Auto, Flag, Value
from forebay.config.server_args import BY_NAME, CONFIG_VARIABLE, FLAGS, SERVER_GROUPS

PREFIX: Final = "FOREBAY_"
_OTHER_VARIABLES: Final = (CONFIG_VARIABLE, CPU_VARIABLE, *FAULT_VARIABLES)
# How alike a known name must be to be a guess: lower for our own names than for the many of other projects.
_CUTOFF: Final = 0.72
_ALIAS_CUTOFF: Final = 0.85
# `max_model_len` in a file or as FOREBAY_MAX_MODEL_LEN is what --max-model-len is; one-letter options are not.
_BY_ALIAS: Final = {as_key(alias): flag for flag in FLAGS for alias in flag.aliases if alias.startswith("--")}
BY_KEY: Final = {**_BY_ALIAS, **BY_NAME}


@dataclass(frozen=True, slots=True)
class Given:
    """A value that was written: `source` is flag, env or file, `origin` the spelling that error messages name."""

    value: Value | Auto
    source: str
    origin: str


def add_flags(parser: argparse.ArgumentParser, flags: Iterable[Flag] = FLAGS) -> None:
    """Declare every flag with its aliases. Texts are kept as they are; `resolve` reads them."""
    for flag in flags:
        if flag.kind is BOOL:
            parser.add_argument(*flag.options, dest=flag.name, action=Once, nargs="?", const="true")
        else:
            nargs = "+" if flag.kind.several else None
            parser.add_argument(*flag.options, dest=flag.name, action=Once, metavar=flag.metavar, nargs=nargs)


def add_accepted(parser: argparse.ArgumentParser) -> None:
    """Declare the options of other engines that change nothing here. The namespace gets a line for each in
    `accepted`."""
    for accepted in ACCEPTED_OPTIONS.values():
        count = {"nargs": "?" if accepted.optional else None} if accepted.takes_value else {"nargs": 0}
        parser.add_argument(accepted.option, action=_Accept, accepted=accepted, dest="accepted", metavar="X", **count)


class _Accept(argparse.Action):
    """Keeps the line of an accepted option. Raises ConfigError for a value that asks for something else."""

    def __init__(self, *, accepted: Accepted, **options: Any) -> None:
        super().__init__(**{**options, "default": argparse.SUPPRESS})
        self._accepted = accepted

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: object,
        option_string: str | None = None,
    ) -> None:
        value = values if isinstance(values, str) else None
        written = self._accepted.option if value is None else f"{self._accepted.option} {value}"
        if not self._accepted.accepts(value):
            why = ABSENT_OPTIONS.get(as_key(self._accepted.option), self._accepted.line)
            raise ConfigError(f"{written} is not supported: {why}")
        line = f"{written} changes nothing: {self._accepted.line}"
        namespace.accepted = (*getattr(namespace, "accepted", ()), line)


class Once(argparse.Action):
    """Two spellings of one setting with different values are a mistake: the later one must not win in silence."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**{"default": argparse.SUPPRESS, **options})

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: object,
        option_string: str | None = None,
    ) -> None:
        spelled = getattr(namespace, "spelled", {})
        if self.dest in spelled and getattr(namespace, self.dest) != values:
            hidden = self.metavar == SECRET.metavar
            raise ConfigError(
                f"{spelled[self.dest]} and {option_string} set the same thing to different values: give one"
                if hidden
                else f"{spelled[self.dest]} {getattr(namespace, self.dest)} and {option_string} {values} "
                f"contradict each other: both set {self.option_strings[0]}"
            )
        namespace.spelled = {**spelled, self.dest: option_string}
        setattr(namespace, self.dest, values)


def from_flags(flags: Mapping[str, object]) -> dict[str, Given]:
    """Command-line texts, or a library caller's values, by flag name or alias. None stands for "not given"."""
    given: dict[str, Given] = {}
    for name, raw in flags.items():
        if raw is not None:
            flag = _known(name, "there is no setting {!r}")
            origin = flag.option if name == flag.name else name
            _add(given, flag, Given(flag.read(raw, origin), "flag", origin))
    return given


def refuse_server_settings(names: Iterable[str]) -> None:
    """ConfigError for the first that an engine without a server would do nothing about."""
    for name in names:
        if name in BY_KEY and BY_KEY[name].group in SERVER_GROUPS:
            raise ConfigError(f"{name} is a setting of the HTTP server (forebay serve), and here is none: leave it out")


def from_environment(environment: Mapping[str, str]) -> tuple[dict[str, Given], list[str]]:
    """The settings, and a warning for each FOREBAY_ variable that is none."""
    given: dict[str, Given] = {}
    warnings = []
    for variable, text in sorted(environment.items()):
        if not variable.startswith(PREFIX) or variable in _OTHER_VARIABLES or text == "":
            continue
        key = variable.removeprefix(PREFIX)
        flag = BY_KEY.get(key.lower()) if key.isupper() else None
        if flag is None:
            warnings.append(f"the environment variable {variable} is not known and was ignored{_variable_hint(key)}")
            continue
        _add(given, flag, Given(flag.read(text, variable), "env", variable))
    return given, warnings


def _variable_hint(key: str) -> str:
    if why := why_option_is_absent(key):
        return f": {why}"
    variables = [PREFIX + name.upper() for name in BY_NAME]
    aliases = [PREFIX + name.upper() for name in _BY_ALIAS]
    return did_you_mean(PREFIX + key, (*variables, CONFIG_VARIABLE), aliases)


def from_file(path: Path) -> dict[str, Given]:
    """The settings of a TOML file of top-level keys. ConfigError for a key that is none."""
    try:
        with path.open("rb") as file:
            table = tomllib.load(file)
    except OSError as error:
        raise ConfigError(f"--config {path}: cannot be read ({error.strerror or error})") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"--config {path}: not valid TOML: {error}") from error
    given: dict[str, Given] = {}
    for key, raw in table.items():
        flag = _known(key, f"{path}: there is no setting {{!r}}")
        origin = f"{path}: {key}"
        _add(given, flag, Given(flag.read(raw, origin), "file", origin))
    return given


def _known(key: str, problem: str) -> Flag:
    flag = BY_KEY.get(key)
    if flag is None:
        why = why_option_is_absent(key)
        raise ConfigError(problem.format(key) + (f": {why}" if why else did_you_mean(key, BY_NAME, _BY_ALIAS)))
    return flag


def _add(given: dict[str, Given], flag: Flag, item: Given) -> None:
    """One place may name a setting twice, by its name and an alias, if both say the same."""
    before = given.setdefault(flag.name, item)
    if before.value != item.value:
        raise ConfigError(f"{before.origin} and {item.origin} set {flag.name} to different values: give one")


def from_one_flag(flag: Flag) -> Given:
    """Return the default of a setting, as if nothing was given."""
    return Given(flag.default, "rule" if flag.default is AUTO else "default", flag.option)


def did_you_mean(name: str, known: Iterable[str], aliases: Iterable[str] = ()) -> str:
    """`: did you mean X?` where a known name is near, or an alias very near; otherwise nothing."""
    near = difflib.get_close_matches(name, list(known), n=1, cutoff=_CUTOFF)
    near += difflib.get_close_matches(name, list(aliases), n=1, cutoff=_ALIAS_CUTOFF)
    nearest = difflib.get_close_matches(name, near, n=1, cutoff=0.0)
    return f": did you mean {nearest[0]}?" if nearest else ""


def refuse_unknown(arguments: Sequence[str], options: Sequence[str]) -> None:
    """ConfigError for the first of the arguments that argparse could not place."""
    for argument in arguments:
        if argument.startswith("-"):
            name = argument.partition("=")[0]
            known = {option for option in options if as_key(option) not in _BY_ALIAS}
            why = why_option_is_absent(name) or _why_elsewhere(name)
            hint = f": {why}" if why else did_you_mean(name, known, set(options) - known)
            raise ConfigError(f"there is no flag {name}{hint}")
    if arguments:
        raise ConfigError(f"unexpected argument {arguments[0]!r}")


def _why_elsewhere(option: str) -> str:
    """The line about an option that other commands have; empty for all others."""
    flag = next((flag for flag in FLAGS if option in flag.options), None)
    return (
        "" if flag is None else f"it is a setting of {'forebay serve' if flag.group in SERVER_GROUPS else 'an engine'}"
    )
