"""Each bound of images at its value: the last that is accepted, and the first that is refused."""

from __future__ import annotations

import asyncio
import contextlib
from base64 import b64encode
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from PIL import Image

from forebay.base.confined import Late, NoAnswer
from forebay.base.errors import InvalidRequest, Overloaded
from forebay.config.media import MediaOptions
from forebay.http.preparation import Preparation, staying_client
from forebay.requests.pictures import digest_of
from forebay.server.images import cutting, reader, worker
from forebay.server.images.cutting import _check_size, _orientation, _rgb
from forebay.server.images.decoding import CutImage, ImageDecoder
from forebay.server.images.expansion import Expansion
from forebay.server.images.fetching import Fetcher
from forebay.server.images.frames import Decode, Decoded, Refused, decode_answer, decode_question, encode
from forebay.server.images.reader import Asked, ImageReader
from forebay.server.images.sources import Unreadable, check_bytes, check_data
from forebay.server.protocol.images import Source
from forebay.text.tokenizer import Tokenizer
from tests.server.images.smolvlm import TILING, noise, write_tokenizer

MIB = 1024**2
HOST = "images.test"


def why(url: str, domains: Sequence[str] = (), resolve: Any = None) -> str:
    """The refusal of a URL."""
    with pytest.raises(Unreadable) as refused:
        asyncio.run(Fetcher(domains, 100, resolve=resolve).fetch(url))
    return str(refused.value)


def test_url_has_at_most_8192_characters() -> None:
    longest = f"http://{HOST}/".ljust(8192, "a")
    assert "which this server does not fetch from" in why(longest)
    assert why(longest + "a") == "has a URL of 8193 characters; at most 8192 are read"


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("file:///" + "a" * 100, "is named by '{}':"),
        ("http://[" + "a" * 100, "): '{}'"),
        ("http://" + "a" * 100, "is at '{}', which"),
    ],
)
def test_refusal_shows_80_characters_of_a_url(url: str, shown: str) -> None:
    told = url.removeprefix("http://") if shown.startswith("is at") else url
    assert shown.format(told[:80]) in why(url)


def failing(error: Exception) -> Any:
    async def resolve(host: str, port: int) -> Sequence[str]:
        raise error

    return resolve


def test_fetch_takes_5_seconds_at_most_unless_it_is_made_with_another_time() -> None:
    said = why(f"http://{HOST}/", [HOST], failing(TimeoutError()))
    assert said == f"did not arrive from {HOST} within 5 s: send it as data"


def test_fetch_refusal_shows_80_characters_of_an_error() -> None:
    said = why(f"http://{HOST}/", [HOST], failing(OSError("x" * 200)))
    assert said == f"cannot be fetched from {HOST} ({'x' * 80}): send it as a data URL"


@pytest.mark.parametrize(
    ("url", "domain", "port"),
    [
        ("http://images.test/", "images.test", 80),
        ("https://images.test/", "images.test", 443),
        ("http://images.test:80/", "images.test", 80),
        ("https://images.test:443/", "IMAGES.test.", 443),
        ("https://images.test.:443/", "images.test", 443),
        ("http://images.test:443/", "images.test:443", 443),
        ("https://images.test:80/", "images.test:80", 80),
        ("https://images.test:8443/", "images.test:8443", 8443),
    ],
)
def test_fetch_asks_the_port_of_the_scheme_unless_the_url_names_another(url: str, domain: str, port: int) -> None:
    asked = []

    async def resolve(host: str, port: int) -> Sequence[str]:
        asked.append((host, port))
        return []

    assert "which has no address" in why(url, [domain], resolve)
    assert asked == [(HOST, port)]


@pytest.mark.parametrize(
    ("url", "domain"),
    [("http://images.test:443/", HOST), ("https://images.test:80/", HOST), ("http://images.test/", f"{HOST}:80")],
)
def test_fetch_another_port_than_the_scheme_s_own_is_part_of_the_host(url: str, domain: str) -> None:
    assert "which this server does not fetch from" in why(url, [domain])


class Host:
    """A server on loopback that sends one answer and reads until the connection ends."""

    def __init__(self, answer: bytes) -> None:
        self.answer, self.request = answer, b""
        self.ended = asyncio.Event()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.request = await reader.readuntil(b"\r\n\r\n")
        writer.write(self.answer)
        if b"Content-Length" not in self.answer:
            writer.write_eof()
        with contextlib.suppress(ConnectionError):
            await reader.read()
        self.ended.set()
        writer.close()

    async def fetch(self, path: str, max_bytes: int, received: list[int]) -> bytes:
        async def resolve(host: str, port: int) -> Sequence[str]:
            return ["127.0.0.1"]

        async with await asyncio.start_server(self.serve, "127.0.0.1", 0) as server:
            self.named = f"{HOST}:{server.sockets[0].getsockname()[1]}"
            fetcher = Fetcher([self.named], max_bytes, resolve=resolve, is_allowed=bool)
            try:
                return await fetcher.fetch(f"http://{self.named}{path}", received.append)
            finally:
                await self.ended.wait()  # the connection, which the host keeps open, ends with the fetch


@pytest.mark.parametrize(
    ("path", "target"), [("", "/"), ("/a/b.png", "/a/b.png"), ("?x=1", "/?x=1"), ("/a?b?#c", "/a?b?")]
)
def test_fetch_sends_one_request_and_counts_each_byte_of_the_answer(path: str, target: str) -> None:
    async def fetched() -> None:
        received: list[int] = []
        host = Host(b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nabcde")
        assert await host.fetch(path, 5, received) == b"abcde"
        assert sum(received) == len(host.answer)
        assert host.request.decode().split("\r\n") == [
            f"GET {target} HTTP/1.1",
            f"Host: {host.named}",
            "User-Agent: forebay",
            "Accept: image/*",
            "Accept-Encoding: identity",
            "Connection: close",
            "",
            "",
        ]

    asyncio.run(fetched())


@pytest.mark.parametrize("over", [0, 1])
def test_fetch_head_of_an_answer_takes_64_kibibytes_beside_the_content(over: int) -> None:
    """Of an answer that does not announce its length."""
    head = b"HTTP/1.1 200 OK\r\nX: "
    answer = head + b"y" * (64 * 1024 + over - len(head) - 4) + b"\r\n\r\n" + b"z" * 100

    async def fetch() -> bytes:
        return await Host(answer).fetch("/", 100, [])

    if not over:
        assert asyncio.run(fetch()) == b"z" * 100
        return
    with pytest.raises(Unreadable, match="has 101 bytes or more; at most 100 are read"):
        asyncio.run(fetch())


@pytest.mark.parametrize(
    ("status", "said"),
    [
        (299, "with status 299"),
        (300, "with a redirect .300."),
        (399, "with a redirect .399."),
        (400, "with status 400"),
    ],
)
def test_fetch_statuses_from_300_to_399_are_redirects(status: int, said: str) -> None:
    async def fetch() -> bytes:
        return await Host(b"HTTP/1.1 %d Word\r\nContent-Length: 0\r\n\r\n" % status).fetch("/", 100, [])

    with pytest.raises(Unreadable, match=said):
        asyncio.run(fetch())


def test_fetch_content_length_with_many_zeros_is_read() -> None:
    async def fetch() -> bytes:
        return await Host(b"HTTP/1.1 200 OK\r\nContent-Length: %s5\r\n\r\nabcde" % (b"0" * 5000)).fetch("/", 5, [])

    assert asyncio.run(fetch()) == b"abcde"


@pytest.mark.parametrize("what", ["spaces", "lines", "padding", "escapes"])
@pytest.mark.parametrize("size", [298, 299, 300])
def test_data_url_is_refused_for_its_length_before_it_is_decoded(size: int, what: str) -> None:
    """A file of the most bytes is accepted, however it is written."""
    plain = b64encode(bytes(size)).decode()
    text = {
        "spaces": plain + " " * 40,
        "lines": "\r\n".join(plain[at : at + 4] for at in range(0, len(plain), 4)),
        "padding": plain,
        "escapes": plain.replace("=", "%3D") + "%0D%0A" * 9,
    }[what]
    head = "data:;base64,"
    assert check_data(head + text, size) == len(head)
    with pytest.raises(Unreadable, match=f"at most {size - 1} are read"):
        check_data(head + text, size - 1)


def test_data_url_has_its_comma_within_256_characters() -> None:
    for pad, accepted in ((256 - len("data:;base64,"), True), (257 - len("data:;base64,"), False)):
        url = f"data:{'a' * pad};base64,YWJj"
        if accepted:
            assert check_data(url, 3) == 256
        else:
            with pytest.raises(Unreadable, match="has a data URL that is not"):
                check_data(url, 3)


def test_bytes_of_a_file_are_refused_above_the_most() -> None:
    check_bytes(5, 5)
    with pytest.raises(Unreadable, match="has 6 bytes or more; at most 5 are read"):
        check_bytes(6, 5)


def test_image_has_at_most_64_million_pixels() -> None:
    _check_size((8000, 8000))
    with pytest.raises(Unreadable, match="has 8001 x 8000 = 64008000 pixels; at most 64000000 are decoded"):
        _check_size((8001, 8000))


def test_broken_image_s_error_is_cut_to_120_characters(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(content: bytes) -> Image.Image:
        raise ValueError("x" * 200)

    monkeypatch.setattr(cutting, "_decoded", broken)
    with pytest.raises(Unreadable) as refused:
        cutting.tiles_of(b"", TILING, splits=True)
    assert str(refused.value) == f"cannot be decoded (ValueError: {'x' * 120}): send a whole file"


@pytest.mark.parametrize(
    ("pixels", "rows"),
    [(4 << 20, [7]), (30, [3, 3, 1]), (29, [2, 2, 2, 1]), (1, [1] * 7)],
)
def test_image_is_converted_in_bands_of_at_most_so_many_pixels(
    pixels: int, rows: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """4 Mi pixels, unless a row alone has more."""
    if pixels != cutting.BAND_PIXELS:
        assert cutting.BAND_PIXELS == 4 * MIB
        monkeypatch.setattr(cutting, "BAND_PIXELS", pixels)
    boxes = []
    crop = Image.Image.crop

    def noted(image: Image.Image, box: tuple[int, int, int, int]) -> Image.Image:
        boxes.append(box)
        return crop(image, box)

    monkeypatch.setattr(Image.Image, "crop", noted)
    grey = Image.fromarray(noise(7, 10)).convert("L")
    assert _rgb(grey).tobytes() == grey.convert("RGB").tobytes()
    tops = [sum(rows[:at]) for at in range(len(rows))]
    assert boxes == [(0, top, 10, top + count) for top, count in zip(tops, rows, strict=True)]


def test_image_whose_metadata_cannot_be_read_is_upright() -> None:
    def broken() -> dict[int, int]:
        raise SyntaxError("no TIFF")

    assert _orientation(SimpleNamespace(getexif=broken)) == 1  # type: ignore[arg-type]
    assert _orientation(SimpleNamespace(getexif=lambda: {0x0112: "x"})) == 1  # type: ignore[arg-type]
    assert _orientation(SimpleNamespace(getexif=dict)) == 1  # type: ignore[arg-type]


# Decoding.


class FakeProcess:
    """A process that answers in one way, and keeps what it was asked."""

    def __init__(self, answer: bytes | Exception) -> None:
        self.answer = answer
        self.asked: list[tuple[bytes, float]] = []

    @contextlib.contextmanager
    def one(self) -> Iterator[FakeProcess]:
        yield self

    def exchange(self, question: bytes, timeout_s: float) -> bytes:
        self.asked.append((question, timeout_s))
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer


def decoder(answer: bytes | Exception) -> tuple[ImageDecoder, FakeProcess]:
    found, process = ImageDecoder(Preparation({}), TILING, 100), FakeProcess(answer)
    found._processes = process  # type: ignore[assignment]
    return found, process


def test_decoder_process_gets_the_file_and_60_seconds_by_the_clock() -> None:
    tiles = Decoded((1, 1), ((2, 2),), bytes(12))
    found, process = decoder(encode(tiles))
    for file in (b"abc", "data:;base64,YWJj"):
        assert found._decode(file, splits=True) == (tiles, digest_of(tiles.pixels, tiles.grid, tiles.sizes))
        (question, timeout_s) = process.asked.pop()
        asked = decode_question(question)
        expected = (b"", file) if isinstance(file, str) else (file, "")
        assert (asked.file, asked.data_url) == expected
        assert (asked.max_bytes, asked.splits, asked.tiling, timeout_s) == (100, True, TILING, 60.0)


def test_decoder_data_url_that_is_too_long_reaches_no_process() -> None:
    found, process = decoder(b"")
    with pytest.raises(Unreadable, match="at most 100 are read"):
        found._decode(f"data:;base64,{b64encode(bytes(101)).decode()}", splits=True)
    assert not process.asked


@pytest.mark.parametrize(
    ("answer", "kind", "said"),
    [
        (Late("took 60 s"), Overloaded, "decoding an image took 60 s: the server is busy, try again later"),
        (NoAnswer("took 1 GiB"), Unreadable, "took 1 GiB while it was decoded: send a smaller one"),
        (encode(Refused("is none")), Unreadable, "is none"),
    ],
)
def test_decoder_without_an_answer_says_whether_the_server_is_busy_or_the_image_too_large(
    answer: bytes | Exception, kind: type[Exception], said: str
) -> None:
    with pytest.raises(kind) as refused:
        decoder(answer)[0]._decode(b"abc", splits=True)
    assert str(refused.value) == said


def test_decoder_has_two_threads_and_a_spare_one() -> None:
    lane = decoder(b"")[0]._workers._lane
    assert (lane.name, lane._width, lane.num_places) == ("image", 2, 3)


# Reading.


def test_expansion_keeps_the_tokens_of_128_cuts(tmp_path: Path) -> None:
    expansion = Expansion(Tokenizer.from_path(write_tokenizer(tmp_path)), TILING)
    assert expansion.of_tiles.cache_info().maxsize == 128


class OneFile(Fetcher):
    """Fetches the same file from everywhere, or fails."""

    def __init__(self, file: bytes | None) -> None:
        super().__init__((), 0)
        self.file = file

    async def fetch(self, url: str, on_bytes: Any = None) -> bytes:
        if self.file is None:
            raise Unreadable("is gone")
        on_bytes(len(self.file))
        return self.file


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer.from_path(write_tokenizer(tmp_path_factory.mktemp("tokenizer")))


def reading(tokenizer: Tokenizer, fetcher: Fetcher | None = None) -> ImageReader:
    return ImageReader(TILING, tokenizer, MediaOptions(), Preparation({}), fetcher=fetcher)


def asked(*urls: str) -> list[Asked]:
    return [Asked(source=Source(url), place=f"messages.{i}", splits=True) for i, url in enumerate(urls)]


def test_reader_images_have_512_mebibytes_and_64_downloads_at_a_time(tokenizer: Tokenizer) -> None:
    found = reading(tokenizer)
    assert reader.ROOM_BYTES == 512 * MIB
    assert (found._fetching.name, found._fetching._width) == ("download", 64)
    found.close()


def test_reader_room_is_taken_up_to_its_last_byte(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reader, "ROOM_BYTES", 10)
    found = reading(tokenizer)
    with found.admitted(staying_client(), asked("a" * 9)) as images:
        assert images.held == 9
        images.hold(1)
        assert (images.held, found._room.num_inside) == (10, 10)
        with pytest.raises(Overloaded, match="images of requests take the 10 bytes that all may have: try again later"):
            images.hold(1)
        assert (images.held, found._room.num_inside) == (10, 10)
    assert found._room.num_inside == 0
    found.close()


def test_reader_images_hold_their_urls_files_and_pixels_until_they_are_in_the_engine(tokenizer: Tokenizer) -> None:
    file, url, elsewhere = b"a file", "data:;base64,YWJj", f"http://{HOST}/"
    tiles = Decoded((1, 1), ((TILING.tile_size, TILING.tile_size),), bytes(300))
    decoded: list[str | bytes] = []

    async def decode(client: object, file: str | bytes, *, splits: bool) -> CutImage:
        decoded.append(file)
        return CutImage(tiles, b"digest")

    found = reading(tokenizer, OneFile(file))
    found._decoder.decode = decode  # type: ignore[method-assign]
    with found.admitted(staying_client(), asked(url, elsewhere)) as images:
        assert images.held == len(url) + len(elsewhere)
        made = asyncio.run(images.expanded([TILING.placeholder] * 2, ()))
        assert [picture.pixels for picture in made.pictures] == [tiles.pixels] * 2
        assert images.held == len(url) + len(elsewhere) + len(file) + 2 * 300
    assert decoded == [url, file]
    assert found._room.num_inside == 0
    assert not found._fetching._begun.total()
    found.close()


@pytest.mark.parametrize(("count", "name"), [(1, "the image"), (2, "image 1 of 2")])
def test_reader_download_that_fails_names_its_image_and_frees_its_turn(
    tokenizer: Tokenizer, count: int, name: str
) -> None:
    found = reading(tokenizer, OneFile(None))
    urls = [f"http://{HOST}/", "data:;base64,"][:count]
    with (
        pytest.raises(InvalidRequest) as refused,
        found.admitted(staying_client(), asked(*urls)) as images,
    ):
        asyncio.run(images.expanded([], ()))
    assert str(refused.value) == f"{name} is gone"
    assert (refused.value.param, refused.value.code) == ("messages.0", "invalid_image")
    assert not found._fetching._begun.total()
    found.close()


def test_reader_prompt_has_at_most_8_images_by_default(tokenizer: Tokenizer) -> None:
    found = reading(tokenizer)
    with found.admitted(staying_client(), asked(*["data:"] * 8)) as images:
        assert images.held == 8 * len("data:")
    with (
        pytest.raises(InvalidRequest, match="has 9 images; at most 8 are taken") as refused,
        found.admitted(staying_client(), asked(*["data:"] * 9)),
    ):
        pass
    assert refused.value.param == "messages.8"
    found.close()


def test_decoding_process_gives_freed_memory_back_behind_each_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    monkeypatch.setattr(worker, "_answer", lambda question: calls.append("answered") or Refused("is none"))
    monkeypatch.setattr(worker, "give_back_freed_memory", lambda: calls.append("freed"))
    question = encode(Decode(b"", "", 1, TILING, splits=False))
    assert decode_answer(worker.answer(question)) == Refused("is none")
    assert calls == ["answered", "freed"]


@pytest.mark.parametrize("error", [Unreadable("is none"), MemoryError()])
def test_decoding_process_answers_for_an_image_that_it_cannot_decode(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*args: object, **kwargs: object) -> None:
        raise error

    monkeypatch.setattr(worker, "tiles_of", fails)
    question = encode(Decode(b"file", "", 4, TILING, splits=False))
    why = str(error) or "needs more than 1024 MiB to be decoded: send a smaller one"
    assert decode_answer(worker.answer(question)) == Refused(why)
