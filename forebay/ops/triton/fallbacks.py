"""Ops whose kernels do not compile for this GPU: torch computes them, by the definition of the op.

Slower, with a result that may depend on the other rows of a step, and a step that reads values on the host runs without
a graph. The start table and a warning name the op.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import Tensor

from forebay.base.log import event, get_logger
from forebay.ops.interface import Ops
from forebay.ops.linear import LinearWeight
from forebay.ops.reference.experts import TorchHeads
from forebay.ops.reference.recurrence import RecurrenceOps, Scan, StateBatch
from forebay.ops.triton.experts import TritonExperts, TritonHeads
from forebay.ops.triton.launch import NotCompiled
from forebay.ops.triton.linear import TritonLinearWeight, TritonParts, opened
from forebay.ops.triton.recurrence import by_tokens

_LOG: Final = get_logger("ops")


def fall_back(ops: Ops, found: dict[str, str]) -> None:
    """Give each op of `ops` that has kernels its definition as a second way; `found` gets those that took it, by group
    and name."""
    for group_name, group in vars(ops).items():
        if _is_ours(type(group)):
            _fall_back_in(group, group_name, found)


def _fall_back_in(group: Any, group_name: str, found: dict[str, str]) -> None:
    own_class = type(group)
    defined_in = next(base for base in own_class.__mro__ if not _is_ours(base))
    for op in dir(own_class):
        own, name = getattr(own_class, op), f"{group_name}.{op}"
        if op.startswith(("_", "pack")) or not callable(own) or not _is_ours(own):
            continue
        twin = _OF_PACKED.get(name) or functools.partial(getattr(defined_in, op), group)
        setattr(group, op, _guarded(name, getattr(group, op), twin, found))


def _is_ours(thing: Any) -> bool:
    return thing.__module__.startswith(__package__ or "")


def _guarded(name: str, own: Callable[..., Any], twin: Callable[..., Any], found: dict[str, str]) -> Callable[..., Any]:
    @functools.wraps(own)
    def op(*args: Any, **kwargs: Any) -> Any:
        if name not in found:
            try:
                return own(*args, **kwargs)
            except NotCompiled as error:
                found[name] = str(error)
                effect = "torch computes it: slower, and its bits may depend on the batch"
                _LOG.warning(event("kernel_not_compiled", op=name, reason=str(error), effect=effect))
        return twin(*args, **kwargs)

    return op


def _linear(x: Tensor, w: LinearWeight) -> Tensor:
    if isinstance(w, TritonParts):
        return torch.cat([_linear(x, part) for part in w.parts], dim=1)
    assert isinstance(w, TritonLinearWeight), type(w)
    values = w.values if w.form is None else opened(w, None, x.dtype)
    return F.linear(x, values, None if w.bias is None else w.bias.to(x.dtype))


def _linear_f32(x: Tensor, w: LinearWeight) -> Tensor:
    return _linear(x, w).float()


def _fused_experts(x: Tensor, experts: TritonExperts, topk_ids: Tensor, topk_weights: Tensor) -> Tensor:
    """Every expert computes every token: no host reads how many tokens each has, and a graph may capture it."""
    per_choice = x.new_zeros(*topk_ids.shape, x.shape[1])
    for e, (inner, outer) in enumerate(zip(experts.gate_up, experts.down, strict=True)):
        result = _linear(experts.activate(_linear(x, inner)), outer)
        per_choice = torch.where((topk_ids == e).unsqueeze(-1), result.unsqueeze(1), per_choice)
    return (per_choice.float() * topk_weights.unsqueeze(-1)).sum(dim=1).to(x.dtype)


def _mamba2_scan(x: Tensor, dt: Tensor, b: Tensor, c: Tensor, scan: Scan, state: Tensor, batch: StateBatch) -> Tensor:
    shape = x.shape[1], b.shape[2], x.shape[2]
    return by_tokens(RecurrenceOps.mamba2_scan, x, dt, b, c, scan, shape=shape, state=state, batch=batch)


def _gated_delta_rule(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor, state: Tensor, batch: StateBatch
) -> Tensor:
    shape = v.shape[1], k.shape[2], v.shape[2]
    return by_tokens(RecurrenceOps.gated_delta_rule, q, k, v, log_decay, beta, shape=shape, state=state, batch=batch)


def _linear_heads(x: Tensor, heads: TritonHeads | TorchHeads) -> Tensor:
    return torch.stack([_linear(x[:, h], weight) for h, weight in enumerate(heads.weights)], dim=1)


# The definitions of ops that take weights as these ops pack them, or states as they keep them.
_OF_PACKED: Final[dict[str, Callable[..., Any]]] = {
    "linear.apply": _linear,
    "linear.apply_f32": _linear_f32,
    "experts.fused_experts": _fused_experts,
    "recurrence.mamba2_scan": _mamba2_scan,
    "recurrence.gated_delta_rule": _gated_delta_rule,
    "experts.linear_heads": _linear_heads,
}
