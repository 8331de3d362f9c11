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
from typing import Final, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from forebay.layers.build import Parts
from forebay.layers.embedding import embedding_table, lookup
from forebay.layers.norms import LayerNormSpec, NormSpec, build_norm
from forebay.layers.rotary import RopeSpec
from forebay.ops import Ops
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
class TextEmbeddingsSpec:
    """The sum of a token's embeddings, normed: of its id, multiplied by `scale`, of its place in the text, and of its
    kind.

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
    scale: float = 1.0

    @property
    def equation(self) -> str:
        """Return what it computes of a token."""
        places = " + position[place]" if self.positions else ""
        kinds = " + type[kind]" if self.types else ""
        factor = "" if self.scale == 1.0 else f"{self.scale:.4g} "
        total = f"{factor}embedding[token]{kinds}{places}"
        whole = total if self.norm is None else f"layernorm({total})"
        return f"x = {whole}  ({self.vocab_size:,} x {self.hidden_size:,})"

    def build(self, parts: Parts) -> TextEmbeddings:
        """Return the part with its weights."""
        return TextEmbeddings(self, parts)


class TextEmbeddings:
    """BERT, arXiv 1810.04805, section 3: input representation."""

    def __init__(self, spec: TextEmbeddingsSpec, parts: Parts) -> None:
        self._ops, self._vocab_size, self._scale = parts.ops, spec.vocab_size, spec.scale
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
        if self._scale != 1.0:
            x = ops.elementwise.scale_(x, self._scale)
        if self._positions is not None:
            x = ops.elementwise.add_(x, self._positions(positions))
        return x if self._norm is None else self._norm(x)


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
        self._qkv = parts.linear(outputs, spec.hidden_size, bias=spec.bias)
        self._head_norms = [build_norm(norm, parts, spec.norm_eps).of for norm in spec.head_norms or ()]
        self._output = parts.linear({spec.output: spec.hidden_size}, width, bias=spec.output_bias)
        self._cos_sin = None if spec.rope is None else parts.rope(spec.rope)

    def __call__(self, x: Tensor, texts: Segments) -> Tensor:
        """x [T, H], which stays as it is -> [T, H]."""
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


_Sublayer = Callable[[Tensor, Segments], Tensor]


class AttentionPartSpec(Protocol):
    """The attention of a layer. `reach`: tokens to each side that a token sees, 0 for all of the text."""

    @property
    def reach(self) -> int: ...
    def equations(self) -> Iterator[str]:
        """Yield what it computes, line by line."""
        ...

    def build(self, parts: Parts) -> _Sublayer:
        """Return the part with its weights."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class EncoderLayerSpec:
    """Attention and a feed-forward part, each with a norm behind the sum with its input, or with `norm_first` in front
    of itself; None for no norm. `inner_norms` are those behind each part, before the sum."""

    attention: AttentionPartSpec
    mlp: EncoderMlpSpec
    norms: tuple[NormSpec | None, NormSpec | None]
    norm_eps: float
    norm_first: bool = False
    inner_norms: tuple[NormSpec, NormSpec] | None = None

    def equations(self) -> Iterator[str]:
        """Yield what it computes, line by line."""
        mlp = self.mlp
        inner = f"{mlp.activation}(Wg h) Wu h" if mlp.gate else f"{mlp.activation}(Wu h)"
        for part, norm in zip(("attention", "mlp"), self.norms, strict=True):
            inner_x = "x" if norm is None else f"{norm_name(norm)}(x)"
            result = f"{part}({inner_x})" if self.inner_norms is None else f"{norm_name(norm)}({part}({inner_x}))"
            yield f"x += {result}" if self.norm_first else f"x = layernorm(x + {part}(x))"
        yield from self.attention.equations()
        yield f"mlp(h) = Wd {inner}  of {mlp.intermediate_size:,}"

    def build(self, parts: Parts) -> EncoderLayer:
        """Return the layer with its weights."""
        return EncoderLayer(self, parts)


class EncoderLayer:
    """norm(x + attention(x)), then norm(x + mlp(x)): Attention Is All You Need, arXiv 1706.03762, section 3.1. Or x +
    attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, spec: EncoderLayerSpec, parts: Parts) -> None:
        self._ops, self._norm_first = parts.ops, spec.norm_first
        norms = (_norm_of(norm, parts, spec.norm_eps) for norm in spec.norms)
        self._attention, self._mlp = spec.attention.build(parts), spec.mlp.build(parts)
        inner = (_norm_of(norm, parts, spec.norm_eps) for norm in spec.inner_norms or (None, None))
        sublayers: tuple[_Sublayer, _Sublayer] = (self._attention, self._each)
        self._sublayers = tuple(zip(sublayers, norms, inner, strict=True))

    def _each(self, x: Tensor, texts: Segments) -> Tensor:
        return self._mlp(x)

    def __call__(self, x: Tensor, texts: Segments) -> Tensor:
        """x [T, H] -> [T, H]."""
        for part, norm, inner in self._sublayers:
            if self._norm_first:
                x = self._ops.elementwise.add_(inner(part(norm(x), texts)), x)
            else:
                x = norm(self._ops.elementwise.add_(part(x, texts), x))
        return x


def norm_name(norm: NormSpec | None) -> str:
    """Return what equations call a norm."""
    return "layernorm" if isinstance(norm, LayerNormSpec) else "norm"


def _norm_of(norm: NormSpec | None, parts: Parts, eps: float) -> Callable[[Tensor], Tensor]:
    return (lambda x: x) if norm is None else build_norm(norm, parts, eps).of


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadLayerSpec:
    """A linear layer under the checkpoint's `name`, perhaps with an `activation` ("" for none) and a norm behind it."""

    name: str
    inputs: int
    outputs: int
    bias: bool = True
    activation: str = ""
    norm: LayerNormSpec | None = None
    norm_eps: float = 0.0

    def equation(self, x: str) -> str:
        """Return what it computes of `x`."""
        product = f"W {x}{' + b' if self.bias else ''}"
        inner = f"{self.activation}({product})" if self.activation else f"({product})"
        return inner if self.norm is None else f"layernorm({inner})"

    def build(self, parts: Parts) -> HeadLayer:
        """Return the layer with its weights."""
        return HeadLayer(self, parts)


class HeadLayer:
    """Computed in float32: it runs on few vectors, and its results are scores."""

    def __init__(self, spec: HeadLayerSpec, parts: Parts) -> None:
        self.num_outputs, self._eps = spec.outputs, spec.norm_eps
        self._activate = _OF_HEADS[spec.activation]
        self._weight = parts.tensor(f"{spec.name}.weight", spec.outputs, spec.inputs, float32=True)
        self._bias = parts.tensor(f"{spec.name}.bias", spec.outputs, float32=True) if spec.bias else None
        norm = () if spec.norm is None else (spec.norm.weight, spec.norm.bias)
        self._norm = [None if param is None else parts.weights.tensor(param, float32=True) for param in norm]

    def __call__(self, x: Tensor) -> Tensor:
        """x [inputs] float32 -> [outputs] float32."""
        product = torch.mv(self._weight, x)
        x = self._activate(product if self._bias is None else product + self._bias)
        if self._norm:
            weight, bias = self._norm
            x = F.layer_norm(x, x.shape, weight, bias, self._eps)
        return x


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadSpec:
    """Layers behind a chosen hidden state, or behind the pooling of a text: `what` they give, such as labels."""

    layers: tuple[HeadLayerSpec, ...]
    what: str

    @property
    def equation(self) -> str:
        """Return what it computes of a chosen vector x."""
        inner = "x"
        for layer in self.layers:
            inner = layer.equation(inner)
        return f"{inner}  ({self.layers[-1].outputs:,} {self.what})"

    def build(self, parts: Parts) -> Head:
        """Return the head with its weights."""
        return Head(self, parts)


class Head:
    """The layers of a `HeadSpec`, one behind the other."""

    def __init__(self, spec: HeadSpec, parts: Parts) -> None:
        self._layers = [layer.build(parts) for layer in spec.layers]

    def __call__(self, chosen: Tensor) -> Tensor:
        """chosen [N, H] -> [N, outputs] float32. A row's bits do not depend on the other rows."""
        if not len(chosen):
            return chosen.new_empty(0, self._layers[-1].num_outputs, dtype=torch.float32)
        return torch.stack([self._of(row) for row in chosen.float()])

    def _of(self, x: Tensor) -> Tensor:
        for layer in self._layers:
            x = layer(x)
        return x


_OF_HEADS: Final[Mapping[str, _Activation]] = {
    "": lambda x: x,
    "tanh": torch.tanh,
    "relu": torch.relu,
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "silu": F.silu,
}
