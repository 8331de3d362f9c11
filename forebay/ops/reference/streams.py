"""Hyper-connections: several residual streams instead of one, mixed before and behind each part of a layer. The ops of
every backend, defined in torch.

Manifold-constrained hyper-connections, DeepSeek-V4, section 2.2; checked against transformers' `deepseek_v4`.

Shape letters: T tokens, N streams, H hidden size.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class Mixing:
    """Weights of the mixing of streams, float32, see `mix_weights`. `norm_eps` is that of the norm of all streams
    together."""

    num_streams: int
    fn: Tensor
    scale: Tensor
    base: Tensor
    norm_eps: float
    eps: float
    iterations: int = 0


class MixWeights(NamedTuple):
    """Weights of the streams around a part, float32. `before` [T, N] collapses them to its input, `behind` [T, N]
    spreads its output over them. `between` [T, N, N] is how much of each stream, the first N, goes to each, the
    second."""

    before: Tensor
    behind: Tensor
    between: Tensor


class StreamOps:
    """Streams [T, N * H] lie side by side. Computed in float32, rounded once."""

    def mix_weights(self, streams: Tensor, mixing: Mixing) -> MixWeights:
        """Return the weights of a part by all streams [T, N * H] of a token, normed together. `mixing` has fn
        [(2 + N) N, N * H], scale [3] and base [(2 + N) N]: of `before`, `behind` and `between`.

        Sinkhorn's iterations make rows and columns of `between` sum to 1.
        """
        n = mixing.num_streams
        sizes = [n, n, n * n]
        parts, bases = torch.split(_logits(streams, mixing), sizes, dim=-1), torch.split(mixing.base, sizes)
        before, behind, between = (
            part * mixing.scale[i] + base for i, (part, base) in enumerate(zip(parts, bases, strict=True))
        )
        between = between.view(-1, n, n).softmax(dim=-1) + mixing.eps
        between = between / (between.sum(dim=1, keepdim=True) + mixing.eps)
        for _ in range(mixing.iterations - 1):
            between = between / (between.sum(dim=2, keepdim=True) + mixing.eps)
            between = between / (between.sum(dim=1, keepdim=True) + mixing.eps)
        return MixWeights(before.sigmoid() + mixing.eps, 2 * behind.sigmoid(), between)

    def last_weights(self, streams: Tensor, mixing: Mixing) -> Tensor:
        """Return `before` of `mix_weights`, behind the last layer: with fn [N, N * H], scale [1] and base [N]."""
        return (_logits(streams, mixing) * mixing.scale + mixing.base).sigmoid() + mixing.eps

    def collapse_streams(self, streams: Tensor, weights: Tensor) -> Tensor:
        """The sum of streams [T, N * H] times weights [T, N] -> [T, H]."""
        n = weights.shape[1]
        wide = streams.view(len(streams), n, streams.shape[1] // n).float()
        return (wide * weights.unsqueeze(-1)).sum(dim=1).to(streams.dtype)

    def mix_streams_(self, streams: Tensor, between: Tensor) -> None:
        """streams [T, N * H] become their mixture in place: stream j of the result is the sum over i of between[i, j]
        times stream i. between [T, N, N]."""
        n = between.shape[1]
        wide = streams.view(len(streams), n, streams.shape[1] // n)
        mixed = between[:, 0].unsqueeze(-1) * wide[:, :1].float()
        for i in range(1, n):
            mixed = mixed + between[:, i].unsqueeze(-1) * wide[:, i : i + 1].float()
        wide.copy_(mixed)

    def spread_streams(self, x: Tensor, weights: Tensor) -> Tensor:
        """x [T, H] times each of weights [T, N] -> [T, N * H]."""
        return (x.float().unsqueeze(1) * weights.unsqueeze(-1)).flatten(1).to(x.dtype)

    def match_streams(self, x: Tensor, y: Tensor, num_streams: int) -> Tensor:
        """Return how far each stream of x and y, [T, N * H] each, agree -> [T, N]: with s = x . y / sqrt(H) of a
        stream, sqrt(max(|s|, 1e-6)) with the sign of s. Qwen 4, as transformers has it."""
        hidden = x.shape[1] // num_streams
        product = (x.float() * y.float()).view(len(x), num_streams, hidden)
        agreed: Tensor = product.sum(dim=-1) * hidden**-0.5
        return (agreed.abs().clamp(min=1e-6).sqrt() * agreed.sign()).to(x.dtype)


def _logits(streams: Tensor, mixing: Mixing) -> Tensor:
    """Return the linear layer of the normed streams."""
    wide = streams.float()
    inverse = torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + mixing.norm_eps)
    return torch.nn.functional.linear(wide, mixing.fn) * inverse
