"""Mamba mixers, and models of nothing else."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Final

from forebay.families.base.fields import Fields
from forebay.families.base.mixers import Mamba1Mixer
from forebay.families.base.shape import Shape
from forebay.families.base.tensor_names import TensorNames
from forebay.families.config.model_config import ModelConfig
from forebay.families.config.transformer import LINEAR, LayerValues, common, kernel_width

_POSITIONS: Final = 1 << 17
"""Positions of a model whose configuration has no limit, since its state has no room for one: 131,072. The published
ones were trained on 2,048 to 8,192 tokens, so that it is memory for the page tables, not the model, that this bounds.
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class MambaConfig(ModelConfig):
    """A configuration with the sizes of a Mamba mixer."""

    mixer: Mamba1Mixer


def mamba1_mixer(fields: Fields) -> Mamba1Mixer:
    """Read the sizes of a Mamba mixer under transformers' names."""
    hidden_size = fields.size("hidden_size")
    intermediate = fields.size("expand", default=2, most=1024) * hidden_size
    return Mamba1Mixer(
        intermediate_size=fields.size("intermediate_size", default=intermediate),
        state_size=fields.size("state_size", default=16),
        dt_rank=rank_of(fields, "time_step_rank", hidden_size),
        width=kernel_width(fields, "conv_kernel"),
        bias=fields.flag("use_bias", default=False),
        conv_bias=fields.flag("use_conv_bias", default=True),
    )


class MixerValues(LayerValues):
    """The values of a `ModelConfig` of mixers alone."""

    tie_word_embeddings: bool


def mixers_only(fields: Fields, *, tied: bool) -> MixerValues:
    """Return `ModelConfig`'s values of models without attention, and without anything else but mixers."""
    shared = common(fields)
    return {
        **shared,
        "intermediate_size": 0,
        "num_heads": 0,
        "num_kv_heads": 0,
        "head_dim": 0,
        "max_position_embeddings": fields.size("max_position_embeddings", default=_POSITIONS),
        "rms_norm_eps": fields.number("layer_norm_epsilon", default=1e-5),
        "rope_theta": 0.0,
        "tie_word_embeddings": fields.flag("tie_word_embeddings", default=tied),
        "layer_types": (LINEAR,) * shared["num_layers"],
    }


def rank_of(fields: Fields, name: str, hidden_size: int) -> int:
    """Return the rank of the layer that gives dt: a sixteenth of the hidden size, rounded up, if the file says
    `auto` or nothing."""
    return math.ceil(hidden_size / 16) if fields.get(name) in (None, "auto") else fields.size(name)


def small(shape: Shape) -> dict[str, Any]:
    """Return the own fields of a small model, whose mixers are twice as wide as the model."""
    return {"state_size": 16, "expand": 2, "intermediate_size": 2 * shape.hidden_size}


NAMES: Final = TensorNames(renamed=((r"^backbone\.embedding\.", "backbone.embeddings."),))
# How transformers computes, what it trains with, and how it makes weights that are not in a file.
KERNELS: Final = frozenset(
    {"chunk_size", "mamba_chunk_size", "use_associative_scan", "use_mamba_kernels", "use_mambapy", "use_mem_eff_path"}
)
INITIAL: Final = frozenset({"time_step_floor", "time_step_init_scheme", "time_step_max", "time_step_scale"})
HARMLESS: Final = KERNELS | INITIAL | {"residual_in_fp32", "time_step_min"}
