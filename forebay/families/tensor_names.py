"""What else a model type's checkpoints call its tensors, and which of theirs a language model has no use for."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

from forebay.formats.mxfp4 import BLOCKS, SCALES

GATE_UP: Final = "gate_up_proj"
DOWN: Final = "down_proj"

_LAYER: Final = re.compile(r"model\.layers\.(\d{1,6})\.")


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorNames:
    """`renamed`: patterns and what takes their place, one after the other. `unused`: how the names, after that, of
    tensors begin that belong to parts which are not served. `stacked_experts`: experts may be in one tensor for all of
    a layer's, `experts.gate_up_proj` and `experts.down_proj`, instead of under a number each. `draft_layers`: layers
    behind the model's own are for drafting, and not served either. `mxfp4`: weights may be packed in that format.
    `stacks`: what files call these stacks, of gate with up and of down, where experts are in nothing else."""

    renamed: tuple[tuple[str, str], ...] = ()
    unused: tuple[str, ...] = ()
    stacked_experts: bool = False
    draft_layers: bool = False
    mxfp4: bool = False
    stacks: tuple[str, str] | None = None

    def here(self, name: str, num_layers: int) -> str:
        """What `name` is called here; "" for a tensor without use."""
        for pattern, replacement in self.renamed:
            name = re.sub(pattern, replacement, name)
        layer = _LAYER.match(name)
        if self.draft_layers and layer is not None and int(layer[1]) >= num_layers:
            return ""
        return "" if name.startswith(self.unused) else name

    def is_stack(self, name: str) -> bool:
        return self.stacked_experts and name.endswith((f".experts.{GATE_UP}", f".experts.{DOWN}"))

    def is_packed(self, name: str) -> bool:
        return self.mxfp4 and name.endswith((BLOCKS, SCALES))


AS_STORED: Final = TensorNames()
