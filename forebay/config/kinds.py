"""Settings of the kinds of cache beside full KV: flags, what "auto" becomes, and what clashes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final, Protocol

from forebay.base.foreign import ABSENT_VALUES
from forebay.base.units import ceil_div
from forebay.config.engine_config import StateStrategy
from forebay.config.flag import BYTES, COUNT, FLOAT, TEXT, Decision, Flag, Settled, in_group

GROUP: Final = "recurrent states and sliding windows"
# About a sentence: what a continued conversation computes again at most.
TRACK_TOKENS: Final = 32

FLAGS: Final = in_group(
    GROUP,
    Flag(
        "mamba_ssm_dtype",
        TEXT,
        "type of the states that scans carry on",
        aliases=("--mamba-ssm-cache-dtype",),
        choices=("float32", "bfloat16"),
        absent=ABSENT_VALUES["dtype"],
    ),
    Flag(
        "mamba_scheduler_strategy",
        TEXT,
        "how states come into the prefix cache: extra_buffer tracks them in slots of its own, no_buffer ends steps "
        "where one is wanted",
        aliases=("--mamba-radix-cache-strategy",),
        choices=tuple(StateStrategy),
        absent=ABSENT_VALUES["mamba_scheduler_strategy"],
    ),
    Flag(
        "mamba_track_interval",
        COUNT,
        "tokens between the states that a request tracks while it generates; whole pages",
        low=1,
        high=1 << 31,
    ),
    Flag(
        "anchor_interval",
        COUNT,
        "tokens between the states kept of a long prompt, besides those where reuse is likely",
        default=1024,
        low=1,
        high=1 << 31,
    ),
    Flag(
        "max_mamba_cache_size",
        COUNT,
        "state slots, for running requests and the prefix cache together; raised to what the requests need",
        low=1,
        high=1 << 24,
    ),
    Flag("mamba_full_memory_ratio", FLOAT, "memory of states to memory of KV", default=0.9, low=0.01, high=100.0),
    Flag(
        "swa_full_tokens_ratio",
        FLOAT,
        "tokens that sliding windows' KV holds to tokens that full KV holds",
        default=0.8,
        low=0.01,
        high=1.0,
    ),
    Flag(
        "retraction_host_bytes",
        BYTES,
        "memory for what retracted requests keep, such as 1GiB; 0: they compute everything again",
        low=0,
    ),
)


class _Model(Protocol):
    @property
    def page_multiple(self) -> int: ...


class _Facts(Protocol):
    @property
    def model(self) -> _Model: ...


def _strategy(facts: object, settled: Settled) -> Decision:
    if settled["disable_radix_cache"]:
        return Decision(StateStrategy.NO_BUFFER.value, "without the prefix cache no state is kept")
    return Decision(StateStrategy.EXTRA_BUFFER.value, "steps need not end where a state is kept")


def _page_size(facts: _Facts, settled: Settled) -> Decision:
    if settled["mamba_scheduler_strategy"] == StateStrategy.NO_BUFFER and not settled["disable_radix_cache"]:
        return Decision(1, "no_buffer keeps states at any length, and pages end where states do")
    return page_of(facts.model.page_multiple)


def page_of(multiple: int) -> Decision:
    """Return the default page size, of whole blocks of `multiple` tokens."""
    plain = 16
    if plain % multiple == 0:
        return Decision(plain, "small enough to share short prefixes, large enough to keep page tables short")
    return Decision(multiple, f"layers keep an entry for up to {multiple} tokens, and pages hold whole ones")


def _track_interval(facts: object, settled: Settled) -> Decision:
    page = settled.number("page_size")
    return Decision(ceil_div(TRACK_TOKENS, page) * page, "a state a sentence, in whole pages")


RULES: Final[Mapping[str, Callable[[Any, Settled], Decision]]] = {
    "mamba_ssm_dtype": lambda facts, settled: Decision("float32", "rounding at every token adds up over a scan"),
    "mamba_scheduler_strategy": _strategy,
    "page_size": _page_size,
    "mamba_track_interval": _track_interval,
}
# What somebody may have asked for and is of no use without a prefix cache, and what is then instead.
WITHOUT_TREE: Final = {"mamba_scheduler_strategy": (StateStrategy.EXTRA_BUFFER.value, StateStrategy.NO_BUFFER.value)}
OPTIONAL: Final = {"max_mamba_cache_size": "by --mamba-full-memory-ratio, and no more than can be of use"}


def clashes(strategy: object, page_size: object, *, radix_cache: bool) -> Iterator[tuple[str, str, str]]:
    """Pairs of settings that were written and cannot both hold, and why; None for a setting that was not written."""
    if not radix_cache and strategy == StateStrategy.EXTRA_BUFFER:
        yield "disable_radix_cache", "mamba_scheduler_strategy", "without the cache no state is tracked"
    if radix_cache and strategy == StateStrategy.NO_BUFFER and page_size not in (1, None):
        why = "no_buffer keeps states at any length: give a page size of 1"
        yield "mamba_scheduler_strategy", "page_size", why
