from __future__ import annotations

from typing import Any, Final

from forebay.families.base.fields import Fields
from forebay.families.base.shape import Shape
from forebay.families.base.tensor_names import TensorNames
from forebay.families.config.model_config import Experts, Family, ModelConfig
from forebay.families.parts.rotated_first import SAID, rotated_first

_ALIASES: Final = {"num_experts_per_tok": "moe_topk", "num_local_experts": "num_experts"}

# Options of published files, none of which transformers has.
_ONLY: Final = {"moe_layer_num_skipped": 0, "use_mixed_mlp_moe": True, "use_mla": False, "norm_topk_prob": True}


def parse(fields: Fields) -> ModelConfig:
    """Read the fields of Hunyuan's mixture. All layers have as many experts, each as wide as the shared MLP."""
    for alias, name in _ALIASES.items():
        if fields.get(alias) is not None and fields.get(name) not in (None, fields.get(alias)):
            raise fields.wrong(alias, f"as {name}")
    fields = fields.renamed(_ALIASES)
    values = rotated_first(fields)
    fields = _alike(
        fields, values["num_layers"], "num_experts", "moe_topk", "moe_intermediate_size", "num_shared_expert"
    )
    fields.only("moe_intermediate_size", values["intermediate_size"])
    fields.only("num_shared_expert", 1)
    fields.only("routed_scaling_factor", False, 1)
    for name, value in _ONLY.items():
        fields.only(name, value)
    number = fields.size("num_experts", default=1)
    per_token = fields.size("moe_topk", default=1, most=number)
    experts = Experts(num_experts=number, per_token=per_token, intermediate_size=values["intermediate_size"])
    return ModelConfig(**values, experts=experts)


def _alike(fields: Fields, num_layers: int, *names: str) -> Fields:
    """With a number in the place of a list of the same for each layer. Raises ModelError for lists of others."""
    for name in names:
        value = fields.get(name)
        if isinstance(value, list):
            if len(value) < num_layers or any(each != value[0] for each in value):
                raise fields.wrong(name, f"a number, or a list of {num_layers} that are the same")
            fields = fields.replaced(**{name: value[0]})
    return fields


def small(shape: Shape) -> dict[str, Any]:
    """Return the own fields of a small model, with eight experts."""
    return {"num_experts": 8, "moe_topk": 2, "intermediate_size": shape.hidden_size}


# Of training, and of where experts are computed.
_TRAINING: Final = frozenset({"capacity_factor", "moe_drop_tokens", "moe_random_routing_dropped_token"})

FAMILY: Final = Family(parse=parse, small=small, harmless=SAID | _TRAINING, names=TensorNames(stacked_experts=True))
