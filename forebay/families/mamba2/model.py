from __future__ import annotations

from forebay.families.mamba.model import backbone_decoder, mixer_name
from forebay.families.mamba2.config import Mamba2Config
from forebay.layers.mamba2 import GatedNorm, Mamba2Spec
from forebay.models.decoder import DecoderSpec


def describe(config: Mamba2Config) -> DecoderSpec:
    mixers = [mamba2_spec(config, mixer_name(layer)) for layer in range(config.num_layers)]
    return backbone_decoder(config, mixers)


def mamba2_spec(config: Mamba2Config, name: str) -> Mamba2Spec:
    """With a gated norm behind the scan; `name` is the checkpoint's prefix."""
    mixer = config.mixer
    return Mamba2Spec(
        name=name,
        hidden_size=config.hidden_size,
        num_heads=mixer.num_heads,
        head_dim=mixer.head_dim,
        num_groups=mixer.num_groups,
        state_size=mixer.state_size,
        width=mixer.width,
        norm=GatedNorm(eps=config.rms_norm_eps),
        in_bias=mixer.bias,
        conv_bias=mixer.conv_bias,
        out_bias=mixer.bias,
        dt_limit=mixer.dt_limit,
    )
