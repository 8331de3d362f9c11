"""Routers: which experts a token goes to, and how much each of them counts.

Shape letters: T tokens, H hidden size, E experts, k experts per token.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from forebay.base.errors import ModelError
from forebay.layers.build import Parts
from forebay.layers.context import ForwardContext
from forebay.ops import Gating


@dataclass(frozen=True, kw_only=True, slots=True)
class RouterSpec:
    """`gating` chooses from the outputs of the linear layer `name`, one for each expert. `correction` is the name of
    what it adds to the scores for the choice alone, "" for nothing; with `correction_in_row` checkpoints have it as one
    row. `factors` is the name of what experts' weights are multiplied by, "" for nothing. `table` is the name of the
    experts of each of `vocab_size` token ids, which are then not chosen but looked up; "" for none. With a `norm`, the
    name of its weight, the layer's input is normed; its outputs are multiplied by `scale`. With a `jitter`, None
    for none, a SparseMixer chooses (see `ExpertOps.sparse_mixer`) instead of the rest of `gating`."""

    name: str
    hidden_size: int
    num_experts: int
    gating: Gating
    bias: bool = False
    correction: str = ""
    correction_in_row: bool = False
    factors: str = ""
    table: str = ""
    vocab_size: int = 0
    norm: str = ""
    norm_eps: float = 0.0
    scale: float = 1.0
    jitter: float | None = None


class Router:
    """Router of a mixture of experts."""

    def __init__(self, spec: RouterSpec, parts: Parts) -> None:
        self._ops, self._spec = parts.ops, spec
        count, size = spec.num_experts, spec.hidden_size
        self._logits = parts.without_adapters.linear({spec.name: count}, size, bias=spec.bias, min_bits=16).weight
        self._norm = parts.tensor(spec.norm, size) if spec.norm else None
        self._correction = self._corrections(parts) if spec.correction else None
        self._factors = parts.tensor(spec.factors, count, float32=True) if spec.factors else None
        self._table = self._lookup_table(parts) if spec.table else None

    def _corrections(self, parts: Parts) -> Tensor:
        """Return the addition to each expert's score for the choice, [E] float32."""
        shape = (1, self._spec.num_experts) if self._spec.correction_in_row else (self._spec.num_experts,)
        return parts.tensor(self._spec.correction, *shape, float32=True, change=torch.flatten)

    def _lookup_table(self, parts: Parts) -> Tensor:
        """Return the experts of each token id, [V, k] int64; ModelError for one that there is not."""
        spec = self._spec

        def whole(table: Tensor) -> Tensor:
            if len(table) and not 0 <= float(table.min()) <= float(table.max()) < spec.num_experts:
                raise ModelError(f"{spec.table} names experts that are none of {spec.num_experts}")
            return table.long()

        return parts.tensor(spec.table, spec.vocab_size, spec.gating.num_experts_per_tok, float32=True, change=whole)

    def __call__(self, ctx: ForwardContext, x: Tensor) -> tuple[Tensor, Tensor]:
        """x [T, H] -> the experts' numbers [T, k] int64 and their weights [T, k] float32."""
        ops, spec = self._ops, self._spec
        if self._norm is not None:
            x = ops.norms.rms_norm(x, self._norm, spec.norm_eps)
        logits = ops.linear.apply_f32(x, self._logits)
        if spec.scale != 1.0:
            ops.elementwise.scale_(logits, spec.scale)
        if self._table is not None:
            assert ctx.input_ids is not None, "a step of a model without its tokens"
            return ops.experts.hash_gating(logits, ctx.input_ids, self._table, spec.gating)
        if spec.jitter is not None:
            return ops.experts.sparse_mixer(logits, spec.jitter)
        return ops.experts.topk_gating(logits, spec.gating, self._correction, self._factors)
