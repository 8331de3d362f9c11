"""The format of a server's log, before its settings are read: their errors and notes are lines of the log, too."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from itertools import zip_longest
from pathlib import Path

from forebay.base.errors import ConfigError
from forebay.base.log import LogFormat
from forebay.config.server_args import BY_NAME, CONFIG_VARIABLE
from forebay.config.sources import from_file


def asks_for_json(words: Sequence[str], environment: Mapping[str, str] = os.environ) -> bool:
    """Return whether the words, the environment or the file of settings ask for JSON, in this order."""
    flag = BY_NAME["log_format"]
    chosen = _value_of(words, flag.option) or environment.get(flag.variable) or None
    if chosen is None:
        chosen = _in_file(_value_of(words, "--config") or environment.get(CONFIG_VARIABLE))
    return chosen == LogFormat.JSON


def _value_of(words: Sequence[str], option: str) -> str | None:
    """Return the last value of an option, as `--option value` or `--option=value`."""
    found = None
    for word, following in zip_longest(words, words[1:]):
        name, has_value, value = word.partition("=")
        if name == option:
            found = value if has_value else following
    return found


def _in_file(path: str | None) -> str | None:
    if not path:
        return None
    try:
        given = from_file(Path(path)).get("log_format")
    except ConfigError:
        return None  # it is reported when the settings are read
    return None if given is None else str(given.value)
