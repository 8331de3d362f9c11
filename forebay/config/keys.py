"""Keys from files: those of clients, and the one that servers prove to each other."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple

from forebay.base.errors import ConfigError
from forebay.base.log import event, get_logger
from forebay.base.units import human_bytes
from forebay.config.flag import Settled
from forebay.config.server_args import BY_NAME

MAX_KEY_FILE_BYTES: Final = 1 << 16
MIN_KEY_CHARS: Final = 8
MIN_CLUSTER_KEY_BYTES: Final = 16
MAX_WEIGHT: Final = 1000
_WEIGHT: Final = "weight"
_NAME: Final = "name"
_RECEIPT: Final = "receipt"
_SWITCH: Final = {"on": True, "off": False}
_NAMES: Final = re.compile(r"[A-Za-z0-9._-]{1,64}")
_DEFAULT: Final = re.compile(r"(key|admin)-[0-9]+")
_SETTING: Final = re.compile(r"([a-z_]+)=(\S*)")

log = get_logger("config")


class ApiKey(NamedTuple):
    """A key, the name of the tenant that holds it, the tenant's weight among others (C32), and whether its answers have
    receipts unless a request says otherwise."""

    text: str
    name: str
    weight: int = 1
    receipt: bool = False

    @property
    def line(self) -> str:
        """The key as a line of a file."""
        receipt = f" {_RECEIPT}=on" if self.receipt else ""
        return f"{self.text} {_NAME}={self.name} {_WEIGHT}={self.weight}{receipt}"


Keys = tuple[tuple[ApiKey, ...], tuple[ApiKey, ...]]
"""Those of users and those of admins."""


def all_keys(written: Settled) -> Keys:
    """Return the keys that settings give, directly or as the lines of files. Raises ConfigError."""
    keys = _keys(written, "api_key", "key"), _keys(written, "admin_api_key", "admin")
    weights_of([*keys[0], *keys[1]])
    return keys


def weights_of(keys: Iterable[ApiKey]) -> dict[str, int]:
    """Return the weight of each tenant, which may have several keys. Raises ConfigError if these disagree."""
    weights: dict[str, int] = {}
    for key in keys:
        if weights.setdefault(key.name, key.weight) != key.weight:
            raise ConfigError(
                f"two API keys have the name {key.name}, one with weight {weights[key.name]} and one with "
                f"{key.weight}: give both the same weight, or another name to one"
            )
    return weights


def key_fields(keys: Keys) -> dict[str, Any]:
    """As fields of the configuration."""
    users, admins = keys
    return {
        "api_keys": tuple(key.text for key in users),
        "admin_api_keys": tuple(key.text for key in admins),
        "key_names": {key.text: key.name for key in (*users, *admins)},
        "tenants": weights_of([*users, *admins]),
        "receipt_tenants": frozenset(key.name for key in (*users, *admins) if key.receipt),
    }


def share_lines(weights: Mapping[str, int]) -> list[tuple[str, str]]:
    """Each tenant with its weight and what that is of all."""
    total = sum(weights.values())
    return [(name, f"weight {weight} ({weight / total:.0%})") for name, weight in weights.items()]


def _keys(written: Settled, name: str, prefix: str) -> tuple[ApiKey, ...]:
    path = written.get(f"{name}_file")
    if name in written:
        where, keys = BY_NAME[name].option, [ApiKey(str(written[name]), f"{prefix}-1")]
    elif path is not None:
        option = BY_NAME[f"{name}_file"].option
        where = f"{option} {path}"
        keys = [
            _read_key(line, f"{prefix}-{i}", where) for i, line in enumerate(_read_lines(Path(str(path)), option), 1)
        ]
    else:
        return ()
    if any(len(key.text) < MIN_KEY_CHARS or not key.text.isascii() or not key.text.isprintable() for key in keys):
        raise ConfigError(f"{where}: a key is at least {MIN_KEY_CHARS} printable ASCII characters long")
    return tuple(keys)


def _read_key(line: str, name: str, where: str) -> ApiKey:
    """Read `KEY [name=NAME] [weight=N] [receipt=on]`. Words of the form `word=text` at its end are settings, except the
    first word. No message has the line's text, which is a secret."""
    words = line.split()
    found: dict[str, str] = {}
    while len(words) > 1 and (setting := _SETTING.fullmatch(words[-1])):
        line = line[: line.rindex(words.pop())].rstrip()
        if setting[1] not in (_NAME, _WEIGHT, _RECEIPT) or setting[1] in found:
            known = f"{_NAME}=NAME, {_WEIGHT}=N and {_RECEIPT}=on"
            raise ConfigError(f"{where}, {name}: a key may be followed by {known}, each once")
        found[setting[1]] = setting[2]
    default, name = name, found.get(_NAME, name)
    if name != default and _DEFAULT.fullmatch(name):
        raise ConfigError(f"{where}, {default}: {name} is what a key without a name is called: choose another")
    if not _NAMES.fullmatch(name):
        raise ConfigError(f"{where}: the name {name[:100]!a} is not 1 to 64 letters, digits, dots, dashes, underscores")
    weight = found.get(_WEIGHT, "1")
    if not (weight.isascii() and weight.isdigit() and len(weight) <= 4 and 1 <= int(weight) <= MAX_WEIGHT):
        raise ConfigError(f"{where}, {name}: the weight {weight[:20]!a} is no whole number from 1 to {MAX_WEIGHT}")
    return ApiKey(line, name, int(weight), _is_on(found.get(_RECEIPT, "off"), f"{where}, {name}: {_RECEIPT}"))


def _is_on(text: str, where: str) -> bool:
    if text not in _SWITCH:
        raise ConfigError(f"{where}={text[:20]!a} is neither on nor off")
    return _SWITCH[text]


def _read_lines(path: Path, option: str) -> list[str]:
    text = read_text(path, option, MAX_KEY_FILE_BYTES)
    keys = [line.strip() for line in text.splitlines() if line.strip() and not line.startswith("#")]
    if not keys:
        raise ConfigError(f"{option} {path}: there is no key in it")
    if path.stat().st_mode & 0o007:
        log.warning(event("key_file_open", path=path, problem="others can read it", fix=f"chmod 600 {path}"))
    return keys


def read_text(path: Path, option: str, limit: int) -> str:
    """A file of at most `limit` bytes that `option` names. Raises ConfigError."""
    try:
        if path.stat().st_size > limit:
            raise ConfigError(f"{option} {path}: larger than {human_bytes(limit)}")
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{option} {path}: cannot be read ({error})") from None


def cluster_key(settled: Settled) -> bytes:
    """Return the file's content without the white space around it; empty if there is no file."""
    if "cluster_key_file" not in settled:
        return b""
    path = str(settled["cluster_key_file"])
    key = read_text(Path(path), "--cluster-key-file", MAX_KEY_FILE_BYTES).strip().encode()
    if len(key) < MIN_CLUSTER_KEY_BYTES:
        least = f"put at least {MIN_CLUSTER_KEY_BYTES} random ones in it"
        raise ConfigError(f"--cluster-key-file {path}: {len(key)} bytes are no key: {least}")
    return key
