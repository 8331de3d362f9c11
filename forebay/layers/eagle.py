"""Heads that guess ahead from what another model made of a token, and the token that follows it, as their only inputs.

EAGLE, arXiv 2401.15077, section 3, and EAGLE-3, arXiv 2503.01840, section 3.1. Shape letters: T tokens, H hidden size,
F entries of what an EAGLE-3 head is fed with, N chosen tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from forebay.base.errors import ModelError
from forebay.formats.quantized import HEAD_BITS
from forebay.layers.attention import AttentionSpec
from forebay.layers.build import BlockSpec, Parts
from forebay.layers.context import ForwardContext
from forebay.layers.mlp import MlpSpec


@dataclass(frozen=True, kw_only=True, slots=True)
class EagleSpec:
    """`join_bias`: `fc` has one."""

    hidden_size: int
    blocks: tuple[BlockSpec, ...]
    join_bias: bool

    def build(self, parts: Parts) -> EagleLayers:
        return EagleLayers(self, parts)


class EagleLayers:
    """Hidden states go in and come out as the model's are after its last norm."""

    def __init__(self, spec: EagleSpec, parts: Parts) -> None:
        self._ops = parts.ops
        self._join = parts.linear({"fc": spec.hidden_size}, 2 * spec.hidden_size, bias=spec.join_bias)
        self._blocks = [block.build(parts) for block in spec.blocks]

    def __call__(self, ctx: ForwardContext, embedded: Tensor, hidden: Tensor) -> Tensor:
        """Return the predicted hidden states [T, H] of the next tokens.

        hidden [T, H] is of the tokens at the context's positions; embedded [T, H] of the token behind each. Writes KV.
        """
        ops = self._ops
        x = self._join(ctx, ops.elementwise.concat([embedded, hidden]))
        residual = ops.elementwise.zeros_like(x)
        for block in self._blocks:
            x = block(ctx, x, residual)
        return ops.elementwise.add_(residual, x)


@dataclass(frozen=True, kw_only=True, slots=True)
class Eagle3Spec:
    """One layer, whose attention sees embeddings beside hidden states. It is fed with `num_taps` hidden states of the
    model's. `draft_vocab_size` 0: the logits are the model's; else its own, of that number of tokens, which are the
    first of the vocabulary unless they are `listed`."""

    name: str
    hidden_size: int
    num_taps: int
    attention: AttentionSpec
    mlp: MlpSpec
    norm_eps: float
    norm_before_residual: bool
    join_bias: bool
    vocab_size: int
    draft_vocab_size: int
    listed: bool

    def build(self, parts: Parts) -> Eagle3Layers:
        return Eagle3Layers(self, parts)


class Eagle3Layers:
    """Layers of an EAGLE-3 head, with an output head over a reduced vocabulary if the checkpoint has one."""

    def __init__(self, spec: Eagle3Spec, parts: Parts) -> None:
        self._spec, self._ops, size = spec, parts.ops, spec.hidden_size
        self._join = parts.linear({"fc": size}, spec.num_taps * size, bias=spec.join_bias)
        self._attention, self._mlp = spec.attention.build(parts), spec.mlp.build(parts)
        layer = parts.within(spec.name)
        names = "input_layernorm", "hidden_norm", "post_attention_layernorm"
        self._norms = [layer.tensor(f"{name}.weight", size) for name in names]
        self._last_norm = parts.tensor("norm.weight", size)
        self._head = self._targets = None
        if spec.draft_vocab_size:
            self._head = parts.linear({"lm_head": spec.draft_vocab_size}, size, min_bits=HEAD_BITS).weight
        if spec.listed:
            tokens = parts.tensor("d2t", spec.draft_vocab_size, float32=True, change=self._token_ids)
            self._targets = tokens.unsqueeze(1)

    def _token_ids(self, differences: Tensor) -> Tensor:
        """[draft vocabulary] int64, of how much more each is than its number among those that are drafted."""
        ids = differences.long() + torch.arange(len(differences), device=differences.device)
        if ((ids < 0) | (ids >= self._spec.vocab_size)).any():
            raise ModelError(f"d2t names tokens outside of the vocabulary of {self._spec.vocab_size}")
        return ids

    def join(self, ctx: ForwardContext, tapped: Tensor) -> Tensor:
        """tapped [T, F] of the model -> [T, H], the input of the layer before it has a hidden state of its own."""
        return self._join(ctx, tapped)

    def __call__(self, ctx: ForwardContext, embedded: Tensor, hidden: Tensor) -> Tensor:
        """Return the predicted hidden states [T, H] of the next tokens, not yet normed.

        hidden [T, H] is of the tokens at the context's positions, from `join` or from this method; embedded [T, H] of
        the token behind each. Writes KV.
        """
        ops, eps = self._ops, self._spec.norm_eps
        of_embedding, of_hidden, between = self._norms
        normed = ops.norms.rms_norm(hidden, of_hidden, eps)
        residual = ops.elementwise.add_(
            ops.elementwise.zeros_like(hidden), normed if self._spec.norm_before_residual else hidden
        )
        x = self._attention(ctx, ops.elementwise.concat([ops.norms.rms_norm(embedded, of_embedding, eps), normed]))
        x = self._mlp(ctx, ops.norms.add_rms_norm(x, residual, between, eps))
        return ops.elementwise.add_(residual, x)

    def normed(self, hidden: Tensor) -> Tensor:
        """[N, H], of which the logits are taken."""
        return self._ops.norms.rms_norm(hidden, self._last_norm, self._spec.norm_eps)

    def token_ids(self, hidden: Tensor) -> Tensor | None:
        """hidden [N, H] -> the tokens [N] int64 that its own logits make the most likely; None if it has no logits."""
        if self._head is None:
            return None
        ids, _ = self._ops.sampling.argmax_rows(self._ops.linear.apply_f32(self.normed(hidden), self._head))
        return ids if self._targets is None else self._ops.linear.embedding(ids, self._targets).squeeze(1)
