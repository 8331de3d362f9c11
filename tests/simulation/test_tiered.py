"""KV in two tiers under random traffic, faults, sleep and pairs, and whether mistakes would be found there (C23)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pytest
from torch import Tensor

from forebay.memory.draft import Draft
from forebay.memory.holding import Allocation
from forebay.memory.kinds.kind import Arrival
from forebay.memory.kinds.resident.residents import Residents
from forebay.memory.slots import Ids
from forebay.runtime.kinds.resident import HisparseCoordinator
from tests.simulation.tiered import run_seeds

QUICK = (3, 7)


@pytest.mark.parametrize("seeds", [QUICK, pytest.param(range(600), marks=pytest.mark.slow)])
def test_tiers_random_traffic_reads_what_the_host_tier_has(seeds: Sequence[int]) -> None:
    outcome = run_seeds(seeds)
    assert 0 < outcome.loaded < outcome.read, "hot buffers held everything, or nothing"
    assert outcome.from_copies > 0 < outcome.from_host, "prompts read from one tier alone"


def forget_removals(residents: Residents, pages: Ids) -> Ids:
    ids: Ids = residents.full_to_hisparse_device_index_mapping[pages].astype("int64")
    residents.full_to_hisparse_device_index_mapping[pages] = 0
    return ids


def load_too_early(residents: Residents, held: Allocation, arrival: Arrival, draft: Draft) -> None:
    ADMIT(residents, held, arrival._replace(from_elsewhere=False), draft)
    if arrival.from_elsewhere:
        pages = residents._rows.pages(held.row, 0, held.kv_len // residents._rows.page_size)
        residents._loaded.append(residents._take(pages, held.id))


def never_reset(coordinator: HisparseCoordinator, columns: Mapping[str, Tensor]) -> None:
    CHANGE(coordinator, {name: ids for name, ids in columns.items() if name != "admit_rows"})


def trust_what_a_failed_launch_left(residents: Residents, held: Allocation, arrival: Arrival, draft: Draft) -> None:
    before = len(residents._changed)
    ADMIT(residents, held, arrival, draft)
    del residents._changed[before]  # the entries of the pages that the request has now


ADMIT, CHANGE = Residents.admit, HisparseCoordinator.change


@pytest.mark.slow
@pytest.mark.quick(1)
@pytest.mark.parametrize(
    ("owner", "name", "mistake", "seeds"),
    [
        (Residents, "_unmap", forget_removals, range(60)),
        (Residents, "admit", load_too_early, range(60)),
        (Residents, "admit", trust_what_a_failed_launch_left, range(80, 90)),
        (HisparseCoordinator, "change", never_reset, range(60)),
    ],
    ids=["removed copies", "loads before the host copy", "entries of admitted pages", "reset of hot rows"],
)
def test_a_mistake_about_tiers_is_found(
    owner: type[object], name: str, mistake: object, seeds: range, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(owner, name, mistake)
    with pytest.raises(Exception, match=r"resident|another KV|copy"):
        run_seeds(seeds)
