"""Bytes and durations, to and from what people write."""

from __future__ import annotations

import re

from forebay.base.errors import ConfigError

_BINARY = {"": 1, "k": 2**10, "m": 2**20, "g": 2**30, "t": 2**40}
_DECIMAL = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
_SIZE = re.compile(r"^\s*(\d+(?:\.\d+)?)\s*([kmgt]?)(i?b?)\s*$", re.IGNORECASE)
_COUNT = re.compile(r"^\s*(\d+(?:\.\d+)?)\s*([km]?)\s*$", re.IGNORECASE)


def parse_bytes(text: str) -> int:
    """`"20GiB"`, `"512M"`, `"1.5g"` -> bytes. A bare letter or `iB` is binary; `GB` is decimal."""
    match = _SIZE.match(text)
    if match is None:
        raise ConfigError(f"{text!r} is not a size: write a number and a unit, such as 4GiB or 512MiB")
    number, prefix, suffix = match.groups()
    table = _DECIMAL if suffix.lower() == "b" and prefix else _BINARY
    return int(float(number) * table[prefix.lower()])


def parse_count(text: str) -> int:
    """`"32k"` -> 32768, `"1M"` -> 1048576, `"8192"` -> 8192 (binary, as context lengths are)."""
    match = _COUNT.match(text)
    if match is None:
        raise ConfigError(f"{text!r} is not a whole number: write digits, optionally with k or M, such as 8192 or 32k")
    number, prefix = match.groups()
    value = float(number) * _BINARY[prefix.lower()]
    if value != int(value):
        raise ConfigError(f"{text!r} is not a whole number")
    return int(value)


def human_bytes(num_bytes: float) -> str:
    """1536 -> `1.5 KiB`."""
    value = float(num_bytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(value) < 1024:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} TiB"


def human_seconds(seconds: float) -> str:
    """0.0123 -> `12.3 ms`."""
    if seconds < 1e-3:
        return f"{seconds * 1e6:.0f} us"
    if seconds < 1:
        return f"{seconds * 1e3:.1f} ms"
    return f"{seconds:.2f} s" if seconds < 120 else f"{seconds / 60:.1f} min"


def ceil_div(a: int, b: int) -> int:
    """Return `a / b` rounded up, exactly, for integers with b > 0."""
    return -(-a // b)
