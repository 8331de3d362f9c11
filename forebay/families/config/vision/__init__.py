"""Configurations of the encoders that turn pictures into rows of a model's embedding, a module for each kind."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

from forebay.base.errors import ModelError, brief
from forebay.families.base.fields import Fields
from forebay.families.config.vision.base import Vision
from forebay.families.config.vision.gemma3 import pooled_siglip
from forebay.families.config.vision.gemma4 import gemma4
from forebay.families.config.vision.gemma4_unified import gemma4_unified
from forebay.families.config.vision.internvl import internvl
from forebay.families.config.vision.kimi_k25 import kimi_k25
from forebay.families.config.vision.muse_glimmer import muse_glimmer
from forebay.families.config.vision.pixtral import pixtral
from forebay.families.config.vision.qwen2 import qwen2_5_vl, qwen2_vl
from forebay.families.config.vision.qwen3 import qwen3_5, qwen3_vl
from forebay.families.config.vision.siglip import siglip
from forebay.families.config.vision.siglip2 import siglip2

_READERS: Final[Mapping[str, Callable[[Fields, Fields, int], Vision]]] = {
    "gemma3": pooled_siglip,
    "gemma4": gemma4,
    "gemma4_unified": gemma4_unified,
    "idefics3": siglip,
    "internvl": internvl,
    "kimi_k25": kimi_k25,
    "lfm2_vl": siglip2,
    "mistral3": pixtral,
    "muse_glimmer": muse_glimmer,
    "qwen2_5_vl": qwen2_5_vl,
    "qwen2_vl": qwen2_vl,
    "qwen3_5": qwen3_5,
    "qwen3_5_moe": qwen3_5,
    "qwen3_vl": qwen3_vl,
    "qwen3_vl_moe": qwen3_vl,
    "qwen4_exp": qwen3_5,
    "smolvlm": siglip,
}
TYPES: Final = tuple(_READERS)  # outer types whose images are served


def vision_of(raw: Mapping[str, Any], where: str, processor: Mapping[str, Any], vocab_size: int) -> Vision | None:
    """Read the encoder in the fields of a model around a language model of `vocab_size`, and in those of its image
    `processor`. None if there is none, and for types whose encoders are not served. ModelError for a wrong value."""
    read = _READERS.get(str(raw.get("model_type")))
    if read is None or raw.get("vision_config") is None:
        return None
    if not isinstance(raw["vision_config"], dict):
        raise ModelError(f"{where}: vision_config is {brief(raw['vision_config'])}; it must be an object")
    return read(Fields.of_file(raw, where), Fields.of_file(processor, f"{where}: image processor"), vocab_size)
