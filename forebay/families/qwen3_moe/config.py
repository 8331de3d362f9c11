from __future__ import annotations

from typing import Final

from forebay.families.base.fields import Fields
from forebay.families.base.shape import Shape
from forebay.families.base.tensor_names import TensorNames
from forebay.families.config.model_config import Family
from forebay.families.config.transformer import Defaults, Windows, experts, transformer
from forebay.families.parts.expert_layers import Qwen3MoeConfig, expert_layers
from forebay.families.parts.late_windows import NO_WINDOW, asks_for_windows


def parse(fields: Fields) -> Qwen3MoeConfig:
    """Read the fields of Qwen3's mixture, under either name of the number of experts."""
    return Qwen3MoeConfig(
        **transformer(fields, Defaults(), windows=Windows(listed=False) if asks_for_windows(fields) else None),
        # transformers 5 writes num_local_experts and reads both.
        experts=experts(fields, name="num_experts" if fields.has("num_experts") else "num_local_experts"),
        expert_layers=expert_layers(fields),
        norm_topk_prob=fields.flag("norm_topk_prob", default=False),
    )


# Those of Qwen 3 VL are stacked.
FAMILY: Final = Family(parse=parse, small=Shape.experts, harmless=NO_WINDOW, names=TensorNames(stacked_experts=True))
