"""Settings of the tiers of the prefix cache behind the device: flags, what "auto" becomes, and what clashes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final, Protocol

from forebay.config.engine_config import DisaggregationMode, Exact
from forebay.config.flag import BYTES, FLOAT, PATH, Decision, Flag, Settled, in_group

GROUP: Final = "tiers of the prefix cache"
HOST_PART: Final = 4  # of free host memory, one in so many bytes

FLAGS: Final = in_group(
    GROUP,
    Flag(
        "host_cache_bytes",
        BYTES,
        "host memory for what the prefix cache keeps, such as 16GiB: prompts that are evicted from the device are read "
        "from there; more than the device's cache, or it adds little; 0: none",
        low=0,
        aliases=("--hicache-size",),
    ),
    Flag(
        "prefix_cache_dir",
        PATH,
        "folder for what the prefix cache keeps: a restart with the same model, settings and folder has it again",
    ),
    Flag(
        "prefix_cache_disk_bytes",
        BYTES,
        "most bytes of the files in --prefix-cache-dir",
        default=16 << 30,
        low=1 << 20,
    ),
    Flag(
        "cache_check_rate",
        FLOAT,
        "entries of the prefix cache that an idle engine computes again and compares to the bit, a minute; 0: none",
        low=0,
        high=6000,
    ),
)
OPTIONAL: Final = {"prefix_cache_dir": "none: the prefix cache ends with the server"}


class _Memory(Protocol):
    @property
    def value(self) -> int: ...


class _Facts(Protocol):
    @property
    def gpu(self) -> object | None: ...

    @property
    def host_memory(self) -> _Memory: ...


def _host_cache_bytes(facts: _Facts, settled: Settled) -> Decision:
    if facts.gpu is None:
        return Decision(0, "on a CPU the device's cache is host memory")
    if settled["disable_radix_cache"]:
        return Decision(0, "there is no prefix cache")
    left = facts.host_memory.value - settled.number("retraction_host_bytes")
    return Decision(max(0, left // HOST_PART), "a quarter of free host memory")


def _cache_check_rate(facts: _Facts, settled: Settled) -> Decision:
    if why := _without_checks(settled):
        return Decision(0.0, why)
    return Decision(1.0, "while the engine is idle")


def _without_checks(settled: Settled) -> str:
    """Return why the prefix cache cannot be checked; "" if it can."""
    if settled["disable_radix_cache"]:
        return "there is no prefix cache"
    if settled.number("tp_size") > 1:
        return "checks are not built for ranks"
    if settled["exact"] == Exact.OFF:
        return "with --exact off bits may differ"
    if settled["disaggregation_mode"] != DisaggregationMode.NULL:
        return "the engine computes one half of its requests"
    return ""


RULES: Final[Mapping[str, Callable[[Any, Settled], Decision]]] = {
    "host_cache_bytes": _host_cache_bytes,
    "cache_check_rate": _cache_check_rate,
}


def problems(settled: Settled, asked: Callable[[str], str]) -> Iterator[str]:
    """Yield one line for each setting that cannot work."""
    if settled["disable_radix_cache"] and settled.number("host_cache_bytes"):
        yield f"{asked('host_cache_bytes')}: without a prefix cache it has no effect: leave --disable-radix-cache out"
    if settled["cache_check_rate"] and (why := _without_checks(settled)):
        yield f"{asked('cache_check_rate')}: the prefix cache cannot be checked: {why}: leave it out"
    if settled["disable_radix_cache"] and "prefix_cache_dir" in settled:
        yield f"{asked('prefix_cache_dir')}: without a prefix cache it has no effect: leave --disable-radix-cache out"
