"""Pixels and tokens of images are those of transformers' processors, to the byte and to the token."""

from __future__ import annotations

import struct
import zlib
from functools import cache
from io import BytesIO
from pathlib import Path

import msgspec
import numpy as np
import pytest
from PIL import Image, ImageOps
from transformers import Idefics3Processor, PreTrainedTokenizerFast
from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil
from transformers.models.smolvlm.image_processing_pil_smolvlm import SmolVLMImageProcessorPil
from transformers.models.smolvlm.processing_smolvlm import get_image_prompt_string

from forebay.requests.pictures import digest_of
from forebay.server.images.cutting import _decoded, tiles_of
from forebay.server.images.decoding import CutImage
from forebay.server.images.expansion import Expansion
from forebay.server.images.frames import Decoded
from forebay.server.images.tilings.idefics import AROUND, WHOLE, SquareTiles
from forebay.text.tokenizer import Tokenizer
from tests.server.images.smolvlm import (
    LONGEST,
    PER_TILE,
    PLACEHOLDER,
    TEMPLATE,
    TILE,
    TILING,
    file_of,
    noise,
    write_tokenizer,
)

ORIENTATION = 0x0112
PROCESSORS = {"smolvlm": SmolVLMImageProcessorPil, "idefics3": Idefics3ImageProcessorPil}
OF_SMOLVLM = msgspec.structs.replace(TILING, tile_size=512, longest_edge=2048)  # of SmolVLM-256M
SIZE = (TILE, TILE)
SIZES = ((1, 1), (1, 4000), (4000, 1), (511, 513), (513, 511), (32, 32), (33, 127), (200, 100))


@cache
def files() -> dict[str, bytes]:
    """Of every format and mode, from a few pixels; but for grey levels of 16 bits, which Pillow clips."""
    pixels = noise(41, 60, 4)
    solid = pixels[..., :3].copy()
    found = {
        "grey": file_of(solid, mode="L"),
        "black and white": file_of(solid, mode="1"),
        "palette": file_of(solid, mode="P"),
        "transparent palette": file_of(solid, mode="P", transparency=7),
        "transparent colour": file_of(solid, transparency=tuple(map(int, solid[0, 0]))),
        "alpha": file_of(pixels),
        "grey with alpha": file_of(pixels, mode="LA"),
        "jpeg": file_of(solid, "JPEG"),
        "grey jpeg": file_of(solid, "JPEG", mode="L"),
        "cmyk": file_of(solid, "JPEG", mode="CMYK"),
        "webp": file_of(solid, "WEBP"),
        "webp with alpha": file_of(pixels, "WEBP", lossless=True),
        "gif": file_of(solid, "GIF"),
        **{
            f"{kind} of two frames": file_of(solid, kind, save_all=True, append_images=[Image.fromarray(solid[::-1])])
            for kind in ("GIF", "PNG", "WEBP")
        },
    }
    for number in range(1, 9):
        exif = Image.Exif()
        exif[ORIENTATION] = number
        found[f"jpeg turned {number}"] = file_of(solid, "JPEG", exif=exif)
        found[f"palette png turned {number}"] = file_of(solid, mode="P", transparency=3, exif=exif)
    return found


def expected(
    content: bytes, tiling: SquareTiles, *, splits: bool, kind: str = "smolvlm"
) -> tuple[tuple[int, int], np.ndarray]:
    processor = PROCESSORS[kind](
        size={"longest_edge": tiling.longest_edge},
        max_image_size={"longest_edge": tiling.tile_size},
        resample=tiling.resample,
        do_image_splitting=splits,
        do_rescale=False,
        do_normalize=False,
        do_pad=False,
        return_row_col_info=True,
    )
    made = processor(ImageOps.exif_transpose(Image.open(BytesIO(content))))
    tiles = [np.moveaxis(tile, 0, -1) for tile in made["pixel_values"][0]]
    return (made["rows"][0][0], made["cols"][0][0]), np.stack(tiles)


def check(content: bytes, tiling: SquareTiles, *, splits: bool, kind: str = "smolvlm") -> None:
    grid, tiles = expected(content, tiling, splits=splits, kind=kind)
    found = tiles_of(content, tiling, splits=splits)
    assert tiles.dtype == np.uint8
    assert (found.grid, found.sizes) == (grid, (tiles.shape[1:3],) * len(tiles))
    assert found.pixels == tiles.tobytes()


@pytest.mark.parametrize("kind", PROCESSORS)
@pytest.mark.parametrize("splits", [True, False])
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_tiles_any_size_equal_those_of_transformers(size: tuple[int, int], splits: bool, kind: str) -> None:
    check(file_of(noise(*size)), TILING, splits=splits, kind=kind)


@pytest.mark.parametrize("name", files())
def test_tiles_any_mode_and_orientation_equal_those_of_transformers(name: str) -> None:
    check(files()[name], TILING, splits=True)


WHITE = (255, 255, 255)
DEPTHS = {  # bits, type of colour, samples, transparent colour, pixels
    "1 bit": (1, 0, b"\x40", (), [(0, 0, 0), WHITE]),
    "1 bit with a transparent level": (1, 0, b"\x40", (0,), [WHITE, WHITE]),
    "2 bits with a transparent level": (2, 0, b"\x60", (1,), [WHITE, (170, 170, 170)]),
    "4 bits with a transparent level": (4, 0, b"\x12", (2,), [(17, 17, 17), WHITE]),
    "8 bits with a transparent level": (8, 0, b"\x10\x20", (16,), [WHITE, (32, 32, 32)]),
    "16 bits": (16, 0, b"\x12\x34\xff\xff", (), [(18, 18, 18), WHITE]),
    "16 bits, dark": (16, 0, b"\x00\xff\x01\x00", (), [(0, 0, 0), (1, 1, 1)]),
    "16 bits with a transparent level": (16, 0, b"\x12\x34\x12\x35", (0x1234,), [WHITE, (18, 18, 18)]),
    "16 bits with alpha": (16, 4, b"\x12\x34\xff\xff\x12\x34\0\0", (), [(18, 18, 18), WHITE]),
    "16 bits of colour": (16, 2, b"\x12\x34\x56\x78\x9a\xbc" + b"\xff" * 6, (), [(18, 86, 154), WHITE]),
    "16 bits with a transparent colour": (
        16, 2, b"\x12\x34\x56\x78\x9a\xbc" + bytes(6), (0x1234, 0x5678, 0x9ABC), [WHITE, (0, 0, 0)],
    ),
    "16 bits of colour with alpha": (16, 6, b"\x12\x34" * 3 + b"\xff\xff" + bytes(8), (), [(18, 18, 18), WHITE]),
}  # fmt: skip


def png_chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


@pytest.mark.parametrize("name", DEPTHS)
def test_png_of_any_depth_has_the_high_bits_of_its_samples_and_white_for_what_is_transparent(name: str) -> None:
    bits, colours, samples, transparent, pixels = DEPTHS[name]
    parts = [png_chunk(b"IHDR", struct.pack(">IIBBBBB", 2, 1, bits, colours, 0, 0, 0))]
    if transparent:
        parts.append(png_chunk(b"tRNS", struct.pack(f">{len(transparent)}H", *transparent)))
    parts += [png_chunk(b"IDAT", zlib.compress(b"\0" + samples)), png_chunk(b"IEND", b"")]
    image = _decoded(b"\x89PNG\r\n\x1a\n" + b"".join(parts))
    assert (image.mode, [image.getpixel((x, 0)) for x in range(2)]) == ("RGB", pixels)


def test_png_of_16_bits_equals_that_of_8_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("forebay.server.images.cutting.BAND_PIXELS", 100)
    grey = noise(24, 30)[..., 0]
    deep, plain = (_decoded(file_of(pixels)) for pixels in (grey.astype(np.uint16) * 257, grey))
    assert deep.tobytes() == plain.tobytes()


@pytest.mark.parametrize("resample", [0, 2, 3, 4, 5])
def test_tiles_other_filter_equal_those_of_transformers(resample: int) -> None:
    check(file_of(noise(70, 50)), msgspec.structs.replace(TILING, resample=resample), splits=True)


def test_tiles_image_converted_in_bands_equal_those_of_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("forebay.server.images.cutting.BAND_PIXELS", 100)
    for name in ("alpha", "transparent palette", "grey", "cmyk"):
        check(files()[name], TILING, splits=True)


@pytest.mark.slow
@pytest.mark.parametrize("splits", [True, False])
@pytest.mark.parametrize("size", [*SIZES[:5], (3000, 2000), (5000, 4100)], ids=str)
def test_tiles_of_smolvlm_equal_those_of_transformers(size: tuple[int, int], splits: bool) -> None:
    check(file_of(noise(*size)), OF_SMOLVLM, splits=splits)


@pytest.mark.slow
@pytest.mark.parametrize("longest", [364, 1024, 4096, 5000])
def test_tiles_other_longest_edge_equal_those_of_transformers(longest: int) -> None:
    tiling = msgspec.structs.replace(TILING, tile_size=364, longest_edge=longest)
    for size in ((513, 511), (100, 900), (5000, 30)):
        check(file_of(noise(*size)), tiling, splits=True)


@pytest.mark.slow
@pytest.mark.parametrize("name", files())
def test_tiles_of_smolvlm_any_mode_equal_those_of_transformers(name: str) -> None:
    check(files()[name], OF_SMOLVLM, splits=True)


# Tokens.


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tokenizer(tmp_path_factory.mktemp("smolvlm"))


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> Tokenizer:
    return Tokenizer.from_path(folder)


@pytest.fixture(scope="module")
def expansion(tokenizer: Tokenizer) -> Expansion:
    return Expansion(tokenizer, TILING)


@pytest.fixture(scope="module")
def processor(folder: Path) -> Idefics3Processor:
    own = PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"))
    images = Idefics3ImageProcessorPil(size={"longest_edge": LONGEST}, max_image_size={"longest_edge": TILE})
    return Idefics3Processor(images, own, image_seq_len=PER_TILE, chat_template=TEMPLATE)


@pytest.mark.parametrize("grid", [(0, 0), (1, 4), (4, 1), (4, 4), (2, 3)], ids=str)
def test_text_of_tiles_equals_that_of_transformers(grid: tuple[int, int]) -> None:
    text = get_image_prompt_string(*grid, PER_TILE, AROUND, "<image>", WHOLE)
    assert TILING.text_of(grid, (SIZE,), "<image>") == text


SHAPES = ((), ((50, 70),), ((32, 32), (90, 20)), ((1, 1), (1, 99), (99, 1), (60, 61), (20, 90)))


@pytest.mark.parametrize("shapes", SHAPES, ids=len)
def test_expanded_prompt_equals_that_of_transformers(
    tokenizer: Tokenizer, expansion: Expansion, processor: Idefics3Processor, shapes: tuple[tuple[int, int], ...]
) -> None:
    images = [file_of(noise(*shape, seed=i)) for i, shape in enumerate(shapes)]
    content: list[dict[str, str]] = [{"type": "text", "text": "hello\n\n"}]
    for number in range(len(images)):
        content += [{"type": "image"}, {"type": "text", "text": f"\nand {number}: "}]
    messages = [{"role": "user", "content": content}]
    text = processor.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    opened = [Image.open(BytesIO(image)) for image in images]
    wanted = processor(text=text, images=opened or None)["input_ids"][0]
    cut = [CutImage(Decoded(*tiles_of(image, TILING, splits=True)), bytes([i])) for i, image in enumerate(images)]
    found = expansion.expand(tokenizer.encode_chat(messages), (), cut)
    assert found.token_ids == wanted
    assert all(
        found.token_ids[start : start + length] == [PLACEHOLDER] * length
        for picture in found.pictures
        for start, length in picture.runs
    )
    assert sum(picture.num_tokens for picture in found.pictures) == found.token_ids.count(PLACEHOLDER)
    for image, picture in zip(cut, found.pictures, strict=True):
        assert picture.num_tokens == len(picture.sizes) * PER_TILE
        assert picture.digest == image.digest


def test_expansion_resume_points_move_behind_the_images_before_them(expansion: Expansion) -> None:
    one = CutImage(Decoded((0, 0), (SIZE,), b""), b"")
    wide = CutImage(Decoded((1, 2), (SIZE,) * 3, b""), b"")
    a, b = (len(expansion.of_tiles(its.tiles.grid, its.tiles.sizes)) for its in (one, wide))
    found = expansion.expand([5, PLACEHOLDER, 6, PLACEHOLDER, 7], [1, 2, 3, 4, 5], [one, wide])
    assert found.resume_points == (1, 1 + a, 2 + a, 2 + a + b, 3 + a + b)
    assert len(found.token_ids) == 3 + a + b


def test_digest_differs_for_equal_pixels_of_another_grid_or_other_sizes() -> None:
    pixels = bytes(range(12))
    others = (pixels, (2, 1), [(2, 2)]), (pixels[1:], (1, 2), [(2, 2)]), (pixels, (1, 2), [(1, 4)])
    assert len({digest_of(*its) for its in ((pixels, (1, 2), [(2, 2)]), *others)}) == 4
