"""How fast caches go from one engine to another, each transport beside what it is made of.

    python -m benchmarks.transfer [--mib 256] [--repeats 5] [--pages 16x64 16x8 1x8]

Two processes on this machine, with the cache of a model of 24 layers, 2 heads of 64 (bfloat16); the sequence lies in
runs of pages, 16x8 being eight pages of 16 tokens in each. `shm` is compared with a copy of as many bytes from one
buffer to another (memcpy), `tcp` with a bare connection of the loopback device between two processes. Rounds are
interleaved; the figures are the best: by the clock, and by the processor's time of the busier of both sides, which is
what is left where nothing else runs.
"""

from __future__ import annotations

import argparse
import contextlib
import multiprocessing
import os
import secrets
import select
import socket
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from functools import partial
from multiprocessing.connection import Connection
from typing import NamedTuple, TypeVar

import numpy as np

from forebay.config.engine_config import CacheTypes, DisaggregationMode, DisaggregationOptions, TransferBackend
from forebay.memory.kinds.build import per_token
from forebay.pools.cache_pool import CachePool
from forebay.pools.cache_spec import FullAttention, cache_sizes
from forebay.pools.regions import Regions, Tag
from forebay.requests.transfers import Arrived, Broken, Closed, Event, Offer, Offered, Send, Span, Tail, Ticket
from forebay.transfer.session.layout import columns_of
from forebay.transfer.wire.frames import Layout
from forebay.transfer.worker import Worker, transfers_of


class Pages(NamedTuple):
    """Of `size` tokens, `run` of them side by side."""

    size: int
    run: int

    @classmethod
    def parse(cls, text: str) -> Pages:
        return cls(*map(int, text.split("x")))


class Took(NamedTuple):
    """`cpu_seconds` are of the busier side."""

    seconds: float
    cpu_seconds: float


E = TypeVar("E")

SPECS = (FullAttention(num_kv_heads=2, head_dim=64),) * 24
TYPES = CacheTypes(dtype="bfloat16", kv_cache_dtype="bfloat16")
TIMEOUT_S = 120.0
SOCKET_BYTES = 1 << 20


def engine(
    mode: DisaggregationMode, backend: str, pages: Pages, num_tokens: int
) -> tuple[Worker, dict[str, Span], Regions]:
    regions = Regions(shared=(Tag.KV_CACHE,))
    page_size, run = pages
    num_pages = -(-num_tokens // page_size)
    cache = CachePool(
        SPECS,
        TYPES,
        page_size=page_size,
        num_slots={"kv": num_pages + num_pages // 4},
        device="cpu",
        take=partial(regions.take, Tag.KV_CACHE),
    )
    layout = Layout(
        page_size=page_size,
        vocab_size=1,
        weights="",
        quantization="",
        dtype=TYPES.dtype,
        kernels="",
        activation_bits=16,
        columns=list(columns_of(cache)),
    )
    options = DisaggregationOptions(mode=mode, transfer_backend=TransferBackend(backend), bootstrap_port=0)
    runs = np.random.default_rng(mode == DisaggregationMode.PREFILL).permutation(num_pages // run + 1)
    ids = (runs[:, None] * run + np.arange(1, run + 1)).ravel()
    ids = ids[ids <= num_pages][:num_pages].astype(np.int64)
    return transfers_of(options, cache, layout, regions.place), {"kv": Span(start=0, ids=ids)}, regions


class News:
    """What a half's transfers tell, in order."""

    def __init__(self, transfers: Worker) -> None:
        self._transfers = transfers
        self._found: list[Event] = []

    def wait(self, kind: type[E], nonce: bytes | None = None) -> E:
        end = time.monotonic() + TIMEOUT_S
        while time.monotonic() < end:
            for event in self._found:
                if nonce is None or event.ticket.nonce == nonce:
                    if isinstance(event, kind):
                        return event
                    if isinstance(event, Broken):
                        raise SystemExit(event.failure.message)
            select.select([self._transfers], [], [], 0.1)
            self._found += self._transfers.poll()
        raise SystemExit(f"no {kind.__name__} within {TIMEOUT_S:g} s")


def prefill(pipe: Connection, backend: str, pages: Pages, num_tokens: int) -> None:
    transfers, spans, _regions = engine(DisaggregationMode.PREFILL, backend, pages, num_tokens)
    transfers.pattern(spans, num_tokens).write()
    tail = Tail(num_tokens=num_tokens, token_id=0)
    pipe.send(transfers.port)
    with contextlib.suppress(EOFError):
        while pipe.recv():
            begin, news = time.process_time(), News(transfers)
            ticket = news.wait(Offered).ticket
            transfers.submit(Send(ticket=ticket, spans=spans, tail=tail))
            news.wait(Closed, ticket.nonce)
            pipe.send(time.process_time() - begin)
    transfers.close()


@contextlib.contextmanager
def transport(backend: str, pages: Pages, num_tokens: int) -> Iterator[Callable[[], Took]]:
    """What moves the tokens once."""
    ours, theirs = multiprocessing.get_context("spawn").Pipe()
    process = multiprocessing.get_context("spawn").Process(
        target=prefill, args=(theirs, backend, pages, num_tokens), daemon=True
    )
    process.start()
    theirs.close()
    port = ours.recv()
    transfers, spans, _regions = engine(DisaggregationMode.DECODE, backend, pages, num_tokens)
    pattern = transfers.pattern(spans, num_tokens)

    def once() -> Took:
        ours.send(True)
        pattern.clear()
        ticket, news = Ticket(transfers.instance, 0, secrets.token_bytes(16)), News(transfers)
        begin, cpu_begin = time.monotonic(), time.process_time()
        transfers.submit(
            Offer(
                ticket=ticket,
                host="127.0.0.1",
                port=port,
                num_tokens=num_tokens,
                digest=b"",
                start=0,
                spans=spans,
            )
        )
        news.wait(Arrived, ticket.nonce)
        seconds, cpu_seconds = time.monotonic() - begin, time.process_time() - cpu_begin
        news.wait(Closed, ticket.nonce)
        if wrong := pattern.wrong():
            raise SystemExit(f"{backend}: {wrong}")
        return Took(seconds, max(cpu_seconds, ours.recv()))

    try:
        yield once
    finally:
        ours.close()
        process.join()
        transfers.close()


def memcpy(num_bytes: int) -> Callable[[], Took]:
    source, target = np.ones(num_bytes, dtype=np.uint8), np.ones(num_bytes, dtype=np.uint8)

    def once() -> Took:
        begin, cpu_begin = time.monotonic(), time.process_time()
        np.copyto(target, source)
        return Took(time.monotonic() - begin, time.process_time() - cpu_begin)

    return once


def send_bytes(pipe: Connection, address: tuple[str, int], num_bytes: int) -> None:
    data = memoryview(bytearray(SOCKET_BYTES))
    with socket.create_connection(address) as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4 << 20)
        while sock.recv(1):
            begin = time.process_time()
            for _ in range(num_bytes // SOCKET_BYTES):
                sock.sendall(data)
            pipe.send(time.process_time() - begin)


@contextlib.contextmanager
def bare_socket(num_bytes: int) -> Iterator[Callable[[], Took]]:
    ours, theirs = multiprocessing.get_context("spawn").Pipe()
    listener = socket.create_server(("127.0.0.1", 0))
    process = multiprocessing.get_context("spawn").Process(
        target=send_bytes, args=(theirs, listener.getsockname(), num_bytes), daemon=True
    )
    process.start()
    sock, _ = listener.accept()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4 << 20)
    data = memoryview(bytearray(SOCKET_BYTES))

    def once() -> Took:
        begin, cpu_begin = time.monotonic(), time.process_time()
        due = num_bytes // SOCKET_BYTES * SOCKET_BYTES
        sock.send(b"\0")
        while due:
            due -= sock.recv_into(data, min(due, SOCKET_BYTES))
        cpu_seconds = time.process_time() - cpu_begin
        return Took(time.monotonic() - begin, max(cpu_seconds, ours.recv()))

    try:
        yield once
    finally:
        sock.close()
        listener.close()
        process.join()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mib", type=int, default=256, help="of KV that is moved")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--pages", type=Pages.parse, nargs="+", default=[Pages(16, 64), Pages(16, 8), Pages(1, 8)])
    parser.add_argument("--backends", nargs="+", default=["shm", "tcp"])
    options = parser.parse_args()
    num_tokens = (options.mib << 20) // per_token(cache_sizes(SPECS, TYPES))
    num_bytes = num_tokens * per_token(cache_sizes(SPECS, TYPES))
    with contextlib.ExitStack() as stack:
        contenders = {"memcpy": memcpy(num_bytes), "bare socket": stack.enter_context(bare_socket(num_bytes))}
        for backend in options.backends:
            for pages in options.pages:
                name = f"{backend}, {pages.size}x{pages.run}"
                contenders[name] = stack.enter_context(transport(backend, pages, num_tokens))
        found: dict[str, list[Took]] = defaultdict(list)
        for _ in range(options.repeats + 1):
            for name, once in contenders.items():
                found[name].append(once())
    best = {name: Took(*map(min, zip(*took[1:], strict=True))) for name, took in found.items()}  # 1: fresh memory
    print(f"{num_tokens} tokens, {num_bytes / 2**20:.0f} MiB, {os.cpu_count()} CPUs, best of {options.repeats}")
    print("GB/s                 by the clock           by CPU time")
    for name, took in best.items():
        against = best["memcpy" if name.startswith("shm") else "bare socket"]
        shares = (f"{num_bytes / own / 1e9:8.2f} {other / own:7.0%}" for own, other in zip(took, against, strict=True))
        print(f"{name:<20} {'      '.join(shares)}")


if __name__ == "__main__":
    main()
