"""Images to tiles of pixels, with Pillow: decoded, turned upright, made RGB, and cut as the model's type does.

Pixels are not rescaled: the encoder does that.
"""

from __future__ import annotations

from io import BytesIO
from typing import Final

from PIL import GifImagePlugin, Image, JpegImagePlugin, PngImagePlugin, UnidentifiedImageError, WebPImagePlugin
from PIL.ExifTags import Base
from PIL.Image import Transpose

from forebay.server.images.headers import webp_size
from forebay.server.images.sources import Unreadable
from forebay.server.images.tiling import Tiling
from forebay.server.images.tilings.base import Tiles

MAX_PIXELS: Final = 64_000_000
BAND_PIXELS: Final = (
    1 << 22
)  # that are converted at once: an image of the most pixels is in memory twice, not five times

_PLUGINS: Final = (PngImagePlugin, JpegImagePlugin, WebPImagePlugin, GifImagePlugin)  # importing them registers them
_FORMATS: Final = ("PNG", "JPEG", "WEBP", "GIF")
_UPRIGHT: Final = {
    2: Transpose.FLIP_LEFT_RIGHT,
    3: Transpose.ROTATE_180,
    4: Transpose.FLIP_TOP_BOTTOM,
    5: Transpose.TRANSPOSE,
    6: Transpose.ROTATE_270,
    7: Transpose.TRANSVERSE,
    8: Transpose.ROTATE_90,
}
_WHITE: Final = (255, 255, 255, 255)
_LEVELS: Final = range(1 << 16)
_HIGH_BYTES: Final = [level >> 8 for level in _LEVELS]

Image.MAX_IMAGE_PIXELS = None  # `_check_size` has the limit


def tiles_of(content: bytes, tiling: Tiling, *, splits: bool) -> Tiles:
    """Decode and cut an image file. Raises Unreadable, and MemoryError."""
    try:
        image = _decoded(content)
    except (Unreadable, MemoryError):
        raise
    except Exception as error:  # what Pillow's plugins raise about wrong files is of many types
        raise Unreadable(
            f"cannot be decoded ({type(error).__name__}: {str(error)[:120]}): send a whole file"
        ) from error
    return tiling.cut(image, splits=splits)


def _decoded(content: bytes) -> Image.Image:
    """The first frame of a file, upright and RGB."""
    if (size := webp_size(content)) is not None:
        _check_size(size)  # Pillow makes room for all pixels before it says how many there are
    try:
        image = Image.open(BytesIO(content), formats=_FORMATS)
    except UnidentifiedImageError:
        raise Unreadable("is no PNG, JPEG, WebP or GIF file, or its header is broken: send one of these") from None
    _check_size(image.size)
    _scale_transparent_colour(image)
    image.load()
    turn = _UPRIGHT.get(_orientation(image))
    upright = _rgb(image)
    del image  # its memory
    return upright if turn is None else upright.transpose(turn)


def _check_size(size: tuple[int, int]) -> None:
    width, height = size
    if width * height > MAX_PIXELS:
        raise Unreadable(
            f"has {width} x {height} = {width * height} pixels; at most {MAX_PIXELS} are decoded: send a smaller one"
        )


def _scale_transparent_colour(image: Image.Image) -> None:
    """Bring a PNG's transparent colour to the 8 bits that Pillow makes of samples of 2, 4 or 16. It leaves the colour
    as the file has it, which then is none of the image's, or another one."""
    tiles = getattr(image, "tile", None)  # of a file that Pillow reads
    colour, layout = image.info.get("transparency"), str(tiles[0].args) if tiles else ""
    if layout in ("L;2", "L;4") and isinstance(colour, int):
        image.info["transparency"] = colour * 255 // ((1 << int(layout[-1])) - 1)
    elif layout == "RGB;16B" and colour is not None:
        image.info["transparency"] = tuple(sample >> 8 for sample in colour)


def _orientation(image: Image.Image) -> int:
    """Upright for metadata that cannot be read."""
    try:
        return int(image.getexif().get(Base.Orientation, 1))
    except Exception:
        return 1


def _rgb(image: Image.Image) -> Image.Image:
    """Convert an image of any mode to RGB, transparent pixels on white."""
    has_alpha = "A" in image.getbands() or image.info.get("transparency") is not None
    if image.mode == "RGB" and not has_alpha:
        return image
    made = Image.new("RGB", image.size)
    rows = max(1, BAND_PIXELS // image.width)
    for top in range(0, image.height, rows):
        band = image.crop((0, top, image.width, min(image.height, top + rows)))
        made.paste(_opaque(band) if has_alpha else _in_8_bits(band).convert("RGB"), (0, top))
    return made


def _opaque(image: Image.Image) -> Image.Image:
    image = _in_8_bits(image).convert("RGBA")
    return Image.alpha_composite(Image.new("RGBA", image.size, _WHITE), image).convert("RGB")


def _in_8_bits(image: Image.Image) -> Image.Image:
    """Return the high bytes of grey levels of 16 bits, as Pillow does for colours; it would clip grey ones."""
    if not image.mode.startswith("I"):
        return image
    levels, transparent = image.convert("I"), image.info.get("transparency")
    grey = levels.point(_HIGH_BYTES, "L")
    if transparent is None:
        return grey
    return Image.merge("LA", (grey, levels.point([255 * (level != transparent) for level in _LEVELS], "L")))
