"""What it costs to protect chunks between two engines: our frames, TLS 1.3 with mutual certificates, Noise.

    python -m benchmarks.transfer_security [--mib 512] [--repeats 9]

Two processes on this machine, one connection of the loopback device for each way, chunks of 16 MiB. One repeat measures
every way once. The ratio to `frames` is the median, over the repeats, of pairs within one. Ways:

- bare: nothing but the bytes.
- frames: as `tcp` sends chunks: an authenticated frame (`transfer/wire/framing.py`) with a checksum (XXH3), then the
  bytes.
- frames + mac: the same with HMAC-SHA256 over the bytes in place of the checksum.
- tls: TLS 1.3, a certificate on both sides. Needs the program `openssl`, which makes the certificates.
- noise: NNpsk0_25519_AESGCM_SHA256 of the library noiseprotocol, if it is installed; its messages have at most 64 KiB.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import hmac
import importlib.util
import multiprocessing
import os
import socket
import ssl
import statistics
import subprocess
import tempfile
import time
from collections import defaultdict
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import xxhash

from forebay.requests.pieces import CHUNK_BYTES, Chunk
from forebay.transfer.session.connection import tune
from forebay.transfer.wire.framing import FrameDecoder, FrameEncoder

KEY = b"k" * 32
EPOCH = 1
NOISE_BYTES = 65535 - 16  # of plain text in a message
TIMEOUT_S = 120.0


class Took(NamedTuple):
    """Seconds of the receiver, and CPU seconds of both sides."""

    seconds: float
    cpu_seconds: float


class Way(Protocol):
    """One end of a connection that carries chunks. Raises ValueError for a chunk that does not fit its checksum."""

    def send(self, chunk: memoryview) -> None: ...

    def receive(self, into: memoryview) -> None: ...


def fill(sock: socket.socket, into: memoryview) -> None:
    while into:
        size = sock.recv_into(into)
        if not size:
            raise EOFError
        into = into[size:]


class Bare:
    def __init__(self, sock: socket.socket, folder: Path, is_sender: bool) -> None:
        self.sock = sock

    def send(self, chunk: memoryview) -> None:
        self.sock.sendall(chunk)

    def receive(self, into: memoryview) -> None:
        fill(self.sock, into)


class Frames:
    """As `TcpWriter` and `TcpReader`: what comes is summed while it is in the processor's cache."""

    def __init__(self, sock: socket.socket, folder: Path, is_sender: bool) -> None:
        self.sock = sock
        self.encoder, self.decoder = FrameEncoder(KEY, EPOCH), FrameDecoder(Chunk, KEY, EPOCH)

    def summed(self) -> Any:
        return xxhash.xxh3_64()

    def send(self, chunk: memoryview) -> None:
        total = self.summed()
        total.update(chunk)
        head = Chunk(
            nonce=bytes(16),
            kind="kv",
            region=0,
            num_regions=1,
            first=0,
            end=1,
            num_bytes=len(chunk),
            checksum=int.from_bytes(total.digest()[:8]),
        )
        self.sock.sendall(self.encoder.encode(head))
        self.sock.sendall(chunk)

    def receive(self, into: memoryview) -> None:
        while missing := self.decoder.missing():
            self.decoder.feed(self.sock.recv(missing))
        head, total = self.decoder.take(), self.summed()
        while into:
            size = self.sock.recv_into(into)
            if not size:
                raise EOFError
            total.update(into[:size])
            into = into[size:]
        if not isinstance(head, Chunk) or head.checksum != int.from_bytes(total.digest()[:8]):
            raise ValueError("a chunk differs from its checksum")


class FramesWithMac(Frames):
    def summed(self) -> Any:
        return hmac.new(KEY, digestmod=hashlib.sha256)


class Tls:
    """Each side accepts certificates that the folder's authority has signed."""

    def __init__(self, sock: socket.socket, folder: Path, is_sender: bool) -> None:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT if is_sender else ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.check_hostname, context.verify_mode = False, ssl.CERT_REQUIRED
        context.load_verify_locations(folder / "ca.pem")
        context.load_cert_chain(folder / "end.pem", folder / "end.key")
        self.sock = context.wrap_socket(sock, server_side=not is_sender)
        if not is_sender:
            print(f"tls: {self.sock.version()}, {self.sock.cipher()[0]}, {ssl.OPENSSL_VERSION}")  # type: ignore[index]

    def send(self, chunk: memoryview) -> None:
        self.sock.sendall(chunk)

    def receive(self, into: memoryview) -> None:
        fill(self.sock, into)


class Noise:
    def __init__(self, sock: socket.socket, folder: Path, is_sender: bool) -> None:
        from noise.connection import NoiseConnection  # type: ignore[import-not-found]

        self.sock = sock
        self.noise = noise = NoiseConnection.from_name(b"Noise_NNpsk0_25519_AESGCM_SHA256")
        noise.set_psks(KEY)
        if is_sender:
            noise.set_as_initiator()
        else:
            noise.set_as_responder()
        noise.start_handshake()
        for ours in (is_sender, not is_sender):
            if ours:
                sock.sendall(noise.write_message())
            else:
                noise.read_message(sock.recv(1024))

    def send(self, chunk: memoryview) -> None:
        for begin in range(0, len(chunk), NOISE_BYTES):
            self.sock.sendall(self.noise.encrypt(bytes(chunk[begin : begin + NOISE_BYTES])))

    def receive(self, into: memoryview) -> None:
        data = bytearray(NOISE_BYTES + 16)
        for begin in range(0, len(into), NOISE_BYTES):
            part = into[begin : begin + NOISE_BYTES]
            with memoryview(data)[: len(part) + 16] as message:
                fill(self.sock, message)
                part[:] = self.noise.decrypt(bytes(message))


WAYS: dict[str, type[Way]] = {"bare": Bare, "frames": Frames, "frames + mac": FramesWithMac, "tls": Tls}
if importlib.util.find_spec("noise") is not None:
    WAYS["noise"] = Noise


def certify(folder: Path) -> None:
    """Make an authority, and a certificate that both sides use."""
    words = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 1"
    ca, end = folder / "ca", folder / "end"
    for name, more in ((ca, ()), (end, ("-CA", f"{ca}.pem", "-CAkey", f"{ca}.key"))):
        files = ("-keyout", f"{name}.key", "-out", f"{name}.pem", "-subj", f"/CN={name.stem}")
        subprocess.run([*words.split(), *more, *files], check=True, capture_output=True, timeout=TIMEOUT_S)


def send(pipe: Connection, ports: dict[str, int], folder: Path, num_chunks: int) -> None:
    """Send so many chunks whenever a way is named; answer with the CPU seconds that it took."""
    chunk = memoryview(bytearray(os.urandom(CHUNK_BYTES)))
    ways = {}
    for name, port in ports.items():
        sock = socket.create_connection(("127.0.0.1", port), timeout=TIMEOUT_S)
        tune(sock)
        sock.settimeout(TIMEOUT_S)
        ways[name] = WAYS[name](sock, folder, True)
    with contextlib.suppress(EOFError):
        while name := pipe.recv():
            begin = time.process_time()
            for _ in range(num_chunks):
                ways[name].send(chunk)
            pipe.send(time.process_time() - begin)


def measure(pipe: Connection, name: str, way: Way, into: memoryview, num_chunks: int) -> Took:
    pipe.send(name)
    begin, cpu = time.perf_counter(), time.process_time()
    for _ in range(num_chunks):
        way.receive(into)
    seconds, cpu = time.perf_counter() - begin, time.process_time() - cpu
    return Took(seconds, cpu + pipe.recv())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mib", type=int, default=512, help="of chunks that each repeat sends")
    parser.add_argument("--repeats", type=int, default=9)
    args = parser.parse_args()
    num_chunks = max(1, (args.mib << 20) // CHUNK_BYTES)
    with tempfile.TemporaryDirectory() as name, contextlib.ExitStack() as stack:
        folder = Path(name)
        certify(folder)
        listeners = {way: stack.enter_context(socket.create_server(("127.0.0.1", 0))) for way in WAYS}
        ports = {way: listener.getsockname()[1] for way, listener in listeners.items()}
        context = multiprocessing.get_context("spawn")
        pipe, theirs = context.Pipe()
        process = context.Process(target=send, args=(theirs, ports, folder, num_chunks), daemon=True)
        process.start()
        ways = {}
        for way, listener in listeners.items():
            sock, _ = listener.accept()
            tune(sock)
            sock.settimeout(TIMEOUT_S)
            ways[way] = WAYS[way](sock, folder, False)
        into, found = memoryview(bytearray(CHUNK_BYTES)), defaultdict[str, list[Took]](list)
        for _ in range(args.repeats + 1):
            for way, end in ways.items():
                found[way].append(measure(pipe, way, end, into, num_chunks))
        pipe.send("")
        process.join()
    num_bytes = num_chunks * CHUNK_BYTES
    print(f"{num_bytes >> 20} MiB, {os.cpu_count()} CPUs, medians of {args.repeats}")
    print(f"{'':14}{'GB/s':>8}{'of frames':>11}{'CPU s/GB':>10}{'of frames':>11}")
    for way, took in found.items():
        pairs = [*zip(took[1:], found["frames"][1:], strict=True)]  # the first repeat warms up
        speed = statistics.median(num_bytes / own.seconds / 1e9 for own, _ in pairs)
        cpu = statistics.median(own.cpu_seconds / num_bytes * 1e9 for own, _ in pairs)
        ratios = [statistics.median(values) for values in zip(*(_ratios(*pair) for pair in pairs), strict=True)]
        print(f"{way:14}{speed:8.2f}{ratios[0]:11.0%}{cpu:10.2f}{ratios[1]:11.0%}")


def _ratios(own: Took, frames: Took) -> tuple[float, float]:
    return frames.seconds / own.seconds, own.cpu_seconds / frames.cpu_seconds


if __name__ == "__main__":
    main()
