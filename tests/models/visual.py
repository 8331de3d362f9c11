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
from torch import Tensor

from forebay.base.pixels import Size, num_tokens
from tests.models.outers import OUTERS, make_outer
from tests.models.tiny import VOCAB

TYPES: Final = ("smolvlm", "idefics3")
TEXT: Final = range(8, VOCAB)  # tokens that are no type's placeholder
NUM_LAYERS: Final = 3  # two could be cut in one place alone


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
        count = num_tokens(size, self.token_edge)
        return [self.placeholder] * count, [(0, count)]

    @torch.inference_mode()
    def logits(self, ids: list[int], tiles: Sequence[np.ndarray[Any, Any]]) -> Tensor:
        """Return the logits behind each token, [T, V] float32. `tiles` uint8 [height, width, 3] are those of all
        pictures."""
        pictures = {"pixel_values": normalized(np.stack(tiles)).unsqueeze(0)} if tiles else {}
        logits: Tensor = self.oracle(input_ids=torch.tensor([ids]), **pictures).logits[0]
        return logits.float()


def normalized(tiles: np.ndarray[Any, Any]) -> Tensor:
    """Turn uint8 [num, height, width, 3] into what transformers' processor gives, float32 [num, 3, height, width]."""
    return (torch.from_numpy(tiles.copy()).float() / 255 - 0.5).div(0.5).permute(0, 3, 1, 2)


@functools.cache
def shared_visual(model_type: str) -> VisualModel:
    """The checkpoint of a type, made once in a process. It is everybody's: write nothing into its folder."""
    case = OUTERS[model_type]
    oracle = make_outer(replace(case, vision={**case.vision, "num_hidden_layers": NUM_LAYERS}))
    folder = Path(tempfile.mkdtemp(prefix=f"forebay-{model_type}-"))
    oracle.save_pretrained(folder)
    config, vision = oracle.config, oracle.config.vision_config
    edge, side = vision.patch_size * config.scale_factor, vision.image_size
    return VisualModel(folder, oracle, edge, config.image_token_id, ((side, side),))
