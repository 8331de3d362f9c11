"""What a kind of cache beside full KV is asked and told.

Full KV is the backbone: its pages are the edges of the prefix tree. Whatever else layers keep for a token, a window or
a sequence is a `Kind`: it owns its slots, and hangs what the prefix cache keeps of it on the tree's nodes. The tree
asks every kind the same questions, and a model without such layers loops over nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import ClassVar, Protocol

from forebay.memory.miss_reason import MissReason
from forebay.memory.radix_node import Node
from forebay.memory.slots import Holder, Ids, Slots


class Tree(Protocol):
    """The prefix tree, as far as a kind knows it."""

    page_size: int

    def lost(self, nodes: Iterable[Node]) -> None:
        """The cache gave up what a kind kept: matches made before are void, and of `nodes` the rank has changed."""


class Kind:
    """A kind of cache. The defaults are those of one that is there wherever full KV is, and costs nothing.

    Units are pages of full KV, counted from the root of the tree, except where a name says otherwise.
    """

    name: ClassVar[str]
    missing: ClassVar[MissReason] = MissReason.NONE  # why a hit ends where this kind cannot be resumed
    whole_leaves: ClassVar[bool] = False  # a leaf that was cut short could not be resumed any more
    slots: Slots
    tree: Tree  # set by the tree that asks
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

    # -- what the prefix tree tells -----------------------------------------------------------------------------------

    def touch(self, node: Node, num_pages: int) -> None:
        """Somebody goes on from the end of `node`, after `num_pages` pages."""

    def attached(self, node: Node, owner: int) -> None:
        """A leaf with pages of request `owner` has been added: what belongs to them is the cache's from now on."""

    def replaced(self, nodes: Sequence[Node], cached: Ids, own: Ids, owner: int) -> None:
        """Request `owner` turns from its `own` pages to those of `nodes`, `cached`, which hold the same tokens."""

    def split(self, upper: Node, lower: Node) -> None:
        """A node has been cut in two; `lower` is the node that was there, and ends where it did."""

    def removed(self, node: Node) -> None:
        """A leaf goes, and what is kept with it."""

    def clear(self) -> None:
        """Forget everything, locked or not."""

    # -- checking -----------------------------------------------------------------------------------------------------

    def cached(self, nodes: Iterable[Node]) -> Holder:
        """The slots that hang on the tree's `nodes`, for an audit."""
        raise NotImplementedError

    def check(self, nodes: Iterable[Node]) -> None:
        """Assert that what is counted is what hangs on the tree's nodes, roots included."""
