"""What files have of the prefix cache, in any order, is attached to their tier (C18, C30)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from forebay.formats.prefix_files import Record, RecordedPicture, Rows
from forebay.memory.slots import Ids
from forebay.memory.tier import Prefix
from forebay.scheduler.memory.restoring import restore
from tests.kinds_of import kind_config
from tests.pictures import PLACEHOLDER, SIZE, VOCAB, picture, picture_config
from tests.scheduler.rig import Rig

TOKENS = np.arange(32, dtype=np.int32).tobytes()  # of 8 pages
PAGE_BYTES = 16


def record(start: int, stop: int) -> Record:
    return Record("/n", "", TOKENS[: stop * PAGE_BYTES], start, {"kv": Rows([*range(start + 1, stop + 1)], 4, [])})


def dropped(first: int) -> Record:
    """Return the record that drops the pages from a number on."""
    return Record("/n", "", TOKENS[: (first + 1) * PAGE_BYTES], first, {})


FIRST, SECOND, THIRD = record(0, 3), record(3, 5), record(5, 8)


@pytest.mark.parametrize(
    ("records", "num_pages", "placed"),
    [
        ([FIRST, SECOND, THIRD], 8, [FIRST, SECOND, THIRD]),
        ([THIRD, SECOND, FIRST], 8, [FIRST, SECOND, THIRD]),
        ([THIRD, FIRST], 3, [FIRST]),
        ([FIRST, SECOND, dropped(4)], 4, [FIRST, SECOND]),
        ([FIRST, SECOND, dropped(4), SECOND], 5, [FIRST, SECOND, SECOND]),
        ([FIRST, THIRD, dropped(4), SECOND], 5, [FIRST, SECOND]),
        ([FIRST, THIRD, dropped(7), SECOND], 5, [FIRST, SECOND]),
        ([SECOND, dropped(5), FIRST], 5, [FIRST, SECOND]),
    ],
)
def test_restore_attaches_what_was_not_dropped_since_in_any_order(
    records: Sequence[Record], num_pages: int, placed: Sequence[Record]
) -> None:
    tier = Rig(num_pages=15, tiers={"disk": {"kv": 24}}).scheduler.memory.tiers.named("disk")
    found: list[Record] = []

    def place(slots: dict[str, Ids], record: Record) -> None:
        assert len(slots["kv"]) == len(record.kinds["kv"].ends)
        found.append(record)

    restore(tier, [(each, lambda slots, each=each: place(slots, each)) for each in records], "disk_restore", None)
    _, pages = tier.walk(Prefix(TOKENS, "/n", "", ""))
    assert (len(pages), sorted(found, key=lambda each: each.start)) == (num_pages, placed)


IDS = np.array([5, 6, VOCAB, VOCAB + 1, VOCAB + 2, 7, 8, 9], dtype=np.int32).tobytes()  # two pages, with a picture
SHOWN = RecordedPicture(VOCAB, picture(1).digest, (1, 1), (SIZE,))


def restored(recorded: list[RecordedPicture], **changes: Any) -> Rig:
    """Return an engine that knows another picture already, and restores one record with the pictures `recorded`."""
    kinds = kind_config(slot_bytes={"kv": 4}, recompute_bytes_per_token=200)
    rig = Rig(num_pages=15, tiers={"disk": {"kv": 24}}, kinds=kinds, **changes)
    if rig.scheduler.pools.pictures is not None:
        rig.scheduler.pools.pictures.ids_of("n", picture(2))
    found = Record("/n", "", IDS, 0, {"kv": Rows([1, 2], 4, [])}, recorded)
    rig.scheduler.memory.tiers.restore("disk", [(found, lambda slots: None)], writable=lambda: True)
    return rig


def test_c34_restore_gives_a_picture_the_ids_of_this_process() -> None:
    rig = restored([SHOWN], pictures=picture_config())
    req = rig.add([5, 6, *[PLACEHOLDER] * 3, 7, 8, 9, 10], pictures=[picture(1, 2)], namespace="n", max_new=1)
    assert req.tokens[2] == VOCAB + 3, "the ids of the other picture"
    rig.run()
    (cache,) = [update.cache for update in rig.updates if update.cache]
    assert cache.tiers == {"disk": 8}


@pytest.mark.parametrize("recorded", [[], [SHOWN]])
def test_c34_restore_leaves_out_a_record_whose_pictures_are_unknown(recorded: list[RecordedPicture]) -> None:
    """The record does not name them, or the engine has no encoder."""
    rig = restored(recorded, **({} if recorded else {"pictures": picture_config()}))
    assert rig.scheduler.memory.tiers.named("disk").cache.num_pages == 0


def test_restore_leaves_out_what_the_tier_has_no_room_for() -> None:
    tier = Rig(num_pages=15, tiers={"disk": {"kv": 4}}).scheduler.memory.tiers.named("disk")
    found: list[object] = []
    restore(tier, [(record(0, 8), found.append), (FIRST, found.append)], "disk_restore", None)
    assert len(found) == 1
    assert tier.cache.num_pages == 3
