"""Who had the beginning of a prompt before."""

from __future__ import annotations

import json
from hashlib import blake2b
from typing import Any

import pytest

from forebay.config.engine_config import CacheIsolation
from forebay.http.security import Tenant
from forebay.route.prefixes import BLOCK_BYTES, MOST_BLOCKS, Match, Prefixes, PromptBlocks, blocks_of


def chat(*texts: str) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text} for text in texts]}


def test_the_next_turn_of_a_chat_begins_as_the_one_before() -> None:
    first = blocks_of(chat("a" * 600))
    assert len(first) == 600 // BLOCK_BYTES
    assert blocks_of(chat("a" * 600, "b" * 300))[: len(first)] == first


def test_the_next_turn_begins_as_the_one_before_in_every_dialect() -> None:
    """Also where a client changes a line of its system text with every request."""
    bodies = [
        [
            {"system": f"x-anthropic-billing-header: cch={nonce};\n{'s' * 300}", **chat("a" * 600, *more)}
            for nonce, more in (("1", ()), ("2", ("b" * 300,)))
        ],
        [{"instructions": "s" * 300, "input": chat("a" * 600, *more)["messages"]} for more in ((), ("b" * 300,))],
    ]
    for first, second in bodies:
        blocks = blocks_of(first)
        assert len(blocks) >= 3
        assert blocks_of(second)[: len(blocks)] == blocks


def test_what_parts_early_has_nothing_in_common_behind() -> None:
    one, other = blocks_of(chat("a" + "x" * 2000)), blocks_of(chat("b" + "x" * 2000))
    assert not {*one} & {*other}
    assert blocks_of({"prompt": "a"}) == []


def test_long_prompts_cost_no_more_than_their_beginning() -> None:
    assert len(blocks_of({"prompt": "a" * (BLOCK_BYTES * MOST_BLOCKS * 3)})) == MOST_BLOCKS


def test_blocks_of_a_prompt_are_chained_hashes_that_all_routers_compute() -> None:
    """An active router of another version sends its keys to the standby."""
    text = json.dumps("a" * 600).encode()
    first = blake2b(b"" + text[:256], digest_size=16).digest()
    assert blocks_of({"prompt": "a" * 600}) == [first, blake2b(first + text[256:512], digest_size=16).digest()]
    assert blocks_of({"prompt": "a" * 600}, b"x")[0] == blake2b(b"x" + text[:256], digest_size=16).digest()
    assert len(blocks_of({"prompt": "a" * (256 * 600)})) == 512


def test_prefixes_table_of_a_router_has_65536_blocks() -> None:
    known = Prefixes()
    for start in range(0, 65_600, 512):
        known.learn([(start + i).to_bytes(16, "big") for i in range(512)], "one")
    assert len(known) == known.size("one") == 65_536


def test_prefixes_match_is_what_a_member_has_of_a_prompt() -> None:
    known = Prefixes()
    short, long = blocks_of({"prompt": "a" * 600}), blocks_of({"prompt": "a" * 2000})
    known.learn(long, "one")
    known.learn(short, "two")
    for url, num in (("one", len(long)), ("two", len(short)), ("three", 0)):
        assert (known.match(long, url).num_blocks, known.size(url)) == (num, num)
    assert known.match(blocks_of({"prompt": "b" * 2000}), "one") == Match(0, is_branch=False)
    known.forget("one")
    assert (known.match(long, "one").num_blocks, known.size("one"), len(known)) == (0, 0, len(short))
    assert known.match(long, "two").num_blocks == len(short)


def test_prefixes_match_is_a_branch_where_another_prompt_goes_on() -> None:
    known = Prefixes()
    system, turn = [b"s1", b"s2"], [b"t1"]
    known.learn(system, "one")
    assert known.match([*system, *turn], "one") == Match(2, is_branch=False)
    known.learn([*system, *turn], "one")
    assert known.match([*system, b"u1"], "one") == Match(2, is_branch=True)
    assert known.match([*system, *turn, b"t2"], "one") == Match(3, is_branch=False)
    known.learn(system, "one")  # a shorter prompt does not make it the end
    assert known.match(system, "one").is_branch


def test_the_table_keeps_the_beginnings_that_were_asked_for_last() -> None:
    known = Prefixes(most=4)
    blocks = blocks_of({"prompt": "a" * 2000})
    known.learn(blocks, "one")
    assert len(known) == known.size("one") == 4
    assert known.match(blocks, "one") == Match(4, is_branch=True)
    known.learn(blocks_of({"prompt": "b" * 2000}), "two")
    assert known.match(blocks, "one").num_blocks == known.size("one") == 0
    assert known.size("two") == 4


SAME: dict[str, Any] = {"prompt": "a" * 600}
ONE, OTHER = Tenant("one"), Tenant("other")


@pytest.mark.parametrize(
    ("isolation", "other", "shares"),
    [
        (CacheIsolation.KEY, (ONE, {}), True),
        (CacheIsolation.KEY, (OTHER, {}), False),
        (CacheIsolation.KEY, (ONE, {"user": "b"}), True),
        (CacheIsolation.KEY, (ONE, {"cache_salt": "s"}), False),
        (CacheIsolation.NONE, (OTHER, {}), True),
        (CacheIsolation.NONE, (OTHER, {"cache_salt": "s"}), False),
        (CacheIsolation.USER, (ONE, {"user": "b"}), False),
        (CacheIsolation.NONE, (ONE, {"model": "an-adapter"}), False),
        (CacheIsolation.NONE, (ONE, {"model": 5, "cache_salt": ["x"]}), True),
    ],
)
def test_prompt_blocks_are_shared_exactly_where_a_server_shares_its_cache(
    isolation: CacheIsolation, other: tuple[Tenant, dict[str, Any]], shares: bool
) -> None:
    """C29: another tenant's cache is of no use. Routers with one cluster key agree (`PromptBlocks` of a standby)."""
    blocks = PromptBlocks(isolation, b"key").of_body(ONE, json.dumps(SAME).encode())
    tenant, fields = other
    others = PromptBlocks(isolation, b"key").of_body(tenant, json.dumps({**SAME, **fields}).encode())
    assert len(blocks) == len(others) == 2
    assert (blocks == others) is shares
    assert PromptBlocks(isolation, b"another").of_body(ONE, json.dumps(SAME).encode()) != blocks
