"""The encoder of pictures beside a language model: found by its kind, loaded, and its cost in tokens of a prompt."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Final

import torch

from forebay.base.errors import ModelError
from forebay.families.checkpoint import Checkpoint
from forebay.families.config.model_config import ModelConfig
from forebay.families.config.vision.base import VisionConfig
from forebay.layers.params import TensorParam
from forebay.models import needs_of
from forebay.models.dry_build import asked_by
from forebay.models.encoders import (
    gemma3,
    gemma4,
    gemma4_unified,
    internvl,
    kimi_k25,
    muse_glimmer,
    pixtral,
    qwen2,
    qwen3,
    siglip,
    siglip2,
)
from forebay.models.encoders.encoder import Encoder, EncoderSpec
from forebay.models.loader import Loader, Progress, check_names
from forebay.ops import Ops

_SPECS: Final[Mapping[str, Callable[[ModelConfig], EncoderSpec]]] = {
    "gemma3": gemma3.encoder_spec,
    "gemma4": gemma4.encoder_spec,
    "gemma4_unified": gemma4_unified.encoder_spec,
    "idefics3": siglip.encoder_spec,
    "internvl": internvl.encoder_spec,
    "kimi_k25": kimi_k25.encoder_spec,
    "lfm2_vl": siglip2.encoder_spec,
    "mistral3": pixtral.encoder_spec,
    "muse_glimmer": muse_glimmer.encoder_spec,
    "qwen2_5_vl": qwen2.encoder_spec,
    "qwen2_vl": qwen2.encoder_spec,
    "qwen3_5": qwen3.encoder_spec,
    "qwen3_5_moe": qwen3.encoder_spec,
    "qwen3_vl": qwen3.encoder_spec,
    "qwen3_vl_moe": qwen3.encoder_spec,
    "qwen4_exp": qwen3.encoder_spec,
    "smolvlm": siglip.encoder_spec,
}


def encoder_spec(config: ModelConfig) -> EncoderSpec:
    """Describe the encoder of a model that has one, under the names of its files."""
    return _SPECS[vision_config(config).kind](config)


def vision_config(config: ModelConfig) -> VisionConfig:
    """Return the encoder's part of the configuration of a model that has one."""
    assert config.vision is not None, f"a {config.model_type} model without an encoder"
    return config.vision


def encoder_params(config: ModelConfig) -> tuple[TensorParam, ...]:
    """Return all weights of the encoder, each once; none for a model without one."""
    if config.vision is None:
        return ()
    return asked_by(encoder_spec(config).build)


def load_encoder(
    checkpoint: Checkpoint,
    *,
    ops: Ops,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    progress: Progress,
) -> Encoder:
    """Load the encoder of a model that has one, in `dtype`: no weight of it is quantized. `progress(done, total)` is
    called with bytes of the result. Raises ModelError, before anything is read, if a weight is missing, unused or of
    another shape than the configuration has."""
    params = encoder_params(checkpoint.config)
    if not checkpoint.encoder:
        count = sum(len(param.names) for param in params)
        raise ModelError(
            f"{checkpoint.path}: none of the {count} weights of the encoder that vision_config describes is in "
            "the files: take the whole checkpoint, or remove vision_config from config.json to serve text alone"
        )
    beside = replace(checkpoint, path=checkpoint.mmproj or checkpoint.path, tensors=checkpoint.encoder)
    check_names(beside, params)
    weights = Loader(beside, params, ops=ops, dtype=dtype, device=device, progress=progress)
    return encoder_spec(checkpoint.config).build(ops, weights)


def layer_costs(config: ModelConfig) -> tuple[float, float]:
    """Return the costs of a layer of the encoder: for each token of a tile, and for each pair of them.

    They are in tokens of a prompt whose matrices take as many products.
    What the encoder computes before and behind its layers is divided among them. Of a mixture, a token's experts count.
    A prompt's attention, which depends on its length, is left out.
    """
    vision, token = vision_config(config), _token_products(config)
    per_patch, per_pair = vision.layer_products
    each = per_patch + vision.outer_products(config.hidden_size) / vision.num_layers
    patches = vision.merge**2
    return patches * each / token, patches**2 * per_pair / token


def _token_products(config: ModelConfig) -> float:
    """Return the products that a prompt's token takes in the layers of the decoder."""
    experts = config.experts
    share = 1.0 if experts is None else experts.per_token / experts.num_experts
    return math.fsum(
        param.num_elements * (share if ".experts." in param.names[0] else 1.0) for param in _of_layers(config)
    )


def _of_layers(config: ModelConfig) -> Iterable[TensorParam]:
    return (param for param in needs_of(config).params if len(param.inner) == 1 and ".layers." in param.names[0])
