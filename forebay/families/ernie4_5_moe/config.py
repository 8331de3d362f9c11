from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

from forebay.families.base.fields import Fields
from forebay.families.base.shape import Shape
from forebay.families.base.tensor_names import TensorNames
from forebay.families.config.model_config import Experts, Family, ModelConfig
from forebay.families.config.transformer import Defaults, count_of, transformer

# Remote code that transformers has by now, and how the model was trained.
_HARMLESS: Final = frozenset({"auto_map", "moe_capacity", "moe_gate"})


@dataclass(frozen=True, kw_only=True, slots=True)
class Ernie45MoeConfig(ModelConfig):
    """A configuration with experts, and the numbers of the layers that have them. `shared_size` is that of the MLP
    beside them, 0 for none; weights of experts are divided by their sum, or by `norm_min` if that is more."""

    experts: Experts
    expert_layers: tuple[int, ...]
    shared_size: int
    norm_min: float


def parse(fields: Fields) -> Ernie45MoeConfig:
    """Read the fields of ERNIE's mixtures. No published file has biases, which would be the logits' too."""
    fields = fields.renamed({"num_experts": "moe_num_experts", "num_experts_per_tok": "moe_k"})
    fields.only("moe_gate_act", "softmax")
    fields.only("moe_use_aux_free", True)
    fields.only("use_bias", False)
    defaults = Defaults(rms_norm_eps=1e-5, rope_theta=500_000.0, tied=True, attention_bias=False)
    values = transformer(fields, defaults)
    number = fields.size("moe_num_experts", default=64)
    inner = fields.size("moe_intermediate_size", default=1536)
    return Ernie45MoeConfig(
        **values,
        experts=Experts(
            num_experts=number,
            per_token=fields.size("moe_k", default=6, most=number),
            intermediate_size=inner,
        ),
        expert_layers=_expert_layers(fields, values["num_layers"]),
        shared_size=count_of(fields, "moe_num_shared_experts", default=2) * inner,
        norm_min=fields.number("moe_norm_min", default=1e-12),
    )


def _expert_layers(fields: Fields, num_layers: int) -> tuple[int, ...]:
    """Every `moe_layer_interval`-th layer from the one to the other index, of which -1 is the last layer's."""
    last = fields.get("moe_layer_end_index", -1)
    last = num_layers - 1 if type(last) is int and last == -1 else fields.size("moe_layer_end_index", least=0)
    first = count_of(fields, "moe_layer_start_index", default=1)
    interval = fields.size("moe_layer_interval", default=1)
    return tuple(i for i in range(first, min(last + 1, num_layers)) if (i + 1) % interval == 0)


def small(shape: Shape) -> dict[str, Any]:
    """Return the own fields of a small model, with eight experts beside two shared ones behind the first layer."""
    return {
        "moe_num_experts": 8,
        "moe_k": 2,
        "moe_num_shared_experts": 2,
        "moe_intermediate_size": shape.hidden_size,
        "moe_layer_start_index": 1,
    }


_NAMES: Final = TensorNames(
    renamed=((r"\.mlp\.gate\.moe_statics\.", ".mlp.moe_statics."),), unused=("model.mtp_",), stacked_experts=True
)

FAMILY: Final = Family(parse=parse, small=small, harmless=_HARMLESS, names=_NAMES)
