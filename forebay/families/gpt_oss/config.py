from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

from forebay.families.base.fields import Fields
from forebay.families.base.shape import WINDOW, Shape
from forebay.families.base.tensor_names import TensorNames
from forebay.families.config.model_config import Experts, Family, ModelConfig
from forebay.families.config.transformer import FULL, SLIDING, Defaults, Windows, transformer
from forebay.formats.float_layers import FloatPacking, Floats

_ROPE: Final = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}


@dataclass(frozen=True, kw_only=True, slots=True)
class GptOssConfig(ModelConfig):
    """A configuration with experts, and the two constants of their clamped SwiGLU."""

    experts: Experts
    swiglu_alpha: float
    swiglu_limit: float


def parse(fields: Fields) -> GptOssConfig:
    """Read gpt-oss's fields: MXFP4 experts, and a window in every second layer by default."""
    fields = fields.renamed({"num_experts": "num_local_experts"})
    quantization = fields.get("quantization_config")
    if quantization and not (isinstance(quantization, dict) and quantization.get("quant_method") == "mxfp4"):
        raise fields.wrong("quantization_config", "absent, or of the quant_method mxfp4")
    packing = FloatPacking(method="mxfp4", floats=Floats.MXFP4, only=".experts.") if quantization else None
    rope = fields.get("rope_scaling") or fields.get("rope_parameters", _ROPE)
    defaults = Defaults(head_dim=64, rms_norm_eps=1e-5, rope_theta=150_000.0)
    windows = Windows(size=128, layers=lambda num_layers: range(0, num_layers, 2), required=True)
    values = transformer(fields.replaced(rope_scaling=rope), defaults, windows=windows)
    values["attention_bias"] = fields.flag("attention_bias", default=True)
    number = fields.size("num_local_experts", default=128)
    return GptOssConfig(
        **values,
        packing=packing,
        experts=Experts(
            num_experts=number,
            per_token=fields.size("num_experts_per_tok", default=4, most=number),
            intermediate_size=values["intermediate_size"],
        ),
        swiglu_alpha=fields.number("swiglu_alpha", default=1.702),
        swiglu_limit=_limit(fields),
    )


def _limit(fields: Fields) -> float:
    """Return what gate and up are cut at, which may be 0. Raises ModelError for a null, with which transformers fails:
    it may have been meant as no limit."""
    if fields.is_null("swiglu_limit"):
        raise fields.wrong("swiglu_limit", "a number of at least 0")
    return fields.number("swiglu_limit", default=7.0)


def small(shape: Shape) -> dict[str, Any]:
    """Return the own fields of a small model: windows in every second layer, and eight experts."""
    return {
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "intermediate_size": shape.hidden_size,
        "layer_types": shape.cycle(SLIDING, FULL),
        "sliding_window": WINDOW,
    }


FAMILY: Final = Family(parse=parse, small=small, names=TensorNames(turned_experts=True))
