from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from forebay.families.base.fields import MAX_LAYERS, Fields
from forebay.families.base.mixers import Mamba2Mixer
from forebay.families.base.rope import ROPE_FIELDS
from forebay.families.base.shape import Shape
from forebay.families.base.tensor_names import TensorNames
from forebay.families.config.model_config import Family
from forebay.families.config.transformer import FULL, LINEAR, Defaults, kernel_width, transformer
from forebay.families.parts.experts import GroupedExperts
from forebay.families.parts.mamba import INITIAL, KERNELS
from forebay.families.parts.mamba2 import Mamba2Config, groups_of, listed_layers
from forebay.families.parts.own_code import OWN_CODE

MLP: Final = "mlp"
MOE: Final = "moe"
DRAFT_LAYERS: Final = (FULL, MOE)

_DEFAULT_LAYERS: Final = (LINEAR, MOE, FULL, MLP)

# Before transformers 5 Nemotron-H called its mixer's fields what Bamba does.
_OLD_NAMES: Final = {
    "mamba_n_groups": "n_groups",
    "mamba_d_conv": "conv_kernel",
    "mamba_dt_min": "time_step_min",
    "mamba_conv_bias": "use_conv_bias",
}
_LETTERS: Final = {"M": LINEAR, "E": MOE, "*": FULL, "-": MLP}


@dataclass(frozen=True, kw_only=True, slots=True)
class LatentExperts(GroupedExperts):
    """`latent_size`: of the vectors that go to the experts, 0 for the model's own."""

    latent_size: int


@dataclass(frozen=True, kw_only=True, slots=True)
class NemotronHConfig(Mamba2Config):
    """`draft_layers`: the layers of the draft head, empty if there is none."""

    experts: LatentExperts | None
    draft_layers: tuple[str, ...]


def parse(fields: Fields) -> NemotronHConfig:
    """Read Nemotron-H's fields: each layer is one of a mixer, attention, an MLP and experts. A pattern of letters may
    stand for the list."""
    fields = fields.renamed(_OLD_NAMES, nulls=True)
    fields.only("mlp_hidden_act", "relu2")
    fields.only("mamba_hidden_act", "silu")
    layers = _layer_types(fields, ("layers_block_type", "layer_types"), "hybrid_override_pattern", _DEFAULT_LAYERS)
    head = _draft_layers(fields)
    eps = fields.number("layer_norm_epsilon", default=1e-5)
    inner = fields.size("intermediate_size", default=21504)
    sizes = {"num_hidden_layers": len(layers), "rms_norm_eps": eps, "intermediate_size": inner}
    defaults = Defaults(head_dim=128, attention_bias=False, mlp_bias=True)
    values = transformer(fields.dropped(*ROPE_FIELDS).replaced(**sizes), defaults, layer_types=layers)
    experts = _experts(fields) if MOE in (*layers, *head) else None
    values |= {"tie_word_embeddings": False}
    return NemotronHConfig(**values, mixer=_mixer(fields), experts=experts, draft_layers=head)


def _draft_layers(fields: Fields) -> tuple[str, ...]:
    """Return the layers of the draft head. Without a draft head their field is not checked."""
    if not fields.size("num_nextn_predict_layers", default=0):
        return ()
    return tuple(_layer_types(fields, ("mtp_layers_block_type",), "mtp_hybrid_override_pattern", DRAFT_LAYERS))


def _layer_types(fields: Fields, lists: Sequence[str], pattern_name: str, default: Sequence[str]) -> list[str]:
    """Return the layer types by the first of the `lists` that is there, or by the letters of a pattern."""
    for name in lists:
        if fields.get(name) is not None:
            return listed_layers(fields, name, (LINEAR, FULL, MLP, MOE))
    pattern = fields.get(pattern_name)
    if pattern is None:
        return list(default)
    if not isinstance(pattern, str) or not 0 < len(pattern) <= MAX_LAYERS or set(pattern) - set(_LETTERS):
        raise fields.wrong(pattern_name, f"of the letters {''.join(_LETTERS)}")
    return [_LETTERS[letter] for letter in pattern]


def _mixer(fields: Fields) -> Mamba2Mixer:
    heads = fields.size("mamba_num_heads", default=128)
    return Mamba2Mixer(
        num_heads=heads,
        head_dim=fields.size("mamba_head_dim", default=64),
        num_groups=groups_of(fields, "n_groups", heads, default=8),
        state_size=fields.size("ssm_state_size", default=128),
        width=kernel_width(fields, "conv_kernel"),
        bias=fields.flag("use_bias", default=False),
        conv_bias=fields.flag("use_conv_bias", default=True),
        out_bias=fields.flag("use_bias", default=False),
        # What transformers computes a prompt with; its own field time_step_limit has no effect there.
        dt_limit=(fields.number("time_step_min", default=0.001), math.inf),
    )


def _experts(fields: Fields) -> LatentExperts:
    num_experts = fields.size("n_routed_experts", default=8)
    groups = fields.size("n_group", default=1)
    if num_experts % groups or num_experts < 2 * groups:
        raise fields.wrong("n_group", f"a divisor of {num_experts} experts, two or more in each group")
    best = fields.size("topk_group", default=1, most=groups)
    return LatentExperts(
        num_experts=num_experts,
        per_token=fields.size("num_experts_per_tok", default=2, most=best * num_experts // groups),
        groups=groups,
        best_groups=best,
        intermediate_size=fields.size("moe_intermediate_size", default=7688),
        shared_size=fields.size("moe_shared_expert_intermediate_size", default=7688),
        latent_size=fields.size("moe_latent_size", default=0),
        scale=fields.number("routed_scaling_factor", default=1.0),
        normalize=fields.flag("norm_topk_prob", default=True),
    )


def small(shape: Shape) -> dict[str, Any]:
    """Return the own fields of a small model: a mixer, an MLP, attention and experts in turn."""
    return {
        "layers_block_type": shape.cycle("mamba", "mlp", "attention", "moe"),
        "mamba_num_heads": 2 * shape.num_heads,
        "mamba_head_dim": shape.head_dim,
        "n_groups": 1,
        "ssm_state_size": 64,
        "conv_kernel": 4,
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": shape.hidden_size,
        "moe_shared_expert_intermediate_size": shape.hidden_size,
    }


# What the shapes of weights and other fields say already.
_SAID: Final = frozenset(
    {
        "expand",
        "mamba_proj_bias",
        "mamba_ssm_cache_dtype",
        "moe_shared_expert_overlap",
        "mtp_hybrid_override_pattern",
        "mtp_layers_block_type",
        "n_shared_experts",
        "rescale_prenorm_residual",
        "residual_in_fp32",
        "time_step_limit",
    }
)
# What drafts tokens: attention and experts, each a layer, with what is around them.
_DRAFT_HEAD: Final = (
    ("mtp.layers.1.final_layernorm.", "backbone.layers.{0}.shared_head.norm."),
    ("mtp.layers.0.", "backbone.layers.{0}."),
    ("mtp.layers.1.", "backbone.layers.{1}."),
)
# transformers' own name of what its checkpoints call backbone.
_NAMES: Final = TensorNames(renamed=((r"^model\.", "backbone."),), unused=("mtp.",), draft_head=_DRAFT_HEAD)

FAMILY: Final = Family(parse=parse, small=small, harmless=OWN_CODE | KERNELS | INITIAL | _SAID, names=_NAMES)
