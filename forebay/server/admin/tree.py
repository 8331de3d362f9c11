"""`POST /debug/tree`: the branches of the prefix cache, the largest first.

A viewer sees the cache that their own requests would use; an admin sees all of it. Text is shown to a viewer if their
own session wrote it, and always to an admin (C29, decision 11).
"""

from __future__ import annotations

from typing import Annotated, Any, Final, TypedDict

import msgspec
import numpy as np
from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response

from forebay.base.errors import NotFound
from forebay.http.route import Access, Forward, Route
from forebay.memory.radix_node import NAME_BYTES, may_see
from forebay.server.admin.prefix_tree import Node, Tree
from forebay.server.context import RequestContext, ServerContext, read_body
from forebay.server.protocol.strict import Sender

MAX_ROWS: Final = 200


class TreeRequest(Sender):
    """The node whose branches are wanted, "" for the top; `offset` and `limit` as they come, the largest first. Of the
    rest the viewer's session is known by what its requests say of themselves."""

    node: Annotated[str, Field(pattern=rf"^([0-9a-f]{{{2 * NAME_BYTES}}})?$")] = ""
    offset: Annotated[int, Field(ge=0, le=1 << 20)] = 0
    limit: Annotated[int, Field(ge=1, le=MAX_ROWS)] = 50


class BranchRow(TypedDict):
    """A branch: `num_tokens` are its own tokens, and the fields with `below` include them. `kept` counts the slots that
    layers keep beside KV, by kind of cache. `num_requests` use the branch now. `text` is the text of its first tokens,
    null if they belong to another author."""

    node: str
    num_tokens: int
    num_below: int
    num_tokens_below: int
    num_bytes_below: int
    num_branches: int
    kept: dict[str, int]
    kept_below: dict[str, int]
    num_requests: int
    num_uses: int
    idle_s: float
    text: str | None


class TreeRows(TypedDict):
    """`is_cut`: there is more in the cache than is shown."""

    num_branches: int
    num_nodes: int
    num_bytes: int
    is_cut: bool
    rows: list[BranchRow]


async def debug_tree(request: Request, server: ServerContext) -> Response:
    """The branches of the prefix cache, or those of one of its nodes."""
    body = await read_body(request, server, TreeRequest)
    server.check_model(RequestContext.of(request.scope), body.model)
    tenant = RequestContext.of(request.scope).tenant
    namespace = server.isolation.namespace(tenant, body.session)
    author = server.isolation.author(tenant, body.session)
    tree = await server.trees.now(server.engine)
    roots = [root for root in tree.roots if tenant.is_admin or _is_of(root, namespace)]
    found = roots[0].children if len(roots) == 1 else roots
    if body.node:
        node = tree.nodes.get(bytes.fromhex(body.node))
        if node is None or node.root not in roots:
            raise NotFound(f"there is no branch {body.node} in this cache any more", code="no_branch", param="node")
        found = node.children
    found.sort(key=lambda node: -node.num_bytes)
    rows = [_row(server, tree, node, author) for node in found[body.offset : body.offset + body.limit]]
    total = TreeRows(
        num_branches=len(found),
        num_nodes=sum(root.num_nodes - 1 for root in roots),
        num_bytes=sum(root.num_bytes for root in roots),
        is_cut=tree.is_cut,
        rows=rows,
    )
    return Response(msgspec.json.encode(total), media_type="application/json")


def _is_of(root: Node, namespace: str) -> bool:
    """Weights of each version, and each load of an adapter, have a cache of their own: see `Request.compute_with`."""
    return root.branch.namespace.partition("/")[2] == namespace


def _row(server: ServerContext, tree: Tree, node: Node, author: str) -> BranchRow:
    branch = node.branch

    def by_kind(counts: list[int]) -> dict[str, int]:
        return dict(zip(tree.kinds, counts, strict=True))

    return {
        "node": branch.name.hex(),
        "num_tokens": branch.num_pages * tree.page_size,
        "num_below": node.num_nodes,
        "num_tokens_below": node.num_pages * tree.page_size,
        "num_bytes_below": node.num_bytes,
        "num_branches": len(node.children),
        "kept": by_kind(branch.kept),
        "kept_below": by_kind(node.num_kept),
        "num_requests": max(0, node.num_requests),
        "num_uses": branch.hits,
        "idle_s": round(branch.idle_s, 1),
        "text": _text(server, branch.tokens) if may_see(author, branch.author) else None,
    }


def _text(server: ServerContext, tokens: bytes) -> str:
    ids: Any = np.frombuffer(tokens, dtype="<i4").tolist()
    return b"".join(map(server.tokenizer.table.spelled, ids)).decode("utf-8", "replace")


ROUTES: Final[tuple[Route[ServerContext], ...]] = (
    Route(
        "POST",
        "/debug/tree",
        debug_tree,
        body=TreeRequest,
        answer=TreeRows,
        text="What the prefix cache holds, branch by branch, the largest first.",
        access=Access.TOTALS,
        forward=Forward.NONE,
    ),
)
