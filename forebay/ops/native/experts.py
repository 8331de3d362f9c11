"""The native twins of the ops in experts.py: thin calls into the compiled kernels."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from forebay.ops.linear import LinearOps, LinearWeight
from forebay.ops.native.kernels import Kernels, address
from forebay.ops.native.linear import NativeLinearWeight
from forebay.ops.reference.elementwise import ElementwiseOps
from forebay.ops.reference.experts import ExpertActivation, ExpertOps, Experts, Gating, HeadWeights, Scoring

_SCORINGS = list(Scoring)  # in the order of `Scoring` of cpu/routing.cpp
_ACTIVATIONS = list(ExpertActivation)  # in the order of `Activation` of cpu/experts.cpp


@dataclass(frozen=True, slots=True, eq=False)
class NativeLayers(HeadWeights):
    """Linear layers of one shape; `tables` are arrays of `PackedLinear` of cpu/linear.h, by the dtype of x."""

    weights: tuple[NativeLinearWeight, ...]
    tables: dict[torch.dtype, Tensor]

    @property
    def in_features(self) -> int:
        return self.weights[0].in_features

    @property
    def out_features(self) -> int:
        return self.weights[0].out_features


@dataclass(frozen=True, slots=True, eq=False)
class NativeExperts(Experts):
    """The experts of one layer; `activation` is an index into `Activation` of cpu/experts.cpp."""

    gate_up: NativeLayers
    down: NativeLayers
    activation: int
    alpha: float
    limit: float
    offset: float

    @property
    def num_experts(self) -> int:
        return len(self.down.weights)

    @property
    def inner_size(self) -> int:
        """Outputs of the activation: a part of the inputs of `down` if the experts are a rank's."""
        ungated = self.activation == _ACTIVATIONS.index(ExpertActivation.RELU2)
        return self.gate_up.out_features // (1 if ungated else 2)


def _options(gating: Gating) -> tuple[int, bool, float, float, float]:
    """Return the kernels' arguments for scores and weights."""
    return _SCORINGS.index(gating.scoring), gating.normalize, gating.epsilon, gating.scale, gating.least_sum


class NativeExpertOps(ExpertOps):
    """See `ExpertOps`. The last dimension of every tensor is contiguous, and so are ids and weights."""

    def __init__(self, kernels: Kernels, linear: LinearOps, elementwise: ElementwiseOps) -> None:
        super().__init__(linear, elementwise)
        self._kernels, self._pool = kernels, kernels.pool
        self._topk_gating = kernels.bind("fb_topk_gating")
        self._hash_gating = kernels.bind("fb_hash_gating")
        self._sparse_mixer = kernels.bind("fb_sparse_mixer")
        self._fused_experts = kernels.by_dtype("fb_fused_experts_{}")
        self._inside, self._outside = (kernels.by_dtype(f"fb_experts_{part}_{{}}") for part in ("inside", "outside"))
        self._linear_heads = kernels.by_dtype("fb_linear_heads_{}")

    def topk_gating(
        self, logits: Tensor, gating: Gating, correction: Tensor | None = None, factors: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        tokens, num_experts = logits.shape
        choices = gating.num_experts_per_tok
        ids, weights = (torch.empty(tokens, choices, dtype=dtype) for dtype in (torch.int64, torch.float32))
        inputs = logits.data_ptr(), address(correction), address(factors)
        sizes = (tokens, num_experts, choices, gating.groups, gating.best_groups, gating.summed)
        options = _options(gating)
        self._topk_gating(self._pool, *inputs, ids.data_ptr(), weights.data_ptr(), *sizes, *options)
        return ids, weights

    def hash_gating(self, logits: Tensor, token_ids: Tensor, table: Tensor, gating: Gating) -> tuple[Tensor, Tensor]:
        tokens, num_experts = logits.shape
        choices = gating.num_experts_per_tok
        ids, weights = (torch.empty(tokens, choices, dtype=dtype) for dtype in (torch.int64, torch.float32))
        inputs = logits.data_ptr(), token_ids.data_ptr(), table.data_ptr(), ids.data_ptr(), weights.data_ptr()
        options = _options(gating)
        self._hash_gating(self._pool, *inputs, tokens, num_experts, choices, *options)
        return ids, weights

    def sparse_mixer(self, logits: Tensor, jitter: float) -> tuple[Tensor, Tensor]:
        ids, weights = (torch.empty(len(logits), 2, dtype=dtype) for dtype in (torch.int64, torch.float32))
        self._sparse_mixer(self._pool, logits.data_ptr(), ids.data_ptr(), weights.data_ptr(), *logits.shape, 2 * jitter)
        return ids, weights

    def pack_experts(
        self,
        gate_up: Sequence[LinearWeight],
        down: Sequence[LinearWeight],
        activation: ExpertActivation = ExpertActivation.SILU_AND_MUL,
        *,
        alpha: float = 0.0,
        limit: float = 0.0,
        offset: float = 1.0,
    ) -> NativeExperts:
        layers = self._layers(gate_up), self._layers(down)
        return NativeExperts(*layers, _ACTIVATIONS.index(activation), alpha, limit, offset)

    def fused_experts(self, x: Tensor, experts: Experts, topk_ids: Tensor, topk_weights: Tensor) -> Tensor:
        assert isinstance(experts, NativeExperts), type(experts)
        (tokens, choices), width, (gate_up, down) = topk_ids.shape, x.shape[1], (experts.gate_up, experts.down)
        out = x.new_empty(tokens, width)
        tables = gate_up.tables[x.dtype].data_ptr(), down.tables[x.dtype].data_ptr()
        chosen = topk_ids.data_ptr(), topk_weights.data_ptr()
        sizes = (tokens, choices, experts.num_experts, width, gate_up.out_features, down.in_features)
        options = (experts.activation, experts.alpha, experts.limit, experts.offset)
        self._fused_experts[x.dtype](
            self._pool, x.data_ptr(), x.stride(0), *tables, *chosen, out.data_ptr(), *sizes, *options
        )
        return out

    def experts_inside(self, x: Tensor, experts: Experts, topk_ids: Tensor) -> Tensor:
        assert isinstance(experts, NativeExperts), type(experts)
        (tokens, choices), gate_up, inner = topk_ids.shape, experts.gate_up, experts.inner_size
        out = x.new_empty(tokens * choices, inner)
        addresses = gate_up.tables[x.dtype].data_ptr(), topk_ids.data_ptr(), out.data_ptr()
        sizes = (tokens, choices, experts.num_experts, x.shape[1], gate_up.out_features, inner)
        options = (experts.activation, experts.alpha, experts.limit, experts.offset)
        self._inside[x.dtype](self._pool, x.data_ptr(), x.stride(0), *addresses, *sizes, *options)
        return out

    def experts_outside(self, inner: Tensor, experts: Experts, topk_ids: Tensor, topk_weights: Tensor) -> Tensor:
        assert isinstance(experts, NativeExperts), type(experts)
        (tokens, choices), down = topk_ids.shape, experts.down
        out = inner.new_empty(tokens, down.out_features)
        addresses = inner.data_ptr(), down.tables[inner.dtype].data_ptr(), topk_ids.data_ptr(), topk_weights.data_ptr()
        sizes = (tokens, choices, experts.num_experts, down.out_features, down.in_features)
        self._outside[inner.dtype](self._pool, *addresses, out.data_ptr(), *sizes)
        return out

    def pack_heads(self, weights: Sequence[LinearWeight]) -> NativeLayers:
        return self._layers(weights)

    def linear_heads(self, x: Tensor, heads: HeadWeights) -> Tensor:
        assert isinstance(heads, NativeLayers), type(heads)
        tokens, num_heads, inputs = x.shape
        out = x.new_empty(tokens, num_heads, heads.out_features)
        strides, table = (x.stride(0), x.stride(1)), heads.tables[x.dtype].data_ptr()
        sizes = (tokens, num_heads, inputs, heads.out_features)
        self._linear_heads[x.dtype](self._pool, x.data_ptr(), *strides, table, out.data_ptr(), *sizes)
        return out

    def _layers(self, weights: Sequence[LinearWeight]) -> NativeLayers:
        layers = []
        for weight in weights:
            assert isinstance(weight, NativeLinearWeight), type(weight)
            layers.append(weight)
        assert len({(layer.in_features, layer.out_features) for layer in layers}) == 1, "layers of several shapes"
        tables = {
            dtype: torch.tensor([_as_packed_linear(layer, dtype) for layer in layers]) for dtype in _dtypes(layers)
        }
        return NativeLayers(tuple(layers), tables)


def _as_packed_linear(layer: NativeLinearWeight, dtype: torch.dtype) -> list[int]:
    return [layer.panels[dtype], layer.packed_ptr, layer.bias_ptr, layer.activation_bits]


def _dtypes(layers: Sequence[NativeLinearWeight]) -> set[torch.dtype]:
    """Return the dtypes of x that every layer accepts."""
    return set[torch.dtype].intersection(*(set(layer.panels) for layer in layers))
