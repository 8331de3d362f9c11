"""Pictures in prompts: a prompt's chunks end in front of tiles that are not encoded, and encoding shares its budget."""

from __future__ import annotations

import ast
import re
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import forebay
from forebay.base.errors import EngineError, Overloaded
from forebay.config.engine_config import KindConfig, SpeculationOptions, SpeculativeAlgorithm
from forebay.memory import pictures as memory
from forebay.requests.pictures import Picture
from forebay.requests.request import Request, Status
from forebay.requests.sampling_params import SamplingParams
from forebay.requests.step_plan import StepPlan, TokenLogprob
from forebay.requests.updates import FinishReason
from forebay.scheduler.admission import MAX_OVERTAKES
from forebay.scheduler.encoding import _plan_slice
from tests.pictures import EDGE, PLACEHOLDER, SIZE, TOKENS, VOCAB, picture, picture_config, with_placeholders
from tests.scheduler.rig import Rig

LAYERS = 4
TEXT = list(range(100, 120))
ERROR = EngineError("the step failed")


def rig(num_blocks: int = 8, layer_tokens: float = 2.0, num_pixels: int = 8, **changes) -> Rig:
    """A layer costs 2 tokens: a tile 8."""
    return Rig(pictures=picture_config(num_blocks, num_pixels, layer_tokens=layer_tokens), **changes)


def add(engine: Rig, *pictures: Picture, text: list[int] = TEXT, **kw) -> Request:
    return engine.add(with_placeholders(text, pictures), pictures=pictures, **kw)


def slices(plan: StepPlan | None) -> list[tuple[int, int, int]]:
    assert plan is not None
    return [(its.tile, its.first_layer, its.last_layer) for its in plan.pictures.encodes]


def spans(plan: StepPlan) -> list[tuple[int, int]]:
    return list(zip(plan.starts.tolist(), plan.ends.tolist(), strict=True))


def test_prompt_with_room_for_all_is_encoded_and_computed_in_one_step() -> None:
    engine = rig()
    req = add(engine, picture(1, 5))
    plan = engine.step()
    assert slices(plan) == [(0, 0, LAYERS)]
    assert spans(plan) == [(0, 20)]
    assert plan.pictures.encodes[0].pixels == picture(1).pixels
    assert plan.pictures.encodes[0].rows.tolist() == [1, 2, 3]
    assert plan.pictures.picture_tokens.tolist() == [5, 6, 7]
    assert plan.pictures.picture_rows.tolist() == [1, 2, 3]
    engine.run()
    assert engine.finish_of(req) is FinishReason.LENGTH


def test_plans_have_the_placeholder_and_requests_the_exact_ids() -> None:
    engine = rig()
    req = add(engine, picture(1, 5))
    plan = engine.step()
    assert req.tokens[5:8].tolist() == [VOCAB, VOCAB + 1, VOCAB + 2]
    assert plan.input_ids.tolist() == [*TEXT[:5], *[PLACEHOLDER] * TOKENS, *TEXT[8:]]
    assert plan.admissions[0].token_ids.tolist() == plan.input_ids.tolist()


def test_text_before_a_picture_is_computed_while_it_is_encoded() -> None:
    engine = rig(chunked_prefill_size=8)
    add(engine, picture(1, 5))
    steps = [engine.step() for _ in range(4)]
    assert [spans(plan) for plan in steps] == [[(0, 5)], [(5, 7)], [(7, 15)], [(15, 20)]]
    assert [slices(plan) for plan in steps] == [[(0, 0, 1)], [(0, 1, 4)], [], []]


def test_prompt_that_begins_with_a_picture_starts_when_it_is_encoded() -> None:
    engine = rig(chunked_prefill_size=4)
    req = add(engine, picture(1, 0))
    first, second = engine.step(), engine.step()
    assert (first.num_seqs, slices(first)) == (0, [(0, 0, 2)])
    assert (spans(second), slices(second)) == ([(0, 1)], [(0, 2, 4)])
    engine.run()
    assert engine.finish_of(req) is FinishReason.LENGTH


def test_slice_has_at_least_a_layer_where_a_layer_costs_more_than_a_chunk() -> None:
    engine = rig(layer_tokens=50.0, chunked_prefill_size=4)
    add(engine, picture(1, 0))
    assert [slices(engine.step()) for _ in range(4)] == [[(0, at, at + 1)] for at in range(4)]


def test_tiles_of_one_picture_cost_what_their_own_sizes_cost() -> None:
    """A layer of the first tile costs 2, of the second 4. The tokens of the first cost 3 in the second step."""
    engine = rig(chunked_prefill_size=8)
    add(engine, picture(1, 0, sizes=(SIZE, (2 * EDGE, 3 * EDGE)), runs=((0, 9),)))
    found = [slices(engine.step()) for _ in range(4)]
    assert found == [[(0, 0, 4)], [(1, 0, 1)], [(1, 1, 3)], [(1, 3, 4)]]


def test_layers_with_windows_cost_what_their_tokens_see() -> None:
    """Of a tile of 3 tokens the third layer costs 9, the others 3."""
    limits = picture_config(token_cost=0.0, pair_cost=1.0, seen_tokens=(1, 1, 50, 1))
    engine = Rig(pictures=limits, chunked_prefill_size=6)
    req = add(engine, picture(1, 0))
    assert [slices(engine.step()) for _ in range(3)] == [[(0, 0, 2)], [(0, 2, 3)], [(0, 3, 4)]]
    assert req.account.encoded_tokens == limits.layer_tokens(SIZE, range(LAYERS)) == 18


def test_slice_of_an_encoder_with_many_layers_looks_at_each_layer_once() -> None:
    looked_at = []

    class Seen(tuple[int, ...]):
        def __getitem__(self, layer: Any) -> Any:
            looked_at.append(layer)
            return super().__getitem__(layer)

    limits = picture_config(num_layers=1000, token_cost=0.0, pair_cost=1.0, seen_tokens=Seen([1] * 1000))
    assert limits.layers_within(SIZE, 10, 1e9) == range(10, 1000)
    assert looked_at == [*range(10, 1000)]


def test_slices_of_steps_in_flight_follow_each_other() -> None:
    engine = rig(layer_tokens=2.0, chunked_prefill_size=2, depth=2, overlap_depth=2)
    add(engine, picture(1, 0))
    assert [slices(engine.launch()) for _ in range(4)] == [[(0, at, at + 1)] for at in range(4)]


def test_c26_request_that_comes_back_from_the_host_starts_at_its_own_length() -> None:
    kinds = KindConfig(slot_bytes={"kv": 1}, retraction_host_bytes=1 << 20, recompute_bytes_per_token=1 << 20)
    engine = rig(chunked_prefill_size=8, kinds=kinds)
    req = add(engine, picture(1, 5, 9, num_tiles=2))
    engine.step()
    engine.scheduler.preemption.retract(req)
    engine.run()
    assert engine.scheduler.memory.host_copies.num_saved == 1
    assert all(plan.q_lens.min(initial=1) > 0 for plan in engine.plans)
    assert engine.finish_of(req) is FinishReason.LENGTH


def rope_positions(plan: StepPlan) -> list[list[int]]:
    return plan.pictures.rope_positions.reshape(3, -1).tolist()


def test_mrope_plans_have_three_positions_of_all_prompt_tokens_and_the_delta_behind_them() -> None:
    engine = Rig(pictures=picture_config(mrope=True), chunked_prefill_size=64)
    engine.add(2)
    add(engine, picture(1, 5, grid=(1, 3)), picture(2, 9, grid=(3, 1)), text=TEXT[:13])
    plan = engine.step()
    time = [0, 1, *range(5), 5, 5, 5, 8, 9, 9, 9, 12]
    rows = [0, 1, *range(5), 5, 5, 5, 8, 9, 10, 11, 12]
    columns = [0, 1, *range(5), 5, 6, 7, 8, 9, 9, 9, 12]
    assert rope_positions(plan) == [time, rows, columns]
    assert [admission.rope_delta for admission in plan.admissions] == [0, 0]
    assert len(engine.step().pictures.rope_positions) == 0


def test_mrope_hit_behind_a_picture_continues_from_the_pictures_before_it() -> None:
    """C19: the delta at the hit is not that of the prompt's end."""
    square = {"grid": (2, 3), "sizes": ((4, 6),), "runs": ((3, 6),)}
    later = {**square, "runs": ((14, 6),)}
    engine = Rig(pictures=picture_config(mrope=True), chunked_prefill_size=64)
    add(engine, picture(1, **square), text=TEXT[:13])
    engine.run()
    add(engine, picture(1, **square), picture(2, **later))
    plan = engine.step()
    assert plan.starts.tolist() == [12]
    assert plan.admissions[0].rope_delta == -6
    assert rope_positions(plan) == [[9, 10, *[11] * 6], [9, 10, *[11] * 3, *[12] * 3], [9, 10, *[11, 12, 13] * 2]]


def test_mrope_text_alone_has_no_positions_in_its_plan() -> None:
    engine = Rig(pictures=picture_config(mrope=True))
    engine.add(5)
    plan = engine.step()
    assert len(plan.pictures.rope_positions) == 0
    assert plan.admissions[0].rope_delta == 0


def test_slices_share_the_budget_of_prompts_beside_decodes() -> None:
    engine = rig(chunked_prefill_size=64, mixed_chunk_size=4)
    decoding = engine.add(4, max_new=20)
    engine.step()
    add(engine, picture(1, 0))
    assert [slices(engine.step()) for _ in range(2)] == [[(0, 0, 2)], [(0, 2, 4)]]
    assert len(engine.tokens_of(decoding)) == 3


def test_tiles_are_encoded_one_after_the_other() -> None:
    engine = rig(chunked_prefill_size=16)
    add(engine, picture(1, 2, 8, num_tiles=2))
    steps = [engine.step() for _ in range(2)]
    assert [slices(plan) for plan in steps] == [[(0, 0, 4)], [(1, 0, 4)]]
    assert [spans(plan) for plan in steps] == [[(0, 8)], [(8, 16)]]


def test_equal_pictures_of_two_requests_are_encoded_once() -> None:
    engine = rig(chunked_prefill_size=4, radix_cache=False)
    reqs = [add(engine, picture(1, 0)), add(engine, picture(1, 3))]
    engine.run()
    assert sum(len(slices(plan)) for plan in engine.plans) == 2
    assert [engine.finish_of(req) for req in reqs] == [FinishReason.LENGTH] * 2


def test_prefix_hit_skips_the_tiles_in_it() -> None:
    engine = rig()
    add(engine, picture(1, 5))
    engine.run()
    engine.scheduler.pools.pictures.clear()
    req = add(engine, picture(1, 5))
    engine.run()
    assert req.cache_report.cached_tokens == 16
    assert sum(len(slices(plan)) for plan in engine.plans) == 1


def test_c34_placeholders_of_another_picture_are_no_hit() -> None:
    engine = rig()
    add(engine, picture(1, 5))
    engine.run()
    other = add(engine, picture(2, 5))
    engine.run()
    assert other.cache_report.cached_tokens == 4
    report = other.cache_report
    assert (report.differs_at, report.token_here, report.token_there) == (5, PLACEHOLDER, PLACEHOLDER)


def test_abort_of_a_picture_half_encoded_drops_the_work_once() -> None:
    engine = rig(chunked_prefill_size=4, depth=1, overlap_depth=1)
    req = add(engine, picture(1, 0))
    engine.launch()
    engine.abort(req.id)
    other = engine.add(4)
    plan = engine.launch()
    assert plan.pictures.drops == (1,)
    engine.run()
    assert engine.finish_of(other) is FinishReason.LENGTH
    assert all(not plan.pictures.drops for plan in engine.plans[2:])


def test_failed_encoding_of_one_request_ends_it_alone() -> None:
    engine = rig(chunked_prefill_size=4)
    req = add(engine, picture(1, 0))
    engine.launch()
    (update,) = engine.fail(ERROR)
    assert (update.request_id, update.finish) == (req.id, FinishReason.ERROR)
    engine.scheduler.audit()


def test_failed_step_that_encodes_for_a_waiting_request_puts_that_on_trial_too() -> None:
    engine = rig(chunked_prefill_size=4)
    decoding = engine.add(4, max_new=8)
    engine.step()
    waits = add(engine, picture(1, 0))
    engine.launch()
    assert engine.fail(ERROR) == []
    assert {req for group in engine.scheduler.queues.suspects.groups for req in group} == {decoding, waits}
    engine.run()
    assert [engine.finish_of(req) for req in (decoding, waits)] == [FinishReason.LENGTH] * 2


def test_steps_behind_a_failed_one_begin_the_tile_again_from_its_pixels() -> None:
    engine = rig(chunked_prefill_size=4, depth=1, overlap_depth=1)
    add(engine, picture(1, 5))
    other = engine.add(3, max_new=8)
    for _ in range(2):
        engine.step()
    engine.launch()
    engine.fail(ERROR)
    engine.flights.clear()
    assert engine.scheduler.pools.pictures.drops == {1}
    engine.run()
    again = [plan for plan in engine.plans if (0, 0) in [its[:2] for its in slices(plan)]]
    assert len(again) == 2
    assert again[1].pictures.drops == (1,) or any(plan.pictures.drops for plan in engine.plans)
    assert engine.finish_of(other) is FinishReason.LENGTH


def test_retracted_request_keeps_its_encoding_until_another_needs_the_rows() -> None:
    engine = rig(num_blocks=1, radix_cache=False, tenants={"a": 1, "b": 1})
    req = add(engine, picture(1, 5), max_new=12, tenant="a")
    engine.step()
    engine.scheduler.preemption.retract(req)
    engine.step()
    engine.step()
    assert sum(len(slices(plan)) for plan in engine.plans) == 1
    engine.scheduler.preemption.retract(req)
    other = add(engine, picture(2, 5), tenant="b")
    engine.run()
    assert len(engine.tokens_of(req)) == 12
    assert engine.finish_of(other) is FinishReason.LENGTH
    assert req.account.encoded_tokens == LAYERS * 2.0, "work is charged twice"


def test_c32_queued_pictures_of_one_tenant_leave_rows_and_pixels_to_another() -> None:
    engine = rig(num_blocks=1, num_pixels=4, tenants={"a": 1, "b": 1}, max_running_requests=2)
    own = [add(engine, picture(seed, 5), tenant="a") for seed in range(4)]
    with pytest.raises(Overloaded, match="this API key has its share"):
        add(engine, picture(9, 5), tenant="a")
    engine.step()
    other = add(engine, picture(10, 5), tenant="b")
    while other.status is Status.WAITING:
        engine.step()
    assert sum(req.status is Status.WAITING for req in own) >= 2, "it waits for all that were there"
    engine.run()
    assert {engine.finish_of(req) for req in (*own, other)} == {FinishReason.LENGTH}


def test_rows_of_a_prompt_under_way_stay_and_are_free_behind_it() -> None:
    """The second tenant has been served less: its request is tried before the first prompt goes on."""
    engine = rig(num_blocks=1, chunked_prefill_size=12, tenants={"a": 1, "b": 1})
    first, second = add(engine, picture(1, 5), tenant="a", max_new=30), add(engine, picture(2, 5), tenant="b")
    engine.step()
    while first.status is not Status.DECODING:
        assert second.status is Status.WAITING
        engine.step()
    while second.status is Status.WAITING:
        engine.step()
    assert first.status is Status.DECODING, "it keeps rows that it needs no more"
    assert len(first.pictures.encodings[0].blocks) == 0
    engine.run()


def test_request_half_encoded_keeps_its_rows_from_others() -> None:
    engine = rig(num_blocks=1, chunked_prefill_size=4, tenants={"a": 1, "b": 1})
    first, second = add(engine, picture(1, 0), tenant="a"), add(engine, picture(2, 0), tenant="b")
    engine.run()
    assert [its.picture for plan in engine.plans for its in plan.pictures.encodes] == [1, 1, 2, 2]
    assert {engine.finish_of(req) for req in (first, second)} == {FinishReason.LENGTH}


@pytest.mark.parametrize(("tenant", "most"), [("b", 64), ("a", 180)])
def test_c27_request_that_waits_for_many_rows_gets_them_before_others_take_more(tenant: str, most: int) -> None:
    """Small pictures of another tenant, or of its own, always leave too few for the large one."""
    engine = rig(
        num_blocks=3, num_pixels=500, chunked_prefill_size=16, tenants={"a": 1, "b": 1}, max_queued_requests=500
    )
    small = [add(engine, picture(seed, 5), tenant="a", max_new=1) for seed in range(10, 12)]
    large = add(engine, picture(1, 2, 6, 10, num_tiles=3), tenant=tenant, max_new=1)
    for seed in range(20, 20 + most):
        small.append(add(engine, picture(seed, 5), tenant="a", max_new=1))
        engine.step()
        if large.status is Status.FINISHED:
            break
    assert large.status is Status.FINISHED
    assert any(req.status is Status.WAITING for req in small)
    engine.run()


def test_text_starts_while_a_picture_of_its_tenant_waits_for_rows() -> None:
    engine = rig(num_blocks=1, chunked_prefill_size=30)
    add(engine, picture(1, 5), text=[*TEXT, *TEXT])
    waits, text = add(engine, picture(2, 0), text=TEXT[:5]), engine.add(3)
    engine.step()
    engine.step()
    assert (waits.status, text.status) == (Status.WAITING, Status.DECODING)
    engine.run()


def test_c30_request_whose_numbers_are_not_finite_leaves_no_encoding_behind() -> None:
    engine = rig()
    add(engine, picture(1, 5))
    engine.launch()
    engine.commit(failed=(0,))
    add(engine, picture(1, 5))
    assert slices(engine.step()) == [(0, 0, LAYERS)]


def test_tenant_is_charged_for_the_layers_that_are_computed_for_it() -> None:
    engine = rig(tenants={"a": 1, "b": 1})
    alone, both = add(engine, picture(1, 5), tenant="a"), engine.add(TEXT, tenant="b")
    engine.step()
    assert alone.account.service - both.account.service == LAYERS * 2.0


def test_tenant_is_charged_once_for_layers_that_are_computed_again() -> None:
    engine = rig(tenants={"a": 1, "b": 1})
    alone, both = add(engine, picture(1, 5), tenant="a"), engine.add(TEXT, tenant="b")
    engine.launch()
    tile = alone.pictures.encodings[0].tiles[0]
    assert tile.charged == tile.planned == LAYERS
    charged = alone.account.encoded_tokens
    tile.planned = 0  # as if the step that encoded it had failed
    _plan_slice(engine.scheduler.pools, alone, alone.pictures.encodings[0], 0, 1 << 20)
    assert alone.account.encoded_tokens == charged == LAYERS * 2.0
    assert both.account.encoded_tokens == 0


def test_refused_request_leaves_its_pictures() -> None:
    engine = rig(num_blocks=1)
    engine.scheduler.handoff.enqueue = _refuse
    with pytest.raises(EngineError):
        add(engine, picture(1, 5))
    del engine.scheduler.handoff.enqueue
    assert engine.scheduler.idle
    engine.scheduler.audit()
    add(engine, picture(2, 5))
    engine.run()


def _refuse(req: Request, now: float) -> None:
    raise ERROR


class Repeats:
    """Proposes what follows in the prompt behind its fourth token."""

    def begin_step(self, num_requests: int) -> None: ...

    def propose(self, req: Request, most: int) -> list[int]:
        return req.tokens[3 : 3 + most].tolist()

    def ended(self, req: Request) -> None: ...


def test_drafts_end_in_front_of_a_picture() -> None:
    options = SpeculationOptions(algorithm=SpeculativeAlgorithm.NGRAM, num_draft_tokens=4)
    engine = rig(speculation=options, proposer=Repeats(), width=4)
    add(engine, picture(1, 5), max_new=8)
    engine.run()
    drafts = [plan.drafts.tolist() for plan in engine.plans]
    assert max(drafts, key=len) == TEXT[3:5]


def test_prompt_logprobs_of_pictures_are_not_told() -> None:
    engine = rig()
    params = SamplingParams(max_tokens=1, prompt_logprobs=0)
    req = add(engine, picture(1, 5), text=TEXT[:10], params=params)
    plan = engine.launch()
    assert plan.prompt_logprobs == (0,)
    entries = [TokenLogprob(at + 1, -1.0, 1) for at in range(9)]
    (update,) = engine.commit(prompt_logprobs={0: [*entries, None]})
    told = [entry and entry.token_id for entry in update.prompt_logprobs]
    assert told == [None, 1, 2, 3, 4, None, None, None, 8, 9]
    assert engine.finish_of(req) is FinishReason.LENGTH


def test_c25_sleep_and_weights_encode_pictures_again() -> None:
    engine = rig()
    add(engine, picture(1, 5))
    engine.run()
    for forget in (engine.scheduler.memory.keep_cached, lambda: engine.scheduler.memory.clear([])):
        forget()
        engine.scheduler.pools.cache.flush()
        add(engine, picture(1, 5))
        assert slices(engine.step()) == [(0, 0, LAYERS)]
        engine.run()


def test_c34_numbering_that_ends_drops_the_prefix_cache_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "END_OF_IDS", VOCAB + 3 * TOKENS)
    engine = rig()
    living = add(engine, picture(1, 5), max_new=30)
    for seed in (2, 3):
        add(engine, picture(seed, 5))
    for _ in range(8):
        engine.step()
    assert engine.scheduler.pools.cache.num_pages > 4
    other = add(engine, picture(4, 5))
    assert other.tokens[5] == VOCAB + TOKENS, "the ids of a picture in use are given again"
    assert living.tokens[5] == VOCAB
    assert other.tokens[:20] != living.tokens[:20]
    engine.run()
    assert other.cache_report.cached_tokens == 4, "a pinned prefix with other ids is a hit"
    engine.scheduler.audit()


def test_c34_numbering_that_ends_drops_the_other_tiers_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their prefixes have ids that other pictures get."""
    monkeypatch.setattr(memory, "END_OF_IDS", VOCAB + TOKENS)
    engine = rig(tiers={"host": {"kv": 64}})
    for seed in (1, 2):
        req = add(engine, picture(seed, 5), max_new=1)
        engine.run()
        assert req.tokens[5] == VOCAB
        engine.scheduler.pools.cache.flush()
    assert req.cache_report.tiers == {}
    engine.scheduler.audit()


def test_tokens_of_interleaved_pictures_take_the_rows_of_their_own() -> None:
    engine = rig()
    one = picture(1, num_tiles=1, runs=((2, 1), (6, 2)))
    two = picture(2, num_tiles=1, runs=((3, 2), (8, 1)))
    req = add(engine, one, two)
    plan = engine.step()
    assert plan.pictures.picture_tokens.tolist() == [2, 3, 4, 6, 7, 8]
    rows = [its.rows.tolist() for its in req.pictures.encodings]
    assert plan.pictures.picture_rows.tolist() == [
        rows[0][0], rows[1][0], rows[1][1], rows[0][1], rows[0][2], rows[1][2]
    ]  # fmt: skip
    assert req.tokens[2:9].tolist() == [VOCAB, VOCAB + 3, VOCAB + 4, TEXT[5], VOCAB + 1, VOCAB + 2, VOCAB + 5]
    engine.run()


def test_rows_of_chunks_that_cut_a_picture_are_counted_from_the_step_s_first_token() -> None:
    engine = rig(chunked_prefill_size=6, layer_tokens=0.1)
    req = add(engine, picture(1, 4), text=TEXT[:9])
    plans = [engine.step() for _ in range(2)]
    rows = req.pictures.encodings[0].rows
    assert [plan.pictures.picture_tokens.tolist() for plan in plans] == [[4], [0, 1]]
    assert np.concatenate([plan.pictures.picture_rows for plan in plans]).tolist() == rows.tolist()


def test_ids_of_pictures_are_told_from_tokens_by_one_predicate() -> None:
    """Whoever takes ids of a request for tokens asks `Pictures.stand_for`: a new place belongs here."""
    package = Path(forebay.__file__).parent
    sources = {path: path.read_text() for path in package.rglob("*.py")}
    found = Counter(
        (node.func.attr, str(path.relative_to(package)))
        for path, source in sources.items()
        if re.search("stand_for|as_tokens|as_inputs", source)
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)
        if node.func.attr in ("stand_for", "as_tokens", "as_inputs")
    )
    assert found == {
        ("stand_for", "memory/pictures.py"): 2,  # the two below, and ids that are in use when the numbering restarts
        ("stand_for", "scheduler/proposer.py"): 1,  # drafts
        ("stand_for", "scheduler/encoding.py"): 1,  # log-probabilities of prompts
        ("stand_for", "scheduler/memory/restoring.py"): 1,  # prefixes in files
        ("stand_for", "engine/loop/cache_checks.py"): 1,  # entries that are not computed again
        ("as_inputs", "scheduler/step_draft.py"): 1,  # what the model is given
        ("as_tokens", "scheduler/step_draft.py"): 1,  # what penalties count
        ("as_tokens", "scheduler/admission.py"): 1,  # reports of the cache
        ("as_tokens", "engine/loop/surveys.py"): 1,  # texts of the cache's tree
    }


# -- attention in both directions within pictures ---------------------------------------------------------------------


def spanned(**changes) -> Rig:
    """Runs of pictures' tokens must not be cut; a tile costs one token."""
    return Rig(pictures=picture_config(layer_tokens=0.1, longest_span=6), **changes)


def in_spans(plan: StepPlan) -> list[tuple[int, int]]:
    return list(zip(plan.pictures.span_starts.tolist(), plan.pictures.span_lens.tolist(), strict=True))


@pytest.mark.parametrize(
    ("chunk", "steps"),
    [
        (1, [(0, 1), (1, 2), (2, 3), (3, 4), (4, 5), (5, 8), (8, 9), (9, 12), (12, 13)]),
        (2, [(0, 2), (2, 4), (4, 5), (5, 8), (8, 9), (9, 12), (12, 14)]),
        (6, [(0, 5), (5, 9), (9, 15), (15, 20)]),
        (7, [(0, 5), (5, 9), (9, 16), (16, 20)]),
        (22, [(0, 20)]),  # the slices of both tiles cost a token each
    ],
)
def test_chunk_ends_in_front_of_a_run_or_is_widened_to_its_end(chunk: int, steps: list[tuple[int, int]]) -> None:
    engine = spanned(chunked_prefill_size=chunk)
    req = add(engine, picture(1, 5, 9, num_tiles=2))
    engine.run()
    computed = [span for plan in engine.plans if plan.num_extends for span in spans(plan)]
    assert computed[: len(steps)] == steps
    assert engine.finish_of(req) is FinishReason.LENGTH


def test_plan_has_the_spans_of_its_chunks_counted_from_the_step_s_first_token() -> None:
    engine = spanned()
    add(engine, picture(1, 5, 9, num_tiles=2))
    add(engine, picture(2, 0), text=TEXT[:9])
    plan = engine.step()
    assert spans(plan) == [(0, 20), (0, 9)]
    assert in_spans(plan) == [(5, 3), (9, 3), (20, 3)]


def test_causal_models_have_no_spans() -> None:
    engine = rig()
    add(engine, picture(1, 5))
    assert in_spans(engine.step()) == []


def test_c18_hit_inside_a_picture_computes_the_rest_of_it_in_one_chunk() -> None:
    engine = spanned(chunked_prefill_size=1, page_size=1)
    add(engine, picture(1, 5), text=TEXT[:9], max_new=1)
    engine.run()
    engine.scheduler.pools.cache.evict(3)  # the leaf ends inside the picture
    engine.plans.clear()
    add(engine, picture(1, 5))
    plan = engine.step()
    assert spans(plan) == [(6, 8)]
    assert in_spans(plan) == [(0, 2)]


def test_picture_behind_another_prompt_waits_for_a_step_with_room_and_nobody_starts_before_it() -> None:
    engine = spanned(chunked_prefill_size=6, schedule_conservativeness=0.01)
    first = add(engine, text=TEXT[:4])
    shown, later = add(engine, picture(1, 0), text=TEXT[:5]), add(engine, text=TEXT[:1])
    one, two = engine.step(), engine.step()
    assert spans(one) == [(0, 4)]
    assert two.rows[: two.num_extends].tolist() == [shown.allocation.row, later.allocation.row]
    engine.run()
    assert {engine.finish_of(req) for req in (first, shown, later)} == {FinishReason.LENGTH}


def test_c27_request_overtaken_often_gets_rows_before_others_while_a_picture_is_encoded() -> None:
    """All starts do not wait for it, so that the picture that holds rows starts; but no other takes rows."""
    engine = rig(num_blocks=3, layer_tokens=8.0, chunked_prefill_size=8, tenants=dict.fromkeys("abc", 1))
    holds = add(engine, picture(2, 0), tenant="b", max_new=1)
    engine.step()
    assert (holds.status, len(holds.pictures.encodings[0].blocks)) == (Status.WAITING, 1)
    large = add(engine, picture(1, 0, 4, 8, num_tiles=3), tenant="a", max_new=1)
    large.overtaken = MAX_OVERTAKES
    small = add(engine, picture(3, 0), tenant="c", max_new=1)
    engine.run()
    started = [admission.request_id for plan in engine.plans for admission in plan.admissions]
    assert started == [holds.id, large.id, small.id]


# -- a place is kept while a picture is encoded -----------------------------------------------------------------------


def busy(tenants: str = "ab", **changes: Any) -> Rig:
    """Two rows, and long answers of the first tenant in both; its others wait. Each step is longer than the patience.
    A layer costs a whole step."""
    engine = rig(
        num_blocks=6,
        layer_tokens=8.0,
        chunked_prefill_size=8,
        max_running_requests=2,
        context_length=400,
        num_pages=512,
        tenants=dict.fromkeys(tenants, 1),
        **changes,
    )
    for _ in range(4):
        engine.add(4, max_new=300, tenant="a")
    for _ in range(8):
        engine.step()
    return engine


def long_steps(engine: Rig, req: Request) -> None:
    """Step until the request runs, in steps that are longer than a tenant's patience."""
    for _ in range(60):
        engine.now += 1.0
        engine.step()
        if req.status is not Status.WAITING:
            return
    raise AssertionError(f"{req} has not started")


def test_c32_row_freed_for_a_picture_is_kept_while_it_is_encoded() -> None:
    """Else the other tenant's next request takes it, and another one has to give up its place again."""
    engine = busy()
    shown = add(engine, picture(1, 0, 4, 8, num_tiles=3), tenant="b")
    long_steps(engine, shown)
    assert sum(len(slices(plan)) for plan in engine.plans) == LAYERS, "it was not encoded over several steps"
    assert engine.scheduler.counters["displaced"] == 1


def test_c32_pages_for_a_picture_are_kept_while_it_is_encoded() -> None:
    engine = rig(
        layer_tokens=8.0, chunked_prefill_size=8, num_pages=14, schedule_conservativeness=0.01, tenants={"a": 1, "b": 1}
    )
    engine.add(4, max_new=20, tenant="a")
    engine.step()
    shown = add(engine, picture(1, 0), tenant="b")
    engine.step()
    other = engine.add(32, max_new=1, tenant="a")
    engine.run()
    started = [admission.request_id for plan in engine.plans for admission in plan.admissions]
    assert started[1:] == [shown.id, other.id]


def test_c27_request_that_all_others_wait_for_gets_the_row_of_a_picture_that_is_encoded() -> None:
    engine = rig(layer_tokens=8.0, chunked_prefill_size=8, max_running_requests=1, tenants={"a": 1, "b": 1})
    shown = add(engine, picture(1, 0, 4, 8, num_tiles=3), tenant="a")
    engine.step()
    text = engine.add(4, tenant="b")
    engine.step()
    assert [req.status for req in (shown, text)] == [Status.WAITING] * 2
    text.overtaken = MAX_OVERTAKES
    engine.step()
    assert [req.status for req in (shown, text)] == [Status.WAITING, Status.DECODING]
    engine.run()


def test_picture_that_is_encoded_and_ends_keeps_no_row() -> None:
    engine = rig(layer_tokens=8.0, chunked_prefill_size=8, max_running_requests=1)
    shown = add(engine, picture(1, 0))
    engine.step()
    text = engine.add(4)
    engine.step()
    assert text.status is Status.WAITING
    engine.abort(shown.id)
    engine.step()
    assert text.status is Status.DECODING
    engine.run()
