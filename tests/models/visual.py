"""Small checkpoints with an encoder of pictures, and logits of the models that they were saved from."""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from forebay.base.pixels import Size, num_tokens
from forebay.families.model_config import config_from_folder
from forebay.families.vision.base import HALVES
from forebay.families.vision.pixtral import MEAN, STD
from tests.models.outers import OUTERS, make_outer
from tests.models.tiny import VOCAB

TYPES: Final = ("smolvlm", "idefics3", "lfm2_vl", "mistral3", "gemma3")
TEXT: Final = range(8, VOCAB)  # tokens that are no type's placeholder
LINE_END: Final = 3  # the token behind a row of a tile's tokens
NUM_LAYERS: Final = 3  # two could be cut in one place alone


Pixels = np.ndarray[Any, Any]


@dataclass(frozen=True)
class VisualModel:
    """A checkpoint, and the model that it was saved from. A token stands for `token_edge` x `token_edge` pixels and is
    the `placeholder` in a prompt. The tiles of a picture have the `tile_sizes` by turns."""

    path: Path
    oracle: Any
    token_edge: int
    placeholder: int
    tile_sizes: tuple[Size, ...]

    def sizes(self, num_tiles: int) -> tuple[Size, ...]:
        """Return the sizes of the tiles of a picture."""
        return tuple(self.tile_sizes[at % len(self.tile_sizes)] for at in range(num_tiles))

    def written(self, size: Size) -> tuple[list[int], list[tuple[int, int]]]:
        """Return the tokens that stand for a tile in a prompt, and the runs of placeholders in them."""
        if self.oracle.config.model_type != "mistral3":
            count = num_tokens(size, self.token_edge)
            return [self.placeholder] * count, [(0, count)]
        rows, columns = (edge // self.token_edge for edge in size)
        line = [self.placeholder] * columns + [LINE_END]
        return line * rows, [(row * len(line), columns) for row in range(rows)]

    @torch.inference_mode()
    def logits(self, ids: list[int], tiles: Sequence[np.ndarray[Any, Any]]) -> Tensor:
        """Return the logits behind each token, [T, V] float32. `tiles` uint8 [height, width, 3] are those of all
        pictures."""
        pictures = oracle_inputs(self.oracle.config, tiles) if tiles else {}
        if pictures and self.oracle.config.model_type == "gemma3":
            pictures["token_type_ids"] = torch.tensor([ids]).eq(self.placeholder).long()
        logits: Tensor = self.oracle(input_ids=torch.tensor([ids]), **pictures).logits[0]
        return logits.float()


def oracle_inputs(
    config: Any, tiles: Sequence[Pixels], mean: float | None = None, std: float | None = None
) -> dict[str, Tensor]:
    """Return what transformers' processor makes of tiles, uint8 [height, width, 3] each."""
    usual_mean, usual_std = (MEAN, STD) if config.model_type == "mistral3" else (HALVES, HALVES)
    means = torch.tensor(usual_mean if mean is None else mean)
    deviations = torch.tensor(usual_std if std is None else std)
    numbers = [(torch.from_numpy(tile.copy()).float() / 255 - means) / deviations for tile in tiles]
    if config.model_type == "lfm2_vl":
        return _flex_inputs(numbers, config.vision_config.patch_size)
    if config.model_type == "mistral3":
        return _padded_inputs(numbers)
    stacked = torch.stack(numbers).permute(0, 3, 1, 2)
    return {"pixel_values": stacked if config.model_type == "gemma3" else stacked.unsqueeze(0)}


def _flex_inputs(numbers: Sequence[Tensor], size: int) -> dict[str, Tensor]:
    """Patches row by row, each pixel by pixel, padded to those of the largest tile."""
    shapes = [(len(tile) // size, tile.shape[1] // size) for tile in numbers]
    patches = [
        tile.view(rows, size, columns, size, 3).transpose(1, 2).reshape(rows * columns, -1)
        for tile, (rows, columns) in zip(numbers, shapes, strict=True)
    ]
    masks = [torch.ones(len(own), dtype=torch.int32) for own in patches]
    return {
        "pixel_values": pad_sequence(patches, batch_first=True),
        "pixel_attention_mask": pad_sequence(masks, batch_first=True),
        "spatial_shapes": torch.tensor(shapes),
    }


def _padded_inputs(numbers: Sequence[Tensor]) -> dict[str, Tensor]:
    """All tiles as large as the largest edges."""
    sizes = torch.tensor([tile.shape[:2] for tile in numbers])
    height, width = sizes.amax(0).tolist()
    padded = [F.pad(tile.permute(2, 0, 1), (0, width - tile.shape[1], 0, height - len(tile))) for tile in numbers]
    return {"pixel_values": torch.stack(padded), "image_sizes": sizes}


@torch.no_grad()
def oracle_features(oracle: Any, tiles: Sequence[Pixels], **numbers: float) -> list[Tensor]:
    """Return the encoding of each tile."""
    found = oracle.model.get_image_features(**oracle_inputs(oracle.config, tiles, **numbers)).pooler_output
    return list(found[0].chunk(len(tiles))) if oracle.config.model_type in ("smolvlm", "idefics3") else list(found)


def tile_sizes(config: Any) -> tuple[Size, ...]:
    """Return sizes of tiles for a tiny model of that configuration."""
    vision = config.vision_config
    if config.model_type == "lfm2_vl":
        return (32, 32), (16, 48), (32, 16)
    if config.model_type == "mistral3":
        return (48, 48), (16, 32), (48, 16)
    return ((vision.image_size, vision.image_size),)


@functools.cache
def shared_visual(model_type: str) -> VisualModel:
    """The checkpoint of a type, made once in a process. It is everybody's: write nothing into its folder."""
    case = OUTERS[model_type]
    oracle = make_outer(replace(case, vision={**case.vision, "num_hidden_layers": NUM_LAYERS}))
    folder = Path(tempfile.mkdtemp(prefix=f"forebay-{model_type}-"))
    oracle.save_pretrained(folder)
    vision = config_from_folder(folder).vision
    assert vision is not None
    return VisualModel(folder, oracle, vision.token_edge, vision.placeholder, tile_sizes(oracle.config))
