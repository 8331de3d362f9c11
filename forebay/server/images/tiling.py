"""How images become tiles: the parameters of a checkpoint's image processor."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final, TypeAlias

from forebay.families.config.model_config import ProcessorFiles, config_from_folder, config_from_gguf, processor_files
from forebay.families.config.vision.base import VisionConfig
from forebay.families.config.vision.gemma3 import PooledSiglipConfig
from forebay.families.config.vision.gemma4 import Gemma4VisionConfig
from forebay.families.config.vision.gemma4_unified import UnifiedVisionConfig
from forebay.families.config.vision.internvl import InternVitConfig
from forebay.families.config.vision.kimi_k25 import KimiVisionConfig
from forebay.families.config.vision.muse_glimmer import MuseVisionConfig
from forebay.families.config.vision.pixtral import PixtralConfig
from forebay.families.config.vision.qwen2 import Qwen2Config
from forebay.families.config.vision.qwen3 import Qwen3Config
from forebay.families.config.vision.siglip import SiglipConfig
from forebay.families.config.vision.siglip2 import Siglip2Config
from forebay.families.parts.mmproj.reader import open_mmproj
from forebay.formats.gguf import GgufFile
from forebay.server.images.tilings.flex import FlexTiles, flex
from forebay.server.images.tilings.gemma3 import WholeSquare, whole_square
from forebay.server.images.tilings.gemma4 import ScaledImage, scaled_image
from forebay.server.images.tilings.idefics import SquareTiles, squares
from forebay.server.images.tilings.internvl import GridTiles, grid_tiles
from forebay.server.images.tilings.kimi_k25 import PaddedImage, padded_image
from forebay.server.images.tilings.muse_glimmer import ClosestImage, closest_image
from forebay.server.images.tilings.qwen import FittedImage, fitted_image
from forebay.server.images.tilings.whole import WholeImage, whole_image

Tiling: TypeAlias = (
    SquareTiles
    | FlexTiles
    | GridTiles
    | WholeImage
    | WholeSquare
    | ScaledImage
    | FittedImage
    | PaddedImage
    | ClosestImage
)
"""A way of cutting with its parameters, told from others by its tag."""

_READERS: Final[Mapping[type[VisionConfig], Callable[[ProcessorFiles, Any], Tiling]]] = {
    Gemma4VisionConfig: scaled_image,
    UnifiedVisionConfig: scaled_image,
    InternVitConfig: grid_tiles,
    KimiVisionConfig: padded_image,
    MuseVisionConfig: closest_image,
    PooledSiglipConfig: whole_square,
    Qwen2Config: fitted_image,
    Qwen3Config: fitted_image,
    SiglipConfig: squares,
    Siglip2Config: flex,
    PixtralConfig: whole_image,
}


def tiling_at(path: str, mmproj: str | None = None) -> Tiling | None:
    """Read the parameters of the checkpoint at `path`, for a GGUF model from the file `mmproj` of its encoder; None for
    one without an encoder. Raises ModelError."""
    if mmproj is not None:
        file = GgufFile(Path(path))
        found = open_mmproj(Path(mmproj), config_from_gguf(file), file.metadata)
        vision, files = found.config.vision, ProcessorFiles(found.processor, {}, mmproj)
        return None if vision is None else _READERS[type(vision)](files, vision)
    vision = config_from_folder(Path(path)).vision if Path(path).is_dir() else None
    return None if vision is None else tiling_of(path, vision)


def tiling_of(path: str, vision: VisionConfig) -> Tiling:
    """Read the parameters of the checkpoint in the folder `path`, with the way of cutting that its encoder has. Raises
    ModelError for parameters that the encoder does not fit."""
    return _READERS[type(vision)](processor_files(Path(path)), vision)
