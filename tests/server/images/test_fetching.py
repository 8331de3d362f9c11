"""Fetching images for clients that are not trusted: from named hosts, at public addresses."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

import pytest

from forebay.base.errors import Overloaded
from forebay.server.images.fetching import Fetcher, is_public
from forebay.server.images.sources import Unreadable

pytestmark = pytest.mark.usefixtures("patience")

HOST = "images.test"
CERTIFICATE = Path(__file__).parent / "images_test.pem"  # of this host, by itself, with its key; for 100 years
OK = b"HTTP/1.1 200 OK\r\n"
WHOLE = OK + b"Content-Length: 5\r\n\r\nabcde"
INTERIM = b"HTTP/1.1 103 Early Hints\r\nLink: </a>\r\n\r\n"
Answer = Callable[[asyncio.StreamWriter], Awaitable[None]]


class Host:
    """A server on loopback that answers each request in one way, and a look-up that finds it."""

    def __init__(self, answer: Answer) -> None:
        self.answer = answer
        self.requests: list[bytes] = []
        self.looked_up: list[str] = []
        self.address = "127.0.0.1"

    async def resolve(self, host: str, port: int) -> Sequence[str]:
        self.looked_up.append(host)
        return [self.address]

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.requests.append(await reader.readuntil(b"\r\n\r\n"))
        try:
            await self.answer(writer)
        except ConnectionError:
            pass
        finally:
            writer.close()

    async def fetch(
        self,
        *,
        path: str = "/a.png",
        max_bytes: int = 100,
        timeout_s: float = 30.0,
        name: str = HOST,
        tls: ssl.SSLContext | None = None,
    ) -> bytes:
        async with await asyncio.start_server(self.serve, "127.0.0.1", 0, ssl=tls) as server:
            port = server.sockets[0].getsockname()[1]
            domains = [f"{name.upper()}:{port}"]
            fetcher = Fetcher(
                domains, max_bytes, resolve=self.resolve, is_allowed="127.0.0.1".__eq__, timeout_s=timeout_s
            )
            return await fetcher.fetch(f"{'https' if tls else 'http'}://{name}:{port}{path}")


def says(*pieces: bytes) -> Answer:
    async def answer(writer: asyncio.StreamWriter) -> None:
        for piece in pieces:
            writer.write(piece)
            await writer.drain()

    return answer


@pytest.mark.parametrize(
    "pieces",
    [
        (OK, b"Content-Length: 5\r\n\r\nab", b"cde"),
        (OK, b"Transfer-Encoding: chunked\r\n\r\n2\r\nab\r\n", b"3\r\ncde\r\n0\r\n\r\n"),
        (OK, b"\r\nabcde"),  # to the end of the connection
        (b"HTTP/1.0 200 OK\r\nContent-Type: image/png\r\n\r\n", b"abcde"),
    ],
)
def test_fetch_returns_the_content(pieces: tuple[bytes, ...]) -> None:
    host = Host(says(*pieces))
    assert asyncio.run(host.fetch(path="/a/b.png?x=1#part")) == b"abcde"
    assert host.requests[0].startswith(b"GET /a/b.png?x=1 HTTP/1.1\r\nHost: images.test:")
    assert host.looked_up == [HOST]  # once: the address that was looked at is the one that is asked


@pytest.fixture
def with_certificate() -> ssl.SSLContext:
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(CERTIFICATE)
    return context


def test_fetch_https_host_with_a_trusted_certificate_is_read(
    with_certificate: ssl.SSLContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SSL_CERT_FILE", str(CERTIFICATE))
    host = Host(says(OK, b"Content-Length: 5\r\n\r\nabcde"))
    assert asyncio.run(host.fetch(tls=with_certificate)) == b"abcde"


@pytest.mark.parametrize(("name", "trusted"), [("images.test", False), ("other.test", True)])
def test_fetch_https_host_without_a_certificate_of_its_own_is_refused(
    name: str, trusted: bool, with_certificate: ssl.SSLContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    if trusted:
        monkeypatch.setenv("SSL_CERT_FILE", str(CERTIFICATE))
    host = Host(says(OK, b"Content-Length: 5\r\n\r\nabcde"))
    with pytest.raises(Unreadable, match=rf"cannot be fetched from {name} .*CERTIFICATE_VERIFY_FAILED"):
        asyncio.run(host.fetch(name=name, tls=with_certificate))
    assert not host.requests


@pytest.mark.parametrize(
    ("pieces", "why"),
    [
        ((b"HTTP/1.1 302 Found\r\nLocation: http://127.0.0.1/\r\n\r\n",), "redirect .302., which is not followed"),
        ((b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: x\r\nConnection: upgrade\r\n\r\nabc",), "with status 101"),
        ((b"HTTP/1.1 101 Switching Protocols\r\n\r\nabc",), "with status 101"),
        ((INTERIM,), "ended after 0 bytes"),
        ((INTERIM * 3, b"HTTP/1.1 404 Not Found\r\n\r\n"), "with status 404"),
        ((b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n",), "with status 404"),
        ((b"HTTP/1.1 206 Partial Content\r\nContent-Length: 2\r\n\r\nab",), "with status 206"),
        ((OK, b"Content-Length: 101\r\n\r\n"), "has 101 bytes or more; at most 100 are read"),
        ((OK, b"\r\n", b"x" * 101), "has 101 bytes or more; at most 100 are read"),
        ((OK, b"Transfer-Encoding: chunked\r\n\r\n", b"7f\r\n" + b"x" * 127), "at most 100 are read"),
        ((OK, b"Content-Length: 5\r\n\r\nabc"), "ended after 3 bytes"),
        ((OK,), "ended after 0 bytes"),
        ((), "ended after 0 bytes"),
        ((b"SSH-2.0-OpenSSH\r\n\r\n",), "cannot be fetched"),
        ((OK, b"X: " + b"y" * (1 << 20)), "cannot be fetched|at most 100 are read"),
    ],
)
def test_fetch_answer_that_is_no_image_is_refused(pieces: tuple[bytes, ...], why: str) -> None:
    with pytest.raises(Unreadable, match=why):
        asyncio.run(Host(says(*pieces)).fetch())


@pytest.mark.parametrize(
    "pieces",
    [
        (b"HTTP/1.1 100 Continue\r\n\r\n", WHOLE),
        (b"HTTP/1.1 100 Continue\r\n\r\n" + INTERIM * 3 + WHOLE,),
        (b"HTTP/1.1 102 Processing\r\n\r\n", INTERIM, WHOLE[:20], WHOLE[20:]),
        (WHOLE + WHOLE,),  # what no request asked for
        (WHOLE + b"SSH",),
        (b"HTTP/1.1 200 OK\r\nUpgrade: h2c\r\nConnection: upgrade\r\nContent-Length: 5\r\n\r\nabcde",),
    ],
)
def test_fetch_content_behind_interim_answers_is_read_and_what_follows_is_not(pieces: tuple[bytes, ...]) -> None:
    assert asyncio.run(Host(says(*pieces)).fetch()) == b"abcde"


@pytest.mark.parametrize("status", [100, 101, 199, 204, 304, 503, 99, 999])
@pytest.mark.parametrize(
    "rest",
    [b"\r\n", b"\r\nabc", b"Content-Length: 3\r\n\r\nabc", b"Upgrade: websocket\r\nConnection: upgrade\r\n\r\nabc"],
    ids=["nothing", "content", "length", "upgrade"],
)
def test_fetch_answer_of_each_other_status_is_refused_in_words(status: int, rest: bytes) -> None:
    with pytest.raises(Unreadable, match=f"status {status}|redirect .{status}.|ended after 0 bytes|cannot be fetched"):
        asyncio.run(Host(says(b"HTTP/1.1 %d Word\r\n%s" % (status, rest))).fetch())


def test_fetch_host_that_sends_a_byte_now_and_then_is_left() -> None:
    async def drip(writer: asyncio.StreamWriter) -> None:
        writer.write(OK + b"Content-Length: 90\r\n\r\n")
        while not writer.is_closing():
            writer.write(b"x")
            await writer.drain()
            await asyncio.sleep(0.05)

    with pytest.raises(Unreadable, match=r"did not arrive from images\.test within 0\.2 s"):
        asyncio.run(Host(drip).fetch(timeout_s=0.2))


def test_fetch_look_up_that_takes_too_long_is_left() -> None:
    async def never(host: str, port: int) -> Sequence[str]:
        await asyncio.sleep(3600)
        return []

    with pytest.raises(Unreadable, match="did not arrive"):
        asyncio.run(Fetcher([HOST], 100, resolve=never, timeout_s=0.05).fetch(f"http://{HOST}/"))


def test_fetch_stops_when_there_is_no_room() -> None:
    def full(count: int) -> None:
        raise Overloaded("no room")

    async def fetch() -> None:
        host = Host(says(OK, b"Content-Length: 5\r\n\r\nabcde"))
        async with await asyncio.start_server(host.serve, "127.0.0.1", 0) as server:
            named = f"{HOST}:{server.sockets[0].getsockname()[1]}"
            await Fetcher([named], 100, resolve=host.resolve, is_allowed=bool).fetch(f"http://{named}/", full)

    with pytest.raises(Overloaded):
        asyncio.run(fetch())


@pytest.mark.parametrize("addresses", [["127.0.0.1"], ["8.8.8.8", "10.0.0.1"], ["fe80::1%eth0"], []])
def test_fetch_host_with_an_address_that_is_not_public_is_refused(addresses: list[str]) -> None:
    async def resolve(host: str, port: int) -> Sequence[str]:
        return addresses

    with pytest.raises(Unreadable, match="has an address that is not public:" if addresses else "has no address:"):
        asyncio.run(Fetcher([HOST], 100, resolve=resolve).fetch(f"https://{HOST}/a.png"))


@pytest.mark.parametrize(
    ("url", "why"),
    [
        ("file:///etc/passwd", "only data:, http: and https: URLs are read"),
        ("ftp://images.test/a", "only data:"),
        ("/etc/passwd", "only data:"),
        ("http:///a", "only data:"),
        (f"http://{HOST}@evil.test/", "only data:"),
        ("http://user@images.test/a", "only data:"),
        ("http://evil.test/a", "which this server does not fetch from"),
        (f"http://evil.test/{HOST}", "does not fetch from"),
        (f"http://{HOST}.evil.test/", "does not fetch from"),
        (f"http://{HOST}:8080/", "does not fetch from"),
        ("http://127.0.0.1/a", "does not fetch from"),
        ("http://[::1]/a", "does not fetch from"),
        ("http://2130706433/", "does not fetch from"),
        (f"http://{HOST}:99999/", "has a URL that is none"),
        (f"http://[{HOST}/", "has a URL that is none"),
        (f"http://{HOST}/a b", "with a space in it"),
        (f"http://{HOST}/\u00e9", "only data:"),
        (f"http://{HOST}/" + "a" * 9000, "characters; at most 8192 are read"),
    ],
)
def test_fetch_url_that_is_not_allowed_is_refused_before_a_look_up(url: str, why: str) -> None:
    async def resolve(host: str, port: int) -> Sequence[str]:
        raise AssertionError(host)

    with pytest.raises(Unreadable, match=why):
        asyncio.run(Fetcher([HOST], 100, resolve=resolve).fetch(url))


@pytest.mark.parametrize("address", ["127.0.0.1", "10.1.2.3", "172.16.0.1", "192.168.1.1", "169.254.169.254"])
def test_is_public_private_address_and_those_that_embed_it_are_not(address: str) -> None:
    high, low = (int(part) for part in address.split(".")[:2]), (int(part) for part in address.split(".")[2:])
    words = ":".join("".join(f"{part:02x}" for part in parts) for parts in (high, low))
    for found in (address, f"::ffff:{address}", f"2002:{words}::1", f"64:ff9b::{address}"):
        assert not is_public(found), found


@pytest.mark.parametrize(
    "address", ["::1", "::", "0.0.0.1", "224.0.0.1", "ff02::1", "fe80::1%eth0", "fd00::1", "100.64.0.1", "240.0.0.1"]
)
def test_is_public_special_address_is_not(address: str) -> None:
    assert not is_public(address)


@pytest.mark.parametrize("address", ["8.8.8.8", "2606:4700::1", "::ffff:8.8.8.8", "64:ff9b::8.8.8.8"])
def test_is_public_address_of_the_internet_is(address: str) -> None:
    assert is_public(address)
