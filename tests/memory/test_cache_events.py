"""Events of one prefix tree: hashes, namespaces, adapters, groups, and what is removed when (C18, C34)."""

from __future__ import annotations

from typing import Final

import numpy as np
import pytest

from forebay.memory.cache_events import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    CacheEvents,
    Salt,
    Source,
)
from forebay.memory.kinds.kind import Kinds
from forebay.memory.radix_cache import RadixCache
from forebay.memory.slots import Slots
from forebay.memory.tier import of_device

PAGE_SIZE: Final = 4
OWNER: Final = 7


def key_of(first: int, num_pages: int) -> bytes:
    return np.arange(first, first + num_pages * PAGE_SIZE, dtype=np.int32).tobytes()


KEY_OF_TWO: Final = key_of(0, 2)


def salt_of(namespace: str) -> Salt:
    """Name the salt of "name/client+adapter number"; numbers are not part of it."""
    client, _, adapter = namespace.partition("+")
    adapter = adapter.rstrip("0123456789")
    return Salt(f"{adapter}/{client}", client, adapter or None)


def published_tree(
    key: bytes = b"k", num_pages: int = 64, *, with_tokens: bool = True
) -> tuple[RadixCache, CacheEvents]:
    """Return a tree whose pages 1 to `num_pages` are a request's, and its events."""
    slots = Slots("kv", num_pages)
    slots.take_ids(num_pages, OWNER)
    tree = RadixCache(slots, PAGE_SIZE)
    source = Source(of_device(slots, tree, Kinds()), "CPU", salt_of)
    return tree, CacheEvents([source], key, lambda: 5.0, with_tokens=with_tokens)


def pages(*ids: int) -> np.ndarray:
    return np.array(ids, dtype=np.int64)


def stored(events: CacheEvents) -> list[BlockStored]:
    return [event for event in events.take_events() if isinstance(event, BlockStored)]


def test_c34_hashes_depend_on_tokens_before_them_namespace_and_key() -> None:
    tree, events = published_tree()
    tree.insert(key_of(0, 2), pages(1, 2), OWNER)
    (own,) = stored(events)
    tree.insert(key_of(0, 1) + key_of(20, 1), pages(3, 4), OWNER)
    tree.insert(key_of(0, 2), pages(5, 6), OWNER, namespace="salted")
    branch, salted = stored(events)
    other_tree, other_events = published_tree(b"another")
    other_tree.insert(key_of(0, 2), pages(1, 2), OWNER)
    same_tree, same_events = published_tree()
    same_tree.insert(key_of(0, 2), pages(1, 2), OWNER)
    others = stored(other_events)
    hashes = {*own.block_hashes, *branch.block_hashes, *salted.block_hashes, *others[0].block_hashes}
    assert len(hashes) == 2 + 1 + 2 + 2
    assert stored(same_events)[0].block_hashes[:1] == own.block_hashes[:1]
    assert salted.extra_keys
    assert "salted" not in str(salted)
    assert own.extra_keys is None


def test_split_publishes_nothing_again() -> None:
    tree, events = published_tree()
    tree.insert(key_of(0, 4), pages(1, 2, 3, 4), OWNER)
    (first,) = stored(events)
    tree.insert(key_of(0, 2) + key_of(40, 1), pages(5, 6, 7), OWNER)
    (second,) = events.take_events()
    assert isinstance(second, BlockStored)
    assert second.parent_block_hash == first.block_hashes[1]
    assert len(second.block_hashes) == 1


def test_page_removed_and_stored_again_in_one_step_is_removed_first() -> None:
    tree, events = published_tree()
    tree.insert(KEY_OF_TWO, pages(1, 2), OWNER)
    (before,) = stored(events)
    tree.evict(2)
    tree.insert(KEY_OF_TWO, pages(3, 4), OWNER)
    gone, again = events.take_events()
    assert isinstance(gone, BlockRemoved)
    assert isinstance(again, BlockStored)
    assert sorted(gone.block_hashes) == sorted(again.block_hashes) == sorted(before.block_hashes)


def test_page_stored_and_evicted_in_one_step_gives_no_event() -> None:
    tree, events = published_tree()
    tree.insert(KEY_OF_TWO, pages(1, 2), OWNER)
    tree.evict(2)
    assert events.take_events() == []


@pytest.mark.parametrize("first", [0, 1])
def test_page_of_an_adapter_is_gone_only_when_no_load_of_it_has_the_page(first: int) -> None:
    tree, events = published_tree()
    names = ["c+lora1", "c+lora2"]
    tree.insert(KEY_OF_TWO, pages(1, 2), OWNER, namespace=names[0])
    tree.insert(KEY_OF_TWO, pages(3, 4), OWNER, namespace=names[1])
    (only,) = events.take_events()
    assert isinstance(only, BlockStored)
    assert only.lora_name == "lora"
    tree.discard(KEY_OF_TWO, 0, names[first])
    assert events.take_events() == []
    tree.discard(KEY_OF_TWO, 0, names[1 - first])
    (gone,) = events.take_events()
    assert isinstance(gone, BlockRemoved)
    assert sorted(gone.block_hashes) == sorted(only.block_hashes)


def test_cleared_cache_is_one_event() -> None:
    tree, events = published_tree()
    tree.insert(KEY_OF_TWO, pages(1, 2), OWNER)
    stored(events)
    tree.clear()
    assert events.take_events() == [AllBlocksCleared()]
    assert events.take_events() == []


def test_events_without_tokens_have_no_token_ids() -> None:
    tree, events = published_tree(with_tokens=False)
    tree.insert(KEY_OF_TWO, pages(1, 2), OWNER)
    assert stored(events)[0].token_ids == []


def test_batches_after_a_start_have_a_bounded_number_of_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("forebay.memory.cache_events.MOST_BLOCKS", 50)
    tree, events = published_tree(num_pages=100, with_tokens=False)
    for i in range(100):
        tree.insert(key_of(i * PAGE_SIZE, 1), pages(i + 1), OWNER)
    assert [len(stored(events)) for _ in range(3)] == [50, 50, 0]
