"""The interface of a kind of cache beside full KV.

Full KV is the backbone: its pages are the edges of the prefix tree. Whatever else layers keep for a token, a window or
a sequence is a `Kind`: it owns its slots, and hangs what the prefix cache keeps of it on the tree's nodes. The tree
asks every kind the same questions, and a model without such layers loops over nothing."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import ClassVar, NamedTuple, Protocol

from forebay.base.counters import Counter
from forebay.memory.draft import Draft
from forebay.memory.holding import Holding, Residency, RowTable
from forebay.memory.miss_reason import MissReason
from forebay.memory.radix_node import Node, Shares
from forebay.memory.slots import NO_IDS, Holder, Ids, Slots


class Arrival(NamedTuple):
    """Facts about a prompt that starts: its length, the lengths from which others are likely to go on
    (`resume_points`), and those at which others part from it (`branches`); and whether it goes on from what comes from
    elsewhere, the host or another engine."""

    num_prompt: int
    from_elsewhere: bool = False
    resume_points: Iterable[int] = ()
    branches: Iterable[int] = ()


class Tree(Protocol):
    """The prefix tree, as far as a kind knows it."""

    page_size: int

    def lost(self, nodes: Iterable[Node]) -> None:
        """The cache gave up what a kind kept: matches made before are void, and of `nodes` the rank has changed."""


class Kind:
    """A kind of cache. The defaults are those of one that is there wherever full KV is, and costs nothing.

    Units are pages of full KV, counted from the root of the tree, except where a name says otherwise.
    """

    COUNTERS: ClassVar[tuple[Counter, ...]] = ()

    name: ClassVar[str]
    missing: ClassVar[MissReason] = MissReason.NONE  # why a hit ends where this kind cannot be resumed
    of_pages: ClassVar[bool] = True  # has a slot for each page, or for the last ones; else a sequence has one
    at_ends: ClassVar[bool] = False  # can be resumed only at ends of nodes, where it was given something
    slots: Slots
    tree: Tree  # set by the tree that asks
    shares: Shares  # likewise: cached slots by the tenants that are charged for them
    num_cached = 0  # slots of the prefix cache, of which `num_locked` cannot be evicted
    num_locked = 0

    @property
    def num_evictable(self) -> int:
        return self.num_cached - self.num_locked

    @property
    def num_available(self) -> int:
        """Slots that can be had now: free, or cached and not locked."""
        return self.slots.num_free + self.num_evictable

    def make_room(self, num_slots: int) -> None:
        """See that `num_slots` are free, or all that can be."""
        short = num_slots - self.slots.num_free
        if short > 0:
            self.evict(short)

    # -- what the prefix tree asks ------------------------------------------------------------------------------------

    def last_resumable(self, nodes: Sequence[Node], pages: Ids, longest: int) -> int:
        """The greatest number of pages, at most `longest`, after which a request can go on: `nodes` lead from the root
        to the end of a cached prefix (of the last one perhaps a part), and `pages` are those of that prefix."""
        return longest

    def is_useful(self, leaf: Node) -> bool:
        """Whether somebody can go on from this leaf; those from which nobody can are evicted first."""
        return True

    def evict(self, num_slots: int) -> int:
        """Free `num_slots` of the cached ones that are not locked, or all there are; how many. Tells the tree."""
        return 0

    def num_kept(self, node: Node) -> int:
        """Slots of the prefix cache that belong to this node."""
        return 0

    # -- what the prefix tree tells -----------------------------------------------------------------------------------

    def touch(self, node: Node, num_pages: int) -> None:
        """Somebody goes on from the end of `node`, after `num_pages` pages."""

    def attached(self, node: Node, owner: int) -> None:
        """A leaf with pages of request `owner` has been added: what belongs to them is the cache's from now on."""

    def replaced(self, nodes: Sequence[Node], cached: Ids, own: Ids, owner: int) -> Ids:
        """Request `owner` turns from its `own` pages to those of `nodes`, `cached`, which hold the same tokens. Those
        whose place in a map of this kind's has changed by that."""
        return NO_IDS

    def split(self, upper: Node, lower: Node) -> None:
        """A node has been cut in two; `lower` is the node that was there, and ends where it did."""

    def removed(self, node: Node) -> None:
        """A leaf goes, and what is kept with it."""

    def clear(self) -> None:
        """Forget everything, locked or not."""

    # -- what a request holds, from its coming to its going -----------------------------------------------------------

    @property
    def can_admit(self) -> bool:
        """Whether one more request can be given what it needs at once, with all that is locked staying."""
        return True

    def make_room_to_admit(self) -> None:
        """See that it is free."""

    def lock(self, node: Node, pages: Ids) -> None:
        """Keep from eviction what somebody needs who will go on from the end of `node`, behind these `pages`."""

    def unlock(self, node: Node, pages: Ids) -> None:
        """Take back such a lock."""

    def admit(self, held: Residency, arrival: Arrival, draft: Draft) -> None:
        """The request has its row and pages, and goes on from the end of its pin, for which it is locked, or from what
        comes from elsewhere, for which it needs places."""

    def slots_with(self, held: Residency, pages: Ids, start: int = 0) -> Ids:
        """The slots of what goes elsewhere beside `pages`, those of its first `kv_len` tokens, and comes back into as
        many others; in the order of tokens, of pages those from number `start` on."""
        return NO_IDS

    def slide(self, table: RowTable, rows: Ids) -> None:
        """A step is being planned for these rows: let go of what the steps before it have left behind."""

    def limit(self, held: Residency, stop: int) -> int:
        """Where a chunk up to `stop` has to end."""
        return stop

    def extend(self, held: Residency, stop: int, draft: Draft) -> None:
        """The step computes the request's tokens up to `stop`."""

    def decode(self, table: RowTable, rows: Ids, committed: int, draft: Draft) -> None:
        """The step decodes these rows, whose bounds count it already; steps up to `committed` have completed."""

    def grow(self, pages: Ids, owners: Ids, draft: Draft) -> None:
        """Decoding requests were given a page more each."""

    def columns(self, draft: Draft, rows: Ids) -> dict[str, Ids]:
        """The plan's columns about this kind, for sequences in `rows`."""
        return {}

    def ends(self, held: Residency, ends: Sequence[int], committed: int, *, last: bool) -> Sequence[int]:
        """Filter `ends` (in tokens), at which the cache could adopt what the steps up to `committed` wrote, to those
        that can be resumed; with `last` the request is leaving."""
        return ends

    def next_end(self, held: Residency, stop: int, end: int | None) -> int | None:
        """The first length, `stop` or more, to which the cache will be given what the request computes; `end` is that
        of full KV, None where it has it already."""
        return end

    def adopted(self, held: Residency, start: int, end: int) -> Holding | None:
        """The cache has the request's pages from page `start` up to `end` tokens; what it would not take."""
        return None

    def let_go(self, pages: Ids) -> Holding | None:
        """A request has turned from these pages of its own: what goes with them."""
        return None

    def is_finishing(self, held: Residency, num_tokens: int) -> bool:
        """Whether more of a request that ends now, with `num_tokens`, can be cached when its steps have committed."""
        return False

    def leave(self, held: Residency) -> Holding | None:
        """All that a leaving request holds."""
        return None

    def release(self, holding: Holding, owner: int) -> None:
        """Give back what was let go of: nobody touches it any more."""

    def start_over(self, draft: Draft) -> None:
        """Nobody holds anything, and what was decided and not launched will not be: this is the step that follows."""

    # -- telling and checking -----------------------------------------------------------------------------------------

    @property
    def counters(self) -> dict[str, float]:
        """The values of `COUNTERS`, by name."""
        return {}

    def holder(self, held: Residency) -> Holder:
        """The slots that a request holds, for an audit."""
        raise NotImplementedError

    def check_locks(self, residents: Iterable[Residency], holdings: Iterable[Holding]) -> None:
        """Assert that what is locked is what `residents` and what was let go of need."""

    def cached(self, nodes: Iterable[Node]) -> Holder:
        """The slots that hang on the tree's `nodes`, for an audit."""
        raise NotImplementedError

    def check(self, nodes: Iterable[Node]) -> None:
        """Assert that what is counted is what hangs on the tree's nodes, roots included."""
