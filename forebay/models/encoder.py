"""An encoder of pictures: a tile of pixels to rows of a language model's embedding.

Its layers run in slices, between which the state of a tile is kept: a step that decodes may so take a few of them at a
time. A tile's bits do not depend on how it is cut, nor on what was encoded before.

Shape letters: P patches of a tile, h hidden size of the encoder, H of the language model.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from forebay.base.errors import ModelError
from forebay.families.checkpoint import Checkpoint
from forebay.families.model_config import ModelConfig
from forebay.families.vision import VisionConfig
from forebay.layers.build import Parts
from forebay.layers.encoder import CHANNELS, ConnectorSpec, EncoderBlockSpec, PatchesSpec
from forebay.layers.norms import LayerNormSpec, build_norm, layer_norm_spec
from forebay.layers.params import TensorParam, Weights
from forebay.layers.rotary import RopeTables
from forebay.models import needs_of
from forebay.models.dry_build import asked_by
from forebay.models.loader import Loader, Progress, check_names
from forebay.ops import Ops
from forebay.ops.attention import segments

_VISION = "model.vision_model"


@dataclass(frozen=True, kw_only=True, slots=True)
class EncoderSpec:
    """Patches, blocks, and behind the last one `norm` and the connector."""

    patches: PatchesSpec
    blocks: tuple[EncoderBlockSpec, ...]
    norm: LayerNormSpec
    norm_eps: float
    connector: ConnectorSpec

    @property
    def num_patches(self) -> int:
        return self.patches.side**2

    @property
    def tokens_per_tile(self) -> int:
        return self.num_patches // self.connector.factor**2


class Encoder:
    """Encodes one tile at a time: `begin`, all `layers` in any slices, `finish`. None of them changes its arguments."""

    def __init__(self, spec: EncoderSpec, ops: Ops, weights: Weights) -> None:
        parts = Parts(ops, weights, RopeTables(1, weights.device, ops.memory))
        self.dtype = weights.dtype
        self.num_layers, self.tokens_per_tile = len(spec.blocks), spec.tokens_per_tile
        self.hidden_size = spec.connector.output_size
        self._patches = spec.patches.build(parts)
        self._blocks = [block.build(parts) for block in spec.blocks]
        self._norm = build_norm(spec.norm, parts, spec.norm_eps)
        self._connector = spec.connector.build(parts)
        self.weight_bytes = sum(weights.held_bytes.values())
        assert not parts.kept, "an encoder keeps nothing"
        self._tile = segments([spec.num_patches], weights.device)

    def begin(self, pixels: Tensor) -> Tensor:
        """pixels uint8 [height, width, 3], red first -> state [P, h]."""
        return self._patches(pixels)

    def layers(self, state: Tensor, first: int, last: int) -> Tensor:
        """Run layers `first` up to, not including, `last`: [P, h] -> [P, h]."""
        for block in self._blocks[first:last]:
            state = block(state, self._tile)
        return state

    def finish(self, state: Tensor) -> Tensor:
        """state [P, h] behind the last layer -> [tokens_per_tile, H]."""
        return self._connector(self._norm.of(state))


def encoder_spec(config: ModelConfig) -> EncoderSpec:
    """Describe the encoder of a model that has one, under the names of its files."""
    vision = vision_config(config)
    return EncoderSpec(
        patches=PatchesSpec(
            name=f"{_VISION}.embeddings",
            hidden_size=vision.hidden_size,
            size=vision.patch_size,
            side=vision.side,
            rescale=vision.rescale,
            mean=vision.mean,
            std=vision.std,
        ),
        blocks=tuple(_block(vision, layer) for layer in range(vision.num_layers)),
        norm=layer_norm_spec(f"{_VISION}.post_layernorm", vision.hidden_size, bias=True),
        norm_eps=vision.norm_eps,
        connector=ConnectorSpec(
            name="model.connector.modality_projection.proj",
            side=vision.side,
            factor=vision.scale_factor,
            hidden_size=vision.hidden_size,
            output_size=config.hidden_size,
        ),
    )


def vision_config(config: ModelConfig) -> VisionConfig:
    """Return the encoder's part of the configuration of a model that has one."""
    assert config.vision is not None, f"a {config.model_type} model without an encoder"
    return config.vision


def _block(vision: VisionConfig, layer: int) -> EncoderBlockSpec:
    return EncoderBlockSpec(
        name=f"{_VISION}.encoder.layers.{layer}",
        hidden_size=vision.hidden_size,
        intermediate_size=vision.intermediate_size,
        num_heads=vision.num_heads,
        norm_eps=vision.norm_eps,
    )


def encoder_params(config: ModelConfig) -> tuple[TensorParam, ...]:
    """Return all weights of the encoder, each once; none for a model without one."""
    if config.vision is None:
        return ()
    spec = encoder_spec(config)
    return asked_by(lambda ops, weights: Encoder(spec, ops, weights))


def load_encoder(
    checkpoint: Checkpoint,
    *,
    ops: Ops,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    progress: Progress,
) -> Encoder:
    """Load the encoder of a model that has one, in `dtype`: no weight of it is quantized. `progress(done, total)` is
    called with bytes of the result. ModelError, before anything is read, where a weight is missing, unused or of
    another shape than the configuration says."""
    params = encoder_params(checkpoint.config)
    if not checkpoint.encoder:
        count = sum(len(param.names) for param in params)
        raise ModelError(
            f"{checkpoint.path}: none of the {count} weights of the encoder that vision_config describes is in "
            "the files: take the whole checkpoint, or remove vision_config from config.json to serve text alone"
        )
    beside = replace(checkpoint, tensors=checkpoint.encoder)
    check_names(beside, params)
    weights = Loader(beside, params, ops=ops, dtype=dtype, device=device, progress=progress)
    return Encoder(encoder_spec(checkpoint.config), ops, weights)


def layer_tokens(config: ModelConfig) -> float:
    """Return how many tokens of a prompt cost as much as a layer of the encoder on a tile, in products of the matrices.

    What the encoder computes before and behind its layers is divided among them. Of a mixture, a token's experts count.
    A prompt's attention, which depends on its length, is left out.
    """
    vision = vision_config(config)
    patches, width = vision.num_patches, vision.hidden_size
    layer = patches * (4 * width**2 + 2 * width * vision.intermediate_size) + 2 * patches**2 * width
    others = patches * width * (CHANNELS * vision.patch_size**2 + config.hidden_size)
    return (layer + others / vision.num_layers) / _token_products(config)


def _token_products(config: ModelConfig) -> float:
    """Return the products that a prompt's token takes in the layers of the decoder."""
    experts = config.experts
    share = 1.0 if experts is None else experts.per_token / experts.num_experts
    return math.fsum(
        param.num_elements * (share if ".experts." in param.names[0] else 1.0) for param in _of_layers(config)
    )


def _of_layers(config: ModelConfig) -> Iterable[TensorParam]:
    return (param for param in needs_of(config).params if len(param.inner) == 1 and ".layers." in param.names[0])
