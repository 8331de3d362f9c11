"""Ranges of a GPU's and the host's memory, of a driver that is not there: what it maps, in which order (C23)."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from forebay.base.errors import ConfigError
from forebay.pools import regions
from forebay.pools.cuda_range import Properties, map_range

MIB = 1 << 20
BASE = 1 << 40
DEVICE, HOST = 1, 3


class FakeDriver:
    """Pieces have 2 MiB. `fails` is the name of a function and the error that it returns."""

    def __init__(self, fails: tuple[str, int] = ("", 0)) -> None:
        self._fails, self.calls = fails, list[tuple[Any, ...]]()

    def _done(self, name: str, *call: Any) -> int:
        self.calls.append((name, *call))
        return self._fails[1] if name == self._fails[0] else 0

    def cuMemGetAllocationGranularity(self, size: Any, properties: Any, option: int) -> int:
        assert option == 0
        size._obj.value = 2 * MIB
        return 0

    def cuMemAddressReserve(self, base: Any, size: Any, alignment: Any, at: Any, flags: Any) -> int:
        base._obj.value = BASE
        return self._done("reserve", size.value)

    def cuMemCreate(self, handle: Any, size: Any, properties: Any, flags: Any) -> int:
        made: Properties = properties._obj
        assert made.type == 1, "pinned"
        handle._obj.value = 70 + made.location.type
        return self._done("create", made.location.type, size.value)

    def cuMemMap(self, at: Any, size: Any, offset: Any, handle: Any, flags: Any) -> int:
        assert not offset.value
        return self._done("map", at.value - BASE, size.value, handle.value - 70)

    def cuMemSetAccess(self, at: Any, size: Any, access: Any, count: Any) -> int:
        assert all(each.flags == 3 for each in access)
        readers = [each.location.type for each in access][: count.value]
        return self._done("access", at.value - BASE, size.value, readers)


def test_map_range_host_memory_begins_behind_the_piece_in_which_the_device_s_ends() -> None:
    driver = FakeDriver()
    assert map_range(3 * MIB, 6 * MIB, driver=driver) == (BASE, 10 * MIB)
    assert driver.calls == [
        ("reserve", 10 * MIB),
        ("create", DEVICE, 4 * MIB),
        ("map", 0, 4 * MIB, DEVICE),
        ("access", 0, 4 * MIB, [DEVICE]),
        ("create", HOST, 6 * MIB),
        ("map", 4 * MIB, 6 * MIB, HOST),
        ("access", 4 * MIB, 6 * MIB, [DEVICE, HOST]),
    ]


def test_map_range_of_a_host_part_within_the_device_s_last_piece_maps_no_host_memory() -> None:
    driver = FakeDriver()
    assert map_range(MIB, MIB // 2, driver=driver) == (BASE, 2 * MIB)
    assert [call[:2] for call in driver.calls if call[0] == "create"] == [("create", DEVICE)]


@pytest.mark.parametrize("name", ["reserve", "create", "map", "access"])
def test_map_range_that_the_driver_refuses_is_one_line_with_a_remedy(name: str) -> None:
    with pytest.raises(ConfigError, match=r"CUDA error 801\), which needs CUDA 12.2 and Linux: update the driver"):
        map_range(MIB, 9 * MIB, driver=FakeDriver((name, 801)))


def test_regions_of_a_gpu_take_both_tiers_from_one_range(monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[tuple[int, int, torch.device]] = []
    monkeypatch.setattr(regions, "take_range", lambda *sizes: taken.append(sizes))
    regions.Regions("cuda").take_tiers(regions.Tag.KV_CACHE, 3 * MIB, 6 * MIB)
    assert taken == [(3 * MIB, 6 * MIB, torch.device("cuda"))]


def test_map_range_without_memory_names_both_parts() -> None:
    with pytest.raises(MemoryError, match=r"out of memory: 2.0 MiB on the GPU and 8.0 MiB of the host"):
        map_range(MIB, 9 * MIB, driver=FakeDriver(("create", 2)))
