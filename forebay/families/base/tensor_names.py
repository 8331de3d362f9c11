"""Other names of a model type's tensors in checkpoints, and which of theirs a language model has no use for."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

from forebay.formats.turned_experts import DOWN, GATE_UP, SUFFIXES

_SHARED: Final = ("embed_tokens.weight", "shared_head.head.weight", "lm_head.weight")
_JOINS: Final = ("eh_proj.weight", ".h_proj.weight", "mtp.fc.weight", "mtp.fc_hidden.weight")
_LAYER: Final = re.compile(r"model\.layers\.(\d{1,6})\.")


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorNames:
    """`renamed`: patterns and their replacements, one after the other. `unused`: the prefixes, after that, of tensors
    that belong to parts which are not served. `stacked_experts`: experts may be in one tensor for all of a layer's,
    `experts.gate_up_proj` and `experts.down_proj`, instead of under a number each. `draft_layers`: layers behind the
    model's own are for drafting. `draft_head`: the prefix of its tensors' names, and its replacement. In a replacement
    {0} is the number of the first layer behind the model's own, {1} of the next; tensors for drafting with another
    prefix are not served. `turned_experts`: experts are as gpt-oss has them. `stacks`: the names of these stacks in
    files, of gate with up and of down, if experts are in nothing else. `expert_parts`: the file's names of an expert's
    gate, up and down. `whole`: the endings of our names of tensors that hold whole numbers, below 2^24, and no weights.
    `modules`: as `renamed`, for transformers' names of linear layers that differ from those in its files. `by_row`: a
    part of our names of tables that stay in the files, of which a step reads its tokens' rows; "" for none."""

    renamed: tuple[tuple[str, str], ...] = ()
    unused: tuple[str, ...] = ()
    stacked_experts: bool = False
    draft_layers: bool = False
    draft_head: tuple[tuple[str, str], ...] = ()
    turned_experts: bool = False
    stacks: tuple[str, str] | None = None
    expert_parts: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
    whole: tuple[str, ...] = ()
    modules: tuple[tuple[str, str], ...] = ()
    by_row: str = ""

    def here(self, name: str, num_layers: int) -> str:
        """Return our name of the tensor `name`; "" for a tensor without use to the model."""
        name = self._renamed(name)
        layer = _LAYER.match(name)
        if self.draft_layers and layer is not None and int(layer[1]) >= num_layers:
            return ""
        return "" if name.startswith(self.unused) else name

    def layer(self, name: str, num_layers: int) -> str:
        """Return our name of the linear layer that transformers or its files call `name`; "" for a layer without use to
        the model."""
        for pattern, replacement in self.modules:
            name = re.sub(pattern, replacement, name)
        return self.here(f"{name}.weight", num_layers).removesuffix(".weight")

    def begins_draft_head(self, name: str) -> bool:
        """Return whether it is the one matrix of a draft head, whichever of several, that joins what the head is fed
        with."""
        return bool(self.draft_head) and self._renamed(name).endswith(_JOINS)

    def in_draft_head(self, name: str, num_layers: int) -> str:
        """Return our name of the draft head's tensor `name`; "" for a tensor without use to the draft head, which
        shares embedding and logits with the model, whether the files repeat them or not."""
        name, layers = self._renamed(name), (num_layers, num_layers + 1)
        for theirs, ours in self.draft_head:
            begin = theirs.format(*layers)
            if name.startswith(begin) and not name.endswith(_SHARED):
                return ours.format(*layers) + name.removeprefix(begin)
        return ""

    def stored_in_draft_head(self, name: str, num_layers: int) -> str:
        """Return a file's name of the draft head's tensor `name`: of several names the first."""
        layers = (num_layers, num_layers + 1)
        for theirs, ours in self.draft_head:
            if name.startswith(ours.format(*layers)):
                return theirs.format(*layers) + name.removeprefix(ours.format(*layers))
        return name

    def _renamed(self, name: str) -> str:
        for pattern, replacement in self.renamed:
            name = re.sub(pattern, replacement, name)
        return name

    def is_by_row(self, name: str) -> bool:
        """Return whether the tensor stays in the files, and its rows are read when they are needed."""
        return bool(self.by_row) and self.by_row in name

    def is_stack(self, name: str) -> bool:
        """Return whether the tensor holds one matrix of all experts of a layer."""
        return self.stacked_experts and name.endswith((f".experts.{GATE_UP}", f".experts.{DOWN}"))

    def is_turned(self, name: str) -> bool:
        """Return whether the tensor holds something of all experts of a layer as gpt-oss has them."""
        return self.turned_experts and name.endswith(SUFFIXES)


AS_STORED: Final = TensorNames()
