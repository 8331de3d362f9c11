"""Feed-forward layers: one for all tokens, or a mixture of experts.

Shape letters: T tokens, H hidden size.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from typing import ClassVar, Final

from torch import Tensor

from forebay.families.base.mixers import Xielu
from forebay.layers.build import Parts
from forebay.layers.context import ForwardContext
from forebay.layers.experts import ExpertLayers
from forebay.layers.linear import GatheredLinear
from forebay.layers.params import TensorParam
from forebay.layers.routing import Router, RouterSpec
from forebay.ops import ExpertActivation

GATE_UP_DOWN: Final = ("gate_proj", "up_proj", "down_proj")
UP_DOWN: Final = ("up_proj", "down_proj")


class Activation(StrEnum):
    """Activation function of a gate, which is multiplied with up, or used alone: the square of a ReLU (Primer, arXiv
    2109.08668, 4.1), a GELU, and an xIELU."""

    SILU = "silu"
    GELU_TANH = "gelu_pytorch_tanh"
    RELU2 = "relu2"  # without a gate
    GELU_TANH_UNGATED = "gelu_pytorch_tanh, no gate"
    XIELU = "xielu"  # without a gate


_UNGATED: Final = (Activation.RELU2, Activation.GELU_TANH_UNGATED, Activation.XIELU)


@dataclass(frozen=True, kw_only=True, slots=True)
class MlpSpec:
    """`names`: the checkpoint's names of gate, up and down, or of both inputs of the activation in one tensor, and
    down. The gate and the layer's output are multiplied by `gate_scale` and `scale`. With a `limit`, which is 0 for
    none, gate and up of SiLU are cut at it as in `ElementwiseOps.clamped_swiglu` with offset 0. `deviations`, None for
    none: see `ElementwiseOps.sparse_gelu_and_mul`, which a GELU is with them. `xielu`: the numbers of
    an xIELU, None if they are in the checkpoint, below `act_fn`."""

    name: str
    hidden_size: int
    intermediate_size: int
    bias: bool = False
    activation: Activation = Activation.SILU
    names: tuple[str, ...] = GATE_UP_DOWN
    gate_scale: float = 1.0
    scale: float = 1.0
    limit: float = 0.0
    deviations: float | None = None
    xielu: Xielu | None = None

    @property
    def for_ranks(self) -> bool:
        """See `models/shares.py`. `deviations` are of all outputs of a token."""
        return self.deviations is None

    def build(self, parts: Parts) -> Mlp:
        return Mlp(self, parts)


class Mlp:
    """Feed-forward layer: down(activation(gate, up)), or down(activation(up)) without a gate."""

    def __init__(self, spec: MlpSpec, parts: Parts) -> None:
        parts = parts.within(spec.name)
        self._activate, self._exchange = _activation(spec, parts), parts.share.exchange
        (*before, down), size, hidden_size = spec.names, spec.intermediate_size, spec.hidden_size
        up = 0 if spec.activation in _UNGATED else size
        inside = parts.share.of(size, f"inner outputs of {parts.prefix.removesuffix('.')}")
        own = [inside, range(size + inside.start, size + inside.stop)][: 2 if up else 1]
        self.before = parts.linear(
            dict.fromkeys(before, (size + up) // len(before)),
            hidden_size,
            bias=spec.bias,
            scales=((size, spec.gate_scale), (up, 1.0)),
            own=parts.share.part(*own),
        )
        self.down = parts.gathered(down, hidden_size, size, bias=spec.bias, scale=spec.scale)

    def __call__(self, ctx: ForwardContext, x: Tensor) -> Tensor:
        """down(activation(gate(x)) * up(x)), or down(activation(up(x))): x [T, H] -> [T, H]."""
        return self.down(ctx, self._exchange.gather(self._activate(self.before(ctx, x))))


def _activation(spec: MlpSpec, parts: Parts) -> Callable[[Tensor], Tensor]:
    ops = parts.ops.elementwise
    if spec.limit:
        return partial(ops.clamped_swiglu, alpha=1.0, limit=spec.limit, offset=0.0)
    if spec.deviations is not None:
        return partial(ops.sparse_gelu_and_mul, deviations=spec.deviations)
    if spec.activation is Activation.XIELU:
        alpha_p, alpha_n, beta, eps = spec.xielu or _stored_xielu(parts.within("act_fn"))
        return partial(ops.xielu, alpha_p=_softplus(alpha_p), alpha_n=beta + _softplus(alpha_n), beta=beta, eps=eps)
    activations: dict[Activation, Callable[[Tensor], Tensor]] = {
        Activation.SILU: ops.silu_and_mul,
        Activation.GELU_TANH: ops.gelu_and_mul,
        Activation.RELU2: ops.relu2,
        Activation.GELU_TANH_UNGATED: ops.gelu,
    }
    return activations[spec.activation]


def _stored_xielu(parts: Parts) -> Xielu:
    alpha_p, alpha_n = parts.number("alpha_p"), parts.number("alpha_n")
    return Xielu(alpha_p, alpha_n, parts.number("beta", bare=True), parts.number("eps", bare=True))


def _softplus(x: float) -> float:
    return max(x, 0.0) + math.log1p(math.exp(-abs(x)))


@dataclass(frozen=True, kw_only=True, slots=True)
class MoeSpec:
    """`names`: the checkpoint's names of the layers of an expert, as of an `MlpSpec`. With `latent_size`, which is 0
    for none, experts work on a projection of their inputs to that size, and the sum of their outputs is projected back.
    `limit` is that of an `MlpSpec`. `norm` is the weight of a norm of the experts' input, but not of the router's; None
    for none."""

    name: str
    router: RouterSpec
    intermediate_size: int
    activation: Activation = Activation.SILU
    names: tuple[str, ...] = GATE_UP_DOWN
    latent_size: int = 0
    latent_bias: bool = False
    norm: TensorParam | None = None
    norm_eps: float = 0.0
    limit: float = 0.0
    for_ranks: ClassVar[bool] = True

    def expert(self, number: int) -> MlpSpec:
        """Return the description of one expert."""
        return MlpSpec(
            name=f"{self.name}.experts.{number}",
            hidden_size=self.latent_size or self.router.hidden_size,
            intermediate_size=self.intermediate_size,
            activation=self.activation,
            names=self.names,
            limit=self.limit,
        )

    def build(self, parts: Parts) -> Moe:
        return Moe(self, parts)


_OF_EXPERTS: Final = {
    Activation.SILU: ExpertActivation.SILU_AND_MUL,
    Activation.RELU2: ExpertActivation.RELU2,
    Activation.GELU_TANH: ExpertActivation.GELU_AND_MUL,
}


class Moe:
    """Mixture of experts, optionally in a latent space narrower than the residual stream."""

    def __init__(self, spec: MoeSpec, parts: Parts) -> None:
        self._ops = parts.ops
        self._router = Router(spec.router, parts)
        self._latent = _latent(spec, parts.within(spec.name)) if spec.latent_size else None
        self._norm = None if spec.norm is None else parts.weights.tensor(spec.norm)
        self._eps = spec.norm_eps
        experts = [Mlp(spec.expert(i), parts.without_adapters) for i in range(spec.router.num_experts)]
        before, down = [expert.before.weight for expert in experts], [expert.down.weight for expert in experts]
        clamp = {"alpha": 1.0, "limit": spec.limit, "offset": 0.0} if spec.limit else {}
        activation = ExpertActivation.CLAMPED_SWIGLU if spec.limit else _OF_EXPERTS[spec.activation]
        self._experts = ExpertLayers(parts, before, down, activation, **clamp)

    def __call__(self, ctx: ForwardContext, x: Tensor) -> Tensor:
        """x [T, H] -> [T, H]: each token's experts, weighted as its router says."""
        ids, weights = self._router(ctx, x)
        if self._norm is not None:
            x = self._ops.norms.rms_norm(x, self._norm, self._eps)
        if self._latent is None:
            return self._experts(x, ids, weights)
        into, out_of = self._latent
        return out_of(ctx, self._experts(into(ctx, x), ids, weights))


def _latent(spec: MoeSpec, parts: Parts) -> tuple[GatheredLinear, GatheredLinear]:
    """To the experts' inputs, and from their outputs."""
    bias, outside, inside = spec.latent_bias, spec.router.hidden_size, spec.latent_size
    into = parts.gathered("fc1_latent_proj", inside, outside, bias=bias)
    return into, parts.gathered("fc2_latent_proj", outside, inside, bias=bias)
