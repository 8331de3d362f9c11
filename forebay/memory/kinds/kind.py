"""The interface of a kind of cache beside full KV.

Full KV is the backbone: its pages are the edges of the prefix tree. What else layers keep for a token, a window or a
sequence is a `Kind`. It owns its slots, and implements those of the protocols below that it needs: cached in the tree,
held by a request, planned as columns. Its share of memory is a `KindDemand` (`memory/budget.py`). `Kinds` finds out
which protocols the kinds of an engine implement, and refuses one that implements a protocol in part. A kind may name
the protocols that it implements as its bases, so that mypy checks them.

Units of the tree are pages of full KV, counted from the root, except where a name says otherwise.
"""

# mypy: disable-error-code="type-abstract"
# `Kinds._all` is given protocols, none of which it makes an object of.

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, ClassVar, NamedTuple, Protocol, TypeVar, runtime_checkable

from forebay.base.counters import Counter
from forebay.memory.draft import Draft
from forebay.memory.holding import Allocation, Holding, RowTable
from forebay.memory.miss_reason import MissReason
from forebay.memory.radix_node import Node, Pin, Shares
from forebay.memory.slots import NO_IDS, Holder, Ids, Slots


class Arrival(NamedTuple):
    """Facts about a prompt that starts.

    `num_prompt` is its length, `resume_points` are lengths from which other requests are likely to resume, and
    `branches` those at which other prompts part from it. With `from_elsewhere` its cache is copied from the host or
    from another engine.
    """

    num_prompt: int
    from_elsewhere: bool = False
    resume_points: Iterable[int] = ()
    branches: Iterable[int] = ()


class Reserve(NamedTuple):
    """Slots of a kind that requests may take without asking for room: `per_row` in each row, and `in_flight` for the
    chunks of all requests together. Admission gives out a row only if its share is available."""

    per_row: int = 0
    in_flight: int = 0


class Retaining(Protocol):
    """The retained prefixes of a tree, as far as a kind uses them."""

    def give_up(self, frees: Callable[[Node, Ids], bool]) -> bool:
        """End the retention of one prefix for which evicting its slots `frees` memory, given its end and its pages;
        return whether there is any."""


class Watcher(Protocol):
    """Learns which nodes of a tree have changed."""

    def changed(self, node: Node) -> None:
        """Handle that the cache keeps something else for a node than before."""

    def split(self, upper: Node, lower: Node) -> None:
        """Handle a node cut in two: `lower` is the original node, and its end does not move."""

    def removed(self, node: Node) -> None:
        """Handle that a node is gone."""

    def cleared(self) -> None:
        """Handle that all nodes are gone."""


class Tree(Protocol):
    """The prefix tree, as far as a kind uses it."""

    page_size: int
    watcher: Watcher | None

    @property
    def retention(self) -> Retaining: ...

    def lost(self, nodes: Iterable[Node]) -> None:
        """Handle that the cache dropped slots of a kind: earlier matches are void, and the rank of `nodes` changed."""


# -- cached in the tree ------------------------------------------------------------------------------------------------


@runtime_checkable
class AttachedKind(Protocol):
    """The prefix cache keeps slots of this kind for its pages."""

    name: ClassVar[str]
    slots: Slots

    def attached(self, node: Node, owner: int) -> None:
        """Take over what belongs to the pages of a new leaf, which were those of request `owner`."""

    def removed(self, node: Node) -> None:
        """Free the slots of a leaf that is removed."""

    def cached(self, nodes: Iterable[Node]) -> Holder:
        """Return the slots that the tree's `nodes` keep, for an audit."""


@runtime_checkable
class ResumedKind(Protocol):
    """A hit ends where this kind cannot be resumed. Its cached slots are evicted alone, before or with their pages."""

    name: ClassVar[str]
    missing: ClassVar[MissReason]  # why a hit ends where this kind cannot be resumed
    at_ends: ClassVar[bool]  # whether it can be resumed only at ends of nodes that keep a slot
    slots_per_request: int

    def last_resumable(self, nodes: Sequence[Node], pages: Ids, longest: int) -> int:
        """Return the greatest number of pages, at most `longest`, after which a request can resume. `nodes` lead from
        the root to the end of a cached prefix (the last one may be matched in part), and `pages` are its pages."""

    def num_kept(self, node: Node) -> int:
        """Return the number of slots that the prefix cache keeps for this node."""

    def make_room(self, num_slots: int) -> None:
        """Evict until `num_slots` are free, or nothing more can be evicted."""

    def evict(self, num_slots: int) -> int:
        """Free up to `num_slots` cached slots that are not locked, and report lost nodes to the tree. Return the number
        of freed slots."""

    def lock(self, node: Node, pages: Ids) -> None:
        """Protect from eviction the slots that a request needs to resume at the end of `node`, behind `pages`."""

    def unlock(self, node: Node, pages: Ids) -> None:
        """Release such a lock."""

    def touch(self, node: Node, num_pages: int) -> None:
        """Record that a request resumes at the end of `node`, after `num_pages` pages."""

    def split(self, upper: Node, lower: Node) -> None:
        """Handle a node cut in two: `lower` is the original node, and its end does not move."""


@runtime_checkable
class RetainedKind(Protocol):
    """Slots of this kind are retained at the end of a prefix: they are evicted last (`memory/retention.py`)."""

    name: ClassVar[str]
    slots: Slots

    def num_retained(self, pages: Ids) -> int:
        """Return the number of slots that a request reads which resumes behind `pages`."""

    def retain(self, node: Node, pages: Ids) -> None:
        """Evict no slot that a request reads which resumes at the end of `node`, behind `pages`."""

    def end_retention(self, node: Node, pages: Ids) -> None:
        """Evict these slots in the ordinary order again."""

    def is_retained(self, node: Node, pages: Ids) -> bool:
        """Return whether all these slots are there, and are not evicted: for audits."""


@runtime_checkable
class ReplacedKind(Protocol):
    """Requests exchange their pages for cached pages with the same tokens, and what this kind keeps for these."""

    def replaced(self, nodes: Sequence[Node], cached: Ids, own: Ids, owner: int) -> Ids:
        """Handle request `owner` exchanging its `own` pages for the pages `cached` of `nodes`. Return the pages whose
        entry in a map of this kind has changed."""


class Kept(NamedTuple):
    """Slots that a tree keeps for a prefix: slot i belongs to the page in front of page number `ends[i]`, or to the end
    of that page."""

    ends: Ids
    slots: Ids


@runtime_checkable
class TieredKind(Protocol):
    """Slots of this kind are copied with their pages between the tiers of the prefix cache."""

    name: ClassVar[str]
    in_tree: CachedPart  # the part that keeps them in a tree
    retained: RetainedKind  # the part that retains them there
    at_ends: ClassVar[bool]
    spec_kind: ClassVar[str]  # its name in the events of the prefix cache, as vLLM names layers
    span: int | None  # tokens that its layers read, None for all

    def of_tier(self, num_slots: int, num_pages: int) -> TieredKind:
        """Make the same for the tree of a tier with `num_slots` slots beside `num_pages` pages."""

    def kept(self, nodes: Sequence[Node], pages: Ids) -> Kept:
        """Return what the tree keeps for the prefix with these `pages`, which `nodes` lead to."""

    def first_read(self, num_pages: int) -> int:
        """Return the first of the `ends` that are read by a request that resumes after `num_pages` pages."""

    def lend(self, pages: Ids, slots: Ids) -> None:
        """Let each of `pages`, which their owner will give to the tree, have its slot. Not of a kind `at_ends`."""

    def attach_at(self, pin: Pin, slot: int, owner: int) -> bool:
        """Give the tree the owner's slot at the end of a pin. Return False, and leave it to the owner, if the tree has
        one there, or if the kind is not `at_ends`."""

    def free_lent(self, pages: Ids, owner: int) -> None:
        """Free what the owner has lent to pages that the tree did not adopt."""


@runtime_checkable
class CheckedKind(Protocol):
    """A kind with counts about the tree, which an audit checks."""

    def check(self, nodes: Iterable[Node]) -> None:
        """Assert that the counts match what the tree's nodes keep, roots included."""


# -- held by a request -------------------------------------------------------------------------------------------------


@runtime_checkable
class HeldKind(Protocol):
    """A request holds slots of this kind from its admission to its release."""

    name: ClassVar[str]
    slots: Slots

    def admit(self, allocation: Allocation, arrival: Arrival, draft: Draft) -> None:
        """Allocate for a request that has its row and pages. It resumes at the end of its pin, for which it is locked,
        or from a copy that comes from elsewhere, for which it needs slots."""

    def release_all(self, allocation: Allocation) -> Holding | None:
        """Detach all that a leaving request holds."""

    def return_slots(self, holding: Holding, owner: int) -> None:
        """Free the slots and locks of a holding that no step reads any more."""


@runtime_checkable
class ExtendedKind(Protocol):
    """Prompts take slots of this kind by chunk."""

    def extend(self, allocation: Allocation, stop: int, draft: Draft) -> None:
        """Allocate for a step that computes the request's tokens up to `stop`."""


@runtime_checkable
class DecodedKind(Protocol):
    """Decodes take or free slots of this kind."""

    def decode(self, table: RowTable, rows: Ids, committed: int, draft: Draft) -> None:
        """Allocate for a step that decodes these rows, whose bounds count it; steps up to `committed` completed."""


@runtime_checkable
class GrownKind(Protocol):
    """Each page of a request has slots of this kind."""

    def grow(self, pages: Ids, owners: Ids, draft: Draft) -> None:
        """Allocate for a new page of each of the decoding requests `owners`."""


@runtime_checkable
class PagedKind(Protocol):
    """Slots of this kind are released with the pages of a running request."""

    def release_pages(self, pages: Ids) -> Holding | None:
        """Detach what belongs to these pages, which the request gives up."""


@runtime_checkable
class TrimmedKind(Protocol):
    """Running requests free slots of this kind that they no longer read."""

    def trim(self, table: RowTable, rows: Ids) -> None:
        """Free what these rows no longer read, before a step is planned for them."""


@runtime_checkable
class AdoptableKind(Protocol):
    """The cache can adopt this kind only at some lengths, where a step writes a snapshot."""

    def limit(self, allocation: Allocation, stop: int) -> int:
        """Return the length at which a chunk up to `stop` tokens has to end."""

    def adoptable_ends(
        self, allocation: Allocation, ends: Sequence[int], committed: int, *, last: bool
    ) -> Sequence[int]:
        """Return those of the lengths up to `ends` at which the cache can adopt what steps up to `committed` wrote;
        with `last` the request is leaving."""

    def next_adoptable_end(self, allocation: Allocation, stop: int, end: int | None) -> int | None:
        """Return the first length, `stop` or more, up to which the cache will adopt what the request computes, None for
        no such length. `end` is that of full KV."""

    def is_finishing(self, allocation: Allocation, num_tokens: int) -> bool:
        """Return True if more of a request that ends now, with `num_tokens`, can be cached once its steps commit."""


@runtime_checkable
class AdoptedKind(Protocol):
    """A kind that acts when the cache adopts a request's pages."""

    def adopted(self, allocation: Allocation, start: int, end: int) -> Holding | None:
        """Handle that the cache adopted the request's pages from page `start` up to `end` tokens. Return the slots that
        it did not take."""


@runtime_checkable
class TransferredKind(Protocol):
    """Slots of this kind are copied with a request to the host and to other engines."""

    name: ClassVar[str]
    of_pages: ClassVar[bool]

    def transfer_slots(self, allocation: Allocation, pages: Ids, start: int = 0) -> Ids:
        """Return the slots to copy when the request's first `kv_len` tokens, in `pages`, go to another memory; from
        there they are copied into as many others. In the order of tokens; of pages those from number `start` on."""


@runtime_checkable
class LockedKind(Protocol):
    """Requests lock cached slots of this kind while they read them."""

    def check_locks(self, allocations: Iterable[Allocation], holdings: Iterable[Holding]) -> None:
        """Assert that exactly what `allocations` and deferred `holdings` read is locked."""


@runtime_checkable
class RestartedKind(Protocol):
    """Void steps leave something of this kind to prepare again."""

    def start_over(self, draft: Draft) -> None:
        """Prepare `draft`, the next step, after all requests were released and the steps in flight are void."""


# -- planned and counted -----------------------------------------------------------------------------------------------


@runtime_checkable
class PlannedKind(Protocol):
    """A step's plan has columns of this kind."""

    name: ClassVar[str]

    def columns(self, draft: Draft, rows: Ids) -> dict[str, Ids]:
        """Return the plan's columns of this kind, for sequences in `rows`."""


@runtime_checkable
class CountingKind(Protocol):
    """A kind with counters, which `Kind.COUNTERS` declares."""

    @property
    def counters(self) -> dict[str, float]:
        """The values of `COUNTERS`, by name."""


@runtime_checkable
class DeviceCountingKind(Protocol):
    """The device side of this kind counts something."""

    name: ClassVar[str]

    def count(self, totals: Ids) -> bool:
        """Record the totals that the device side has counted, as far as a completed step left them. Return whether this
        step loaded tokens into hot buffers."""


PROTOCOLS: tuple[type[Any], ...] = (
    *(
        AttachedKind,
        ResumedKind,
        RetainedKind,
        ReplacedKind,
        TieredKind,
        CheckedKind,
        HeldKind,
        ExtendedKind,
        DecodedKind,
        GrownKind,
        PagedKind,
    ),
    *(TrimmedKind, AdoptableKind, AdoptedKind, TransferredKind, LockedKind, RestartedKind, PlannedKind, CountingKind),
    DeviceCountingKind,
)


class Kind:
    """A kind of cache of one engine: its slots, and its declaration. `parts` implement the protocols."""

    name: ClassVar[str]
    COUNTERS: ClassVar[tuple[Counter, ...]] = ()
    missing: ClassVar[MissReason] = MissReason.NONE  # as of its `ResumedKind`
    of_pages: ClassVar[bool] = True  # has a slot for each page, or for the last ones; else a sequence has one
    of_rows: ClassVar[bool] = False  # a request's slot is its row, and is taken and released with that
    slots: Slots
    reserve = Reserve()
    slots_per_request = 0  # slots that a request must be given at its admission, together with its row
    num_cached = 0  # slots of the prefix cache, of which `num_locked` cannot be evicted
    num_locked = 0

    @property
    def num_available(self) -> int:
        """Slots that are free, or cached and not locked."""
        return self.slots.num_free + self.num_cached - self.num_locked

    @property
    def parts(self) -> tuple[object, ...]:
        """The objects that implement the protocols of this kind."""
        return (self,)

    def clear(self) -> None:
        """Free all slots, locked or not."""
        self.slots.clear()

    def holder(self, allocation: Allocation) -> Holder:
        """Return the slots that a request holds, for an audit."""
        return Holder(allocation.id, NO_IDS)


class CachedPart:
    """The part of a kind that the prefix cache keeps, if that is an object of its own."""

    at_ends: ClassVar[bool] = False
    entries: ClassVar[tuple[type, ...]] = ()  # classes of what it has for a node, if that is an object
    slots: Slots
    tree: Tree  # set by the tree
    shares: Shares  # set by the tree: cached slots by the tenants that are charged for them
    slots_per_request = 0  # as of its kind
    num_cached = 0
    num_locked = 0

    @property
    def num_evictable(self) -> int:
        return self.num_cached - self.num_locked

    def make_room(self, num_slots: int) -> None:
        """Evict until `num_slots` are free, or nothing more can be evicted."""
        short = num_slots - self.slots.num_free
        if short > 0:
            self.evict(short)

    def evict(self, num_slots: int) -> int:
        """Free up to `num_slots` cached slots; see `ResumedKind`."""
        raise NotImplementedError

    def clear(self) -> None:
        """Forget all nodes, and free all slots of the kind."""
        raise NotImplementedError


class TreeKind(Kind):
    """A kind whose slots in the prefix cache are kept by `in_tree`; `_in_tiers` copies and retains them."""

    in_tree: CachedPart
    _in_tiers: TieredKind

    @property
    def parts(self) -> tuple[object, ...]:
        return self, self.in_tree, self._in_tiers, self._in_tiers.retained

    @property
    def num_cached(self) -> int:  # type: ignore[override]
        return self.in_tree.num_cached

    @property
    def num_locked(self) -> int:  # type: ignore[override]
        return self.in_tree.num_locked


P = TypeVar("P")


class Kinds:
    """The kinds of an engine, and the parts that implement each protocol, in the order of the kinds."""

    def __init__(self, kinds: Iterable[Kind] = ()) -> None:
        self.all = tuple(kinds)
        self.parts = [part for kind in self.all for part in kind.parts]
        for part in self.parts:
            _check_protocols(part)
        self.attached = self._all(AttachedKind)
        self.resumed = self._all(ResumedKind)
        self.retained = self._all(RetainedKind)
        self.replaced = self._all(ReplacedKind)
        self.tiered = self._all(TieredKind)
        self.checked = self._all(CheckedKind)
        self.held = self._all(HeldKind)
        self.extended = self._all(ExtendedKind)
        self.decoded = self._all(DecodedKind)
        self.grown = self._all(GrownKind)
        self.paged = self._all(PagedKind)
        self.trimmed = self._all(TrimmedKind)
        self.adoptable = self._all(AdoptableKind)
        self.adopted = self._all(AdoptedKind)
        self.transferred = self._all(TransferredKind)
        self.restarted = self._all(RestartedKind)
        self.planned = self._all(PlannedKind)
        self.counting = self._all(CountingKind)
        self.device_counting = self._all(DeviceCountingKind)

    def _all(self, protocol: type[P]) -> tuple[P, ...]:
        return tuple(part for part in self.parts if isinstance(part, protocol))

    @property
    def entries(self) -> list[type]:
        """Return the classes of what kinds have for nodes of the prefix cache."""
        return [entry for part in self._all(CachedPart) for entry in part.entries]

    def num_kept(self, node: Node) -> list[int]:
        """Return for each kind the number of slots that the prefix cache keeps for this node."""
        parts = ([part for part in kind.parts if isinstance(part, ResumedKind)] for kind in self.all)
        return [sum(part.num_kept(node) for part in own) for own in parts]

    def __iter__(self) -> Iterator[Kind]:
        return iter(self.all)

    def __len__(self) -> int:
        return len(self.all)


def _check_protocols(part: object) -> None:
    """Raise TypeError if `part` implements a protocol of kinds in part."""
    for protocol in PROTOCOLS:
        methods = {name for name, member in vars(protocol).items() if callable(member) and not name.startswith("_")}
        missing = {name for name in methods if not hasattr(part, name)}
        if missing and missing != methods:
            raise TypeError(f"{type(part).__name__} lacks {sorted(missing)} of {protocol.__name__}")
