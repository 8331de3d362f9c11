"""Pictures: exact ids for their tokens, and the memory of their pixels and encodings (C8, C34)."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from forebay.base.errors import Overloaded, RequestTooLarge
from forebay.memory import pictures as memory
from forebay.memory.encodings import NO_ID, Encoding, Key
from forebay.memory.holding import Steps
from forebay.memory.pictures import OutOfIds, Pictures
from forebay.memory.radix_node import Tenants
from forebay.memory.slots import NO_IDS
from forebay.requests.pictures import Picture
from tests.pictures import EDGE, SIZE, TILE_BYTES, TOKENS, VOCAB, picture, picture_config
from tests.tiers import examples

LAYERS = picture_config().num_layers
WEIGHTS = {"a": 1, "b": 1, "c": 2}


def pool(num_blocks: int = 8, num_pixels: int = 8, num_tokens: int = 100) -> Pictures:
    return Pictures(picture_config(num_blocks, num_pixels), num_tokens, Steps(), Tenants(WEIGHTS))


def enter(pictures: Pictures, *its: Picture, namespace: str = "", tenant: str = "") -> list[Encoding]:
    """Enter a request and give its pictures rows."""
    encodings = pictures.enter(namespace, tenant, its)
    assert pictures.take_rows([*dict.fromkeys(encodings)], tenant, ())
    return encodings


def encode(pictures: Pictures, encoding: Encoding, tile: int = 0) -> None:
    """Plan the tile in a step, and commit that."""
    encoding.tiles[tile].planned = LAYERS
    pictures._steps.launched += 1
    pictures.committed(pictures._steps.launched, encoding.number, tile, LAYERS)
    pictures._steps.committed += 1


def seen(pictures: Pictures, seed: int, *, num_tiles: int = 1) -> Encoding:
    """The encoding of a picture that somebody has used, and nobody uses."""
    (encoding,) = enter(pictures, picture(seed, num_tiles=num_tiles))
    for tile in range(num_tiles):
        encode(pictures, encoding, tile)
    pictures.leave([encoding], "")
    return encoding


def test_c34_pictures_have_runs_of_ids_behind_the_vocabulary() -> None:
    pictures = pool()
    first, second = enter(pictures, picture(1, num_tiles=2), picture(2))
    assert first.ids == range(VOCAB, VOCAB + 2 * TOKENS)
    assert second.ids == range(VOCAB + 2 * TOKENS, VOCAB + 3 * TOKENS)


def test_c34_equal_pictures_have_one_run_and_others_by_digest_grid_sizes_or_namespace_their_own() -> None:
    pictures = pool()
    its = picture(1)
    same = [*enter(pictures, its, its, namespace="a"), *enter(pictures, its, namespace="a")]
    assert len({encoding.first_id for encoding in same}) == 1
    other_grid = picture(1, grid=(2, 3), digest=its.digest)
    turned = picture(1, digest=its.digest, sizes=(SIZE[::-1],))
    others = [*enter(pictures, its, namespace="b"), *enter(pictures, other_grid, turned, picture(2), namespace="a")]
    assert len({encoding.first_id for encoding in (same[0], *others)}) == 5
    assert len({encoding.number for encoding in (same[0], *others)}) == 5


def test_rows_lie_in_blocks_and_never_in_row_0() -> None:
    pictures = pool(num_blocks=3)
    (encoding,) = enter(pictures, picture(1, num_tiles=3))
    assert sorted(encoding.rows.tolist()) == list(range(1, 3 * TOKENS + 1))
    assert encoding.rows[:TOKENS].tolist() == list(range(encoding.rows[0], encoding.rows[0] + TOKENS))


def test_tiles_of_any_size_share_the_blocks_of_their_picture() -> None:
    pictures = pool(num_blocks=4)
    sizes = ((EDGE, EDGE), (2 * EDGE, 2 * EDGE), (EDGE, 2 * EDGE))
    first, second = enter(pictures, picture(1, sizes=sizes), picture(2, sizes=((EDGE, EDGE),)))
    assert (len(first.blocks), len(second.blocks)) == (3, 1)
    assert [its.rows.tolist() for its in (first, second)] == [[7, 8, 9, 4, 5, 6, 1], [10]]
    assert [tile.tokens for tile in first.tiles] == [slice(0, 1), slice(1, 5), slice(5, 7)]
    assert [len(first.pixels[tile.pixels]) for tile in first.tiles] == [12, 48, 24]
    pictures.audit({1: 1, 2: 1})


def test_picture_without_users_loses_its_pixels_and_keeps_its_ids_and_rows() -> None:
    pictures = pool()
    encoding = seen(pictures, 1)
    assert not encoding.pixels
    assert pictures.num_bytes == 0
    rows = encoding.rows.tolist()
    (again,) = enter(pictures, picture(1))
    assert again is encoding
    assert again.rows.tolist() == rows
    assert again.pixels
    assert pictures.counters["picture_hits"] == 1


def test_encoding_that_was_used_longest_ago_is_evicted_and_keeps_its_ids() -> None:
    pictures = pool(num_blocks=2)
    first, second = seen(pictures, 1), seen(pictures, 2)
    pictures.leave(enter(pictures, picture(1)), "")
    ids = second.ids
    enter(pictures, picture(3))
    assert (len(first.blocks), len(second.blocks)) == (1, 0)
    assert pictures.counters == {"pictures": 4, "picture_hits": 1, "encoded_tiles": 2, "evicted_encodings": 1}
    assert not pictures.is_planned(second, 0)
    pictures.leave(enter(pictures, picture(2)), "")
    assert second.ids == ids


def test_c8_rows_in_use_are_not_evicted_for_others() -> None:
    pictures = pool(num_blocks=2)
    used = enter(pictures, picture(1))
    other = seen(pictures, 2)
    two, one = pictures.enter("", "", [picture(3, num_tiles=2)]), pictures.enter("", "", [picture(4)])
    assert not pictures.take_rows(two, "", used)
    assert (len(other.blocks), len(two[0].blocks)) == (1, 0), "what does not fit changes something"
    assert pictures.take_rows(one, "", used)
    assert [len(its.blocks) for its in (*used, *one, other)] == [1, 1, 0]


def test_c8_pixels_of_two_requests_stay_when_one_of_them_leaves() -> None:
    pictures = pool(num_pixels=1)
    first, second = enter(pictures, picture(1)), enter(pictures, picture(1))
    pictures.leave(first, "")
    assert second[0].pixels
    with pytest.raises(Overloaded):
        enter(pictures, picture(2))
    pictures.leave(second, "")
    assert enter(pictures, picture(2))


def test_pictures_that_can_never_fit_are_refused_with_the_numbers() -> None:
    pictures = pool(num_blocks=2)
    with pytest.raises(RequestTooLarge, match="9 rows, and their pixels 108 B; there is room for 6 rows and 288 B"):
        enter(pictures, picture(1, num_tiles=3))
    with pytest.raises(RequestTooLarge, match="room for 24 rows and 36 B"):
        enter(pool(num_pixels=1), picture(1), picture(2))
    assert enter(pictures, *[picture(1)] * 3), "one picture thrice takes memory once"


def test_pixels_of_pictures_in_use_are_bounded_apart_from_encodings() -> None:
    pictures = pool(num_blocks=8, num_pixels=2)
    enter(pictures, picture(1))
    with pytest.raises(Overloaded):
        enter(pictures, picture(2, num_tiles=2))
    assert enter(pictures, picture(1), picture(2))
    pictures.audit({1: 2, 2: 1})


def test_request_that_does_not_fit_changes_nothing() -> None:
    pictures = pool(num_pixels=1)
    encoding = seen(pictures, 1)
    enter(pictures, picture(2))
    with pytest.raises(Overloaded, match=r"take 36 B; of the 36 B for all requests \(--mm-cache-bytes\) less is free"):
        enter(pictures, picture(1))
    assert len(encoding.blocks) == 1
    pictures.audit({2: 1})


def test_c32_full_room_refuses_the_tenant_that_fills_it_and_takes_others() -> None:
    pictures = pool(num_pixels=4)
    for seed in range(4):
        pictures.enter("", "a", [picture(seed)])
    with pytest.raises(Overloaded):
        pictures.enter("", "a", [picture(9)])
    assert pictures.enter("", "a", [picture(0)]), "what is there takes no room"
    for seed in (10, 11):
        pictures.enter("", "b", [picture(seed)])
    with pytest.raises(Overloaded):
        pictures.enter("", "b", [picture(12)])
    assert pictures.enter("", "c", [picture(13), picture(14)]), "half of the weights is half of the room"
    with pytest.raises(Overloaded):
        pictures.enter("", "c", [picture(15)])


def test_c32_pixels_of_a_shared_picture_are_paid_by_a_tenant_that_uses_it() -> None:
    pictures = pool(num_pixels=2)
    its = pictures.enter("", "a", [picture(1), picture(1)])
    pictures.enter("", "b", [picture(1)])
    pictures.leave(its[:1], "a")
    assert its[0].payer == "a"
    pictures.leave(its[1:], "a")
    assert (its[0].payer, pictures.num_bytes) == ("b", TILE_BYTES)
    pictures.audit({1: 1})
    pictures.enter("", "b", [picture(2)])
    with pytest.raises(Overloaded):
        pictures.enter("", "b", [picture(3)])
    assert pictures.enter("", "a", [picture(3)])


def test_c32_encoding_evicted_while_it_is_used_is_not_charged_again() -> None:
    pictures = pool(num_blocks=1)
    used = enter(pictures, picture(1))
    used[0].tiles[0].charged = 3
    encode(pictures, used[0])
    other = enter(pictures, picture(2))
    assert not pictures.is_planned(used[0], 0)
    assert used[0].tiles[0].charged == 3
    assert pictures.take_rows(used, "", ())
    pictures.leave([*used, *other], "")
    assert used[0].tiles[0].charged == 0, "the next user's work is free"


def test_c32_encoding_evicted_without_users_is_charged_to_its_next_user() -> None:
    pictures = pool(num_blocks=1)
    encoding = seen(pictures, 1)
    encoding.tiles[0].charged = LAYERS
    enter(pictures, picture(2))
    assert encoding.tiles[0].charged == 0


def test_forgotten_pictures_are_bounded_by_the_tokens_of_the_prefix_cache() -> None:
    pictures = pool(num_blocks=1, num_tokens=2 * TOKENS)
    ids = [seen(pictures, seed).ids for seed in range(4)]
    known = [pictures.enter("", "", [picture(seed)])[0] for seed in (1, 2)]  # as many tokens as the cache has
    assert [encoding.ids for encoding in known] == ids[1:3]
    pictures.leave(known, "")
    (forgotten,) = enter(pictures, picture(0))
    assert forgotten.ids.start > ids[3].start


def test_unfinished_work_of_a_picture_without_users_is_dropped_and_begins_again() -> None:
    pictures = pool()
    (encoding,) = enter(pictures, picture(1, num_tiles=2))
    encode(pictures, encoding, 0)
    encoding.tiles[1].planned = 2
    pictures._steps.launched += 1
    pictures.leave([encoding], "")
    assert pictures.drops == {encoding.number}
    assert [tile.planned for tile in encoding.tiles] == [LAYERS, 0]
    pictures.committed(pictures._steps.launched, encoding.number, 1, 2)
    assert encoding.tiles[1].committed == 0, "a slice that was dropped counts"


def test_tile_that_a_step_in_flight_finishes_is_kept_without_users() -> None:
    pictures = pool()
    (encoding,) = enter(pictures, picture(1))
    encoding.tiles[0].planned = LAYERS
    pictures._steps.launched += 1
    pictures.leave([encoding], "")
    pictures.committed(1, encoding.number, 0, LAYERS)
    enter(pictures, picture(1))
    assert pictures.counters["picture_hits"] == 1
    assert not pictures.drops


def test_failed_step_sets_unfinished_tiles_back_to_their_pixels() -> None:
    pictures = pool()
    (encoding,) = enter(pictures, picture(1, num_tiles=3))
    encode(pictures, encoding, 0)
    encoding.tiles[1].planned, encoding.tiles[1].committed, encoding.tiles[1].charged = LAYERS, 2, LAYERS
    pictures.start_over([77])
    assert [tile.planned for tile in encoding.tiles] == [LAYERS, 0, 0]
    assert pictures.drops == {77, encoding.number}
    assert encoding.tiles[1].charged == LAYERS, "a tenant is charged twice for one tile"


def test_c30_forgotten_encoding_is_encoded_again() -> None:
    pictures = pool()
    encoding = seen(pictures, 1)
    pictures.forget([encoding])
    assert not pictures.is_planned(encoding, 0)
    assert not pictures.drops


def test_c25_clear_forgets_encodings_and_keeps_ids_and_users() -> None:
    pictures = pool()
    idle, (used,) = seen(pictures, 1), enter(pictures, picture(2))
    encode(pictures, used)
    ids = idle.ids, used.ids
    pictures.clear()
    assert [pictures.is_planned(its, 0) for its in (idle, used)] == [False, False]
    assert (len(idle.blocks), len(used.blocks)) == (0, 0)
    assert (idle.ids, used.ids) == ids
    pictures.audit({used.number: 1})


def test_ids_restart_behind_the_vocabulary_and_skip_those_in_use(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "END_OF_IDS", VOCAB + 4 * TOKENS)
    pictures = pool()
    idle, (used,) = seen(pictures, 1), enter(pictures, picture(2))
    enter(pictures, picture(3), picture(4))
    with pytest.raises(OutOfIds):
        enter(pictures, picture(5))
    pictures.restart_ids(np.array([5, *used.ids]))
    assert idle.first_id == NO_ID
    (first, second) = enter(pictures, picture(5), picture(6))
    assert (first.first_id, second.first_id) == (VOCAB, VOCAB + 2 * TOKENS)
    assert used.ids == range(VOCAB + TOKENS, VOCAB + 2 * TOKENS)


@pytest.mark.parametrize("fits", [True, False])
def test_ids_of_pictures_end_with_those_of_32_bits(fits: bool) -> None:
    pictures = pool()
    pictures._next_id = 2**31 - TOKENS + (not fits)
    if fits:
        (last,) = enter(pictures, picture(1))
        assert last.ids[-1] == np.iinfo(np.int32).max
    else:
        with pytest.raises(OutOfIds):
            enter(pictures, picture(1))


def test_counters_of_pictures_are_declared_with_their_texts() -> None:
    texts = {counter.name: counter.text for counter in memory.COUNTERS}
    assert texts["pictures"] == "Pictures of prompts"
    assert "was there" in texts["picture_hits"]
    assert "encoded" in texts["encoded_tiles"]
    assert "dropped" in texts["evicted_encodings"]
    assert pool().counters == dict.fromkeys(texts, 0.0)


def test_ids_that_stand_for_pictures_are_shown_as_the_placeholder() -> None:
    pictures = pool()
    assert pictures.as_tokens(np.array([1, VOCAB - 1, VOCAB, 1 << 30])).tolist() == [1, VOCAB - 1, 9, 9]
    assert pictures.as_tokens(NO_IDS).tolist() == []


def test_model_is_given_its_input_id_where_ids_stand_for_pictures() -> None:
    pictures = Pictures(picture_config(input_id=4), 100, Steps(), Tenants({}))
    assert pictures.as_inputs(np.array([1, VOCAB - 1, VOCAB, 1 << 30])).tolist() == [1, VOCAB - 1, 4, 4]
    assert pictures.as_inputs(NO_IDS).tolist() == []


def test_pictures_whose_encodings_take_all_the_memory_leave_none_for_pixels() -> None:
    config = picture_config(cache_bytes=0)
    assert Pictures(config, 100, Steps(), Tenants({})).max_bytes == 0
    assert Pictures(picture_config(num_pixels=1), 100, Steps(), Tenants({})).max_bytes == TILE_BYTES


def test_counters_count_whole_tiles_and_pictures_whose_tiles_are_all_there() -> None:
    pictures = pool()
    (encoding,) = enter(pictures, picture(1, num_tiles=2))
    pictures._steps.launched += 1
    encoding.tiles[0].planned = LAYERS - 1
    pictures.committed(1, encoding.number, 0, LAYERS - 1)
    assert pictures.counters["encoded_tiles"] == 0
    encode(pictures, encoding, 0)
    enter(pictures, picture(1, num_tiles=2))
    assert (pictures.counters["encoded_tiles"], pictures.counters["picture_hits"]) == (1, 0)
    encode(pictures, encoding, 1)
    enter(pictures, picture(1, num_tiles=2))
    assert (pictures.counters["encoded_tiles"], pictures.counters["picture_hits"]) == (2, 1)


def test_cached_blocks_are_those_of_pictures_without_users() -> None:
    pictures = pool()
    seen(pictures, 1, num_tiles=2)
    enter(pictures, picture(2))
    assert pictures.num_cached == 2


def test_c32_work_on_a_tile_is_charged_anew_once_no_request_uses_it_or_it_is_forgotten() -> None:
    pictures = pool()
    (encoding,) = enter(pictures, picture(1, num_tiles=2))
    encode(pictures, encoding, 0)
    for tile in encoding.tiles:
        tile.charged = 2
    encoding.tiles[1].planned = 2
    pictures.leave([encoding], "")
    assert [tile.charged for tile in encoding.tiles] == [2, 0]
    assert len(encoding.blocks), "the tile that is whole is kept"
    enter(pictures, picture(1, num_tiles=2))
    pictures.forget([encoding])
    assert [tile.charged for tile in encoding.tiles] == [0, 0]


def damage(pictures: Pictures, what: str) -> None:
    """Make one of the books wrong."""
    encoding = next(encoding for encoding in pictures._known.values() if encoding.users)
    match what:
        case "pixels without a user":
            next(other for other in pictures._known.values() if not other.users).pixels = b"x"
        case "user without pixels":
            encoding.pixels = b""
        case "bytes of pixels":
            pictures._room.enter("a", 1)
        case "bytes of another tenant":
            pictures._room.enter("b", 1)
        case "remembered tokens":
            pictures._num_remembered += 1
        case "remembered though it is used":
            pictures._remembered[encoding.key] = encoding
            pictures._num_remembered += encoding.num_tokens
        case "planned without rows":
            next(other for other in pictures._known.values() if not len(other.blocks)).tiles[0].planned = 1
        case "ids of two pictures":
            encoding.first_id += 1


@pytest.mark.parametrize(
    "what",
    [
        "pixels without a user",
        "user without pixels",
        "bytes of pixels",
        "bytes of another tenant",
        "remembered tokens",
        "remembered though it is used",
        "planned without rows",
        "ids of two pictures",
    ],
)
def test_c25_audit_finds_a_book_of_pictures_that_is_wrong(what: str) -> None:
    pictures = pool(num_blocks=1)
    (used,) = pictures.enter("", "a", [picture(1)])
    (evicted,) = pictures.enter("", "a", [picture(2)])
    pictures.leave([evicted], "a")
    pictures.audit({used.number: 1})
    damage(pictures, what)
    with pytest.raises(AssertionError):
        pictures.audit({used.number: 1})


class PictureMachine(RuleBasedStateMachine):
    """Requests come and go, take rows, tiles are encoded, steps fail; against a model that knows who uses what."""

    @initialize(num_blocks=st.integers(1, 6), num_pixels=st.integers(1, 6), num_tokens=st.sampled_from([0, 9, 1000]))
    def build(self, num_blocks: int, num_pixels: int, num_tokens: int) -> None:
        self.pictures = pool(num_blocks, num_pixels, num_tokens)
        self.requests: list[tuple[str, list[Encoding]]] = []
        self.ids: dict[Key, range] = {}
        self.room = num_blocks, num_pixels

    @rule(
        seeds=st.lists(st.tuples(st.integers(0, 5), st.integers(1, 3)), min_size=1, max_size=3),
        namespace=st.sampled_from(["", "a"]),
        tenant=st.sampled_from("abc"),
    )
    def enter(self, seeds: list[tuple[int, int]], namespace: str, tenant: str) -> None:
        pictures = [picture(seed, num_tiles=count) for seed, count in seeds]
        distinct = {(namespace, its.digest, its.grid, its.sizes): len(its.sizes) for its in pictures}
        in_use = {its.key: len(its.tiles) for _, req in self.requests for its in req}
        total, new = sum(distinct.values()), sum(distinct[key] for key in distinct.keys() - in_use.keys())
        paid = Counter[str]()
        for its in {its for _, req in self.requests for its in req}:
            paid[its.payer] += len(its.tiles)
        share = self.room[1] * TILE_BYTES * WEIGHTS[tenant] // sum(WEIGHTS[name] for name in {tenant, *paid})
        full = new and paid.total() + new > self.room[1] and (paid[tenant] + new) * TILE_BYTES > share
        if expected := RequestTooLarge if total > min(self.room) else Overloaded if full else None:
            with pytest.raises(expected):
                self.pictures.enter(namespace, tenant, pictures)
            return
        encodings = self.pictures.enter(namespace, tenant, pictures)
        assert [its.key for its in encodings] == [(namespace, its.digest, its.grid, its.sizes) for its in pictures]
        self.requests.append((tenant, encodings))

    @precondition(lambda self: self.requests)
    @rule(which=st.integers(0, 20))
    def leave(self, which: int) -> None:
        tenant, encodings = self.requests.pop(which % len(self.requests))
        self.pictures.leave(encodings, tenant)

    @precondition(lambda self: self.requests)
    @rule(which=st.integers(0, 20), others=st.sets(st.integers(0, 20), max_size=2))
    def take_rows(self, which: int, others: set[int]) -> None:
        tenant, encodings = self.requests[which % len(self.requests)]
        in_use = {its for other in others for its in self.requests[other % len(self.requests)][1]}
        before = {its for its in in_use if len(its.blocks)}
        wanted = {*encodings, *before}
        taken = self.pictures.take_rows([*dict.fromkeys(encodings)], tenant, in_use)
        assert taken == (sum(len(its.tiles) for its in wanted) <= self.room[0])
        assert all(len(its.blocks) for its in (wanted if taken else before))

    @precondition(lambda self: self.requests)
    @rule(which=st.integers(0, 20), tile=st.integers(0, 2), layers=st.integers(1, LAYERS), commits=st.booleans())
    def encode(self, which: int, tile: int, layers: int, commits: bool) -> None:
        encoding = self.requests[which % len(self.requests)][1][0]
        if not len(encoding.blocks):
            return
        tile %= len(encoding.tiles)
        encoding.tiles[tile].planned = max(layers, encoding.tiles[tile].planned)
        self.pictures._steps.launched += 1
        if commits:
            self.pictures.committed(self.pictures._steps.launched, encoding.number, tile, encoding.tiles[tile].planned)

    @rule()
    def fail(self) -> None:
        self.pictures.start_over([])
        assert all(
            tile.planned in (0, LAYERS) and tile.committed == tile.planned
            for encoding in self.pictures._known.values()
            for tile in encoding.tiles
        )

    @rule()
    def clear(self) -> None:
        self.pictures.clear()

    @precondition(lambda self: self.requests)
    @rule()
    def restart_ids(self) -> None:
        in_use = [np.array(its.ids) for _, req in self.requests for its in req]
        self.pictures.restart_ids(np.concatenate(in_use))
        self.ids.clear()

    @invariant()
    def everything_has_one_holder(self) -> None:
        if not hasattr(self, "pictures"):
            return
        self.pictures.audit(Counter(its.number for _, req in self.requests for its in req))
        ids = {}
        for key, encoding in self.pictures._known.items():
            if encoding.users:
                assert len(encoding.pixels) == TILE_BYTES * len(encoding.tiles)
                ids[key] = encoding.ids
            else:
                assert all(tile.planned in (0, LAYERS) for tile in encoding.tiles)
        assert all(self.ids.get(key, own) == own for key, own in ids.items()), "a picture in use has other ids"
        self.ids = ids


TestPictures = PictureMachine.TestCase
TestPictures.settings = settings(max_examples=examples(60), stateful_step_count=30, deadline=None)
