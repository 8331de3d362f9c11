from __future__ import annotations

from dataclasses import replace

from forebay.families.config.transformer import LINEAR
from forebay.families.jamba.config import JambaConfig
from forebay.layers.build import BlockSpec, PartSpec
from forebay.layers.mamba1 import ScanNorm
from forebay.models.decoder import DecoderOptions, attention_spec, block_spec, layer_name, mlp_spec, softmax_experts
from forebay.models.families.parts.mamba import mamba1_spec
from forebay.models.families.parts.mamba_names import FINAL_NORM, NORMS

DECODER: DecoderOptions = {"norm": FINAL_NORM}


def block(config: JambaConfig, layer: int) -> BlockSpec:
    """Describe a layer: a Mamba mixer or attention, and an MLP or experts."""
    return block_spec(config, layer, _mixer(config, layer), _feed_forward(config, layer), before=NORMS)


def _mixer(config: JambaConfig, layer: int) -> PartSpec:
    if config.layer_types[layer] == LINEAR:
        mixer = mamba1_spec(config, f"{layer_name(layer)}.mamba")
        return replace(mixer, norm=ScanNorm.WEIGHTED, norm_eps=config.rms_norm_eps)
    return attention_spec(config, layer, rope=False)


def _feed_forward(config: JambaConfig, layer: int) -> PartSpec:
    if layer not in config.expert_layers:
        return mlp_spec(config, layer, name="feed_forward")
    name = f"{layer_name(layer)}.feed_forward"
    return softmax_experts(config, config.experts, name, router="router", normalize=False)
