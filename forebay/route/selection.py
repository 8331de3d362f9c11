"""The members that compute a request: one server, or a prefill and a decode server. No I/O and no clock."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Final, Generic

from forebay.base.errors import Unavailable
from forebay.route.announcement import Role
from forebay.route.membership import Membership, Record
from forebay.route.prefixes import Match

# `python -m benchmarks.routing reuse`, with much memory: 94.7 % of prompt tokens reused; with 4 instead of 8, 89.7 %.
BALANCE_ABS_THRESHOLD: Final = 8
BALANCE_REL_THRESHOLD: Final = 1.5  # `reuse`: with 1 instead, 3 points less with little memory and two users a prompt
_PROMPTS: Final = (Role.BOTH, Role.PREFILL)
_ANSWERS: Final = (Role.BOTH, Role.DECODE)


class Policy(StrEnum):
    """How the server that computes a prompt is selected. The decode server of a pair is always the least busy one."""

    CACHE_AWARE = "cache_aware"
    LEAST_LOADED = "least_loaded"
    ROUND_ROBIN = "round_robin"


class Reason(StrEnum):
    """Why a server was selected: a cached prefix, its load (or turn), or a failure of another server."""

    PREFIX = "prefix"
    LOAD = "load"
    RETRY = "retry"


@dataclass(frozen=True, slots=True)
class Selected(Generic[Record]):
    """The members that get a request, in this order. The last one answers the client."""

    members: tuple[Record, ...]
    reason: Reason


@dataclass(frozen=True, slots=True)
class Place(Generic[Record]):
    """A member that may get a prompt, what it has of it, and the blocks that it has of all prompts."""

    member: Record
    match: Match
    num_known: int


class Selection:
    """Selects members by a policy. A member with a cached prefix of the prompt is not selected if it has
    `balance_abs_threshold` requests more than the least busy one, or more."""

    def __init__(self, policy: Policy = Policy.CACHE_AWARE, balance_abs_threshold: int = BALANCE_ABS_THRESHOLD) -> None:
        self._policy, self._threshold = policy, balance_abs_threshold
        self._num_selected = 0

    def select(
        self,
        membership: Membership[Record],
        blocks: Sequence[bytes],
        now: float,
        tried: Collection[Record] = (),
    ) -> Selected[Record]:
        """Return the members for a prompt of these blocks, and record that they will have it cached.

        Members that this request has `tried` get it again only as part of a pair, and if there are no others: the
        transfer between the two may be what failed. Raises Unavailable if there is no member.
        """
        decodes = membership.usable([Role.DECODE], now)
        versions = {member.version for member in decodes}
        all_prompts = membership.usable(_PROMPTS, now)
        candidates = [each for each in all_prompts if each.role is Role.BOTH or each.version in versions]
        candidates = _untried(candidates, tried)
        if not candidates:
            raise _unavailable(membership, all_prompts, decodes, now)
        first, reason = self._first(membership, candidates, blocks)
        if self._policy is Policy.CACHE_AWARE:
            membership.prefixes.learn(blocks, first.url)
        members = [first]
        if first.role is Role.PREFILL:
            equal = [member for member in decodes if member.version == first.version]
            members.append(least_busy(_untried(equal, tried)))
        self._num_selected += 1
        for member in members:
            member.last_selected = self._num_selected
        return Selected(tuple(members), Reason.RETRY if tried else reason)

    def _first(
        self, membership: Membership[Record], candidates: Sequence[Record], blocks: Sequence[bytes]
    ) -> tuple[Record, Reason]:
        if self._policy is Policy.ROUND_ROBIN:
            return min(candidates, key=lambda member: member.last_selected), Reason.LOAD
        least = least_busy(candidates)
        if self._policy is Policy.LEAST_LOADED:
            return least, Reason.LOAD
        table = membership.prefixes
        able = [each for each in candidates if each.in_flight - least.in_flight < self._threshold]
        places = [Place(each, table.match(blocks, each.url), table.size(each.url)) for each in able]
        best = max(places, key=lambda place: (place.match.num_blocks, -place.num_known, -place.member.in_flight))
        if not best.match.num_blocks:
            return least, Reason.LOAD
        if best.match.is_branch:
            best = emptier_than(best, places)
        return best.member, Reason.PREFIX if best.match.num_blocks else Reason.LOAD


def emptier_than(best: Place[Record], places: Sequence[Place[Record]]) -> Place[Record]:
    """Return the place for the first turn of a conversation: `best`, which has the longest prefix, or a place with
    enough fewer blocks that computing the prefix again there pays. The conversation will stay there and grow."""
    other = min(places, key=lambda place: place.num_known - place.match.num_blocks)
    num_lost = best.match.num_blocks - other.match.num_blocks
    return other if best.num_known > BALANCE_REL_THRESHOLD * other.num_known + num_lost else best


def select_for_prompt(membership: Membership[Record], now: float, tried: Collection[Record] = ()) -> Selected[Record]:
    """Return the least busy member that computes prompts, for a request without decode. Raises Unavailable."""
    found = [member for member in membership.usable(_PROMPTS, now) if member not in tried]
    if not found:
        raise _no_server(membership, Role.PREFILL, now)
    return Selected((least_busy(found),), Reason.RETRY if tried else Reason.LOAD)


def select_for_answer(membership: Membership[Record], now: float) -> Record:
    """Return the least busy member that answers clients, for a question about the model. Raises Unavailable."""
    found = membership.usable(_ANSWERS, now)
    if not found:
        raise _no_server(membership, Role.DECODE, now)
    return least_busy(found)


def is_ready(membership: Membership[Record], now: float) -> bool:
    """Return whether a request would find members."""
    versions = {member.version for member in membership.usable([Role.DECODE], now)}
    return any(each.role is Role.BOTH or each.version in versions for each in membership.usable(_PROMPTS, now))


def least_busy(members: Sequence[Record]) -> Record:
    """Return the member with the fewest requests under way; of equal ones, the one that has had the fewest."""
    return min(members, key=lambda member: (member.in_flight, member.num_requests))


def _untried(members: Sequence[Record], tried: Collection[Record]) -> list[Record]:
    fresh = [member for member in members if member not in tried]
    return fresh or [member for member in members if member.role is not Role.BOTH]


def _unavailable(
    membership: Membership[Record], prompts: Sequence[Record], decodes: Sequence[Record], now: float
) -> Unavailable:
    prefills = [member for member in prompts if member.role is Role.PREFILL]
    if prefills and decodes:
        versions = [f"{member.url}: {'/'.join(member.version)}" for member in (*prefills, *decodes)]
        return Unavailable(
            f"no prefill and decode server have the same weight version ({'; '.join(versions)})",
            code="weight_versions_differ",
        )
    return _no_server(membership, Role.DECODE if prefills else Role.PREFILL, now)


def _no_server(membership: Membership[Record], role: Role, now: float) -> Unavailable:
    found = membership.with_role(role, Role.BOTH)
    if not found:
        return Unavailable(f"the router has no {role.noun} and no {Role.BOTH.noun}", code=f"no_{role}_server")
    whys = "; ".join(f"{member.url}: {member.obstacle(now) or 'it has failed this request'}" for member in found)
    code = "no_server" if all(member.role is Role.BOTH for member in found) else f"no_{role}_server"
    return Unavailable(f"no server takes the request ({whys})", code=code)
