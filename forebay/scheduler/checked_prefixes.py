"""The prefixes that checks of the prefix cache compute again, in a namespace of their own."""

from __future__ import annotations

from typing import Final

from forebay.memory.radix_cache import RadixCache

CHECK: Final = "\0check"  # the namespace and the tenant of what is computed again


def clear_checks(cache: RadixCache) -> bool:
    """Drop the prefixes that checks have computed; return whether all are gone: steps in flight may use some."""
    gone = True
    for name, root in [*cache.index.roots.items()]:
        if name.endswith(f"/{CHECK}"):
            for child in [*root.children.values()]:
                num_pages = sum(len(node.pages) for node in cache.index.subtree(child))
                gone &= cache.discard(child.key, 0, name) == num_pages
    return gone
