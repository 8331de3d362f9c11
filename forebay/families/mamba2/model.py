from __future__ import annotations

from forebay.families.mamba.model import backbone_decoder, mixer_name
from forebay.families.mamba2.config import Mamba2Config
from forebay.layers.mamba2 import GatedNormSpec, Mamba2Spec
from forebay.models.decoder import DecoderSpec


def describe(config: Mamba2Config) -> DecoderSpec:
    mixers = [mamba2_spec(config, mixer_name(layer)) for layer in range(config.num_layers)]
    return backbone_decoder(config, mixers)


def mamba2_spec(config: Mamba2Config, name: str) -> Mamba2Spec:
    """With a gated norm behind the scan; `name` is the checkpoint's prefix."""
    norm = GatedNormSpec(eps=config.rms_norm_eps)
    return Mamba2Spec(name=name, hidden_size=config.hidden_size, mixer=config.mixer, norm=norm)
