"""Take what files have kept of the prefix cache since an earlier process over into their tier."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

import msgspec
import numpy as np

from forebay.formats.prefix_files import Record
from forebay.memory.encodings import NO_ID
from forebay.memory.kinds.kind import Kept
from forebay.memory.kv_allocator import KV
from forebay.memory.pictures import OutOfIds, Pictures
from forebay.memory.radix_node import OPERATOR
from forebay.memory.slots import Ids, as_ids
from forebay.memory.tier import Prefix, Span, Tier

Found = tuple[Record, Callable[[Mapping[str, Ids]], None]]
"""A record, and the function to call with the slots that its rows get."""


def restore(tier: Tier, records: Iterable[Found], mover: str, pictures: Pictures | None) -> None:
    """Give a tier the spans of `records`, the oldest first, in the name of `mover`. Of `pictures` they get the ids.

    A record may come before the one with the pages in front of it, which was written again later: it waits for that. A
    record without rows drops what the ones before it have of its prefix.
    """
    waiting = list[Found]()
    for found, place in records:
        record = _with_ids(found, pictures)
        if record is None:
            continue
        if record.drops:
            tier.cache.discard(record.tokens, record.start, record.namespace)
            waiting = [each for each in waiting if not record.covers(each[0])]
        elif not _attach(tier, record, place, mover):
            waiting.append((record, place))
    num_before = 0
    while waiting and len(waiting) != num_before:
        num_before = len(waiting)
        waiting = [(record, place) for record, place in waiting if not _attach(tier, record, place, mover)]


def _with_ids(record: Record, pictures: Pictures | None) -> Record | None:
    """Return a record with the ids that this process gives to pictures; None if it has none for some of them."""
    if pictures is None:
        return None if record.pictures else record
    tokens = np.frombuffer(record.tokens, dtype=np.int32)
    ids = np.where(pictures.stand_for(tokens), np.int32(NO_ID), tokens)
    unknown = ids != tokens
    _, _, namespace = record.namespace.partition("/")
    try:
        for picture in record.pictures:
            own = pictures.ids_of(namespace, picture)
            inside = (tokens >= picture.first_id) & (tokens < picture.first_id + len(own))
            ids[inside] = tokens[inside] - picture.first_id + own.start
    except OutOfIds:
        return None
    if (ids[unknown] == NO_ID).any():
        return None
    return msgspec.structs.replace(record, tokens=ids.tobytes())


def _attach(tier: Tier, record: Record, place: Callable[[Mapping[str, Ids]], None], mover: str) -> bool:
    """Attach the span of a record; return False if the pages in front of it are missing."""
    prefix = Prefix(record.tokens, record.namespace, OPERATOR, record.tenant)
    if len(tier.walk(prefix)[1]) < record.start:
        return False
    ends = {kind: as_ids(rows.ends) for kind, rows in record.kinds.items()}
    pages = ends.pop(KV)
    kept = {kind: Kept(own, own) for kind, own in ends.items()}
    span = tier.take(Span(prefix=prefix, start=record.start, pages=pages, kept=kept))
    if span is not None and tier.attach(span, mover):
        place(span.slots)
    return True
