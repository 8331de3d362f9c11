"""Which members get a request, and why: policies, pairs, and other servers after a failure."""

from __future__ import annotations

import pytest

from forebay.base.errors import Unavailable
from forebay.route.announcement import Role, State
from forebay.route.membership import MemberRecord
from forebay.route.selection import (
    BALANCE_ABS_THRESHOLD,
    Policy,
    Selection,
    is_ready,
    select_for_answer,
    select_for_prompt,
)
from tests.route.records import INSTANCES, Records, announcement, membership, up

A, B, C, D = (f"http://{name}:1" for name in "abcd")


def of(found: Records, url: str) -> MemberRecord:
    return next(member for member in found.all if member.url == url)


def selected(selection: Selection, found: Records, *blocks: bytes, tried: tuple[str, ...] = ()) -> tuple[str, ...]:
    """The URLs, and the reason."""
    chosen = selection.select(found, blocks, 0.0, {of(found, url) for url in tried})
    return (*(member.url for member in chosen.members), str(chosen.reason))


def test_selection_single_server_answers_alone_and_a_pair_in_order() -> None:
    assert selected(Selection(), up(membership(both=A))) == (A, "load")
    assert selected(Selection(), up(membership(prefill=A, decode=B))) == (A, B, "load")


def test_selection_cached_prefix_is_worth_a_wait_up_to_the_threshold() -> None:
    for threshold in (BALANCE_ABS_THRESHOLD, 2):
        found, selection = up(membership(both=f"{A} {B}")), Selection(balance_abs_threshold=threshold)
        assert selected(selection, found, b"x") == (A, "load")
        of(found, A).in_flight = threshold - 1
        assert selected(selection, found, b"x", b"y") == (A, "prefix")
        of(found, A).in_flight = threshold
        assert selected(selection, found, b"x", b"y") == (B, "load")
        of(found, A).in_flight = 0
        assert selected(selection, found, b"x", b"y", b"z")[1] == "prefix"


def test_selection_next_turn_stays_and_first_turns_spread_over_servers() -> None:
    """Conversations with one system prompt (of nine blocks) are never so many at once that load would part them."""
    found, selection = up(membership(both=f"{A} {B}")), Selection()
    system = [b"s%d" % i for i in range(9)]
    conversations = [[*system, b"%d" % i] for i in range(8)]
    places = []
    for blocks in conversations:
        [url, _] = selected(selection, found, *blocks)
        places.append(url)
        of(found, url).num_requests += 1
    assert [places.count(url) for url in (A, B)] == [4, 4]
    of(found, A).in_flight = BALANCE_ABS_THRESHOLD - 1
    for blocks, url in zip(conversations, places, strict=True):
        blocks += [b"%b.%d" % (blocks[-1], i) for i in range(100)]
        assert selected(selection, found, *blocks) == (url, "prefix")
        assert found.prefixes.match(blocks, url).num_blocks == len(blocks)


def test_selection_first_turn_stays_where_moving_costs_more_than_it_evens_out() -> None:
    for num_others, expected in ((8, A), (11, B)):  # blocks that A has besides, of which B has 20
        found, selection = up(membership(both=f"{A} {B}")), Selection()
        system = [b"s%d" % i for i in range(20)]
        found.prefixes.learn([*system, b"1"], A)
        found.prefixes.learn([b"b%d" % i for i in range(20)], B)
        found.prefixes.learn([b"a%d" % i for i in range(num_others + 20)], A)
        assert found.prefixes.size(A) == 41 + num_others
        assert selected(selection, found, *system, b"2")[0] == expected


@pytest.mark.parametrize("policy", [Policy.LEAST_LOADED, Policy.ROUND_ROBIN])
def test_selection_other_policies_know_no_prefixes(policy: Policy) -> None:
    found, selection = up(membership(both=f"{A} {B}")), Selection(policy)
    chosen = []
    for _ in range(4):
        chosen.append(selected(selection, found, b"x"))
        of(found, A).num_requests += 1  # the first one always has had more
    expected = [A, B, A, B] if policy is Policy.ROUND_ROBIN else [A, B, B, B]
    assert chosen == [(url, "load") for url in expected]
    assert len(found.prefixes) == 0


def test_selection_decode_with_the_fewest_requests_under_way_then_the_fewest_ever() -> None:
    found = up(membership(prefill=A, decode=f"{B} {C} {D}"))
    for url, in_flight, total in ((B, 2, 0), (C, 1, 9), (D, 1, 5)):
        of(found, url).in_flight, of(found, url).num_requests = in_flight, total
    assert selected(Selection(), found)[1] == D
    of(found, D).up = False
    assert selected(Selection(), found)[1] == C


def test_selection_retry_takes_another_server_and_no_server_twice() -> None:
    found, selection = up(membership(both=f"{A} {B}")), Selection()
    assert selected(selection, found, tried=(A,)) == (B, "retry")
    with pytest.raises(Unavailable) as none:
        selected(selection, found, tried=(A, B))
    assert none.value.code == "no_server"
    assert "has failed this request" in none.value.message


def test_selection_retry_takes_the_same_pair_if_there_is_no_other() -> None:
    found, selection = up(membership(prefill=A, decode=f"{B} {C}")), Selection()
    assert selected(selection, found, tried=(A, B)) == (A, C, "retry")
    assert selected(selection, found, tried=(A, B, C)) == (A, B, "retry")


def test_selection_pair_has_one_weight_version() -> None:
    found, selection = membership(prefill=f"{A} {B}", decode=C), Selection()
    up(found, versions={A: "1", B: "2", C: "2"})
    assert [selected(selection, found, b"x") for _ in range(2)] == [(B, C, "load"), (B, C, "prefix")]
    up(found, versions={A: "1", B: "1", C: "2"})
    assert not is_ready(found, 0.0)
    with pytest.raises(Unavailable) as none:
        selected(selection, found)
    assert none.value.code == "weight_versions_differ"
    found.announce(announcement(1, url=A, role=Role.PREFILL), 0.0)
    found.announce(announcement(1, url=C, role=Role.DECODE, instance=INSTANCES[2]), 0.0)
    assert selected(Selection(), up(found)) == (A, C, "load")  # B, which is not announced, has another one


def test_selection_pair_takes_the_decode_server_of_its_version() -> None:
    found = up(membership(prefill=A, decode=f"{B} {C}"), versions={A: "1", B: "2", C: "1"})
    assert selected(Selection(), found) == (A, C, "load")


def test_selection_draining_expired_or_failed_member_gets_nothing() -> None:
    found, selection = membership(both=B), Selection()
    found.announce(announcement(1, url=A), -9.0)
    up(found)
    of(found, B).in_flight = 5
    assert selected(selection, found, b"x")[0] == A
    found.announce(announcement(2, State.DRAINING, url=A), 0.0)
    assert selected(selection, found, b"x")[0] == B
    of(found, B).up = False
    with pytest.raises(Unavailable, match="it is draining"):
        selected(selection, found)


@pytest.mark.parametrize(
    ("urls", "down", "code"),
    [
        ({}, (), "no_prefill_server"),
        ({"both": A}, (A,), "no_server"),
        ({"prefill": A, "decode": B}, (A,), "no_prefill_server"),
        ({"prefill": A, "decode": B}, (B,), "no_decode_server"),
    ],
)
def test_selection_missing_role_is_named(urls: dict[str, str], down: tuple[str, ...], code: str) -> None:
    found = up(membership(**urls))
    for url in down:
        found.lost(of(found, url), "it ended")
    assert not is_ready(found, 0.0)
    with pytest.raises(Unavailable) as none:
        selected(Selection(), found)
    assert none.value.code == code


def test_selection_prompt_alone_and_question_take_the_role_that_can() -> None:
    found = up(membership(prefill=A, decode=B))
    assert [member.url for member in select_for_prompt(found, 0.0).members] == [A]
    assert select_for_answer(found, 0.0).url == B
    for member in found.all:
        member.up = False
    for failed in (lambda: select_for_prompt(found, 0.0), lambda: select_for_answer(found, 0.0)):
        with pytest.raises(Unavailable):
            failed()
    both = up(membership(both=f"{A} {B}"))
    again = select_for_prompt(both, 0.0, {of(both, A)})
    assert ([member.url for member in again.members], again.reason) == ([B], "retry")
