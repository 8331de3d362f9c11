"""The parts of equations: the name and the definition of each kind of part. Those of feed-forward layers are here, all
others in `equations.py`."""

from __future__ import annotations

from functools import singledispatch
from typing import Any, NamedTuple

from forebay.layers.clamped_moe import ClampedMoeSpec
from forebay.layers.mlp import Activation, MlpSpec, MoeSpec
from forebay.layers.routing import RouterSpec
from forebay.ops import Scoring

ARGUMENT = "@"


class Term(NamedTuple):
    """The name of a part, with an `@` for its input, and the equations that define it."""

    call: str
    lines: tuple[str, ...]

    def of(self, argument: str) -> str:
        """Return the term as text, applied to `argument`."""
        return self.call.replace(ARGUMENT, argument)


def times(factor: float) -> str:
    """Return the factor as written before a term, nothing for 1."""
    return "" if factor == 1.0 else f"{factor:.4g} "


@singledispatch
def term(part: Any) -> Term:
    """Return the equation of a part's spec; each module of layers registers its own."""
    raise NotImplementedError(f"there is no equation for a {type(part).__name__}")


@term.register
def _(part: MlpSpec) -> Term:
    inner = _inner(part.activation, part.gate_scale, part.limit)
    if part.deviations is not None:
        inner = f"Wd (gelu(max(g - mean(g) - {part.deviations:.4g} std(g), 0)) Wu h), g = Wg h"
    return Term(f"mlp({ARGUMENT})", (f"mlp(h) = {times(part.scale)}{inner}  of {part.intermediate_size:,}",))


@term.register
def _(part: MoeSpec) -> Term:
    routed = _mixture(part.router, _inner(part.activation, limit=part.limit), part.intermediate_size)
    latent = (f"  experts see and give {part.latent_size:,} dimensions",) if part.latent_size else ()
    normed = ("  experts see norm(h)",) if part.norm is not None else ()
    return Term(routed.call, (*routed.lines, *latent, *normed))


def _inner(activation: Activation, gate_scale: float = 1.0, limit: float = 0.0) -> str:
    if limit:
        return f"Wd (silu(g) u), g, u = Wg h, Wu h in +-{limit:.4g}"
    if activation is Activation.RELU2:
        return "Wd relu(Wu h)^2"
    if activation in (Activation.GELU_TANH_UNGATED, Activation.XIELU):
        return f"Wd {'xielu' if activation is Activation.XIELU else 'gelu'}(Wu h)"
    name = "gelu" if activation is Activation.GELU_TANH else "silu"
    return f"Wd ({name}({times(gate_scale)}Wg h) Wu h)"


@term.register
def _(part: ClampedMoeSpec) -> Term:
    gated = f"g sigmoid({part.alpha:.4g} g) (u + 1), g, u = Wg h, Wu h in +-{part.limit:.4g}"
    return _mixture(part.router, f"Wd ({gated})", part.intermediate_size)


def _mixture(router: RouterSpec, expert: str, size: int) -> Term:
    gating, logits = router.gating, f"{times(router.scale)}Wr {'norm(h)' if router.norm else 'h'}"
    if router.table:
        return _hashed(router, expert, size, logits)
    if router.jitter is not None:
        return _mixed(router, expert, size, logits)
    if gating.scoring is Scoring.SOFTMAX:
        share = f"{times(gating.scale)}softmax over {'those' if gating.normalize else 'all'} of {logits}"
    else:
        name = "sqrt softplus" if gating.scoring is Scoring.SQRT_SOFTPLUS else "sigmoid"
        share = f"{times(gating.scale)}{name}({logits}){', in shares of their sum' if gating.normalize else ''}"
    share += ", each by a factor of its own" if router.factors else ""
    by = " by their best" if gating.summed == 1 else ""
    groups = f" in the best {gating.best_groups} of {gating.groups} groups{by}" if gating.groups > 1 else ""
    corrected = ", chosen with a bias" if router.correction else ""
    chosen = f"{gating.num_experts_per_tok} of {router.num_experts}{groups}{corrected}"
    line = f"experts(h) = sum of g_i {expert}  of {size:,}"
    return Term(f"experts({ARGUMENT})", (line, f"  i: {chosen}; g = {share}"))


def _mixed(router: RouterSpec, expert: str, size: int, logits: str) -> Term:
    line = f"experts(h) = sum of g_i {expert}  of {size:,}"
    near = f"those at most {2 * router.jitter:.4g} below it, relative to them" if router.jitter else "its equals"
    share = f"softmax over {near}, of {logits}, the second's without the first"
    return Term(f"experts({ARGUMENT})", (line, f"  i: 2 of {router.num_experts}; g = {share}"))


def _hashed(router: RouterSpec, expert: str, size: int, logits: str) -> Term:
    gating = router.gating
    line = f"experts(h) = sum of g_i {expert}  of {size:,}"
    chosen = f"{gating.num_experts_per_tok} of {router.num_experts}, by the token"
    share = f"{times(gating.scale)}sqrt softplus({logits}), in shares of their sum"
    return Term(f"experts({ARGUMENT})", (line, f"  i: {chosen}; g = {share}"))
