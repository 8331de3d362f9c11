"""The command line of a subcommand: its own options plus, where it starts an engine, every declared flag."""

from __future__ import annotations

import argparse
import math
import os
import sys
import textwrap
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NoReturn

from forebay.base.errors import ConfigError, ForebayError
from forebay.base.log import setup_logging
from forebay.config import sampling
from forebay.config.flag import AUTO, Flag, Value
from forebay.config.server_args import BY_NAME, LIMITS, LOGGING, MODEL, SERVER_GROUPS
from forebay.config.sources import Once, add_accepted, add_flags, refuse_unknown

if TYPE_CHECKING:  # words are read at once, and what they come to is another matter
    from forebay.config.config import Config, ServerConfig
    from forebay.config.resolve import Survey
    from forebay.formats.hub_names import HubModel

_FOLDED: Final = (LIMITS, LOGGING)  # too many, too seldom used for the short help
_COLUMNS: Final = 80
_WIDTH: Final = 24  # of options, beside what is said about them
DESCRIBE: Final = "--describe"  # in the place of all words: raises what there is to complete


class Described(ForebayError):
    """The options of a command, each with the values that it may have, if they are few, and what it is about."""

    def __init__(self, options: list[tuple[str, Sequence[str], str]]) -> None:
        super().__init__(" ".join(option for option, _, _ in options))
        self.options = options


@dataclass(frozen=True, slots=True)
class Parsed:
    """`own` are the subcommand's options; `flags` the engine's and server's, as written, by flag name."""

    own: argparse.Namespace
    flags: dict[str, object]
    config_file: Path | None

    @property
    def written(self) -> dict[str, str]:
        """Return the settings of the command line, the environment and the file, with values for people."""
        from forebay.config.resolve import shown

        return {name: shown(name, value) for name, value in self.values.items()}

    @property
    def values(self) -> dict[str, Value]:
        """Return the settings with their values as they are."""
        from forebay.config.resolve import written_values

        return written_values(self.flags, dict(os.environ), self.config_file)

    def resolve(self, survey: Survey | None = None, /, **implied: object) -> Config:
        """Resolve the configuration; without a `survey`, fetch model and adapters first if they are not here. `implied`
        are the subcommand's own values of settings that have no other value."""
        from forebay.config.resolve import HERE, resolve

        setup_logging("info", process="config")  # until the level that was asked for is known
        if "api_key" in self.flags or "admin_api_key" in self.flags:
            note("a key on the command line is visible in the process list: prefer --api-key-file")
        chosen = self.values
        flags = {**self.flags, **{name: value for name, value in implied.items() if name not in chosen}}
        decide = partial(resolve, flags, dict(os.environ), self.config_file)

        def in_silence(survey: Survey) -> Config:
            return decide(warn=lambda text: None, survey=survey)

        if "model_path" not in chosen:
            from forebay.cli.progress import pull_default_model

            pull_default_model()
        elif survey is None and (model := self.absent_model()):
            from forebay.engine.lifecycle.bring import bring

            bring(model, in_silence, note)
        if survey is None and (modules := chosen.get("lora_modules")):
            from forebay.engine.lifecycle.bring import bring_adapters

            assert isinstance(modules, tuple), modules
            bring_adapters(modules, in_silence, note)
        return decide(warn=note, survey=survey or HERE)

    def absent_model(self) -> HubModel | None:
        """Return the hub's model that was named and is not on this machine."""
        from forebay.formats.store import absent_model

        name, revision = (self.values.get(name) for name in ("model_path", "revision"))
        return None if name is None else absent_model(str(name), None if revision is None else str(revision))

    def resolve_server(self) -> ServerConfig:
        """Resolve the settings of a command without an engine."""
        from forebay.config.resolve import resolve_server

        return resolve_server(self.flags, dict(os.environ), self.config_file, note)


_MORE_SETTINGS: Final = (
    "Also: --help=all for every setting.\n"
    "Settings of the engine and the server (all but `options`) are environment\n"
    "variables too, such as FOREBAY_CONTEXT_LENGTH=4k, and keys of --config FILE."
)


class Parser:
    """`name` is the subcommand, `summary` its first line of help. Options are declared with `option`."""

    def __init__(self, name: str, summary: str, usage: str, examples: Sequence[str] = ()) -> None:
        self._head = "\n".join([*_wrapped(f"usage: forebay {name} {usage}", " " * 7), "", _paragraph(summary)])
        self._examples = [f"  forebay {name} {example}".rstrip() for example in examples]
        self._parser = _Quiet(add_help=False, allow_abbrev=False, argument_default=None, exit_on_error=False)
        self._lines: list[tuple[str, str, str]] = []
        self._aliases: dict[str, str] = {}
        self._flags: tuple[Flag, ...] = ()
        self._folded: Callable[[Flag], bool] = lambda flag: flag.group in _FOLDED

    def option(self, *names: str, help: str, default_text: str = "", **settings: Any) -> None:
        """As argparse's `add_argument`; a name without dashes is positional, and names after the first are other
        projects' spellings. Numbers have a `type` from this module."""
        if len(names) > 1:
            settings = {"action": Once, "default": None, **settings}
        action = self._parser.add_argument(*names, **settings)
        value = "" if action.nargs == 0 or not action.option_strings else f" {action.metavar or action.dest.upper()}"
        shown = default_text or ("" if action.default is None or action.nargs == 0 else str(action.default))
        self._lines.append(("options", f"{names[0]}{value}", f"{help}{f' [{shown}]' if shown else ''}"))
        if len(names) > 1:
            self._aliases[f"{names[0]}{value}"] = f" (also {', '.join(names[1:])})"

    def engine_flags(self, *, server: bool, model_is_positional: bool, without: Collection[str] = ()) -> None:
        """Add the declared flags: all with `server`, otherwise without those of HTTP. A command may leave out some."""
        flags = (flag for flag in BY_NAME.values() if server or flag.group not in SERVER_GROUPS)
        self._add_flags(flag for flag in flags if flag.name not in without)
        if not server:  # a command that is about something else
            self._folded = lambda flag: flag.group != MODEL
        if model_is_positional:
            self._parser.add_argument("model_positional", nargs="?")

    def server_flags(self) -> None:
        """Add those of HTTP alone, for a command that has no cache and reads no prompts."""
        self._add_flags(flag for flag in BY_NAME.values() if flag.name in names_without_engine())

    def accept_foreign(self) -> None:
        """Accept options of other engines that change nothing here, each with a note."""
        add_accepted(self._parser)

    def _add_flags(self, flags: Iterable[Flag]) -> None:
        self._flags = tuple(flags)
        add_flags(self._parser, self._flags)
        self._parser.add_argument("--config", dest="config_file", metavar="FILE")

    def parse(self, words: Sequence[str]) -> Parsed:
        """Parse the words; on --help, print the help and exit. ConfigError for words that are not understood."""
        if list(words) == [DESCRIBE]:
            raise Described(self._described())
        for word in words:
            if word in ("-h", "--help") or word.startswith("--help="):
                print(self.help_text(word.partition("=")[2]))
                raise SystemExit(0)
        namespace, unknown = self._parse(words)
        refuse_unknown(unknown, self._parser.known_options())
        for line in getattr(namespace, "accepted", ()):
            note(line)
        flags = {flag.name: getattr(namespace, flag.name) for flag in self._flags if hasattr(namespace, flag.name)}
        self._take_positional(namespace, flags)
        spelled = getattr(namespace, "spelled", {})
        for name, raw in flags.items():  # now, to refuse them at once and by the words that were used
            BY_NAME[name].read(raw, spelled.get(name, BY_NAME[name].option))
        file = getattr(namespace, "config_file", None)
        return Parsed(namespace, flags, Path(file) if file else None)

    def _parse(self, words: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
        try:
            return self._parser.parse_known_intermixed_args(list(words))
        except argparse.ArgumentError as error:
            spelled = _spelled(error, words)
            if error.message.startswith("expected"):
                raise ConfigError(f"{spelled} needs a value: {spelled} {self._parser.metavar(spelled)}") from None
            if error.message.startswith("ignored explicit"):
                raise ConfigError(f"{spelled} takes no value: write {spelled} alone, or leave it out") from None
            raise ConfigError(f"{spelled}: {error.message}") from None

    def _take_positional(self, namespace: argparse.Namespace, flags: dict[str, object]) -> None:
        named = getattr(namespace, "model_positional", None)
        if named is None:
            return
        if flags.get("model_path", named) != named:
            raise ConfigError(f"MODEL {named} and --model-path {flags['model_path']} contradict each other")
        flags["model_path"] = named

    def help_text(self, word: str) -> str:
        """The short help; with a word, every option about it, folded groups and aliases included; `all` shows all."""
        rows = self._rows(full=bool(word))
        if word and word != "all":
            rows = [row for row in rows if word.lower() in " ".join(row).lower()]
        if not rows:
            return f"no option of this command is about {word!r}"
        if word:
            return f"{self._head}\n{_table(rows)}"
        examples = ["\nexamples:\n" + "\n".join(self._examples)] if self._examples else []
        if not self._flags:
            return "\n".join([self._head, _table(rows), *examples])
        groups = ", ".join(dict.fromkeys(group for group, _, _ in rows))
        finds = _paragraph(f"--help=WORD shows the options about a word or of a group: {groups}.")
        return "\n".join([self._head, "", finds, _table(rows), *examples, "", _MORE_SETTINGS])

    def _rows(self, *, full: bool) -> list[tuple[str, str, str]]:
        """Return the group, the option and its description; with `full` also folded groups and aliases."""
        rows = [
            (group, left, right + (self._aliases.get(left, "") if full else "")) for group, left, right in self._lines
        ]
        if self._flags:
            rows.append(("options", "--config FILE", "a TOML file with settings, keys as the flags with underscores"))
        shown = [flag for flag in self._flags if full or not self._folded(flag)]
        return rows + [(f.group, f"{f.option} {f.metavar}".rstrip(), _describe(f, full=full)) for f in shown]

    def _described(self) -> list[tuple[str, Sequence[str], str]]:
        own = [(left.split()[0], (), about) for _, left, about in self._lines if left.startswith("-")]
        return own + [(flag.option, flag.choices, flag.help) for flag in self._flags]


def names_without_engine() -> set[str]:
    """Return the names of the settings of a server without a model: the router's."""
    names = {flag.name for flag in BY_NAME.values() if flag.group in SERVER_GROUPS}
    names -= {"keep_volatile_headers", "report", *(flag.name for flag in sampling.FLAGS)}
    return names | {"log_level", "log_format", "cluster_key_file"}


class _Quiet(argparse.ArgumentParser):
    """Errors are raised, not printed with a page of usage."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(message)

    def _get_option_tuples(self, option_string: str) -> list[Any]:
        """No option is meant by its beginning: `allow_abbrev` says so of long ones, and short ones are words too."""
        return []

    def known_options(self) -> list[str]:
        return [name for action in self._actions for name in action.option_strings]

    def metavar(self, option: str) -> str:
        action = next(action for action in self._actions if option in action.option_strings)
        return str(action.metavar or action.dest.upper())


def _spelled(error: argparse.ArgumentError, words: Sequence[str]) -> str:
    """The spelling that was used of those that argparse lists (`--context-length/--ctx-size/-c`)."""
    names = (error.argument_name or "").split("/")
    written = [name for word in words if (name := word.partition("=")[0]) in names]
    return written[-1] if written else names[0]


def whole(low: int, high: int = (1 << 63) - 1) -> Callable[[str], int]:
    """The `type` of an option that is a whole number; both bounds are inclusive."""

    def read(text: str) -> int:
        value = int(text) if text.strip().lstrip("+-").isdecimal() else low - 1
        if not low <= value <= high:
            most = f", at most {high}" if high < 1 << 62 else ""
            raise argparse.ArgumentTypeError(f"{text!r} is no such number: write a whole number, at least {low}{most}")
        return value

    return read


def number(low: float = 0.0) -> Callable[[str], float]:
    """The `type` of an option that is a number of at least `low`, possibly inf."""

    def read(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not value >= low:  # not a number is neither less nor more
            raise argparse.ArgumentTypeError(f"{text!r} is no such number: write a number, at least {low:g}")
        return value

    return read


def _describe(flag: Flag, *, full: bool) -> str:
    if flag.default is AUTO:
        default = "auto" if flag.metavar != "KEY" and not flag.name.endswith("_file") else ""
    elif isinstance(flag.default, tuple) or flag.default is False:
        default = ""
    else:
        default = f"{flag.default:g}" if isinstance(flag.default, float) else str(flag.default)
    text = flag.help + (f" [{default}]" if default else "")
    also = f" (also {', '.join(flag.aliases)}; {flag.variable})" if flag.aliases else f" ({flag.variable})"
    return text + also if full else text


def _table(rows: list[tuple[str, str, str]]) -> str:
    """Format the rows within the width of every terminal; only a word that cannot be broken exceeds it."""
    lines, group = [], ""
    indent = " " * (_WIDTH + 3)
    for row_group, left, right in rows:
        if row_group != group:
            lines += ["", f"{row_group}:"]
            group = row_group
        about = _wrapped(right, indent, first=indent)
        if len(left) < _WIDTH:
            about[0] = f"  {left:<{_WIDTH}} {about[0].lstrip()}"
        else:
            lines += _wrapped(left.replace(",", ", "), " " * 6, first="  ")
        lines += about
    return "\n".join(lines)


def _wrapped(text: str, indent: str, first: str = "") -> list[str]:
    wrapper = textwrap.TextWrapper(
        _COLUMNS - 1, first, indent, break_long_words=False, break_on_hyphens=False, expand_tabs=False
    )
    return wrapper.wrap(text) or [first]


def _paragraph(text: str) -> str:
    return "\n".join(line for part in text.split("\n") for line in _wrapped(part, ""))


def note(text: str) -> None:
    """Print a note to standard error."""
    print(f"forebay: note: {text}", file=sys.stderr)
