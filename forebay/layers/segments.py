"""Texts of a step, and attention of tokens to all tokens of their own text.

Shape letters: T tokens of all texts of a step, S texts, L longest text, R distances, H hidden size, Hq heads, D head
size.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from forebay.formats.quantized import ENCODER_BITS
from forebay.layers.build import Parts
from forebay.layers.norms import NormSpec, build_norm, norm_name
from forebay.layers.rotary import RopeSpec
from forebay.layers.score_biases import biased_attention
from forebay.ops.reference.attention import KvCache, PagedKv, segments_from


class Distances(NamedTuple):
    """Embeddings of the distances that occur in texts of up to L tokens, [R, H], and which one a distance has: that of
    a query i from a key j is row[L - 1 + i - j]."""

    embeddings: Tensor
    row: Tensor  # [2 L - 1] int64


@dataclass(frozen=True, slots=True, kw_only=True)
class Segments:
    """The texts of a step: `tokens` has each text's, and each token's place in its text is in `positions`. `near` has
    them for attention to near tokens, which sees `ahead` tokens [T] int32 behind a token; of a model without such
    layers it is `tokens`, and there is no `ahead`. `bias`: see `biased_attention`; None for none. `distances`: of a
    model with embeddings of these."""

    tokens: PagedKv
    positions: Tensor  # [T] int64
    near: PagedKv
    ahead: Tensor | None = None
    bias: Tensor | None = None
    distances: Distances | None = None

    @classmethod
    def of(cls, q_start: Tensor, positions: Tensor, longest: int, reach: int) -> Segments:
        """Return the texts that begin at q_start [S + 1] int32, each of at most `longest` tokens; attention to near
        tokens sees `reach` to each side, 0 if no layer has it."""
        tokens = segments_from(q_start, len(positions), longest)
        if not reach:
            return cls(tokens=tokens, positions=positions, near=tokens)
        each = torch.arange(len(positions), dtype=torch.int32, device=q_start.device)
        ends = q_start[torch.searchsorted(q_start, each, right=True)]
        ahead = (ends - 1 - each).clamp(max=reach).int()
        return cls(tokens=tokens, positions=positions, near=replace(tokens, causal=True), ahead=ahead)


@dataclass(frozen=True, slots=True, kw_only=True)
class SegmentAttentionSpec:
    """`names` are the checkpoint's of q, k and v, or of the one layer that has all three. `rope` None: no rotation.
    `reach`: tokens to each side that a token sees, 0 for all of the text. `num_kv_heads` 0: as many as `num_heads`.
    `head_norms` are those of each head of q and k, None for none. `scale` 0 stands for head_dim ** -0.5."""

    names: tuple[str, ...]
    output: str
    hidden_size: int
    num_heads: int
    head_dim: int
    bias: bool = True
    output_bias: bool = True
    rope: RopeSpec | None = None
    reach: int = 0
    num_kv_heads: int = 0
    head_norms: tuple[NormSpec, NormSpec] | None = None
    norm_eps: float = 0.0
    scale: float = 0.0

    @property
    def heads(self) -> tuple[int, int, int]:
        """Return the numbers of heads of q, k and v."""
        kv_heads = self.num_kv_heads or self.num_heads
        return self.num_heads, kv_heads, kv_heads

    @property
    def factor(self) -> float:
        """Return what scores are multiplied by."""
        return self.scale or self.head_dim**-0.5

    def equations(self) -> Iterator[str]:
        """Yield what it computes, line by line."""
        rotated = "rope({})" if self.rope else "{}"
        normed = "{}" if self.head_norms is None else f"{norm_name(self.head_norms[0])}({{}})"
        q, k = (rotated.format(normed.format(w)) for w in ("Wq h", "Wk h"))
        shared = "" if self.heads[1] == self.num_heads else f", {self.heads[1]} of k and v"
        over = f"{self.reach} tokens to each side" if self.reach else "all tokens of the text"
        yield f"attention(h) = Wo softmax({self.factor:.4g} q·k) v  over {over}"
        yield f"  q = {q}, k = {k}, v = Wv h; {self.num_heads} heads of {self.head_dim}{shared}"

    def build(self, parts: Parts) -> SegmentAttention:
        """Return the part with its weights."""
        return SegmentAttention(self, parts)


class SegmentAttention:
    """Attention of each token over all tokens of its text. Attention Is All You Need, arXiv 1706.03762, section 3.2."""

    def __init__(self, spec: SegmentAttentionSpec, parts: Parts) -> None:
        self._ops, self._spec, self._scale = parts.ops, spec, spec.factor
        width, sizes = spec.num_heads * spec.head_dim, [heads * spec.head_dim for heads in spec.heads]
        outputs = dict(zip(spec.names, sizes, strict=True)) if len(spec.names) > 1 else {spec.names[0]: sum(sizes)}
        self._qkv = parts.linear(outputs, spec.hidden_size, bias=spec.bias, min_bits=ENCODER_BITS)
        self._head_norms = [build_norm(norm, parts, spec.norm_eps).of for norm in spec.head_norms or ()]
        self._output = parts.linear({spec.output: spec.hidden_size}, width, bias=spec.output_bias)
        self._cos_sin = None if spec.rope is None else parts.rope(spec.rope)

    def __call__(self, x: Tensor, texts: Segments) -> Tensor:
        """x [T, H], which stays as it is -> [T, H] float32."""
        ops, spec = self._ops, self._spec
        q, k, v = torch.split(self._qkv.of(x).view(len(x), -1, spec.head_dim), list(spec.heads), dim=1)
        if self._head_norms:
            q, k = (norm(part) for norm, part in zip(self._head_norms, (q, k), strict=True))
        if self._cos_sin is not None:
            ops.attention.apply_rope(q, k, texts.positions, self._cos_sin)
        if texts.bias is not None:
            attended = biased_attention(q, KvCache(k, v), texts.tokens.q_start, texts.bias, scale=self._scale)
        elif spec.reach:
            near, window = texts.near, spec.reach + 1
            attended = ops.attention.paged_attention(
                q, KvCache(k, v), near, scale=self._scale, sliding_window=window, ahead=texts.ahead
            )
        else:
            attended = ops.attention.paged_attention(q, KvCache(k, v), texts.tokens, scale=self._scale)
        return self._output.of_f32(attended.flatten(1))
