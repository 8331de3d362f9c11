"""A survey of the whole prefix tree, one node at a time, so that a survey delays no step."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from hashlib import blake2b
from typing import Final

from forebay.memory.radix_index import RadixIndex
from forebay.memory.radix_node import NAME_BYTES, TOKEN_BYTES, Branch, Node, Root

TOLD_TOKENS: Final = 48  # of an edge, its first ones


def survey(index: RadixIndex, secret: bytes, idle_s: Callable[[int], float]) -> Iterator[Branch | None]:
    """Every node behind its parent, and None for each that has gone since its parent was passed: the tree may change
    between two of them, and nodes that come meanwhile may be left out. `idle_s` is how long ago a use was, by the
    tree's clock. Names are digests of whole first pages, keyed with `secret`: they confirm no guess (C29)."""
    for root in list(index.roots.values()):
        name = _name(secret, b"", root.namespace.encode())
        yield _branch(index, root, name, b"", idle_s)
        stack: list[tuple[Node, bytes, Iterator[bytes]]] = [(root, name, iter(list(root.children)))]
        while stack:
            node, above, firsts = stack[-1]
            first = next(firsts, None)
            if first is None:
                stack.pop()
                continue
            child = node.children.get(first)
            if child is None:
                yield None
                continue
            name = _name(secret, above, first)
            yield _branch(index, child, name, above, idle_s)
            stack.append((child, name, iter(list(child.children))))


def _name(secret: bytes, above: bytes, own: bytes) -> bytes:
    return blake2b(above.ljust(NAME_BYTES, b"\0") + own, digest_size=NAME_BYTES, key=secret).digest()


def _branch(index: RadixIndex, node: Node, name: bytes, parent: bytes, idle_s: Callable[[int], float]) -> Branch:
    return Branch(
        name=name,
        parent=parent,
        namespace=node.namespace if isinstance(node, Root) else "",
        author=node.author,
        num_pages=len(node.pages),
        locks=node.locks,
        hits=node.hits,
        idle_s=idle_s(node.last_access),
        kept=index.kinds.num_kept(node),
        tokens=node.key[: TOLD_TOKENS * TOKEN_BYTES],
    )
