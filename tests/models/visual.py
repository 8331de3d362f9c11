"""Tiny random checkpoints with an encoder of pictures, made and saved by transformers, the oracle for both parts."""

from __future__ import annotations

import functools
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForImageTextToText

from tests.models.tiny import BASE, VOCAB

PLACEHOLDER: Final = VOCAB - 1
TEXT_TOKENS: Final = VOCAB - 4  # ids below are text
TYPES: Final = ("smolvlm", "idefics3")

VISION: Final = {
    "hidden_size": 32,
    "intermediate_size": 72,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "image_size": 32,
    "patch_size": 8,
    "hidden_act": "gelu_pytorch_tanh",
}


@dataclass(frozen=True)
class VisualModel:
    """A checkpoint and the model that it was saved from. Tiles have `image_size` pixels and `tokens_per_tile`."""

    path: Path
    oracle: Any
    image_size: int
    tokens_per_tile: int

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
    text = {**BASE, "model_type": "llama", "rms_norm_eps": 1e-5}
    vision = {**VISION, "model_type": f"{model_type}_vision"}
    parts = {"text_config": text, "vision_config": vision, "image_token_id": PLACEHOLDER, "scale_factor": 2}
    config = AutoConfig.for_model(model_type, tie_word_embeddings=False, pad_token_id=0, **parts)
    torch.manual_seed(1)
    model = AutoModelForImageTextToText.from_config(config, dtype=torch.float32).eval()
    for parameter in model.parameters():  # biases and norms that are ones and zeros would hide mistakes
        torch.nn.init.normal_(parameter, std=0.15)
    folder = Path(tempfile.mkdtemp(prefix=f"forebay-{model_type}-"))
    model.save_pretrained(folder)
    return VisualModel(folder, model, image_size=32, tokens_per_tile=4)
