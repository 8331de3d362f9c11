"""What events of the prefix cache cost an engine for each page that is adopted: hashes, comparison, encoding.

    python -m benchmarks.kv_events

Prompts of 16 pages of 16 tokens, 200 one after the other, each published before the next: the difference between a tree
with events and one without, the best of seven runs of each, without token ids and with them.
"""

from __future__ import annotations

import time
from typing import Final

import numpy as np

from forebay.memory.cache_events import CacheEvents, Salt, Source
from forebay.memory.kinds.kind import Kinds
from forebay.memory.radix_cache import RadixCache
from forebay.memory.slots import Slots
from forebay.memory.tier import of_device

PROMPTS: Final = 200
PAGES: Final = 16  # of a prompt
TOKENS: Final = 16  # of a page
RUNS: Final = 7
OWNER: Final = 7


def no_salt(namespace: str) -> Salt:
    """Return the salt of clients that are not kept apart."""
    return Salt(namespace, "", None)


def page_us(*, publishes: bool, with_tokens: bool) -> float:
    """Return the microseconds for each page of prompts that a tree adopts."""
    slots = Slots("kv", PROMPTS * PAGES)
    slots.take_ids(PROMPTS * PAGES, OWNER)
    tree, events = RadixCache(slots, TOKENS), None
    if publishes:
        source = Source(of_device(slots, tree, Kinds()), "CPU", no_salt)
        events = CacheEvents([source], b"k" * 32, time.time, with_tokens=with_tokens)
    draw = np.random.default_rng(0)
    keys = [draw.integers(0, 50_000, PAGES * TOKENS, dtype=np.int32).tobytes() for _ in range(PROMPTS)]
    begin = time.perf_counter()
    for number, key in enumerate(keys):
        tree.insert(key, np.arange(1 + number * PAGES, 1 + (number + 1) * PAGES), OWNER)
        if events is not None:
            list(events.take())
    return (time.perf_counter() - begin) / (PROMPTS * PAGES) * 1e6


def main() -> None:
    print("| token ids | without events, us a page | with | cost |\n|---|---|---|---|")
    for with_tokens in (False, True):
        off, on = (
            min(page_us(publishes=publishes, with_tokens=with_tokens) for _ in range(RUNS))
            for publishes in (False, True)
        )
        print(f"| {'yes' if with_tokens else 'no'} | {off:.2f} | {on:.2f} | {on - off:.2f} |")


if __name__ == "__main__":
    main()
