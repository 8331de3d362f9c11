"""What a scheduler says of itself."""

from __future__ import annotations

import pytest

from forebay.memory.slots import CACHE, FREE, QUARANTINE, Slots
from forebay.requests.account import Account
from forebay.scheduler.state import page_map
from tests.scheduler.rig import Rig


@pytest.mark.parametrize("cells", [4, 8, 99])
def test_page_map_shows_the_kind_of_holder_of_evenly_spread_pages(cells: int) -> None:
    """0 is free, 1 a request's, 2 the cache's, 3 quarantined or a group's."""
    slots = Slots("pages", 8)
    slots.owner[1:] = [FREE, 1, CACHE, QUARANTINE, FREE, 7, CACHE, FREE]
    expected = [0, 1, 2, 3, 0, 1, 2, 0]
    assert page_map(slots, cells) == (expected if cells >= 8 else [0, 2, 0, 0])


def test_state_c29_names_the_tenants_of_keys_and_none_of_a_check() -> None:
    rig = Rig(tenants={"a": 2})
    rig.scheduler.queues.accounts["\0check"] = Account("\0check")
    assert [(tenant.name, tenant.weight) for tenant in rig.scheduler.state(0.0).tenants] == [("", 1), ("a", 2)]
