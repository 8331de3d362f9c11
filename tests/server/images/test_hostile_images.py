"""Files that are no images, or not the images that they say: each is refused, and the next one is decoded."""

from __future__ import annotations

import asyncio
import os
import struct
import zlib
from base64 import b64encode, urlsafe_b64encode
from collections.abc import Iterator
from io import BytesIO
from urllib.parse import quote

import numpy as np
import pytest
from PIL import Image

from forebay.base.confined import ConfinedProcess
from forebay.http.preparation import Preparation, staying_client
from forebay.server.images.decoding import CutImage, ImageDecoder
from forebay.server.images.frames import LIMITS, Decode, encode
from forebay.server.images.headers import webp_size
from forebay.server.images.sources import Unreadable, data_of
from tests.deadlines import HANGS_S
from tests.server.images.smolvlm import TILE, TILING, file_of, noise

pytestmark = pytest.mark.usefixtures("patience")

SMALL = noise(24, 30)
FILES = {
    "png": file_of(SMALL),
    "jpeg": file_of(SMALL, "JPEG"),
    "progressive jpeg": file_of(SMALL, "JPEG", progressive=True),
    "webp": file_of(SMALL, "WEBP"),
    "lossless webp": file_of(noise(24, 30, 4), "WEBP", lossless=True),
    "gif": file_of(SMALL, "GIF"),
}
MAX_BYTES = 1 << 20


class Decoding:
    def __init__(self) -> None:
        self.decoder = ImageDecoder(Preparation({}), TILING, MAX_BYTES)

    def image(self, content: bytes) -> CutImage:
        return asyncio.run(self.decoder.decode(staying_client(), content, splits=True))

    def refusal(self, content: bytes) -> str:
        with pytest.raises(Unreadable) as refused:
            self.image(content)
        return str(refused.value)


@pytest.fixture(scope="module")
def decoding() -> Iterator[Decoding]:
    found = Decoding()
    yield found
    found.decoder.close()


def mutated(content: bytes, seed: int) -> bytes:
    """With some bytes others, some gone, some doubled."""
    rng = np.random.default_rng(seed)
    data = bytearray(content)
    for _ in range(int(rng.integers(1, 6))):
        at, size = (int(number) for number in rng.integers(0, [len(data), 16]))
        match int(rng.integers(0, 4)):
            case 0:
                data[at] = int(rng.integers(0, 256))
            case 1:
                del data[at : at + size]
            case 2:
                data[at:at] = data[at : at + size]
            case _:
                data[at : at + size] = rng.bytes(size)
        if not data:
            break
    return bytes(data)


def with_checksums(content: bytes) -> bytes:
    """A PNG as it is, but for the checksums of its chunks, without which no change gets far."""
    made, at = content[:8], 8
    while at + 8 <= len(content):
        size = struct.unpack_from(">I", content, at)[0] % (1 << 16)
        made += chunk(content[at + 4 : at + 8], content[at + 8 : at + 8 + size])
        at += 12 + size
    return made


def check_mutants(decoding: Decoding, kind: str, seeds: range) -> None:
    decoded = 0
    for seed in seeds:
        content = mutated(FILES[kind], seed)
        try:
            image = decoding.image(with_checksums(content) if kind == "png" else content)
        except Unreadable:
            continue
        decoded += 1
        assert len(image.tiles.pixels) == len(image.tiles.sizes) * TILE * TILE * 3, seed
    assert decoded < len(seeds)  # else they are mutated too little


@pytest.mark.parametrize("kind", FILES)
def test_decoder_mutated_files_are_decoded_or_refused(decoding: Decoding, kind: str) -> None:
    check_mutants(decoding, kind, range(20))


@pytest.mark.slow
@pytest.mark.parametrize("kind", FILES)
def test_decoder_many_mutated_files_are_decoded_or_refused(decoding: Decoding, kind: str) -> None:
    check_mutants(decoding, kind, range(20, 520))


@pytest.mark.parametrize("kind", FILES)
def test_decoder_truncated_files_are_refused(decoding: Decoding, kind: str) -> None:
    content = FILES[kind]
    for size in (0, 1, 8, 20, len(content) // 2, len(content) - 40):
        assert decoding.refusal(content[:size])
    decoding.image(content)


def chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def png(width: int, height: int, *chunks: bytes) -> bytes:
    head = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + head + b"".join(chunks) + chunk(b"IEND", b"")


def bombs() -> dict[str, bytes]:
    """Small files of very many pixels, by their headers."""
    zeros = zlib.compress(bytes(20 << 20), 9)
    jpeg, webp, gif = bytearray(FILES["jpeg"]), bytearray(FILES["lossless webp"]), bytearray(FILES["gif"])
    at = jpeg.index(b"\xff\xc0") + 5
    jpeg[at : at + 4] = struct.pack(">HH", 65000, 65000)
    at = webp.index(b"VP8L") + 9
    webp[at : at + 4] = struct.pack("<I", 0x3FFF | 0x3FFF << 14)
    extended = b"VP8X" + struct.pack("<I", 10) + bytes(4) + b"\xff\xff\x00\xff\xff\x00"
    wide = b"RIFF" + struct.pack("<I", len(extended) + len(webp) - 8) + b"WEBP" + extended + webp[12:]
    gif[6:10] = b"\xff\xff\xff\xff"
    return {
        "png": png(50_000, 50_000, chunk(b"IDAT", zeros)),
        "jpeg": bytes(jpeg),
        "webp": bytes(webp),
        "webp of frames": wide,
        "gif": bytes(gif),
    }


@pytest.mark.parametrize("kind", bombs())
def test_decoder_bomb_is_refused_by_its_header(decoding: Decoding, kind: str) -> None:
    content = bombs()[kind]
    assert len(content) < 25_000
    assert "at most 64000000 are decoded" in decoding.refusal(content)


def test_decoder_png_with_a_text_that_inflates_is_refused(decoding: Decoding) -> None:
    text = b"Comment\0\0" + zlib.compress(bytes(80 << 20), 9)
    pixels = chunk(b"IDAT", zlib.compress(bytes(4)))
    assert "cannot be decoded" in decoding.refusal(png(2, 1, chunk(b"zTXt", text), pixels))


def test_webp_size_is_that_of_the_decoder() -> None:
    for kind in ("webp", "lossless webp"):
        assert webp_size(FILES[kind]) == webp_size(FILES[kind][:30]) == (30, 24)
        assert webp_size(FILES[kind][:29]) is None
    assert webp_size(file_of(noise(5, 7, 4), "WEBP", exif=Image.Exif())) == (7, 5)
    assert webp_size(FILES["png"]) is webp_size(FILES["webp"][:20]) is None


def other_files() -> dict[str, bytes]:
    still = Image.fromarray(SMALL)
    found = {"pdf": b"%PDF-1.7\n", "svg": b"<svg xmlns='http://www.w3.org/2000/svg'/>", "text": b"no image"}
    for kind in ("BMP", "TIFF", "PPM", "ICO"):
        file = BytesIO()
        still.save(file, kind)
        found[kind] = file.getvalue()
    return found


@pytest.mark.parametrize("kind", other_files())
def test_decoder_another_type_of_file_is_refused(decoding: Decoding, kind: str) -> None:
    assert "is no PNG, JPEG, WebP or GIF file" in decoding.refusal(other_files()[kind])


def test_decoder_data_url_is_decoded_in_the_process(decoding: Decoding) -> None:
    url = "data:image/png;base64," + b64encode(FILES["png"]).decode()
    assert asyncio.run(decoding.decoder.decode(staying_client(), url, splits=True)) == decoding.image(FILES["png"])
    with pytest.raises(Unreadable, match="base64 is broken"):
        asyncio.run(decoding.decoder.decode(staying_client(), url + "!", splits=True))
    with pytest.raises(Unreadable, match=f"at most {MAX_BYTES} are read"):
        asyncio.run(decoding.decoder.decode(staying_client(), url + "A" * 2 * MAX_BYTES, splits=True))


def test_decoder_process_that_died_is_replaced(decoding: Decoding) -> None:
    decoding.image(FILES["png"])
    for process in list(decoding.decoder._processes.living):
        process.end()
    assert decoding.image(FILES["png"]) == decoding.image(FILES["png"])


def test_data_url_is_read() -> None:
    for head in ("data:image/png;base64,", "DATA:IMAGE/PNG;BASE64,", "data:;base64,"):
        assert data_of(head + b64encode(b"abcde").decode(), 5) == b"abcde"


@pytest.mark.parametrize("more", [b"", b"a", b"ab"])  # without, with two and with one character of padding
def test_data_url_in_lines_of_either_alphabet_and_escaped_is_read(more: bytes) -> None:
    content = bytes(range(256)) * 3 + more
    plain = b64encode(content).decode()
    lines = "\r\n".join(plain[i : i + 76] for i in range(0, len(plain), 76))
    spelled = (
        *(lines, lines.replace("\r", ""), f" {plain}\n", plain.rstrip("="), quote(plain, safe=""), quote(lines)),
        *(urlsafe_b64encode(content).decode(), urlsafe_b64encode(content).decode().rstrip("=")),
    )
    for head in (
        "data:image/png;base64,",
        "data:image/png;name=a.png;charset=utf-8;base64,",
        "data:image/png; base64,",
    ):
        for text in spelled:
            assert data_of(head + text, len(content)) == content, text[:80]
            with pytest.raises(Unreadable, match=f"at most {len(content) - 1} are read"):
                data_of(head + text, len(content) - 1)


@pytest.mark.parametrize(
    ("url", "why"),
    [
        ("data:image/png;base64", "has a data URL that is not"),
        ("data:" + "a" * 300 + ";base64,YWJj", "has a data URL that is not"),
        ("data:image/png,abc", "has a data URL that is not"),
        ("data:image/png;base64,a", "base64 is broken"),
        ("data:image/png;base64,YW!Jj", "base64 is broken"),
        ("data:image/png;base64,YW%ffJj", "base64 is broken"),
        ("data:image/png;base64,YWJj\nZGVm", "has 6 bytes or more; at most 5 are read"),
        ("data:image/png;base64,YWJ\u00e9", "base64 is broken"),
        ("data:image/png;base64,YWJjZGVm", "has 6 bytes or more; at most 5 are read"),
    ],
)
def test_data_url_that_is_wrong_is_refused(url: str, why: str) -> None:
    with pytest.raises(Unreadable, match=why):
        data_of(url, 5)


def test_limits_of_a_decoding_process_are_a_gibibyte_and_an_answer_of_128_mebibytes() -> None:
    assert (LIMITS.cpu_s, LIMITS.memory_bytes, LIMITS.answer_bytes) == (10.0, 1024 * 1024**2, 128 * 1024**2)


def test_decoding_process_runs_behind_the_others() -> None:
    process = ConfinedProcess("forebay.server.images.worker", LIMITS, "images")
    try:
        process.exchange(encode(Decode(b"no image", "", MAX_BYTES, TILING, splits=False)), HANGS_S)
        ours = os.getpriority(os.PRIO_PROCESS, 0)
        assert os.getpriority(os.PRIO_PROCESS, process._child.pid) == min(19, ours + 10)
    finally:
        process.end()
