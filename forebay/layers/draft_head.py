"""A head that guesses ahead: from what the model made of a token, and the token that follows it, what the model would
make of that one.

DeepSeek-V3, arXiv 2412.19437, section 2.2 (multi-token prediction). Shape letters: T tokens, H hidden size.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from forebay.layers.build import BlockSpec, Parts
from forebay.layers.context import ForwardContext


@dataclass(frozen=True, kw_only=True, slots=True)
class DraftHeadSpec:
    """Blocks as the model's own, and the parts around them, behind the name `name`. Embedding and logits are the
    model's. `norm_offset` is added to the weights of the norms around the blocks."""

    name: str
    hidden_size: int
    blocks: tuple[BlockSpec, ...]
    norm_eps: float
    norm_offset: float = 0.0

    def build(self, parts: Parts) -> DraftHead:
        return DraftHead(self, parts)


class DraftHead:
    """Multi-token prediction head: predicts the next hidden states from hidden states and embeddings."""

    def __init__(self, spec: DraftHeadSpec, parts: Parts) -> None:
        self._ops, self._eps = parts.ops, spec.norm_eps
        self._blocks = [block.build(parts) for block in spec.blocks]
        parts, size = parts.within(spec.name), spec.hidden_size
        names = ("enorm", "hnorm", "shared_head.norm")
        self._norms = [parts.tensor(f"{name}.weight", size, offset=spec.norm_offset) for name in names]
        self._join = parts.linear({"eh_proj": size}, 2 * size)

    def __call__(self, ctx: ForwardContext, embedded: Tensor, hidden: Tensor) -> Tensor:
        """Return the predicted hidden states [T, H] of the next tokens.

        hidden [T, H] is of the tokens at the context's positions, after the last norm; embedded [T, H] of the token
        behind each. Writes KV.
        """
        ops, eps = self._ops, self._eps
        of_embedding, of_hidden, last = self._norms
        both = [ops.norms.rms_norm(embedded, of_embedding, eps), ops.norms.rms_norm(hidden, of_hidden, eps)]
        x = self._join(ctx, ops.elementwise.concat(both))
        residual = ops.elementwise.zeros_like(x)
        for block in self._blocks:
            x = block(ctx, x, residual)
        return ops.norms.add_rms_norm(x, residual, last, eps)
