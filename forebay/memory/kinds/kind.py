"""The interface of a kind of cache beside full KV.

Full KV is the backbone: its pages are the edges of the prefix tree. Whatever else layers keep for a token, a window or
a sequence is a `Kind`: it owns its slots, and attaches what the prefix cache keeps of it to the tree's nodes. The
prefix tree calls the methods of `CachedKind`, the scheduler those of `Kind`. Without such layers both are idle.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import ClassVar, NamedTuple, Protocol

from forebay.base.counters import Counter
from forebay.memory.draft import Draft
from forebay.memory.holding import Allocation, Holding, RowTable
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


class Reserve(NamedTuple):
    """Slots of a kind that requests may take without asking for room: `per_row` in each row, and `in_flight` for the
    chunks of all together. Admission gives out a row only if its share is there."""

    per_row: int = 0
    in_flight: int = 0


class Tree(Protocol):
    """The prefix tree, as far as a kind knows it."""

    page_size: int

    def lost(self, nodes: Iterable[Node]) -> None:
        """The cache gave up what a kind kept: matches made before are void, and of `nodes` the rank has changed."""


class CachedKind:
    """The prefix cache's side of a kind: which slots it keeps, locks and evicts. The defaults are those of a kind that
    is present wherever full KV is, and costs nothing.

    Units are pages of full KV, counted from the root of the tree, except where a name says otherwise.
    """

    name: ClassVar[str]
    missing: ClassVar[MissReason] = MissReason.NONE  # why a hit ends where this kind cannot be resumed
    of_pages: ClassVar[bool] = True  # has a slot for each page, or for the last ones; else a sequence has one
    at_ends: ClassVar[bool] = False  # can be resumed only at ends of nodes that keep a slot
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
        """Slots that are free, or cached and not locked."""
        return self.slots.num_free + self.num_cached - self.num_locked

    def make_room(self, num_slots: int) -> None:
        """Evict until `num_slots` are free, or nothing more can be evicted."""
        short = num_slots - self.slots.num_free
        if short > 0:
            self.evict(short)

    def evict(self, num_slots: int) -> int:
        """Free up to `num_slots` cached slots that are not locked, and report lost nodes to the tree. Returns the
        number of freed slots."""
        return 0

    def last_resumable(self, nodes: Sequence[Node], pages: Ids, longest: int) -> int:
        """Return the greatest number of pages, at most `longest`, after which a request can resume. `nodes` lead from
        the root to the end of a cached prefix (the last one may be matched in part), and `pages` are its pages."""
        return longest

    def num_kept(self, node: Node) -> int:
        """Return the number of slots that the prefix cache keeps for this node."""
        return 0

    def lock(self, node: Node, pages: Ids) -> None:
        """Protect from eviction the slots that a request needs to resume at the end of `node`, behind `pages`."""

    def unlock(self, node: Node, pages: Ids) -> None:
        """Release such a lock."""

    def touch(self, node: Node, num_pages: int) -> None:
        """Record that a request resumes at the end of `node`, after `num_pages` pages."""

    def attached(self, node: Node, owner: int) -> None:
        """Take over what belongs to the pages of a new leaf, which were those of request `owner`."""

    def replaced(self, nodes: Sequence[Node], cached: Ids, own: Ids, owner: int) -> Ids:
        """Handle request `owner` exchanging its `own` pages for the pages `cached` of `nodes`, which hold the same
        tokens. Returns the pages whose entry in a map of this kind has changed."""
        return NO_IDS

    def split(self, upper: Node, lower: Node) -> None:
        """Handle a node cut in two: `lower` is the original node and ends where it did."""

    def removed(self, node: Node) -> None:
        """Free what is kept for a leaf that is removed."""

    def clear(self) -> None:
        """Forget everything, locked or not."""

    def cached(self, nodes: Iterable[Node]) -> Holder:
        """Return the slots that the tree's `nodes` keep, for an audit."""
        raise NotImplementedError

    def check(self, nodes: Iterable[Node]) -> None:
        """Assert that the counts match what the tree's nodes keep, roots included."""


class Kind(CachedKind):
    """A kind of cache: besides what is cached, what each request holds from its admission to its release."""

    COUNTERS: ClassVar[tuple[Counter, ...]] = ()

    of_rows: ClassVar[bool] = False  # a request's slot is its row, and is taken and released with that
    is_transferred: ClassVar[bool] = True  # goes with a request to other memories; else it is a copy of what does
    reserve = Reserve()
    slots_per_request = 0  # slots that a request must be given at its admission, together with its row

    def admit(self, held: Allocation, arrival: Arrival, draft: Draft) -> None:
        """Allocate for a request that has its row and pages. It resumes at the end of its pin, for which it is locked,
        or from a copy that comes from elsewhere, for which it needs slots."""

    def trim(self, table: RowTable, rows: Ids) -> None:
        """Free what these rows no longer read, before a step is planned for them."""

    def limit(self, held: Allocation, stop: int) -> int:
        """Return where a chunk up to `stop` tokens has to end."""
        return stop

    def extend(self, held: Allocation, stop: int, draft: Draft) -> None:
        """Allocate for a step that computes the request's tokens up to `stop`."""

    def decode(self, table: RowTable, rows: Ids, committed: int, draft: Draft) -> None:
        """Allocate for a step that decodes these rows, whose bounds count it; steps up to `committed` completed."""

    def grow(self, pages: Ids, owners: Ids, draft: Draft) -> None:
        """Allocate for a new page of each of the decoding requests `owners`."""

    def columns(self, draft: Draft, rows: Ids) -> dict[str, Ids]:
        """Return the plan's columns of this kind, for sequences in `rows`."""
        return {}

    def transfer_slots(self, held: Allocation, pages: Ids, start: int = 0) -> Ids:
        """Return the slots to copy when the request's first `kv_len` tokens, in `pages`, go to another memory; from
        there they come back into as many others. In the order of tokens; of pages those from number `start` on."""
        return NO_IDS

    def adoptable_ends(self, held: Allocation, ends: Sequence[int], committed: int, *, last: bool) -> Sequence[int]:
        """Filter `ends` (in tokens), at which the cache could adopt what steps up to `committed` wrote, to those that
        can be resumed; with `last` the request is leaving."""
        return ends

    def next_adoptable_end(self, held: Allocation, stop: int, end: int | None) -> int | None:
        """Return the first length, `stop` or more, up to which the cache will adopt what the request computes, None for
        no such length. `end` is that of full KV."""
        return end

    def adopted(self, held: Allocation, start: int, end: int) -> Holding | None:
        """Handle that the cache adopted the request's pages from page `start` up to `end` tokens. Returns what it did
        not take."""
        return None

    def is_finishing(self, held: Allocation, num_tokens: int) -> bool:
        """Return True if more of a request that ends now, with `num_tokens`, can be cached once its steps commit."""
        return False

    def release_pages(self, pages: Ids) -> Holding | None:
        """Detach what belongs to these pages, which the request gives up."""
        return None

    def release_all(self, held: Allocation) -> Holding | None:
        """Detach all that a leaving request holds."""
        return None

    def return_slots(self, holding: Holding, owner: int) -> None:
        """Free the slots and locks of a holding that no step reads any more."""

    def start_over(self, draft: Draft) -> None:
        """Prepare `draft`, the next step, after all requests were released and the steps in flight are void."""

    def count(self, totals: Ids) -> None:
        """Take in the totals that the kind's device side counts, as far as a completed step left them."""

    @property
    def counters(self) -> dict[str, float]:
        """The values of `COUNTERS`, by name."""
        return {}

    def holder(self, held: Allocation) -> Holder:
        """Return the slots that a request holds, for an audit."""
        raise NotImplementedError

    def check_locks(self, allocations: Iterable[Allocation], holdings: Iterable[Holding]) -> None:
        """Assert that exactly what `allocations` and deferred `holdings` read is locked."""
