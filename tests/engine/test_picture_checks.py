"""What an engine says to a request whose pictures do not fit its model (C33)."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from forebay.base.errors import InvalidRequest
from forebay.config.engine_config import SchedulerConfig
from forebay.engine.frames import AddRequest, GetTree
from forebay.engine.loop.core import EngineCore, work_of
from forebay.engine.loop.pictures import check_pictures
from forebay.engine.loop.surveys import Surveys
from forebay.memory.slots import NO_IDS
from forebay.requests.sampling_params import SamplingParams
from forebay.requests.step_plan import Encode
from forebay.scheduler.scheduler import Scheduler
from tests.pictures import EDGE, PLACEHOLDER, SIZE, TILE_BYTES, VOCAB, picture, picture_config, with_placeholders
from tests.plans import plan_of
from tests.scheduler.rig import Rig, config

PROMPT = list(range(20))


def check(*pictures: Any, prompt: list[int] | None = None, limits: SchedulerConfig | None = None) -> None:
    prompt = with_placeholders(PROMPT, [its for its in pictures if its.num_tokens < 9]) if prompt is None else prompt
    check_pictures(pictures, prompt, limits or config(pictures=picture_config()))


def test_pictures_that_fit_their_prompt_are_taken() -> None:
    check(picture(1, 2))
    check(picture(1, 2, 5, num_tiles=2), picture(2, 17))
    check(picture(1, 0, runs=((0, 1), (4, 2))), picture(2, 1))


def test_c33_run_that_no_step_can_hold_is_refused_with_both_numbers() -> None:
    limits = config(pictures=picture_config(longest_span=5))
    check(picture(1, 2, num_tiles=1), limits=limits)
    check(picture(1, num_tiles=2, runs=((2, 5), (8, 1))), limits=limits)
    with pytest.raises(InvalidRequest, match=r"picture 0 has a run of 6 tokens.*at most 5"):
        check(picture(1, num_tiles=2, runs=((2, 6),)), limits=limits)


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        (
            {"sizes": ((EDGE + 1, EDGE),)},
            "tile of picture 0 has 3 x 2 pixels; the model takes multiples of 2, at most 16 on an edge, of at most 8",
        ),
        ({"sizes": ((EDGE, 9 * EDGE),)}, "2 x 18 pixels; the model takes multiples of 2, at most 16"),
        ({"sizes": (SIZE, (3 * EDGE, 3 * EDGE))}, "6 x 6 pixels"),
        ({"sizes": ((-2, -6),), "pixels": bytes(TILE_BYTES)}, "-2 x -6 pixels"),
        ({"num_tiles": 2, "pixels": bytes(TILE_BYTES)}, "2 tiles and 36 bytes of pixels; tiles of these sizes have 72"),
        ({"num_tiles": 0}, "0 tiles and 0 bytes"),
        ({"pixels": bytes(TILE_BYTES - 1)}, "1 tiles and 35 bytes"),
        ({"digest": b"short"}, "the digest of picture 0 has 5 bytes, not 32"),
        ({"runs": ()}, "0 tokens in the prompt, and its tiles have 3"),
        ({"runs": ((2, 2),)}, "2 tokens in the prompt, and its tiles have 3"),
        ({"runs": ((-1, 3),)}, "a run of 3 tokens from -1 on; the prompt has 20 tokens"),
        ({"runs": ((18, 3),)}, "a run of 3 tokens from 18 on"),
        ({"runs": ((1 << 80, 3),)}, "a run of 3 tokens"),
        ({"runs": ((2, 0), (3, 3))}, "a run of 0 tokens"),
        ({"runs": ((4, 2), (2, 1))}, "not in the order of the prompt"),
        ({"runs": ((2, 2), (3, 1))}, "not in the order of the prompt"),
    ],
)
def test_c33_picture_that_is_not_as_the_model_takes_it_is_refused_with_the_numbers(
    changes: dict[str, Any], why: str
) -> None:
    wrong = picture(1, 2, **changes)
    prompt = [PLACEHOLDER] * len(PROMPT) if "runs" in changes else None
    with pytest.raises(InvalidRequest, match=why):
        check(wrong, prompt=prompt)


def test_c33_tile_of_another_size_than_the_only_one_is_refused() -> None:
    limits = config(pictures=picture_config(tile_size=SIZE))
    check(picture(1, 2), limits=limits)
    with pytest.raises(InvalidRequest, match="6 x 2 pixels; the model takes 2 x 6"):
        check(picture(1, 2, sizes=(SIZE[::-1],)), limits=limits)


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"grid": (1, 2)}, "3 tokens in 1 runs; the model takes one run of tokens, 1 x 2 by the grid"),
        ({"grid": (-1, -3)}, "-1 x -3 by the grid"),
        ({"grid": (3, 1), "runs": ((2, 1), (4, 2))}, "3 tokens in 2 runs"),
    ],
)
def test_c33_mrope_picture_whose_tokens_are_no_grid_is_refused(changes: dict[str, Any], why: str) -> None:
    limits, prompt = config(pictures=picture_config(mrope=True)), [PLACEHOLDER] * len(PROMPT)
    check(picture(1, 2, grid=(3, 1)), prompt=prompt, limits=limits)
    with pytest.raises(InvalidRequest, match=why):
        check(picture(1, 2, **changes), prompt=prompt, limits=limits)


def test_c33_runs_of_two_pictures_that_share_a_token_are_refused() -> None:
    with pytest.raises(InvalidRequest, match="two runs of pictures have the prompt's token 4"):
        check(picture(1, 2), picture(2, 4))


def test_c33_runs_on_other_tokens_than_placeholders_are_refused() -> None:
    with pytest.raises(InvalidRequest, match="other tokens than the placeholder 9 among the 3 from 2 on"):
        check(picture(1, 2), prompt=PROMPT)


def test_engine_without_an_encoder_refuses_pictures_in_a_line() -> None:
    with pytest.raises(InvalidRequest, match="this model takes no pictures"):
        check(picture(1, 2), limits=config())


def core(**changes: Any) -> EngineCore:
    return EngineCore(Scheduler(config(**changes)), None, vocab_size=VOCAB, clock=lambda: 0.0)  # type: ignore[arg-type]


def wanted(number: int, *pictures: Any) -> AddRequest:
    prompt = with_placeholders(PROMPT, pictures)
    params = SamplingParams(max_tokens=4)
    return AddRequest(request_id=number, prompt_token_ids=prompt, params=params, pictures=pictures)


def test_added_pictures_reach_the_scheduler_and_what_is_wrong_comes_back() -> None:
    engine = core(pictures=picture_config(num_blocks=1, num_pixels=1))
    assert engine.add(wanted(1, picture(1, 2))) == []
    assert engine.scheduler.requests[1].tokens[2] == VOCAB
    codes = {1: "pictures_full", 2: "picture_capacity_exceeded", 3: "invalid_picture"}
    others = [picture(2, 2)], [picture(2, 2, 5, num_tiles=2)], [picture(2, 2, digest=b"")]
    for (number, code), pictures in zip(codes.items(), others, strict=True):
        (update,) = engine.add(wanted(10 + number, *pictures))
        assert update.failure.code == code
    engine.abort(1)
    assert engine.add(wanted(2, picture(2, 2))) == []
    engine.scheduler.audit()


def test_tree_shows_placeholders_for_pictures() -> None:
    engine = Rig(pictures=picture_config())
    engine.add(with_placeholders(PROMPT, [picture(1, 2)]), pictures=[picture(1, 2)])
    engine.run()
    pools = engine.scheduler.pools
    part = Surveys(pools.cache, pools.pictures).part(GetTree(serial=1, begin=True), 0.0)
    (branch,) = [branch for branch in part.branches if branch.num_pages]
    tokens = [int.from_bytes(branch.tokens[at : at + 4], "little") for at in range(0, 32, 4)]
    assert tokens == [0, 1, PLACEHOLDER, PLACEHOLDER, PLACEHOLDER, 5, 6, 7]


def test_work_of_a_step_counts_slices_as_tokens() -> None:
    limits = picture_config(layer_tokens=2.5)
    height, width = SIZE
    encode = Encode(picture=1, tile=0, first_layer=1, last_layer=4, height=height, width=width)
    columns = dict.fromkeys(("rows", "q_lens", "starts", "input_ids"), NO_IDS)
    nothing = {"step": 1, "num_extends": 0, **columns, "sample_mask": np.zeros(0, dtype=np.bool_)}
    assert work_of(plan_of(**nothing, encodes=(encode, encode)), limits) == 15
    larger = picture_config(layer_tokens=1.0, pair_cost=0.5)
    wide = Encode(picture=1, tile=0, first_layer=0, last_layer=2, height=2 * EDGE, width=3 * EDGE)
    assert work_of(plan_of(**nothing, encodes=(wide,)), larger) == 40
    assert work_of(plan_of(**nothing), limits) == 0
