"""Small checkpoints with an encoder of pictures, and logits of the models that they were saved from."""

from __future__ import annotations

import functools
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from tests.models.outers import OUTERS, make_outer
from tests.models.tiny import VOCAB

TYPES: Final = ("smolvlm", "idefics3")
TEXT: Final = range(8, VOCAB)  # tokens that are no type's placeholder
NUM_LAYERS: Final = 3  # two could be cut in one place alone


@dataclass(frozen=True)
class VisualModel:
    """A checkpoint and the model that it was saved from. Tiles have `image_size` pixels and `tokens_per_tile`, each the
    token `placeholder` in a prompt."""

    path: Path
    oracle: Any
    image_size: int
    tokens_per_tile: int
    placeholder: int

    @torch.inference_mode()
    def logits(self, ids: list[int], tiles: np.ndarray[Any, Any] | None) -> Tensor:
        """Return the logits behind each token, [T, V] float32. `tiles` uint8 [num, height, width, 3] are those of all
        pictures."""
        pictures = {} if tiles is None else {"pixel_values": normalized(tiles).unsqueeze(0)}
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
    side = vision.image_size // vision.patch_size // config.scale_factor
    return VisualModel(folder, oracle, vision.image_size, side**2, config.image_token_id)
