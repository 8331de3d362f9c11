"""Events of the prefix cache of real engines: of prefill and decode, and of files that a start has found (C18, C34)."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import pytest

from forebay.engine.loop.cache_events import events_of
from forebay.engine.loop.core import close
from forebay.requests.sampling_params import SamplingParams
from tests.integration.rig import Engine, Rig
from tests.integration.test_prefix_files import IDENTITY, SIZES, rig_of
from tests.integration.test_two_engines import SHAPES, Two
from tests.models.tiny import random_ids
from tests.simulation.published import KEY, Cached, Subscriber, of_trees

PARAMS: Final = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True)
SHARED: Final = random_ids(24, seed=1)
PROMPTS: Final = [SHARED + random_ids(20, seed=seed) for seed in (2, 3)]
CASES: Final = ("llama", "falcon_h1", "gpt_oss")  # attention; states beside it; windows beside it


class Routed:
    """An engine and the table of a router that reads its events after each step."""

    def __init__(self, engine: Engine) -> None:
        self.subscriber, self._engine, step = Subscriber(), engine, engine.core.step
        self._events = events_of(engine.core.scheduler, "cuda", KEY, with_tokens=False)

        def stepping() -> Any:
            updates = step()
            self.subscriber.take(self._events.take())
            return updates

        engine.core.step = stepping

    def checked(self) -> Cached:
        """Return what the router has, after a check that the trees have that."""
        self.subscriber.take(self._events.take())
        known = self.subscriber.cached
        assert known == of_trees(self._engine.core.scheduler)
        return known


@pytest.mark.parametrize("case", CASES)
def test_c34_events_of_prefill_and_decode_equal_their_trees_and_share_hashes(case: str) -> None:
    two = Two(rig_of(case), *SHAPES["cached"])
    routed = [Routed(engine) for engine in (two.prefill, two.decode)]
    for _ in range(2):
        two.run(PROMPTS, [PARAMS] * len(PROMPTS))
        prefill, decode = (each.checked() for each in routed)
    of_all = "GPU", "full_attention"
    assert len(prefill[of_all] & decode[of_all]) >= len(SHARED) // 4
    assert prefill.keys() == decode.keys()
    assert len(prefill) == (1 if case == "llama" else 2)


def restarted(rig: Rig, folder: Path) -> Engine:
    return rig.engine(**SIZES, page_size=4, disk=(folder, IDENTITY))


@pytest.mark.parametrize("case", CASES)
def test_c34_events_after_a_restart_name_the_files_with_the_hashes_of_before(case: str, tmp_path: Path) -> None:
    rig = rig_of(case)
    first = Routed(engine := restarted(rig, tmp_path))
    engine.run(PROMPTS, PARAMS)
    before = first.checked()
    close(engine.core)
    again = Routed(engine := restarted(rig, tmp_path))
    found = again.checked()  # before any request
    assert {medium for medium, _ in found} == {"STORAGE"}
    assert found == {key: hashes for key, hashes in before.items() if key[0] == "STORAGE"}
    engine.run(PROMPTS, PARAMS)
    assert {medium for medium, _ in again.checked()} == {"GPU", "STORAGE"}
    close(engine.core)
