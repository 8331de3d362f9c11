"""Pictures of requests: attaching them, and the slices of the encoder's work that a step does for prompts."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import ceil

import numpy as np

from forebay.memory.encodings import Encoding
from forebay.memory.pictures import OutOfIds, Pictures
from forebay.memory.slots import NO_IDS
from forebay.requests.pictures import Picture, PromptPictures
from forebay.requests.request import Request
from forebay.requests.step_plan import Encode, TokenLogprob
from forebay.scheduler.memory.pools import Pools
from forebay.scheduler.memory.tiers import Tiers
from forebay.scheduler.queues import Queues


def plan_slices(pools: Pools, req: Request, start: int, left: int, cost: int) -> int:
    """Draft slices of the tiles that the request's tokens from `start` on wait for, and return their cost in tokens.

    The step has `left` prompt tokens for both: a token of the prompt costs `cost`. If any are left where the prompt
    waits, at least one layer is computed.
    """
    assert pools.pictures is not None, f"{req} has pictures in an engine without"
    assert req.pictures is not None, f"{req} has no pictures"
    spent = 0
    while awaited := req.pictures.awaited(start, pools.pictures):
        at, encoding, tile = awaited
        budget = left - spent - (req.pictures.limit(start, at, pools.pictures) - start) * cost
        if budget <= 0:
            break
        spent += _plan_slice(pools, req, encoding, tile, budget)
        pools.draft.encoded_for.setdefault(req, at + 1)
        if not pools.pictures.is_planned(encoding, tile):
            break
    return spent


def _plan_slice(pools: Pools, req: Request, encoding: Encoding, tile: int, budget: int) -> int:
    """Draft the next layers of a tile, as many as the budget has room for, and charge the tenant for those that it has
    not been charged for (C32)."""
    assert pools.pictures is not None
    config, entry = pools.pictures.config, encoding.tiles[tile]
    layers = config.layers_within(entry.size, entry.planned, budget)
    entry.planned = layers.stop
    pools.draft.encodes.append(_slice(encoding, tile, layers, ends=layers.stop == config.num_layers))
    new = range(max(layers.start, entry.charged), layers.stop)
    if new:
        cost = config.layer_tokens(entry.size, new)
        req.account.encoded_tokens += cost
        req.account.service += cost / req.account.weight
        entry.charged = layers.stop
    return ceil(config.layer_tokens(entry.size, layers))


def _slice(encoding: Encoding, tile: int, layers: range, *, ends: bool) -> Encode:
    entry = encoding.tiles[tile]
    height, width = entry.size
    return Encode(
        picture=encoding.number,
        tile=tile,
        first_layer=layers.start,
        last_layer=layers.stop,
        height=height,
        width=width,
        pixels=b"" if layers.start else encoding.pixels[entry.pixels],
        rows=encoding.rows[entry.tokens].copy() if ends else NO_IDS,
    )


def has_rows(encodings: Iterable[Encoding]) -> bool:
    """Return whether all of these have rows."""
    return all(len(encoding.blocks) for encoding in encodings)


def in_use(reqs: Iterable[Request]) -> set[Encoding]:
    """Return the encodings that these requests use."""
    return {encoding for req in reqs if req.pictures for encoding in req.pictures.encodings}


def attach_pictures(queues: Queues, tiers: Tiers, req: Request, pictures: Sequence[Picture]) -> None:
    """Make the request a user of its pictures, and write their ids into its tokens. Raises RequestTooLarge and
    Overloaded."""
    known = queues.pools.pictures
    assert known is not None, f"{req} has pictures in an engine without"
    try:
        encodings = known.enter(req.namespace, req.tenant, pictures)
    except OutOfIds:
        restart_ids(queues, tiers, known)
        encodings = known.enter(req.namespace, req.tenant, pictures)
    req.pictures = PromptPictures(encodings, [picture.runs for picture in pictures])
    req.pictures.write_ids(req.tokens)


def restart_ids(queues: Queues, tiers: Tiers, pictures: Pictures) -> None:
    """Drop the prefix cache, that of other tiers as well, and number pictures anew. Ids in pinned prefixes and in
    living requests stay in use."""
    cache = queues.pools.cache
    cache.flush()
    tiers.clear()
    in_use = [np.frombuffer(req.tokens, dtype=np.int32) for req in (*queues.requests.values(), *queues.finishing)]
    in_use += [np.frombuffer(node.key, dtype=np.int32) for node in cache.index.nodes()]
    pictures.restart_ids(np.concatenate([NO_IDS, *in_use]))


def release_pictures(pools: Pools, req: Request) -> None:
    """Release the encodings of a request's pictures; nothing for a request without pictures."""
    if pools.pictures is not None and req.pictures is not None:
        pools.pictures.leave(req.pictures.encodings, req.tenant)


def forget_pictures(pools: Pools, reqs: Iterable[Request]) -> None:
    """Let the pictures of these requests be encoded again: something was not finite for them."""
    for req in reqs:
        if pools.pictures is not None and req.pictures is not None:
            pools.pictures.forget(req.pictures.encodings)


def without_pictures(pools: Pools, req: Request, entries: list[TokenLogprob | None]) -> list[TokenLogprob | None]:
    """Return the log-probabilities of the request's prompt, with None at the tokens of pictures."""
    if pools.pictures is not None and req.pictures is not None:
        for at in np.flatnonzero(pools.pictures.stand_for(np.array(req.tokens[: len(entries)]))).tolist():
            entries[at] = None
    return entries
