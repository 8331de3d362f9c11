"""Pictures under random traffic, faults and sleep, and whether mistakes would be found there (C18, C26, C28, C34)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pytest

from forebay.memory.encodings import Encoding, EncodingRows
from forebay.memory.pictures import Pictures
from forebay.requests import pictures, rope_positions
from forebay.requests.pictures import PromptPictures
from forebay.requests.rope_positions import GridRun
from forebay.requests.step_plan import StepPlan
from forebay.scheduler import encoding
from tests.simulation.pictures import PictureRunner, run_seeds


@pytest.mark.parametrize("seeds", [range(10), pytest.param(range(10, 600), marks=pytest.mark.slow)])
def test_c34_pictures_random_traffic_tokens_are_those_of_each_request_alone(seeds: range) -> None:
    outcome = run_seeds(seeds)
    assert min(outcome.spans, outcome.turned, outcome.shown, outcome.refused, outcome.hits, outcome.cached) > 0
    assert min(outcome.evicted, outcome.drops) > 0
    assert outcome.slices > outcome.tiles > outcome.alone > 0


def keys_of_placeholders(its: PromptPictures, tokens: Any) -> None: ...


def evict_in_use(rows: EncodingRows, encodings: Any, tenant: str, in_use: Any) -> Any:
    return TAKE(rows, encodings, tenant, ())


TAKE = EncodingRows.take


def rows_from_0(rows: EncodingRows, its: Encoding) -> None:
    PLACE(rows, its)
    its.rows -= 1


PLACE = EncodingRows._place


def count_ids(pictures: Pictures, ids: Any) -> Any:
    return ids if ids.dtype == "int32" else AS_TOKENS(pictures, ids)


AS_TOKENS = Pictures.as_tokens


def keep_unfinished(pictures: Pictures, drops: Iterable[int]) -> None: ...


def plan_from_what_has_committed(*args: Any) -> int:
    its = args[2].tiles[args[3]]
    its.planned = its.committed
    return SLICE(*args)


SLICE = encoding._plan_slice


def do_not_wait(its: PromptPictures, start: int, pictures: Pictures) -> None:
    return None


def give_all_ids_again(pictures: Pictures, in_use: Any) -> None:
    RESTART(pictures, in_use[:0])


RESTART = Pictures.restart_ids


def clear_nothing(pictures: Pictures) -> None: ...


def reserve_nothing(pictures: Pictures, tenant: str, arrived: Any) -> None: ...


def drop_nothing(pictures: Pictures, its: Encoding, tile: Any) -> None:
    BEGIN_AGAIN(pictures, its, tile)
    pictures.drops.clear()


BEGIN_AGAIN = Pictures._begin_again


def leave_deltas(runner: PictureRunner, plan: StepPlan) -> None:
    before = runner.deltas.copy()
    SETTLE(runner, plan)
    for its in plan.admissions:
        runner.deltas[its.row] = its.rope_delta or before[its.row]


SETTLE = PictureRunner._settle


def positions_of_the_end(runs: Sequence[GridRun], start: int, stop: int) -> Any:
    """A hit that begins behind a picture has the delta of all of the prompt's pictures."""
    return POSITIONS(runs, start, stop) if start == 0 else POSITIONS((), start, stop) + rope_positions.rope_delta(runs)


POSITIONS = rope_positions.rope_positions


def cut_spans(its: PromptPictures, start: int, stop: int) -> int:
    return stop


MISTAKES: Sequence[tuple[object, str, Callable[..., Any]]] = [
    (PromptPictures, "write_ids", keys_of_placeholders),
    (EncodingRows, "take", evict_in_use),
    (EncodingRows, "_place", rows_from_0),
    (Pictures, "as_tokens", count_ids),
    (Pictures, "start_over", keep_unfinished),
    (encoding, "_plan_slice", plan_from_what_has_committed),
    (PromptPictures, "awaited", do_not_wait),
    (Pictures, "restart_ids", give_all_ids_again),
    (Pictures, "clear", clear_nothing),
    (Pictures, "_check_fits", reserve_nothing),
    (Pictures, "_begin_again", drop_nothing),
    (PromptPictures, "uncut", cut_spans),
    (PictureRunner, "_settle", leave_deltas),
    (pictures, "rope_positions", positions_of_the_end),
]


@pytest.mark.slow
@pytest.mark.quick(3)
@pytest.mark.parametrize(("owner", "name", "mistake"), MISTAKES, ids=[mistake.__name__ for _, _, mistake in MISTAKES])
def test_a_mistake_about_pictures_is_found(
    owner: object, name: str, mistake: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(owner, name, mistake)
    with pytest.raises(Exception):  # noqa: B017
        run_seeds(range(300))
