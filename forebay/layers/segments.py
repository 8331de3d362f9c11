"""Parts of a text encoder: embeddings, and layers whose tokens attend to all tokens of their own text.

Shape letters: T tokens of all texts of a step, N chosen vectors, H hidden size, I intermediate size, Hq heads, D head
size.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import Final

import torch
import torch.nn.functional as F
from torch import Tensor

from forebay.layers.build import Parts
from forebay.layers.embedding import embedding_table, lookup
from forebay.layers.norms import LayerNormSpec, NormSpec, build_norm
from forebay.layers.rotary import RopeSpec
from forebay.ops import Ops
from forebay.ops.reference.attention import KvCache, PagedKv, segments_from


@dataclass(frozen=True, slots=True, kw_only=True)
class Segments:
    """The texts of a step: `tokens` has each text's, and each token's place in its text is in `positions`. `near` has
    them for attention to near tokens, which sees `ahead` tokens [T] int32 behind a token; of a model without such
    layers it is `tokens`, and there is no `ahead`. `bias`: see `biased_attention`; None for none."""

    tokens: PagedKv
    positions: Tensor  # [T] int64
    near: PagedKv
    ahead: Tensor | None = None
    bias: Tensor | None = None

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
class TextEmbeddingsSpec:
    """The sum of a token's embeddings, normed: of its id, of its place in the text, and of its kind.

    `positions` is the table's name, of which the rows from `offset` on count; "" for none, as is `types`. The id of a
    token of kind t is its own plus t * vocab_size.
    """

    words: str
    vocab_size: int
    hidden_size: int
    positions: str = ""
    num_positions: int = 0
    offset: int = 0
    types: str = ""
    num_types: int = 0
    norm: NormSpec | None = None
    norm_eps: float = 1e-12

    @property
    def equation(self) -> str:
        """Return what it computes of a token."""
        places = " + position[place]" if self.positions else ""
        kinds = " + type[kind]" if self.types else ""
        total = f"embedding[token]{kinds}{places}"
        whole = total if self.norm is None else f"layernorm({total})"
        return f"x = {whole}  ({self.vocab_size:,} x {self.hidden_size:,})"

    def build(self, parts: Parts) -> TextEmbeddings:
        """Return the part with its weights."""
        return TextEmbeddings(self, parts)


class TextEmbeddings:
    """BERT, arXiv 1810.04805, section 3: input representation."""

    def __init__(self, spec: TextEmbeddingsSpec, parts: Parts) -> None:
        self._ops, self._vocab_size = parts.ops, spec.vocab_size
        width, dtype = spec.hidden_size, parts.weights.dtype
        table = embedding_table(f"{spec.words}.weight", spec.vocab_size, width)
        self._words = lookup(parts, parts.weights.table(table))
        self._positions: Callable[[Tensor], Tensor] | None = None
        self._types: Callable[[Tensor], Tensor] | None = None
        if spec.positions:
            rows = spec.num_positions + spec.offset
            places = parts.tensor(f"{spec.positions}.weight", rows, width, change=lambda table: table[spec.offset :])
            self._positions = partial(parts.ops.linear.embedding, table=places, dtype=dtype)
        if spec.types:
            kinds = parts.tensor(f"{spec.types}.weight", spec.num_types, width)
            self._types = partial(parts.ops.linear.embedding, table=kinds, dtype=dtype)
        self._norm = None if spec.norm is None else build_norm(spec.norm, parts, spec.norm_eps).of

    def __call__(self, input_ids: Tensor, positions: Tensor) -> Tensor:
        """input_ids and positions [T] int64 -> [T, H]."""
        ops = self._ops
        if self._types is None:
            x = self._words(input_ids)
        else:
            x = ops.elementwise.add_(
                self._words(input_ids % self._vocab_size), self._types(input_ids // self._vocab_size)
            )
        if self._positions is not None:
            x = ops.elementwise.add_(x, self._positions(positions))
        return x if self._norm is None else self._norm(x)


@dataclass(frozen=True, slots=True, kw_only=True)
class SegmentAttentionSpec:
    """`names` are the checkpoint's of q, k and v, or of the one layer that has all three. `rope` None: no rotation.
    `reach`: tokens to each side that a token sees, 0 for all of the text."""

    names: tuple[str, ...]
    output: str
    hidden_size: int
    num_heads: int
    head_dim: int
    bias: bool = True
    output_bias: bool = True
    rope: RopeSpec | None = None
    reach: int = 0

    def build(self, parts: Parts) -> SegmentAttention:
        """Return the part with its weights."""
        return SegmentAttention(self, parts)


class SegmentAttention:
    """Attention of each token over all tokens of its text. Attention Is All You Need, arXiv 1706.03762, section 3.2."""

    def __init__(self, spec: SegmentAttentionSpec, parts: Parts) -> None:
        self._ops, self._spec, self._scale = parts.ops, spec, spec.head_dim**-0.5
        width = spec.num_heads * spec.head_dim
        each = 3 * width // len(spec.names)
        self._qkv = parts.linear(dict.fromkeys(spec.names, each), spec.hidden_size, bias=spec.bias)
        self._output = parts.linear({spec.output: spec.hidden_size}, width, bias=spec.output_bias)
        self._cos_sin = None if spec.rope is None else parts.rope(spec.rope)

    def __call__(self, x: Tensor, texts: Segments) -> Tensor:
        """x [T, H], which stays as it is -> [T, H]."""
        ops, spec = self._ops, self._spec
        q, k, v = self._qkv.of(x).view(len(x), 3, spec.num_heads, spec.head_dim).unbind(1)
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
        return self._output.of(attended.flatten(1))


@dataclass(frozen=True, slots=True, kw_only=True)
class DistanceBiasSpec:
    """A table of 32 rows, which each head adds to a score by the distance of two tokens; half of them are for tokens in
    front. Distances up to 7 have a row each, longer ones share one by their logarithm up to 128 (T5, arXiv 1910.10683,
    section 2.1)."""

    name: str
    num_heads: int

    def build(self, parts: Parts, num_positions: int) -> Tensor:
        """Return the bias of each head at distances from 1 - num_positions to num_positions - 1, [Hq, 2 L - 1]
        float32."""
        apart = torch.arange(1 - num_positions, num_positions)
        far = 8 + (torch.log(apart.abs().clamp(min=1).float() / 8) / math.log(16) * 8).long()
        rows = torch.where(apart.abs() < 8, apart.abs(), far.clamp(max=15)) + 16 * (apart > 0)
        return parts.tensor(
            f"{self.name}.weight", 32, self.num_heads, float32=True, change=lambda table: table[rows].T.contiguous()
        )


def biased_attention(q: Tensor, cache: KvCache, q_start: Tensor, bias: Tensor, *, scale: float) -> Tensor:
    """Attention of each token over its text with a bias by distance: q [T, Hq, D] over k and v [T, Hq, D] -> [T, Hq,
    D].

    bias [Hq, 2 L - 1] has, for a key j behind query i, what is added to its score at L - 1 + j - i. Computed text by
    text, in float32.
    """
    out, middle, starts = torch.empty_like(q), bias.shape[1] // 2, q_start.tolist()
    for first, end in pairwise(starts):
        places = torch.arange(end - first, device=q.device)
        own = bias[:, middle + places - places.unsqueeze(1)]
        queries, keys, values = (each[first:end].transpose(0, 1).float().contiguous() for each in (q, cache.k, cache.v))
        weights = (queries @ keys.transpose(1, 2) * scale + own).softmax(dim=-1)
        out[first:end] = (weights @ values).transpose(0, 1).to(q.dtype)
    return out


@dataclass(frozen=True, slots=True, kw_only=True)
class EncoderMlpSpec:
    """`up` and `down` are the checkpoint's names. `gate`: the name of the gate's layer, "" for no gate. If it is that
    of `up`, one layer has the outputs of both, those of `up` in front unless `gate_first`."""

    up: str
    down: str
    hidden_size: int
    intermediate_size: int
    activation: str
    up_bias: bool = True
    down_bias: bool = True
    gate: str = ""
    gate_first: bool = False

    def build(self, parts: Parts) -> EncoderMlp:
        """Return the part with its weights."""
        return EncoderMlp(self, parts)


class EncoderMlp:
    """Two linear layers with an activation between them, perhaps gated (arXiv 2002.05202)."""

    def __init__(self, spec: EncoderMlpSpec, parts: Parts) -> None:
        width, inner = spec.hidden_size, spec.intermediate_size
        joined = spec.gate == spec.up
        outputs = {spec.up: 2 * inner} if joined else {name: inner for name in (spec.gate, spec.up) if name}
        gate_first = (range(inner, 2 * inner), range(inner)) if joined and not spec.gate_first else ()
        self._up = parts.linear(outputs, width, bias=spec.up_bias, rows=gate_first)
        self._down = parts.linear({spec.down: width}, inner, bias=spec.down_bias)
        self._activate = (_GATED if spec.gate else _PLAIN)[spec.activation](parts.ops)

    def __call__(self, x: Tensor) -> Tensor:
        """x [T, H], which stays as it is -> [T, H]."""
        return self._down.of(self._activate(self._up.of(x)))


_Activation = Callable[[Tensor], Tensor]
_PLAIN: Final[Mapping[str, Callable[[Ops], _Activation]]] = {
    "gelu": lambda ops: partial(ops.elementwise.gelu, exact=True),
    "gelu_tanh": lambda ops: ops.elementwise.gelu,
    "relu": lambda ops: torch.relu,
    "silu": lambda ops: F.silu,
}
_GATED: Final[Mapping[str, Callable[[Ops], _Activation]]] = {
    "gelu": lambda ops: partial(ops.elementwise.gelu_and_mul, exact=True),
    "gelu_tanh": lambda ops: ops.elementwise.gelu_and_mul,
    "silu": lambda ops: ops.elementwise.silu_and_mul,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class EncoderLayerSpec:
    """Attention and a feed-forward part, each with a norm behind the sum with its input, or with `norm_first` in front
    of itself; None for no norm."""

    attention: SegmentAttentionSpec
    mlp: EncoderMlpSpec
    norms: tuple[NormSpec | None, NormSpec | None]
    norm_eps: float
    norm_first: bool = False

    def equations(self) -> Iterator[str]:
        """Yield what it computes, line by line."""
        attention, mlp = self.attention, self.mlp
        rotated = "rope({})" if attention.rope else "{}"
        q, k = (rotated.format(w) for w in ("Wq h", "Wk h"))
        inner = f"{mlp.activation}(Wg h) Wu h" if mlp.gate else f"{mlp.activation}(Wu h)"
        for part, norm in zip(("attention", "mlp"), self.norms, strict=True):
            inner_x = "x" if norm is None else "layernorm(x)"
            yield f"x += {part}({inner_x})" if self.norm_first else f"x = layernorm(x + {part}(x))"
        over = f"{attention.reach} tokens to each side" if attention.reach else "all tokens of the text"
        yield f"attention(h) = Wo softmax({attention.head_dim**-0.5:.4g} q·k) v  over {over}"
        yield f"  q = {q}, k = {k}, v = Wv h; {attention.num_heads} heads of {attention.head_dim}"
        yield f"mlp(h) = Wd {inner}  of {mlp.intermediate_size:,}"

    def build(self, parts: Parts) -> EncoderLayer:
        """Return the layer with its weights."""
        return EncoderLayer(self, parts)


_Sublayer = Callable[[Tensor, Segments], Tensor]


class EncoderLayer:
    """norm(x + attention(x)), then norm(x + mlp(x)): Attention Is All You Need, arXiv 1706.03762, section 3.1. Or x +
    attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, spec: EncoderLayerSpec, parts: Parts) -> None:
        self._ops, self._norm_first = parts.ops, spec.norm_first
        norms = (_norm_of(norm, parts, spec.norm_eps) for norm in spec.norms)
        self._attention, self._mlp = spec.attention.build(parts), spec.mlp.build(parts)
        sublayers: tuple[_Sublayer, _Sublayer] = (self._attention, self._each)
        self._sublayers = tuple(zip(sublayers, norms, strict=True))

    def _each(self, x: Tensor, texts: Segments) -> Tensor:
        return self._mlp(x)

    def __call__(self, x: Tensor, texts: Segments) -> Tensor:
        """x [T, H] -> [T, H]."""
        for part, norm in self._sublayers:
            if self._norm_first:
                x = self._ops.elementwise.add_(part(norm(x), texts), x)
            else:
                x = norm(self._ops.elementwise.add_(part(x, texts), x))
        return x


def _norm_of(norm: NormSpec | None, parts: Parts, eps: float) -> Callable[[Tensor], Tensor]:
    return (lambda x: x) if norm is None else build_norm(norm, parts, eps).of


@dataclass(frozen=True, slots=True, kw_only=True)
class LabelHeadSpec:
    """A classification head: perhaps a `dense` layer with an `activation` and a norm, then one output for each
    label."""

    hidden_size: int
    num_labels: int
    output: str
    dense: str = ""
    dense_bias: bool = True
    activation: str = "tanh"
    norm: LayerNormSpec | None = None
    norm_eps: float = 0.0

    @property
    def equation(self) -> str:
        """Return what it computes of a chosen hidden state."""
        inner = f"{self.activation}(Wp x + b)" if self.dense else "x"
        inner = inner if self.norm is None else f"layernorm({inner})"
        return f"Wc {inner} + b  ({self.num_labels:,} labels)"

    def build(self, parts: Parts) -> LabelHead:
        """Return the part with its weights."""
        return LabelHead(self, parts)


class LabelHead:
    """Computed in float32: it runs on few vectors, and its results are scores."""

    def __init__(self, spec: LabelHeadSpec, parts: Parts) -> None:
        size, self._activate, self._eps = spec.hidden_size, _OF_HEADS[spec.activation], spec.norm_eps
        self._dense = self._layer(parts, spec.dense, size, size, bias=spec.dense_bias) if spec.dense else None
        norm = () if spec.norm is None else (spec.norm.weight, spec.norm.bias)
        self._norm = [None if param is None else parts.weights.tensor(param, float32=True) for param in norm]
        self._output = self._layer(parts, spec.output, spec.num_labels, size, bias=True)

    @staticmethod
    def _layer(parts: Parts, name: str, outputs: int, inputs: int, *, bias: bool) -> tuple[Tensor, Tensor | None]:
        weight = parts.tensor(f"{name}.weight", outputs, inputs, float32=True)
        return weight, parts.tensor(f"{name}.bias", outputs, float32=True) if bias else None

    def __call__(self, hidden: Tensor) -> Tensor:
        """hidden [N, H] -> logits [N, labels] float32. A row's bits do not depend on the other rows."""
        if not len(hidden):
            return hidden.new_empty(0, len(self._output[0]), dtype=torch.float32)
        return torch.stack([self._of(row) for row in hidden.float()])

    def _of(self, x: Tensor) -> Tensor:
        if self._dense is not None:
            x = self._activate(_applied(self._dense, x))
        if self._norm:
            weight, bias = self._norm
            x = F.layer_norm(x, x.shape, weight, bias, self._eps)
        return _applied(self._output, x)


def _applied(layer: tuple[Tensor, Tensor | None], x: Tensor) -> Tensor:
    weight, bias = layer
    product = torch.mv(weight, x)
    return product if bias is None else product + bias


_OF_HEADS: Final[Mapping[str, _Activation]] = {
    "tanh": torch.tanh,
    "relu": torch.relu,
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "silu": F.silu,
}
