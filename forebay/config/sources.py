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

from forebay.base.errors import ConfigError
from forebay.base.fault import FAULT_VARIABLES
from forebay.config.flag import AUTO, BOOL, SECRET, Auto, Flag, Value
from forebay.config.server_args import BY_NAME, CONFIG_VARIABLE, FLAGS

PREFIX: Final = "FOREBAY_"
_OTHER_VARIABLES: Final = (CONFIG_VARIABLE, *FAULT_VARIABLES)


@dataclass(frozen=True, slots=True)
class Given:
    """A value that somebody wrote: `source` is flag, env or file, `origin` the spelling that error messages name."""

    value: Value | Auto
    source: str
    origin: str


def add_flags(parser: argparse.ArgumentParser, flags: Iterable[Flag] = FLAGS) -> None:
    """Declare every flag with its aliases. Texts are kept as they are; `resolve` reads them."""
    for flag in flags:
        if flag.kind is BOOL:
            parser.add_argument(*flag.options, dest=flag.name, action=_Once, nargs="?", const="true")
        else:
            parser.add_argument(*flag.options, dest=flag.name, action=_Once)


class _Once(argparse.Action):
    """Two spellings of one setting with different values are a mistake; the later one must not win in silence."""

    def __init__(self, **options: Any) -> None:
        super().__init__(default=argparse.SUPPRESS, **options)

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: object,
        option_string: str | None = None,
    ) -> None:
        spelled = getattr(namespace, "spelled", {})
        if self.dest in spelled and getattr(namespace, self.dest) != values:
            hidden = BY_NAME[self.dest].kind is SECRET
            raise ConfigError(
                f"{spelled[self.dest]} and {option_string} set the same thing to different values: give one"
                if hidden
                else f"{spelled[self.dest]} {getattr(namespace, self.dest)} and {option_string} {values} "
                f"contradict each other: both set {BY_NAME[self.dest].option}"
            )
        namespace.spelled = {**spelled, self.dest: option_string}
        setattr(namespace, self.dest, values)


def from_flags(flags: Mapping[str, object]) -> dict[str, Given]:
    """Command-line texts, or a library caller's values, by flag name. None stands for "not given"."""
    given = {}
    for name, raw in flags.items():
        if raw is None:
            continue
        flag = BY_NAME.get("model_path" if name == "model" else name)
        if flag is None:
            raise ConfigError(f"there is no setting {name!r}{did_you_mean(name, BY_NAME)}")
        given[flag.name] = Given(flag.read(raw, flag.option), "flag", flag.option)
    return given


def from_environment(environment: Mapping[str, str]) -> tuple[dict[str, Given], list[str]]:
    """The settings, and a warning for each FOREBAY_ variable that is none."""
    variables = {flag.variable: flag for flag in FLAGS}
    given: dict[str, Given] = {}
    warnings = []
    for variable, text in sorted(environment.items()):
        if not variable.startswith(PREFIX) or variable in _OTHER_VARIABLES or text == "":
            continue
        flag = variables.get(variable)
        if flag is None:
            hint = did_you_mean(variable, (*variables, CONFIG_VARIABLE))
            warnings.append(f"the environment variable {variable} is not known and was ignored{hint}")
            continue
        given[flag.name] = Given(flag.read(text, variable), "env", variable)
    return given, warnings


def from_file(path: Path) -> dict[str, Given]:
    """The settings of a TOML file of top-level keys. ConfigError for a key that is none."""
    try:
        with path.open("rb") as file:
            table = tomllib.load(file)
    except OSError as error:
        raise ConfigError(f"--config {path}: cannot be read ({error.strerror or error})") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"--config {path}: not valid TOML: {error}") from error
    given = {}
    for key, raw in table.items():
        flag = BY_NAME.get(key)
        if flag is None:
            raise ConfigError(f"{path}: there is no setting {key!r}{did_you_mean(key, BY_NAME)}")
        origin = f"{path}: {key}"
        given[key] = Given(flag.read(raw, origin), "file", origin)
    return given


def from_one_flag(flag: Flag) -> Given:
    """What holds when nobody wrote anything."""
    return Given(flag.default, "rule" if flag.default is AUTO else "default", flag.option)


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """`: did you mean X?` where a known name is near, otherwise nothing."""
    near = difflib.get_close_matches(name, list(known), n=1, cutoff=0.6)
    return f": did you mean {near[0]}?" if near else ""


def refuse_unknown(arguments: Sequence[str], options: Iterable[str]) -> None:
    """ConfigError for the first of the arguments that argparse could not place."""
    for argument in arguments:
        if argument.startswith("-"):
            name = argument.partition("=")[0]
            raise ConfigError(f"there is no flag {name}{did_you_mean(name, options)}")
    if arguments:
        raise ConfigError(f"unexpected argument {arguments[0]!r}")
