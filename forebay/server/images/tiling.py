"""How images become tiles: the parameters of a checkpoint's image processor."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import msgspec

from forebay.base.errors import ModelError, brief
from forebay.families.model_config import config_from_folder, image_processor
from forebay.families.vision import VisionConfig
from forebay.formats.files import is_there, read_json

MAX_EDGE: Final = 4096  # pixels that a resized image has at most on a side, as transformers has it
LANCZOS: Final = 1  # Pillow's number
MOST_FILTERS: Final = 6
TILES_BY_DEFAULT: Final = 4  # on the longest edge


class Tiling(msgspec.Struct, frozen=True, kw_only=True):
    """The parameters. An image is resized to `size` (width and height); where there is none, until its longest edge
    has `longest_edge` pixels. Pillow's filter for that is `resample`. If it `splits`, it is then cut into squares of
    `tile_size`, behind which all of it follows as one. A tile has `tokens_per_tile` tokens of a prompt, each the
    `placeholder`."""

    placeholder: int
    tokens_per_tile: int
    tile_size: int
    longest_edge: int
    size: tuple[int, int] | None = None
    resample: int = LANCZOS
    splits: bool = True


def tiling_at(path: str) -> Tiling | None:
    """Read the parameters of the checkpoint at `path`; None for one without an encoder. Raises ModelError."""
    vision = config_from_folder(Path(path)).vision if Path(path).is_dir() else None
    return None if vision is None else tiling_of(path, vision)


def tiling_of(path: str, vision: VisionConfig) -> Tiling:
    """Read the parameters of the checkpoint in the folder `path`; where it says nothing they follow from the encoder.
    Raises ModelError for parameters that the encoder does not fit."""
    folder = Path(path)
    processor = _read(folder / "processor_config.json")
    own = image_processor(folder)
    tile_size = _edge(own, "max_image_size", vision.image_size)
    if tile_size != vision.image_size:
        raise ModelError(f"{folder}: tiles have {tile_size} pixels, and the encoder takes {vision.image_size}")
    if (tokens := processor.get("image_seq_len", vision.tokens_per_tile)) != vision.tokens_per_tile:
        raise ModelError(f"{folder}: image_seq_len is {tokens}; the encoder makes {vision.tokens_per_tile} of a tile")
    resample = own.get("resample", LANCZOS)
    if type(resample) is not int or not 0 <= resample < MOST_FILTERS:
        raise ModelError(f"{folder}: resample is {brief(resample)}, not one of Pillow's filters, 0 to 5")
    if not own.get("do_resize", True):
        raise ModelError(f"{folder}: do_resize is false, and images of any size are no prompt: give a size")
    return Tiling(
        placeholder=vision.placeholder,
        tokens_per_tile=vision.tokens_per_tile,
        tile_size=tile_size,
        longest_edge=_edge(own, "size", TILES_BY_DEFAULT * tile_size),
        size=_size(own, folder),
        resample=resample,
        splits=own.get("do_image_splitting", True) is True,
    )


def _read(path: Path) -> dict[str, Any]:
    return read_json(path) if is_there(path) else {}


def _edge(own: Mapping[str, Any], name: str, default: int) -> int:
    given = own.get(name) or {}
    edge = given.get("longest_edge", default) if isinstance(given, dict) else None
    if type(edge) is not int or edge < 1:
        raise ModelError(f"{name} of the image processor is {brief(given)}, not an object with longest_edge in pixels")
    return edge


def _size(own: Mapping[str, Any], folder: Path) -> tuple[int, int] | None:
    """The exact size, where there is one and no longest edge."""
    size = own.get("size") or {}
    if "longest_edge" in size or not {"width", "height"} <= size.keys():
        return None
    width, height = size["width"], size["height"]
    if not all(type(edge) is int and 0 < edge <= MAX_EDGE for edge in (width, height)):
        raise ModelError(f"{folder}: size is {brief(size)}; its edges must have 1 to {MAX_EDGE} pixels")
    return width, height
