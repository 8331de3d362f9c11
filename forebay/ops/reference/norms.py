"""The norms of rows: each one's contract for every backend, and its definition in torch.

Shape letters: T tokens, H hidden size, I intermediate size, N heads.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor


class GatedNorm(NamedTuple):
    """weight [I], or [group_size] for all groups; the gate comes behind the norm with `norm_first`, and is a silu, or
    with `sigmoid` the sigmoid."""

    weight: Tensor
    eps: float
    group_size: int
    norm_first: bool
    sigmoid: bool = False


class NormOps:
    """Norms of rows, defined in torch. Computed in float32, rounded once."""

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """x * rsqrt(mean(x^2) + eps) * weight over the last dimension, [.., H] -> the same shape, contiguous.

        Computed in float32 and rounded once. x has two or three dimensions.
        """
        x32 = x.float()
        normed = x32 * torch.rsqrt(x32.pow(2).mean(-1, keepdim=True) + eps)
        return (weight.float() * normed).to(x.dtype)

    def layer_norm(self, x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
        """(x - mean(x)) * rsqrt(var(x) + eps) * weight + bias over the last dimension, [T, H] or [T, N, H] -> the same
        shape, contiguous; no bias for None.

        weight and bias [H], or of three dimensions [N, H]: each of N heads has its own. Computed in float32 and rounded
        once. Layer normalization, arXiv 1607.06450, section 3.
        """
        normed = torch.nn.functional.layer_norm(x.float(), x.shape[-1:], eps=eps) * weight.float()
        return (normed if bias is None else normed + bias.float()).to(x.dtype)

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        """residual [T, H] += x [T, H] in place, then `rms_norm` of the sum as it was rounded into residual."""
        residual.add_(x)
        return self.rms_norm(residual, weight, eps)

    def match_rms(self, x: Tensor, like: Tensor, least: float) -> Tensor:
        """x [T, H] with each row multiplied so that the root of its mean square is that of `like` [T, H] -> [T, H].

        Rows of both may be views into wider rows. A mean square of x below `least` counts as `least`.
        """
        own, wanted = (each.float().pow(2).mean(-1, keepdim=True) for each in (x, like))
        return (x.float() * (wanted / own.clamp(min=least)).sqrt()).to(x.dtype)

    def gated_rms_norm(self, x: Tensor, gate: Tensor, norm: GatedNorm) -> Tensor:
        """norm(x) * weight * act(gate), or norm(x * act(gate)) * weight: an RMS norm of groups of entries with a gate.

        x and gate [T, I], which may be views into wider rows -> [T, I] in x's dtype. Computed in float32, rounded once.
        """
        groups = (len(x), x.shape[1] // norm.group_size, norm.group_size)
        x32, gate32 = x.float().reshape(groups), gate.float().reshape(groups)
        opened = gate32.sigmoid() if norm.sigmoid else F.silu(gate32)
        if not norm.norm_first:
            x32 = x32 * opened
        weight = norm.weight.float().view(-1, norm.group_size)
        normed = x32 * torch.rsqrt(x32.pow(2).mean(-1, keepdim=True) + norm.eps) * weight
        return (normed * opened if norm.norm_first else normed).reshape(x.shape).to(x.dtype)
