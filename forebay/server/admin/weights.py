"""Updates of the weights: /update_weights_from_disk."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from starlette.requests import Request
from starlette.responses import Response

from forebay.base.errors import InvalidRequest
from forebay.formats.gguf_parts import part_paths
from forebay.formats.hub_names import BLOBS, REVISIONS
from forebay.http.route import Access, Forward, Route
from forebay.server.admin.occupation import Done, occupied
from forebay.server.context import ServerContext, read_body
from forebay.server.protocol.administration import UpdateWeightsRequest


async def update_weights_from_disk(request: Request, server: ServerContext) -> Response:
    """Take the weights of another checkpoint of the same model, below --weights-root."""
    body = await read_body(request, server, UpdateWeightsRequest)
    path = _below(server.config.weights_root, body.model_path)
    state = await server.engine.update_weights(path, mode=body.mode, timeout_s=body.timeout)
    return occupied(request, "update_weights", state)


def _below(root: str | None, model_path: str) -> str:
    """The checkpoint at `model_path`, whose files are all below the root once links are followed. In a snapshot of a
    hub's cache they may link to the blobs of their repository."""
    if root is None:
        raise InvalidRequest("no weights are read over HTTP: start the server with --weights-root", param="model_path")
    top = Path(root).resolve()
    path = top / model_path  # unresolved: a snapshot's .gguf file is a link whose target has no suffix
    try:
        if not _stays(path, top):
            raise InvalidRequest(f"model_path {model_path[:200]!a} is not below --weights-root", param="model_path")
        files = path.rglob("*") if path.is_dir() else part_paths(path)
        links = [file.name for file in files if not _stays(file, top)]
    except (OSError, ValueError, RuntimeError) as error:  # a circle of links among them
        raise InvalidRequest(f"model_path {model_path[:200]!a} cannot be read: {error}", param="model_path") from None
    if links:
        raise InvalidRequest(
            f"model_path {model_path[:200]!a}: {links[0][:200]!a} is a link that leads out of --weights-root: copy the "
            "file there",
            param="model_path",
        )
    return str(path)


def _stays(entry: Path, top: Path) -> bool:
    """Return whether it is below `top`, or a file of a snapshot there whose content is among the blobs of its
    repository."""
    target, revision = entry.resolve(), entry.parent.resolve()
    if target.is_relative_to(top):
        return True
    return (
        revision.is_relative_to(top)
        and revision.parent.name == REVISIONS
        and target.parent == revision.parent.parent / BLOBS
    )


ROUTES: Final[tuple[Route[ServerContext], ...]] = (
    Route(
        "POST",
        "/update_weights_from_disk",
        update_weights_from_disk,
        body=UpdateWeightsRequest,
        answer=Done,
        empties_cache=True,
        text="Take the weights of another checkpoint of the same model.",
        access=Access.ADMIN,
        forward=Forward.ALL,
    ),
)
