"""Who had the beginning of a prompt before."""

from __future__ import annotations

import json
from typing import Any

import pytest

from forebay.config.engine_config import CacheIsolation
from forebay.route.prefixes import BLOCK_BYTES, MOST_BLOCKS, Prefixes, PromptBlocks, blocks_of
from forebay.server.http.security import Tenant


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


def test_the_longest_known_beginning_counts() -> None:
    known = Prefixes()
    short, long = blocks_of({"prompt": "a" * 600}), blocks_of({"prompt": "a" * 2000})
    known.learn(long, "one")
    known.learn(short, "two")
    assert known.longest(long) == "one"
    assert known.longest(short) == "two"
    assert known.longest(blocks_of({"prompt": "b" * 2000})) is None
    known.forget("one")
    assert known.longest(long) == "two"


def test_the_table_keeps_the_beginnings_that_were_asked_for_last() -> None:
    known = Prefixes(most=4)
    blocks = blocks_of({"prompt": "a" * 2000})
    known.learn(blocks, "one")
    assert len(known) == 4
    assert known.longest(blocks[:1]) == "one"
    known.learn(blocks_of({"prompt": "b" * 2000}), "two")
    assert known.longest(blocks) is None


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
