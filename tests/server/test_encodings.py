"""Bodies in a content coding: the same answer as for the body itself, and a bomb that costs no memory."""

from __future__ import annotations

import asyncio
import gzip
import json
import threading
import tracemalloc
import zlib
from collections.abc import Callable

import pytest

from forebay.base.errors import InvalidRequest, Overloaded, PayloadTooLarge
from forebay.http import encodings
from forebay.http.bodies import INLINE_BYTES, ROOM_BYTES, STEP_BYTES, Bodies
from forebay.http.encodings import MAX_FRAMES, PIECE_BYTES, coding_of, decoded
from forebay.http.errors import HttpError
from forebay.http.lifecycle import Watch
from forebay.http.preparation import Client, Preparation
from forebay.http.workers import Workers
from tests.server.conftest import Running
from tests.server.process_status import MIB
from tests.server.test_bodies import received

LIMIT = 4 << 20
BODY = json.dumps({"prompt": "x" * 100, "max_tokens": 2, "seed": 1}).encode()


def raw_deflate(content: bytes) -> bytes:
    packer = zlib.compressobj(wbits=-zlib.MAX_WBITS)
    return packer.compress(content) + packer.flush()


def zstd(content: bytes) -> bytes:
    module = encodings._zstd()
    if module is None:
        pytest.skip("neither compression.zstd nor backports-zstd is installed: pip install 'forebay[zstd]'")
    packed: bytes = module.compress(content)
    return packed


PACKERS: dict[str, tuple[str, Callable[[bytes], bytes]]] = {
    "gzip": ("gzip", gzip.compress),
    "x-gzip": ("X-Gzip", gzip.compress),
    "two members": ("gzip", lambda content: gzip.compress(content[:7]) + gzip.compress(content[7:])),
    "deflate": ("deflate", zlib.compress),
    "deflate without a header": ("deflate", raw_deflate),
    "zstd": ("zstd", zstd),
    "two frames": ("identity, zstd", lambda content: zstd(content[:7]) + zstd(content[7:])),
}
packed_in = pytest.mark.parametrize(("coding", "pack"), PACKERS.values(), ids=PACKERS)


def scope_of(coding: str) -> dict[str, object]:
    headers = [(b"content-type", b"application/json"), (b"content-encoding", coding.encode())]
    return {"path": "/v1/completions", "headers": headers}


def read(coding: str, sent: bytes, *, limit: int = LIMIT, tenants: int = 1) -> bytes:
    """Read a body as a server does, from `tenants` clients at once; return the first one's."""

    async def main() -> bytes:
        bodies = Bodies(limit, Workers(Preparation({}).lane("test", 1)), {})

        async def one() -> bytes:
            client, scope = Client(Watch(received(sent))), scope_of(coding)
            async with bodies.content(scope, client) as content, bodies.decoded(scope, client, content) as plain:
                return plain

        first, *others = await asyncio.gather(*(one() for _ in range(tenants)), return_exceptions=True)
        assert bodies._room.num_inside == 0
        if failure := next((each for each in (first, *others) if isinstance(each, BaseException)), None):
            raise failure
        assert isinstance(first, bytes)
        return first

    return asyncio.run(main())


@packed_in
@pytest.mark.parametrize("num_bytes", [0, 1, PIECE_BYTES, INLINE_BYTES + 1, STEP_BYTES + PIECE_BYTES + 1, LIMIT])
def test_decoded_body_of_any_length_equals_the_body(
    coding: str, pack: Callable[[bytes], bytes], num_bytes: int
) -> None:
    content = (bytes(range(256)) * (num_bytes // 256 + 1))[:num_bytes]
    assert read(coding, pack(content)) == content


@packed_in
def test_server_compressed_request_gets_the_answer_of_a_plain_one(
    shared: Running, coding: str, pack: Callable[[bytes], bytes]
) -> None:
    kind = {"content-type": "application/json"}
    with shared.client() as http:
        plain, packed = (
            http.post("/v1/completions", content=content, headers={**kind, **headers}).json()
            for content, headers in ((BODY, {}), (pack(BODY), {"content-encoding": coding}))
        )
    assert packed["choices"] == plain["choices"]
    assert packed["usage"] == plain["usage"]


@pytest.mark.quick(4)
@packed_in
@pytest.mark.parametrize("num_bytes", [LIMIT + 1, 16 * LIMIT])
def test_body_that_decodes_to_more_than_the_limit_is_refused_before_it_takes_memory(
    coding: str, pack: Callable[[bytes], bytes], num_bytes: int
) -> None:
    bomb = pack(bytes(num_bytes))
    tracemalloc.start()
    try:
        with pytest.raises(PayloadTooLarge, match=f"at most {LIMIT} are read: raise --max-body-bytes"):
            read(coding, bomb)
        assert tracemalloc.get_traced_memory()[1] < LIMIT + len(bomb) * 2 + 3 * MIB
    finally:
        tracemalloc.stop()


@packed_in
def test_body_that_is_cut_off_or_has_an_error_is_a_typed_400(coding: str, pack: Callable[[bytes], bytes]) -> None:
    sent = pack(bytes(range(256)) * 300)
    for broken in (sent[:-1], sent[:10], b"", BODY, sent + b"junk", b"\xff" * 4 + sent[4:]):
        with pytest.raises(InvalidRequest, match=r"content-encoding (gzip|deflate|zstd): ") as caught:
            read(coding, broken)
        assert caught.value.code == "invalid_content_encoding"


@pytest.mark.parametrize(("coding", "pack"), [PACKERS["gzip"], PACKERS["zstd"]], ids=["gzip", "zstd"])
def test_body_of_very_many_empty_frames_is_refused(coding: str, pack: Callable[[bytes], bytes]) -> None:
    assert b"".join(decoded(coding, pack(b"") * MAX_FRAMES)) == b""
    with pytest.raises(InvalidRequest, match=f"more than {MAX_FRAMES} frames"):
        list(decoded(coding, pack(b"") * (MAX_FRAMES + 1)))


@pytest.mark.parametrize("coding", ["br", "gzip, gzip", "gzip, br", "compress", "gzip;q=1", "\xff"])
def test_other_encodings_are_refused_by_their_names(shared: Running, coding: str) -> None:
    headers = {b"content-type": b"application/json", b"content-encoding": coding.encode("latin-1")}
    with shared.client() as http:
        answer = http.post("/v1/completions", content=BODY, headers=headers)
    error = answer.json()["error"]
    assert (answer.status_code, error["code"]) == (415, "unsupported_content_encoding")
    assert "gzip, deflate" in error["message"]
    assert coding.encode("latin-1").decode("latin-1").encode("ascii", "backslashreplace").decode() in error["message"]


def test_zstd_without_its_package_is_refused_with_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(encodings, "_zstd", lambda: None)
    with pytest.raises(HttpError, match=r"pip install 'forebay\[zstd\]'\): send one of gzip, deflate, or") as caught:
        coding_of([(b"content-encoding", b"zstd")])
    assert caught.value.status == 415


def test_compressed_bodies_take_room_before_they_are_decoded() -> None:
    """Each of these is small as it was sent. Together they would have more than all large bodies may."""
    sent = gzip.compress(bytes(LIMIT))
    with pytest.raises(Overloaded, match="large bodies"):
        read("gzip", sent, tenants=2 * ROOM_BYTES // LIMIT)


def test_large_encoded_bodies_are_decoded_beside_the_event_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    threads: dict[int, threading.Thread] = {}
    real = encodings._Inflater.decompress

    def decompress(self: encodings._Inflater, data: bytes, max_length: int) -> bytes:
        piece = real(self, data, max_length)
        threads[len(threads)] = threading.current_thread()
        return piece

    monkeypatch.setattr(encodings._Inflater, "decompress", decompress)
    read("gzip", gzip.compress(bytes(INLINE_BYTES)))
    assert {*threads.values()} == {threading.current_thread()}
    threads.clear()
    read("gzip", gzip.compress(bytes(LIMIT)))
    inline = [thread for thread in threads.values() if thread is threading.current_thread()]
    assert len(inline) <= 2 < len(threads)


def test_error_of_the_codec_is_shown(shared: Running) -> None:
    headers = {"content-type": "application/json", "content-encoding": "gzip"}
    with shared.client() as http:
        answer = http.post("/v1/messages", content=BODY, headers=headers)
    assert answer.status_code == 400
    assert answer.json()["error"]["details"]["error_code"] == "invalid_content_encoding"
