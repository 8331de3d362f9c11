"""Small checkpoints with an encoder of pictures, and logits of the models that they were saved from."""

from __future__ import annotations

import functools
import json
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
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from forebay.base.pixels import Size, num_tokens
from forebay.families.config.model_config import config_from_folder
from forebay.families.config.vision.base import HALVES
from forebay.families.config.vision.pixtral import MEAN, STD
from tests.models.outers import OUTERS, make_outer, save_as_published
from tests.models.tiny import VOCAB

TYPES: Final = (
    "smolvlm",
    "idefics3",
    "internvl",
    "kimi_k25",
    "lfm2_vl",
    "mistral3",
    "muse_glimmer",
    "qwen2_5_vl",
    "qwen2_vl",
    "qwen3_5",
    "qwen3_5_moe",
    "qwen3_vl",
    "qwen3_vl_moe",
    "qwen4_exp-ngrams",
    "gemma3",
    "gemma4",
    "gemma4_unified",
)
TEXT: Final = range(8, VOCAB)  # tokens that are no type's placeholder
LINE_END: Final = 3  # the token behind a row of a tile's tokens
NUM_LAYERS: Final = 3  # two could be cut in one place alone
KINDS_OF_TOKENS: Final = {
    "gemma3": "token_type_ids",
    "gemma4": "mm_token_type_ids",
    "gemma4_unified": "mm_token_type_ids",
}
"""What transformers calls the input that says where pictures are, of types that attend in both directions there."""


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

    def grid(self, sizes: Sequence[Size]) -> tuple[int, int]:
        """Return the grid of a picture of these tiles."""
        return 1, len(sizes)

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
        if pictures and (name := KINDS_OF_TOKENS.get(self.oracle.config.model_type)):
            pictures[name] = torch.tensor([ids]).eq(self.placeholder).long()
        if pictures and self.oracle.config.model_type == "gemma4_unified":
            pictures["attention_mask"] = self._masks_of_generate(pictures["mm_token_type_ids"])
        logits: Tensor = self.oracle(input_ids=torch.tensor([ids]), **pictures).logits[0]
        return logits.float()

    def _masks_of_generate(self, kinds: Tensor) -> Any:
        """Return the masks of `generate`, in which layers without a window are causal, as Gemma 4's are. Without them
        transformers 5.24 lets a gemma4_unified see both sides there."""
        text = self.oracle.config.get_text_config()
        return self.oracle.create_masks_for_generate(
            config=self.oracle.config,
            inputs_embeds=torch.zeros(1, kinds.shape[1], text.hidden_size),
            attention_mask=None,
            cache=None,
            position_ids=torch.arange(kinds.shape[1]).unsqueeze(0),
            mm_token_type_ids=kinds,
        )


def oracle_inputs(
    config: Any, tiles: Sequence[Pixels], mean: float | None = None, std: float | None = None
) -> dict[str, Tensor]:
    """Return what transformers' processor makes of tiles, uint8 [height, width, 3] each."""
    usual = {
        "mistral3": (MEAN, STD),
        "internvl": (MEAN, STD),
        **dict.fromkeys(("gemma4", "gemma4_unified"), ((0.0,) * 3, (1.0,) * 3)),
    }
    usual_mean, usual_std = usual.get(config.model_type, (HALVES, HALVES))
    means = torch.tensor(usual_mean if mean is None else mean)
    deviations = torch.tensor(usual_std if std is None else std)
    numbers = [(torch.from_numpy(tile.copy()).float() / 255 - means) / deviations for tile in tiles]
    if config.model_type == "lfm2_vl":
        return _flex_inputs(numbers, config.vision_config.patch_size)
    if config.model_type == "gemma4":
        return _gemma4_inputs(numbers, config.vision_config.patch_size)
    if config.model_type == "gemma4_unified":
        return _gemma4_inputs(numbers, config.vision_config.model_patch_size)
    if config.model_type.startswith("qwen"):
        return _qwen_inputs(tiles, config.vision_config.patch_size, means, deviations)
    if config.model_type == "mistral3":
        return _padded_inputs(numbers)
    if config.model_type in ("kimi_k25", "muse_glimmer"):
        return _grid_inputs(numbers, config)
    stacked = torch.stack(numbers).permute(0, 3, 1, 2)
    return {"pixel_values": stacked if config.model_type in ("gemma3", "internvl") else stacked.unsqueeze(0)}


def _flex_inputs(numbers: Sequence[Tensor], size: int) -> dict[str, Tensor]:
    """Patches row by row, each pixel by pixel, padded to those of the largest tile."""
    shapes, patches = _patches(numbers, size)
    masks = [torch.ones(len(own), dtype=torch.int32) for own in patches]
    return {
        "pixel_values": pad_sequence(patches, batch_first=True),
        "pixel_attention_mask": pad_sequence(masks, batch_first=True),
        "spatial_shapes": torch.tensor(shapes),
    }


def _patches(numbers: Sequence[Tensor], size: int) -> tuple[list[Size], list[Tensor]]:
    """Rows and columns of each tile, and its patches row by row, each pixel by pixel."""
    shapes = [(len(tile) // size, tile.shape[1] // size) for tile in numbers]
    patches = [
        tile.view(rows, size, columns, size, 3).transpose(1, 2).reshape(rows * columns, -1)
        for tile, (rows, columns) in zip(numbers, shapes, strict=True)
    ]
    return shapes, patches


def _gemma4_inputs(numbers: Sequence[Tensor], size: int) -> dict[str, Tensor]:
    """Patches, padded to those of the largest tile, and the column and row of each, -1 of padding."""
    shapes, patches = _patches(numbers, size)
    places = [torch.cartesian_prod(*map(torch.arange, shape)).view(-1, 2).flip(1) for shape in shapes]
    return {
        "pixel_values": pad_sequence(patches, batch_first=True),
        "image_position_ids": pad_sequence(places, batch_first=True, padding_value=-1),
    }


def _grid_inputs(numbers: Sequence[Tensor], config: Any) -> dict[str, Tensor]:
    """Patches row by row, each channel by channel, and the grid of each image; for Muse Glimmer as often as its kernel
    has frames."""
    size = config.vision_config.patch_size
    shapes, patches = _patches(numbers, size)
    by_channel = torch.cat(patches).view(-1, size, size, 3).permute(0, 3, 1, 2)
    if config.model_type == "muse_glimmer":
        by_channel = by_channel.flatten(1).repeat(1, config.vision_config.patch_temporal)
    return {"pixel_values": by_channel, "image_grid_thw": torch.tensor([(1, *shape) for shape in shapes])}


def _padded_inputs(numbers: Sequence[Tensor]) -> dict[str, Tensor]:
    """All tiles as large as the largest edges."""
    sizes = torch.tensor([tile.shape[:2] for tile in numbers])
    height, width = sizes.amax(0).tolist()
    padded = [F.pad(tile.permute(2, 0, 1), (0, width - tile.shape[1], 0, height - len(tile))) for tile in numbers]
    return {"pixel_values": torch.stack(padded), "image_sizes": sizes}


def _qwen_inputs(tiles: Sequence[Pixels], size: int, means: Tensor, deviations: Tensor) -> dict[str, Tensor]:
    """Patches of two frames, square by square, and the grid of each image."""
    processor = Qwen2VLImageProcessorPil(
        do_resize=False,
        patch_size=size,
        image_mean=means.expand(3).tolist(),
        image_std=deviations.expand(3).tolist(),
    )
    made = [processor(images=[tile], return_tensors="pt", input_data_format="channels_last") for tile in tiles]
    return {name: torch.cat([its[name] for its in made]) for name in ("pixel_values", "image_grid_thw")}


@torch.no_grad()
def oracle_features(oracle: Any, tiles: Sequence[Pixels], **numbers: float) -> list[Tensor]:
    """Return the encoding of each tile; features for the language model's layers stand beside it."""
    made = oracle.model.get_image_features(**oracle_inputs(oracle.config, tiles, **numbers))
    found = made.pooler_output
    if oracle.config.model_type.startswith("qwen"):
        deepstack = getattr(made, "deepstack_features", None) or []
        return [torch.cat(features, dim=1) for features in zip(found, *deepstack, strict=True)]
    return list(found[0].chunk(len(tiles))) if oracle.config.model_type in ("smolvlm", "idefics3") else list(found)


def tile_sizes(config: Any) -> tuple[Size, ...]:
    """Return sizes of tiles for a tiny model of that configuration."""
    vision = config.vision_config
    if config.model_type == "lfm2_vl":
        return (32, 32), (16, 48), (32, 16)
    if config.model_type == "mistral3":
        return (48, 48), (16, 32), (48, 16)
    if config.model_type in ("gemma4", "gemma4_unified"):
        return (32, 32), (16, 48), (48, 32)
    if config.model_type in ("kimi_k25", "muse_glimmer"):
        return (40, 40), (16, 48), (48, 8)
    edge = vision.image_size[0] if config.model_type == "internvl" else vision.image_size
    return ((edge, edge),)


class QwenModel(VisualModel):
    """A picture is one tile; of how many it is asked for says which of the `tile_sizes` it has."""

    def sizes(self, num_tiles: int) -> tuple[Size, ...]:
        """Return the size of the tile of a picture."""
        return (self.tile_sizes[num_tiles % len(self.tile_sizes)],)

    def grid(self, sizes: Sequence[Size]) -> tuple[int, int]:
        """Return the rows and columns of the tokens."""
        ((height, width),) = sizes
        return height // self.token_edge, width // self.token_edge

    @torch.inference_mode()
    def logits(self, ids: list[int], tiles: Sequence[np.ndarray[Any, Any]]) -> Tensor:
        """Return the logits behind each token, [T, V] float32. `tiles` uint8 [height, width, 3] are those of all
        pictures."""
        tokens = torch.tensor([ids])
        pictures: dict[str, Any] = {}
        if tiles:
            kinds = (tokens == self.placeholder).int()
            pictures = {**oracle_inputs(self.oracle.config, tiles), "mm_token_type_ids": kinds}
        logits: Tensor = self.oracle(input_ids=tokens, **pictures).logits[0]
        return logits.float()


@functools.cache
def shared_visual(model_type: str) -> VisualModel:
    """The checkpoint of a type, made once in a process. It is everybody's: write nothing into its folder."""
    case = OUTERS[model_type]
    is_qwen = model_type.startswith("qwen")
    layers: dict[str, Any] = {"depth" if is_qwen else "num_hidden_layers": NUM_LAYERS}
    if model_type == "gemma4_unified":
        layers = {}  # it has one
    if "deepstack_visual_indexes" in case.vision:
        layers["deepstack_visual_indexes"] = [0, 2]
    oracle = make_outer(replace(case, vision={**case.vision, **layers}))
    folder = Path(tempfile.mkdtemp(prefix=f"forebay-{model_type}-"))
    save_as_published(oracle, case, folder)
    if is_qwen:
        oracle_vision = oracle.config.vision_config
        numbers = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3, "patch_size": oracle_vision.patch_size}
        (folder / "preprocessor_config.json").write_text(json.dumps(numbers))
    if case.outer in ("gemma4", "gemma4_unified"):
        most = 8 if case.outer == "gemma4" else 24  # of tiles of the same size
        (folder / "preprocessor_config.json").write_text(json.dumps({"max_soft_tokens": most}))
    vision = config_from_folder(folder).vision
    assert vision is not None
    if is_qwen:
        edge = vision.token_edge
        sizes = tuple((rows * edge, columns * edge) for rows, columns in ((4, 4), (2, 3), (3, 1), (1, 5), (2, 2)))
        return QwenModel(folder, oracle, edge, vision.placeholder, sizes)
    return VisualModel(folder, oracle, vision.token_edge, vision.placeholder, tile_sizes(oracle.config))
