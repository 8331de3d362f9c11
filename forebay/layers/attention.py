"""Grouped-query attention over the paged KV cache, with what the supported families add to it.

Shape letters: T tokens, H hidden size, Hq query heads, Hk KV heads, D head size.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum
from functools import partial
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from forebay.layers.build import Parts
from forebay.layers.context import ForwardContext
from forebay.layers.linear import Linear
from forebay.layers.paged_attention import PagedAttention
from forebay.layers.params import Change, Rows, in_order, rows_of_blocks, rows_of_heads, unchanged
from forebay.layers.pooled_indexer import MeanIndexerSpec
from forebay.layers.rotary import QueryScaleSpec, RopeSpec
from forebay.ops.exchange import Share, units_of
from forebay.pools.cache_spec import CacheSpec, FullAttention, SlidingWindow


class QkNorm(StrEnum):
    """Normalization of queries and keys, before the rotary embedding unless `AttentionSpec` says otherwise: RMS norms
    but for LAYER."""

    NONE = "none"
    HEAD = "head"  # each head by itself, weight [D]
    PLAIN = "plain"  # each head by itself, without a weight
    LAYER = "layer"  # layer normalization of each head, without bias; of its own weight, [Hq, D] and [Hk, D]
    FULL = "full"  # all heads of a token together, weights [Hq * D] and [Hk * D]


@dataclass(frozen=True, kw_only=True, slots=True)
class AttentionSpec:
    """`name` is the checkpoint's prefix; `rope` None for no rotary embedding; `sliding_window` 0 for none.

    `scale` 0 stands for head_dim ** -0.5; `norm_offset` is added to the weights of q's and k's norms, called
    `norm_names`; with {} in these, each head's weight is a tensor, with the head's number in its name. `sinks`: each
    head has a logit that takes part in its softmax without a value. `head_gate`: each head's output is multiplied by
    sigmoid(gate_proj(x)), one gate per head. `output_gate`: each entry of the output is multiplied by the sigmoid of
    its own gate, which `q_proj` has behind each head's q, or the tensor `gate_name`. The input, k and the output are
    multiplied by `input_scale`, `key_scale` and `output_scale`. `interleaved`: the checkpoint has rotary pairs as
    neighbours. `qkv_name`: the name of the one tensor that holds q, k and v, if there is one. `value_norm`: each head's
    value is normed, without a weight. `values_from_keys`: there is no v_proj, values are the output of k_proj; they are
    normed, then. `input_size`: the size of the input, 0 for the hidden size. `value_dim` is the size of a head's
    values, 0 for `head_dim`; they are multiplied by `value_scale`. `softcap`: see `AttentionOps`. `rope_first`: heads
    are rotated before they are normed. `query_scale` None if queries are not scaled by their position. `bidirectional`:
    see `PagedAttention`. `indexer` None: a query reads all tokens that it sees.
    """

    name: str
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    qkv_bias: bool = False
    o_bias: bool = False
    qk_norm: QkNorm = QkNorm.NONE
    norm_eps: float = 1e-6
    norm_offset: float = 0.0
    rope: RopeSpec | None = None
    query_scale: QueryScaleSpec | None = None
    sliding_window: int = 0
    scale: float = 0.0
    sinks: bool = False
    head_gate: bool = False
    output_gate: bool = False
    gate_name: str = ""
    interleaved: bool = False
    qkv_name: str = ""
    value_norm: bool = False
    values_from_keys: bool = False
    input_size: int = 0
    output_name: str = "o_proj"
    norm_names: tuple[str, str] = ("q_norm", "k_norm")
    rope_first: bool = False
    input_scale: float = 1.0
    key_scale: float = 1.0
    output_scale: float = 1.0
    value_dim: int = 0
    value_scale: float = 1.0
    softcap: float = 0.0
    bidirectional: bool = False
    indexer: MeanIndexerSpec | None = None
    for_ranks: ClassVar[bool] = True

    @property
    def q_size(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        return self.num_kv_heads * self.head_dim

    @property
    def v_head_dim(self) -> int:
        return self.value_dim or self.head_dim

    @property
    def v_size(self) -> int:
        return self.num_kv_heads * self.v_head_dim

    def cache_spec(self) -> CacheSpec:
        """Return what the layer keeps of past tokens."""
        count, dim, value_dim = self.num_kv_heads, self.head_dim, self.value_dim
        if not self.sliding_window:
            return FullAttention(num_kv_heads=count, head_dim=dim, v_head_dim=value_dim)
        return SlidingWindow(num_kv_heads=count, head_dim=dim, v_head_dim=value_dim, window=self.sliding_window)

    def of_heads(self, heads: Heads) -> AttentionSpec:
        """Return the description of a layer with these heads alone."""
        return replace(self, num_heads=len(heads.queries), num_kv_heads=len(heads.kv))

    def build(self, parts: Parts) -> Attention:
        return Attention(self, parts)


class Heads(NamedTuple):
    """The query heads of a rank, and the KV heads that they read. All ranks have `units` equal runs of query heads, of
    which each has some: one for each KV head, or for each rank if there are fewer KV heads."""

    queries: range
    kv: range
    units: int

    @classmethod
    def of(cls, spec: AttentionSpec, share: Share) -> Heads:
        """Divide the heads of a layer: KV heads with their query heads, some ranks may have one more. Raises
        ConfigError if there are fewer KV heads, and the ranks cannot divide the query heads; copies of KV heads cannot
        be normed together."""
        count = spec.num_kv_heads
        if share.size <= count:
            kv, per_head = units_of(share.rank, share.size, count), spec.num_heads // count
            return cls(range(kv.start * per_head, kv.stop * per_head), kv, count)
        divide = share.of if spec.qk_norm is QkNorm.FULL else share.with_copies
        return cls(share.of(spec.num_heads, "query heads"), divide(count, "KV heads"), share.size)


class Attention:
    """Projections, norms and paged attention of one layer; x [T, H] -> [T, H]."""

    def __init__(self, spec: AttentionSpec, parts: Parts) -> None:
        parts, heads = parts.within(spec.name), Heads.of(spec, parts.share)
        self._spec, self._heads = spec.of_heads(heads), heads
        self._ops, self._exchange = parts.ops, parts.share.exchange
        self._qkv = _qkv(spec, parts, heads)
        read = spec.num_heads * spec.v_head_dim
        self._output = parts.gathered(
            spec.output_name, spec.hidden_size, read, bias=spec.o_bias, scale=spec.output_scale
        )
        self._norms = _norms(spec, parts, heads)
        self._plain = parts.ones(spec.head_dim) if spec.value_norm else None
        own = parts.share.part(heads.queries)
        self._gate = parts.linear({"gate_proj": spec.num_heads}, spec.hidden_size, own=own) if spec.head_gate else None
        self._cos_sin = parts.rope(spec.rope) if spec.rope_first and spec.rope is not None else None
        assert self._cos_sin is None or spec.rope is None or spec.rope.sections is None, "M-RoPE before the norms"
        self._attend = PagedAttention(
            parts,
            parts.keep(self._spec.cache_spec()),
            scale=spec.scale or spec.head_dim**-0.5,
            rope=spec.rope if self._cos_sin is None else None,
            query_scale=spec.query_scale,
            window=spec.sliding_window,
            sinks=parts.tensor("sinks", spec.num_heads, float32=True, own=own) if spec.sinks else None,
            softcap=spec.softcap,
            bidirectional=spec.bidirectional,
        )
        self._indexer = None if spec.indexer is None else spec.indexer.build(parts)

    def __call__(self, ctx: ForwardContext, x: Tensor) -> Tensor:
        """x [T, H], or [T, input_size] -> [T, H]. Writes the KV of the step's tokens, then attends over all that the
        rows have."""
        spec, ops = self._spec, self._ops
        q, k, v, gate = self._project(ctx, x)
        selected = None if self._indexer is None else self._indexer(ctx, x)
        out = self._attend(ctx, q, k, v, selected=selected).flatten(1)
        if spec.output_gate:
            out = ops.elementwise.mul_sigmoid(out, gate)
        if self._gate is not None:
            out = ops.elementwise.mul_sigmoid(out, self._gate(ctx, x))
        return self._output(ctx, self._exchange.gather(out, self._heads.units))

    def _project(self, ctx: ForwardContext, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Project x [T, H] to q [T, Hq, D], k [T, Hk, D] and v [T, Hk, Dv], normed if the family does so. Gates are
        [T, Hq * D], or [T, 0] without gates."""
        spec, ops = self._spec, self._ops
        gates, values = spec.q_size if spec.output_gate else 0, 0 if spec.values_from_keys else spec.v_size
        q, k, v, gate = torch.split(self._qkv(ctx, x), [spec.q_size, spec.kv_size, values, gates], dim=-1)
        v = k if spec.values_from_keys else v
        if spec.qk_norm is QkNorm.FULL:
            q, k = (
                self._normed(part, weight, heads)
                for part, weight, heads in zip((q, k), self._norms, self._heads[:2], strict=True)
            )
        q = q.view(len(x), spec.num_heads, spec.head_dim)
        k = k.view(len(x), spec.num_kv_heads, spec.head_dim)
        v = v.view(len(x), spec.num_kv_heads, spec.v_head_dim)
        if self._cos_sin is not None:
            ops.attention.apply_rope(q, k, ctx.positions, self._cos_sin)
        if spec.qk_norm in (QkNorm.HEAD, QkNorm.PLAIN):
            q, k = (
                ops.norms.rms_norm(part, weight, spec.norm_eps)
                for part, weight in zip((q, k), self._norms, strict=True)
            )
        elif spec.qk_norm is QkNorm.LAYER:
            parts = zip((q, k), self._norms, strict=True)
            q, k = (ops.norms.layer_norm(part, weight, None, spec.norm_eps) for part, weight in parts)
        if self._plain is not None:
            v = ops.norms.rms_norm(v, self._plain, spec.norm_eps)
        return q, k, v, gate

    def _normed(self, part: Tensor, weight: Tensor, heads: range) -> Tensor:
        """Norm all heads of a token together, and return those of this rank."""
        whole = self._ops.norms.rms_norm(self._exchange.gather(part, self._heads.units), weight, self._spec.norm_eps)
        first = heads.start * self._spec.head_dim
        return whole[:, first : first + part.shape[1]]


def _norms(spec: AttentionSpec, parts: Parts, heads: Heads) -> tuple[Tensor, ...]:
    """The weights for q and k, where these are normed."""
    if spec.qk_norm is QkNorm.NONE:
        return ()
    dim, counts = spec.head_dim, (spec.num_heads, spec.num_kv_heads)
    if spec.qk_norm is QkNorm.PLAIN:
        return parts.ones(dim), parts.ones(dim)
    shapes: dict[QkNorm, list[tuple[int, ...]]] = {
        QkNorm.HEAD: [(dim,), (dim,)],
        QkNorm.FULL: [(count * dim,) for count in counts],
    }
    if spec.qk_norm is QkNorm.LAYER:
        return tuple(
            _norms_by_head(spec, parts, name, count, own)
            for name, count, own in zip(spec.norm_names, counts, heads[:2], strict=True)
        )
    assert not (spec.interleaved and spec.qk_norm is QkNorm.FULL), "a norm of all heads with neighbours as rotary pairs"
    return tuple(
        parts.tensor(f"{name}.weight", *shape, offset=spec.norm_offset, change=_as_heads_are(spec))
        for name, shape in zip(spec.norm_names, shapes[spec.qk_norm], strict=True)
    )


def _norms_by_head(spec: AttentionSpec, parts: Parts, name: str, count: int, heads: range) -> Tensor:
    """Return the norm's own weight of each of a rank's heads among `count`, [heads, D]."""
    own, dim = parts.share.part(heads), spec.head_dim
    if "{}" in name:
        return parts.stacked((f"{name.format(i)}.weight" for i in range(count)), dim, own)
    return parts.tensor(f"{name}.weight", count, dim, offset=spec.norm_offset, change=_as_heads_are(spec), own=own)


def _as_heads_are(spec: AttentionSpec) -> Change:
    """Return what puts the weights of a head's norm in the order of the head's entries."""
    return partial(in_order, rows=_pair_rows(spec)) if spec.interleaved else unchanged


def _qkv(spec: AttentionSpec, parts: Parts, heads: Heads) -> Linear:
    """Build the linear layer of q, k, v and, with an `output_gate`, the gates."""
    q, kv = spec.q_size, spec.kv_size
    values = {} if spec.values_from_keys else {"v_proj": spec.v_size}
    within_q = spec.output_gate and not spec.gate_name
    outputs = {"q_proj": (1 + within_q) * q, "k_proj": kv, **values}
    if spec.gate_name:
        outputs[spec.gate_name] = q
    scales = ((q, 1.0), (kv, spec.key_scale), *((rows, spec.value_scale) for rows in values.values()))
    return parts.linear(
        {spec.qkv_name: sum(outputs.values())} if spec.qkv_name else outputs,
        spec.input_size or spec.hidden_size,
        bias=spec.qkv_bias,
        rows=_gates_last(spec) if within_q else _halves(spec) if spec.interleaved else (),
        scales=(*scales, (q, 1.0)) if spec.output_gate else scales,
        input_scale=spec.input_scale,
        own=parts.share.part(*_own_rows(spec, heads)),
    )


def _own_rows(spec: AttentionSpec, heads: Heads) -> list[range]:
    """Return the rows of the heads among q, k, v and the gates of all."""
    blocks = [(spec.num_heads, heads.queries, spec.head_dim), (spec.num_kv_heads, heads.kv, spec.head_dim)]
    if not spec.values_from_keys:
        blocks.append((spec.num_kv_heads, heads.kv, spec.v_head_dim))
    if spec.output_gate:
        blocks.append(blocks[0])
    return rows_of_heads(*blocks)


def _gates_last(spec: AttentionSpec) -> Rows:
    dim, q_and_gate = spec.head_dim, 2 * spec.q_size
    q, gates = (rows_of_blocks(count=spec.num_heads, block=2 * dim, first=first, size=dim) for first in (0, dim))
    return (*q, range(q_and_gate, q_and_gate + spec.kv_size + spec.v_size), *gates)


def _halves(spec: AttentionSpec) -> Rows:
    rotated, of_head = spec.q_size + spec.kv_size, _pair_rows(spec)
    heads = (
        range(head + part.start, head + part.stop, part.step)
        for head in range(0, rotated, spec.head_dim)
        for part in of_head
    )
    return (*heads, range(rotated, rotated + spec.v_size))


def _pair_rows(spec: AttentionSpec) -> Rows:
    """Halves are paired here: of each head the first of each pair, then the second ones, then the rows without an
    angle."""
    assert spec.rope is not None, "without rotary embedding there are no pairs"
    dim, size = spec.rope.dim, spec.head_dim
    return tuple(filter(len, (range(0, dim, 2), range(1, dim, 2), range(dim, size))))
