"""Changes with which a model fits that does not, or not with its whole context. Each is checked by planning with it."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Final, Generic, Protocol, TypeVar

from forebay.base.errors import ConfigError, ModelError
from forebay.base.units import human_bytes
from forebay.cli.arguments import Parsed
from forebay.config.machine import Amount
from forebay.config.server_args import BY_NAME

# What takes less memory, the least lossy first.
WAYS: Final[tuple[dict[str, str], ...]] = (
    {"kv_cache_dtype": "int8"},
    {"quantization": "int8"},
    {"quantization": "int8", "kv_cache_dtype": "int8"},
    {"quantization": "int4"},
    {"quantization": "int4", "kv_cache_dtype": "int8"},
)
_GIB: Final = 1 << 30
_MOST_MEMORY: Final = 1 << 46  # bytes: no machine has more


class Outcome(Protocol):
    """Result of a plan: whether the model `fits`, and how well."""

    @property
    def fits(self) -> bool: ...

    @property
    def capacity_words(self) -> str: ...

    @property
    def size(self) -> tuple[int, int]:
        """The longest context in tokens, and how many requests of it run at once."""
        ...

    @property
    def num_running(self) -> int:
        """Most requests at once, of any length."""
        ...


P = TypeVar("P", bound=Outcome)


@dataclass(frozen=True, slots=True)
class Change(Generic[P]):
    """Options to add, or more memory, and the plan with them."""

    words: str
    is_single: bool
    plan: P

    @property
    def line(self) -> str:
        return f"with {self.words}: {'' if self.plan.fits else 'does not fit: '}{self.plan.capacity_words}"


@dataclass(frozen=True, slots=True)
class Changes(Generic[P]):
    """All changes that better a plan, those of options first."""

    found: tuple[Change[P], ...]

    @property
    def lines(self) -> list[str]:
        return [change.line for change in self.found]

    @property
    def most_helpful(self) -> str:
        """Name the single change that helps most; memory only if no option is sufficient."""
        fitting = [change for change in self.found if change.is_single and change.plan.fits]
        if not fitting:
            return "no single change is enough"
        options = [change for change in fitting if change.words.startswith("--")] or fitting
        best = max(options, key=lambda change: change.plan.size)
        return f"{best.words} helps most: {best.plan.capacity_words}"


def find_changes(parsed: Parsed, memory: Amount, plan: Callable[[Parsed, Amount], P], now: P | None) -> Changes[P]:
    """Plan with each change; `now` is the plan without any, None if there is none."""
    size = (0, 0) if now is None else now.size
    options = [change for change in _of_options(parsed, memory, plan) if change.plan.size > size]
    larger = [] if now is not None and now.fits else list(_of_memory(parsed, memory, plan))
    return Changes((*options, *larger))


def _of_options(parsed: Parsed, memory: Amount, plan: Callable[[Parsed, Amount], P]) -> Iterator[Change[P]]:
    written = parsed.written
    for way in (*_fewer_requests(parsed, memory, plan), *WAYS):
        if any(written.get(name) == value for name, value in way.items()):
            continue
        changed = _planned(replace(parsed, flags={**parsed.flags, **way}), memory, plan)
        if changed is not None:
            words = " ".join(f"{BY_NAME[name].option} {value}" for name, value in way.items())
            yield Change(words, len(way) == 1, changed)


def _fewer_requests(parsed: Parsed, memory: Amount, plan: Callable[[Parsed, Amount], P]) -> Iterator[dict[str, str]]:
    """Yield the number of requests that the default lowers itself to, so that one of them has its context. Written, it
    also leaves memory that steps of more requests compute in."""
    found = _planned(replace(parsed, flags={**parsed.flags, "max_running_requests": "auto"}), memory, plan)
    if found is not None and parsed.written.get("max_running_requests") != str(found.num_running):
        yield {"max_running_requests": str(found.num_running)}


def _of_memory(parsed: Parsed, memory: Amount, plan: Callable[[Parsed, Amount], P]) -> Iterator[Change[P]]:
    """Find the least memory, in GiB, with which the model fits; none where a written size of the caches decides."""

    def with_gib(num_gib: int) -> P | None:
        found = _planned(parsed, Amount(num_gib * _GIB, memory.why), plan)
        return found if found is not None and found.fits else None

    low, high = memory.value // _GIB, max(1, memory.value // _GIB * 2)
    while with_gib(high) is None:
        low, high = high, 2 * high
        if high * _GIB > _MOST_MEMORY:
            return
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if with_gib(middle) is not None else (middle, high)
    if (found := with_gib(high)) is not None:
        yield Change(f"{human_bytes(high * _GIB)} of memory", True, found)


def _planned(parsed: Parsed, memory: Amount, plan: Callable[[Parsed, Amount], P]) -> P | None:
    """Plan without warnings; None for what serving would refuse."""
    with contextlib.suppress(ConfigError, ModelError), contextlib.redirect_stderr(io.StringIO()):
        return plan(parsed, memory)
    return None
