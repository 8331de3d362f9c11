"""What is nearly HTTP, to the real server: it is answered or the connection ends, nothing is our fault, and everybody
else is served as before."""

from __future__ import annotations

import asyncio
import contextlib
import random
import re
from collections.abc import Iterator

import pytest

from tests.deadlines import HANGS_S
from tests.fuzz.mutants import MAX_SHOWN, mutated, pieces, seeds
from tests.server.conftest import Running, start
from tests.server.fake_engine import FakeEngine
from tests.text.tiny_tokenizer import tiny_tokenizer

BODY = b'{"prompt": "hello", "max_tokens": 3, "seed": 7}'
HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
REQUESTS = [
    b"%bContent-Length: %d\r\n\r\n%b" % (HEAD, len(BODY), BODY),
    b"%bTransfer-Encoding: chunked\r\n\r\n%x\r\n%b\r\n0\r\nX-Api-Key: no\r\n\r\n" % (HEAD, len(BODY), BODY),
    b"%bContent-Length: %d\r\nExpect: 100-continue\r\n\r\n%b" % (HEAD, len(BODY), BODY),
    b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\nGET /v1/models HTTP/1.1\r\nHost: localhost\r\n\r\n",
    b"GET /v1/models/%2e%2e HTTP/1.0\r\nHost: 127.0.0.1\r\nConnection: keep-alive\r\nCookie: a=b\r\n\r\n",
    b"OPTIONS * HTTP/1.1\r\nHost: 127.0.0.1\r\nOrigin: http://evil.example\r\nUpgrade: h2c\r\n\r\n",
    b"HEAD /metrics HTTP/1.1\r\nHost: [::1]\r\nAuthorization: Bearer \xc3\xa9\r\nX-Request-Id: a\r\n\r\n",
]
STATUS = re.compile(rb"HTTP/1\.1 (\d{3})")
AT_ONCE = 60
FAULTS = range(500, 503)  # 503 has a reason, and none of the others may be


async def answer(port: int, parts: list[bytes]) -> bytes:
    """All that comes back until the server ends the connection, which its own deadlines see to."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    got = b""
    async with asyncio.timeout(HANGS_S):
        with contextlib.suppress(ConnectionError):
            for part in parts:
                writer.write(part)
                await writer.drain()
            while data := await reader.read(1 << 16):
                got += data
    writer.close()
    return got


@pytest.fixture(scope="module")
def impatient() -> Iterator[Running]:
    limits = {"header_timeout_s": 0.5, "body_timeout_s": 0.5, "keep_alive_s": 1.0}
    server = start(tiny_tokenizer(), FakeEngine, **limits)
    yield server
    server.close()


@pytest.mark.parametrize("seed", seeds(1, 30))
async def test_d7_bytes_that_are_nearly_http_are_answered_or_end_their_connection(
    impatient: Running, seed: int
) -> None:
    rng = random.Random(seed)
    with impatient.client() as client:
        before = client.post("/v1/completions", content=BODY, headers={"content-type": "application/json"}).json()
    sent = [mutated(rng, REQUESTS) for _ in range(AT_ONCE)]
    answers = await asyncio.gather(*(answer(impatient.port, pieces(rng, data)) for data in sent))
    for data, got in zip(sent, answers, strict=True):
        faults = [int(status) for status in STATUS.findall(got) if int(status) in FAULTS]
        assert not faults, f"{data!r}"[:MAX_SHOWN]
    impatient.until(lambda: not impatient.engine.running)
    with impatient.client() as client:
        after = client.post("/v1/completions", content=BODY, headers={"content-type": "application/json"}).json()
        assert client.get("/debug/state").json()["server"]["num_inside"] == 0
    assert after["choices"] == before["choices"]
    assert not impatient.failures
