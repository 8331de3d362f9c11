"""A head that guesses ahead: from what the model made of a token, and the token that follows it, what the model would
make of that one.

DeepSeek-V3, arXiv 2412.19437, section 2.2 (multi-token prediction). Shape letters: T tokens, N streams, H hidden size.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from forebay.layers.build import BlockSpec, Parts
from forebay.layers.context import ForwardContext
from forebay.layers.gated_streams import GatedStreamsSpec
from forebay.layers.norms import NormSpec, build_norm
from forebay.layers.streams import StreamsSpec


@dataclass(frozen=True, kw_only=True, slots=True)
class DraftHeadSpec:
    """Blocks as the model's own, and the parts around them, behind the name `name`. Embedding and logits are the
    model's. `norm_offset` is added to the weights of the norms around the blocks."""

    name: str
    hidden_size: int
    blocks: tuple[BlockSpec, ...]
    norm_eps: float
    norm_offset: float = 0.0
    num_streams: ClassVar[int] = 1

    def build(self, parts: Parts) -> DraftHead:
        return DraftHead(self, parts)


@dataclass(frozen=True, kw_only=True, slots=True)
class StreamedDraftHeadSpec:
    """A block of several residual streams, and the parts around it, behind the name `name`. It is fed with the model's
    streams before they are joined. `streams` join those behind the block, and `norm` follows, None for nothing. With
    `joint_norm` all streams of a token are normed together, else each by itself with the same weight."""

    name: str
    hidden_size: int
    num_streams: int
    block: BlockSpec
    streams: StreamsSpec | GatedStreamsSpec
    norm: NormSpec | None
    norm_eps: float
    norm_offset: float = 0.0
    joint_norm: bool = False
    for_ranks: ClassVar[bool] = True

    def build(self, parts: Parts) -> StreamedDraftHead:
        """Return the head with its weights."""
        return StreamedDraftHead(self, parts)


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

    def joined(self, hidden: Tensor) -> Tensor:
        """Return the hidden states that logits are computed from: those of the head itself."""
        return hidden


class StreamedDraftHead:
    """Multi-token prediction head of a model with several residual streams: predicts the next streams from streams and
    embeddings.

    DeepSeek-V4's published inference code, and vLLM's and SGLang's descriptions of Qwen 4.
    """

    def __init__(self, spec: StreamedDraftHeadSpec, parts: Parts) -> None:
        self._ops, self._spec = parts.ops, spec
        self._block = spec.block.build(parts)
        self._streams = spec.streams.build(parts)
        self._norm = None if spec.norm is None else build_norm(spec.norm, parts, spec.norm_eps)
        parts, size = parts.within(spec.name), spec.hidden_size
        normed = size * spec.num_streams if spec.joint_norm else size
        self._norms = [
            parts.tensor(f"{name}.weight", width, offset=spec.norm_offset)
            for name, width in (("enorm", size), ("hnorm", normed))
        ]
        self._of_embedding = parts.linear({"e_proj": size}, size)
        self._of_hidden = parts.linear({"h_proj": size}, size)

    def __call__(self, ctx: ForwardContext, embedded: Tensor, hidden: Tensor) -> Tensor:
        """Return the predicted streams [T, N * H] of the next tokens.

        hidden [T, N * H] are the streams of the tokens at the context's positions, behind the last layer; embedded
        [T, H] is of the token behind each. Writes KV.
        """
        ops, spec = self._ops, self._spec
        of_embedding, of_hidden = self._norms
        width = len(of_hidden)
        normed = ops.norms.rms_norm(hidden.view(-1, width), of_hidden, spec.norm_eps).view(-1, spec.hidden_size)
        own = self._of_embedding.of(ops.norms.rms_norm(embedded, of_embedding, spec.norm_eps))
        x = self._of_hidden.of(normed).view(hidden.shape)
        residual = ops.elementwise.concat([own] * spec.num_streams)
        x = self._block(ctx, x, residual)
        return ops.elementwise.add_(residual, x)

    def joined(self, hidden: Tensor) -> Tensor:
        """hidden [T, N * H] -> the hidden states [T, H] that logits are computed from."""
        joined = self._streams.collapse(hidden)
        return joined if self._norm is None else self._norm.of(joined)
