"""Two engines' halves of transfers over small caches, and what their schedulers would do."""

from __future__ import annotations

import importlib
import secrets
import select
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from types import MappingProxyType

import numpy as np
import torch

from forebay.config.engine_config import CacheTypes, DisaggregationMode, DisaggregationOptions, TransferBackend
from forebay.memory.kinds.build import has_pages
from forebay.pools.cache_pool import CachePool
from forebay.pools.cache_spec import CacheSpec, FullAttention, LatentAttention, RecurrentState, SlidingWindow
from forebay.pools.regions import Regions, Tag
from forebay.requests.transfers import Closed, Event, Offer, Offered, Send, Span, Tail, Ticket
from forebay.transfer.session.layout import columns_of
from forebay.transfer.wire.frames import Layout
from forebay.transfer.worker import Worker, transfers_of
from tests.deadlines import wait_until
from tests.transfer import fake_libraries

LIBRARIES = {"nixl": "nixl_cu12._bindings", "mooncake": "mooncake.engine"}
for _module in LIBRARIES.values():
    try:
        importlib.import_module(_module)
    except ImportError:
        fake_libraries.install(_module)

BACKENDS = ["shm", "tcp", *LIBRARIES]
WINDOW = 8
PLAIN = (FullAttention(num_kv_heads=2, head_dim=8),) * 3
EVERYTHING = (
    FullAttention(num_kv_heads=2, head_dim=5),
    RecurrentState(conv=(6, 3), ssm=(2, 4, 3)),
    SlidingWindow(num_kv_heads=1, head_dim=4, window=WINDOW),
    LatentAttention(rank=6, rope_dim=2),
)
LARGE = (FullAttention(num_kv_heads=4, head_dim=64),) * 4
EIGHT_BITS = CacheTypes(kv_cache_dtype="int8")
KEY = b"k" * 32
OPTIONS = DisaggregationOptions(bootstrap_port=0, cluster_key=KEY)
NUM_SLOTS = MappingProxyType({"kv": 200, "window": 60, "state": 6, "ring": 6})


@dataclass(kw_only=True)
class Half:
    """One engine: its cache, its transfers, and the news so far."""

    cache: CachePool
    transfers: Worker
    regions: Regions
    news: list[Event] = field(default_factory=list)
    by_ticket: dict[bytes, list[str]] = field(default_factory=dict)

    def take_updates(self) -> list[Event]:
        found = [*self.transfers.poll()]
        self.news += found
        for event in found:
            self.by_ticket.setdefault(event.ticket.nonce, []).append(type(event).__name__)
        return found

    def wait(self, kind: type[Event], ticket: Ticket | None = None) -> Event:
        """The first of a kind, by its ticket's nonce where one is given."""
        wait_until(lambda: self._find(kind, ticket) is not None)
        found = self._find(kind, ticket)
        assert found is not None
        return found

    def _find(self, kind: type[Event], ticket: Ticket | None) -> Event | None:
        """Waits a moment for news where there is none yet."""
        for event in self.news:
            if ticket is None or event.ticket.nonce == ticket.nonce:
                if isinstance(event, kind):
                    return event
                assert ticket is None or not isinstance(event, Closed), f"closed without {kind.__name__}: {self.news}"
        select.select([self.transfers], [], [], 0.05)
        self.take_updates()
        return None

    def bytes_of(self, kind: str, span: Span, first: int, end: int) -> list[np.ndarray]:
        """Of positions [first, end), region by region."""
        size = self.cache.page_size if has_pages(kind) else 1
        at = np.arange(first - span.start, end - span.start)
        places = torch.from_numpy(span.ids[at // size] * size + at % size)
        return [
            tensor.view(torch.uint8).reshape(tensor.shape[0] * size, -1)[places].numpy()
            for tensor in self.cache.tables[kind].tensors
        ]


def half(
    mode: DisaggregationMode,
    specs: Sequence[CacheSpec] = PLAIN,
    *,
    page_size: int = 4,
    types: CacheTypes | None = None,
    options: DisaggregationOptions = OPTIONS,
    backend: str = "auto",
    num_slots: Mapping[str, int] = NUM_SLOTS,
    **layout: object,
) -> Half:
    regions = Regions(shared=(Tag.KV_CACHE,))
    cache = CachePool(
        specs,
        types or CacheTypes(dtype="float32", kv_cache_dtype="float32"),
        page_size=page_size,
        num_slots=num_slots,
        device="cpu",
        take=partial(regions.take, Tag.KV_CACHE),
    )
    for i, table in enumerate(cache.tables.values()):
        for j, tensor in enumerate(table.tensors):
            generator = torch.Generator().manual_seed(100 * i + j + 7 * (mode is DisaggregationMode.PREFILL))
            raw = tensor.view(torch.uint8)
            raw.copy_(torch.randint(0, 255, raw.shape, dtype=torch.uint8, generator=generator))
    transfers = transfers_of(
        replace(options, mode=mode, transfer_backend=TransferBackend(backend)),
        cache,
        layout_of(cache, **layout),
        regions.place,
    )
    return Half(cache=cache, transfers=transfers, regions=regions)


def layout_of(cache: CachePool, **others: object) -> Layout:
    values: dict[str, object] = {
        "page_size": cache.page_size,
        "vocab_size": 100,
        "weights": "w",
        "quantization": "none",
        "dtype": "float32",
        "kernels": "torch",
        "activation_bits": 16,
        "columns": list(columns_of(cache)),
    }
    return Layout(**(values | others))  # type: ignore[arg-type]


@contextmanager
def pair(
    specs: Sequence[CacheSpec] = PLAIN, *, page_sizes: tuple[int, int] = (4, 4), **others: object
) -> Iterator[tuple[Half, Half]]:
    """Prefill and decode."""
    prefill = half(DisaggregationMode.PREFILL, specs, page_size=page_sizes[0], **others)  # type: ignore[arg-type]
    try:
        decode = half(DisaggregationMode.DECODE, specs, page_size=page_sizes[1], **others)  # type: ignore[arg-type]
        try:
            yield prefill, decode
        finally:
            decode.transfers.close()
    finally:
        prefill.transfers.close()


def first_read(half: Half, kind: str, num_tokens: int) -> int:
    """The first position that is sent of a kind with pages."""
    num_read = half.cache.num_read.get(kind, 0)
    return max(0, num_tokens - num_read + 1) if num_read else 0


def spans_of(half: Half, num_tokens: int, *, start: int = 0, seed: int = 0) -> dict[str, Span]:
    """Pages anywhere for so many tokens, also of a model that keeps no KV, window pages for the last, and one slot of
    what a sequence has whole."""
    rng = np.random.default_rng(seed)
    size, found = half.cache.page_size, {}
    for kind, table in half.cache.tables.items():
        if not list(table.tensors) and kind != "kv":  # pages are named of every sequence
            continue
        if not has_pages(kind):
            found[kind] = Span(start=0, ids=rng.integers(1, half.cache.num_ids[kind], 1))
            continue
        begin = start if kind == "kv" else first_read(half, kind, num_tokens) // size * size
        pages = rng.permutation(np.arange(1, half.cache.num_ids[kind]))[: -(-(num_tokens - begin) // size)]
        found[kind] = Span(start=begin, ids=pages.astype(np.int64))
    return found


def offer(
    prefill: Half, decode: Half, spans: dict[str, Span], num_tokens: int, *, room: int = 7, start: int = 0
) -> Offer:
    ticket = Ticket(decode.transfers.instance, room, secrets.token_bytes(16))
    return Offer(
        ticket=ticket,
        host="127.0.0.1",
        port=prefill.transfers.port,
        num_tokens=num_tokens,
        digest=b"digest",
        start=start,
        spans=spans,
    )


def sent(prefill: Half, decode: Half, num_tokens: int) -> Offer:
    """An offer for which all has been sent at once; how that ends is yet to be seen."""
    made = offer(prefill, decode, spans_of(decode, num_tokens), num_tokens)
    decode.transfers.submit(made)
    prefill.wait(Offered, made.ticket)
    tail = Tail(num_tokens=num_tokens, token_id=1)
    prefill.transfers.submit(Send(ticket=made.ticket, spans=spans_of(prefill, num_tokens), tail=tail))
    return made


def transfer(prefill: Half, decode: Half, num_tokens: int, *, start: int = 0, in_pages: int = 0, seed: int = 1) -> None:
    """One request from offer to both ends' `Closed`; whole pages go first, `in_pages` at a time."""
    theirs = spans_of(decode, num_tokens, start=start, seed=seed)
    offered = offer(prefill, decode, theirs, num_tokens, start=start)
    decode.transfers.submit(offered)
    ticket = prefill.wait(Offered, offered.ticket).ticket
    ours = spans_of(prefill, num_tokens, seed=seed + 1)
    size = prefill.cache.page_size
    first, last = start // size, dict(ours)
    if "kv" in ours:
        while in_pages and first + in_pages <= num_tokens // size:
            ids = ours["kv"].ids[first : first + in_pages]
            prefill.transfers.submit(Send(ticket=ticket, spans={"kv": Span(start=first * size, ids=ids)}))
            first += in_pages
        last["kv"] = Span(start=first * size, ids=ours["kv"].ids[first:])
    prefill.transfers.submit(Send(ticket=ticket, spans=last, tail=Tail(num_tokens=num_tokens, token_id=5)))
    decode.wait(Closed, ticket)
    prefill.wait(Closed, ticket)
    assert [n for n in decode.by_ticket[ticket.nonce] if n != "Renewed"] == ["Arrived", "Closed"]
    assert prefill.by_ticket[ticket.nonce] == ["Offered", "Sent", "Closed"]
    for kind, span in theirs.items():
        end = num_tokens if has_pages(kind) else 1
        first = first_read(decode, kind, num_tokens) if kind == "window" else span.start
        there, here = decode.bytes_of(kind, span, first, end), prefill.bytes_of(kind, ours[kind], first, end)
        assert all((a == b).all() for a, b in zip(there, here, strict=True)), kind
