"""Linear layers of DeepSeek-V4's published files: FP8 in blocks, and experts in FP8, too, or in MXFP4.

A matrix [N, K] is `weight`, whose scales are `scale`, or `weight_scale_inv` in files of transformers. In FP8 (E4M3) it
has a scale for each block, a float or a power of two (E8M0). In MXFP4 its bytes, of the type I8, hold two codes each,
the lower first, and a power of two scales each 32 inputs of an output.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

from forebay.formats.file_array import FileArray
from forebay.formats.float_layers import FloatLayer, FloatPacking, Floats, float_packing
from forebay.formats.layer_packing import IgnoredModules
from forebay.formats.quantized import CodeFormat

EXPERTS: Final = {"fp4": Floats.MXFP4, "fp8": Floats.FP8}
"""The forms of experts, by the configuration's `expert_dtype`."""
_SCALES: Final = frozenset({"scale", "weight_scale_inv"})
_WEIGHTS: Final = frozenset({"F8_E4M3", "I8"})
_EXPERT: Final = re.compile(r"\.experts\.\d+\.")
# Of the other matrices these are in FP8.
_IN_FP8: Final = re.compile(
    r"\.attn\.(wq_a|wq_b|wkv|wo_a|wo_b)\.|\.attn\.indexer\.wq_b\.|\.shared_experts\.|\.[eh]_proj\."
)


@dataclass(frozen=True, kw_only=True, slots=True)
class MixedFloats:
    """How layers are packed: those in FP8 as `wide` has them, and those of `experts` perhaps in MXFP4."""

    wide: FloatPacking
    experts: Floats
    packs_heads = False

    @property
    def ignored(self) -> IgnoredModules:
        return self.wide.ignored

    def has(self, part: str, dtype: str) -> bool:
        """Return whether that is an array of a packed layer: `weight` is the name of others, too."""
        return part in _SCALES or (part == "weight" and dtype in _WEIGHTS)

    def format(self, name: str, width: int) -> CodeFormat | None:
        """Return the format of the matrix `name`, by its name and inputs alone; None if it is not in codes."""
        if _EXPERT.search(name) is not None:
            return replace(self.wide, floats=self.experts).format(name, width)
        return self.wide.format(name, width) if _IN_FP8.search(name) is not None else None

    def layer(self, parts: Mapping[str, FileArray], where: str) -> FloatLayer:
        """Return the weight that these arrays stand for. ModelError, which begins with `where`, if they do not go
        together."""
        found = dict(parts)
        scale = next((found.pop(name) for name in sorted(_SCALES) if name in found), None)
        weight = found.get("weight")
        paired = weight is not None and weight.dtype.kind == "i"
        if paired and weight is not None:
            found["weight_packed"] = found.pop("weight").as_bytes()
        if scale is not None:
            found["weight_scale" if paired else "weight_scale_inv"] = scale
        return FloatLayer(found, replace(self.wide, floats=Floats.MXFP4) if paired else self.wide, where)


def mixed_floats(fields: Any, expert_dtype: str) -> MixedFloats | None:
    """From a config.json's quantization_config and one of `EXPERTS`; None for another method, and FP8 without
    blocks."""
    wide = float_packing(fields) if isinstance(fields, dict) else None
    if wide is None or wide.method != "fp8" or wide.block is None:
        return None
    return MixedFloats(wide=wide, experts=EXPERTS[expert_dtype])
