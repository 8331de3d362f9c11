from __future__ import annotations

from typing import Any, Final

from forebay.families.base.fields import Fields
from forebay.families.base.shape import WINDOW, Shape
from forebay.families.base.tensor_names import TensorNames
from forebay.families.config.model_config import Family
from forebay.families.config.transformer import Defaults, Windows, transformer
from forebay.families.parts.experts import GroupedConfig, grouped_experts, mlp_layer_types, small_experts


def parse(fields: Fields) -> GroupedConfig:
    """Read the fields of dots.llm1: the layers from `max_window_layers` on have a window, of which published models
    have none."""
    fields.only("scoring_func", "sigmoid", "noaux_tc")
    fields.only("moe_layer_freq", 1)

    def late(num_layers: int) -> range:
        return range(fields.size("max_window_layers", default=62, least=0), num_layers)

    values = transformer(fields, Defaults(kv_heads=True), windows=Windows(layers=late))
    return GroupedConfig(
        **values,
        experts=grouped_experts(fields, number=None, per_token=None, scale=1.0, inner=1408, normalize=False),
        mlp_layer_types=mlp_layer_types(fields.without("mlp_layer_types"), values["num_layers"], dense=0),
    )


def small(shape: Shape) -> dict[str, Any]:
    """Return the own fields of a small model: experts behind the first layer, a window in the last ones."""
    own = {"first_k_dense_replace": 1, "max_window_layers": shape.num_layers // 2, "sliding_window": WINDOW}
    return {**small_experts(shape), **own}


FAMILY: Final = Family(
    parse=parse,
    small=small,
    harmless=frozenset({"max_window_layers", "use_sliding_window"}),
    names=TensorNames(stacked_experts=True),
)
