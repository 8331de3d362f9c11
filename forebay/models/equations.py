"""A model's description as its equations: x is the residual stream, h the input of a part.

Layers that are alike are shown once. Names of weights are left out, and so are parts without effect: a window of a
layer without one, a factor of 1.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from functools import singledispatch
from typing import Any

from forebay.layers.altup import AltUpBlockSpec
from forebay.layers.attention import AttentionSpec
from forebay.layers.blocks import BranchesSpec, ResidualSpec, SublayerSpec
from forebay.layers.compressed_attention import CompressedAttentionSpec
from forebay.layers.embedding import PerLayerGateSpec
from forebay.layers.gated_delta import GatedDeltaSpec
from forebay.layers.gated_streams import GatedStreamsBlockSpec
from forebay.layers.indexer import IndexerSpec
from forebay.layers.kimi_delta import KimiDeltaSpec
from forebay.layers.latent_attention import LatentAttentionSpec
from forebay.layers.mamba1 import Mamba1Spec, ScanNorm
from forebay.layers.mamba2 import Mamba2Spec
from forebay.layers.ngrams import NgramInputsSpec
from forebay.layers.norms import NormSpec
from forebay.layers.params import TensorParam
from forebay.layers.pooled_indexer import MeanIndexerSpec, PooledIndexerSpec
from forebay.layers.query_attention import QueryAttentionSpec
from forebay.layers.rotary import RopeSpec
from forebay.layers.scalar_gate import ScalarGateSpec
from forebay.layers.short_conv import ShortConvSpec
from forebay.layers.streams import StreamedSpec
from forebay.layers.sums import SumSpec
from forebay.models.decoder import DecoderSpec
from forebay.models.terms import ARGUMENT, Term, term, times
from forebay.pools.cache_spec import CacheSpec


def equations(spec: DecoderSpec, kept: Sequence[Iterable[CacheSpec]]) -> Iterator[str]:
    """Line by line; `kept` is what each block keeps of the tokens it has seen."""
    embedding = f"{times(spec.embedding_scale)}embedding[token]"
    yield f"x = {f'norm({embedding})' if spec.embedding_norm else embedding}  ({_by(spec.embedding)})"
    if spec.per_layer is not None:
        own = f"{spec.per_layer.size**0.5:.4g} table[token]"
        yield f"p = 0.7071 (norm(W x) + {own})  ({_by(spec.per_layer.table)}), a part for each layer"
    for layers, lines in _alike(spec, kept).items():
        yield f"\n{layers}:" if len(spec.blocks) > 1 else "\nall layers:"
        yield from (f"  {line}" for line in lines)
    last = "mean(a·n)" if spec.norm is None else f"{_norm(spec.norm)}(x)"
    logits = f"{times(spec.logits_scale)}head({last})"
    logits = f"{spec.logits_cap:g} tanh({logits} / {spec.logits_cap:g})" if spec.logits_cap else logits
    yield f"\nlogits = {logits}  (at most {spec.max_positions:,} positions)"


def _by(table: TensorParam) -> str:
    rows, columns = table.shape
    return f"{rows:,} x {columns:,}"


def _alike(spec: DecoderSpec, kept: Sequence[Iterable[CacheSpec]]) -> dict[str, list[str]]:
    """The lines of each kind of layer, by the numbers of those that are of this kind."""
    layers: dict[tuple[str, ...], list[int]] = {}
    for number, (block, cached) in enumerate(zip(spec.blocks, kept, strict=True)):
        counts = Counter(map(str, cached))
        memory = [f"keeps {f'{count} times ' if count > 1 else ''}{what}" for what, count in counts.items()]
        layers.setdefault((*block_lines(block), *memory), []).append(number)
    return {_ranges(numbers): list(lines) for lines, numbers in layers.items()}


def _ranges(numbers: Sequence[int]) -> str:
    """`layers 0-2, 4-6`."""
    if len(numbers) == 1:
        return f"layer {numbers[0]}"
    starts = [n for n in numbers if n - 1 not in numbers]
    stops = [n for n in numbers if n + 1 not in numbers]
    return "layers " + ", ".join(f"{a}" if a == b else f"{a}-{b}" for a, b in zip(starts, stops, strict=True))


@singledispatch
def block_lines(block: Any) -> list[str]:
    """A family that has blocks of its own registers them."""
    raise NotImplementedError(f"there is no equation for a {type(block).__name__}")


@block_lines.register
def _(block: StreamedSpec) -> list[str]:
    parts = [_between_norms(each.sublayer) for each in block.sublayers]
    streams = block.streams
    return [
        *(f"x = C x + b {part.of('a·x')}" for part in parts),
        *(line for part in parts for line in part.lines),
        f"a, b, C = sigmoid(.), 2 sigmoid(.), sinkhorn(exp(.)) of W norm(x)  for {streams.num_streams} streams of x, "
        f"{streams.iterations} iterations",
    ]


@block_lines.register
def _(block: GatedStreamsBlockSpec) -> list[str]:
    parts, streams = [term(each.part) for each in block.sublayers], block.streams.streams
    return [
        *_ngrams(block.ngrams),
        *(f"x_i += b_i {part.of('mean(a·n)')}  of each stream i" for part in parts),
        *(line for part in parts for line in part.lines),
        f"n = norm(x) of each of {streams.number} streams, a = sigmoid(Wu silu(Wd n / {streams.number})) through "
        f"{streams.rank} dimensions, b = 2 sigmoid(W n / {streams.number})",
    ]


def _ngrams(part: NgramInputsSpec | None) -> tuple[str, ...]:
    if part is None:
        return ()
    ngrams = part.ngrams
    return (
        "x_i += g_i + silu(conv(norm(g_i))),  g_i = sigmoid(root(norm(Wk e)·norm(x_i))) Wv e  of each stream i",
        f"  e = {len(ngrams.sizes[part.table])} rows of a table of {ngrams.num_rows[part.table]:,}, which stays in its "
        f"file, by the last 2 to {ngrams.longest} tokens; conv over {ngrams.width} tokens, {ngrams.longest} apart",
    )


@block_lines.register
def _(block: AltUpBlockSpec) -> list[str]:
    mixer, mlp, gate = _between_norms(block.mixer), _between_norms(block.mlp), term(block.gate)
    laurel = f"n + norm(W2 W1 n), n = norm(a), of {block.laurel.rank}"
    return [
        f"x = C x, a = x_{block.streams.active}  for {block.streams.num_streams} streams of x",
        f"y = (a + {mixer.of('a')} + laurel) / sqrt 2, laurel = {laurel}",
        f"x += c (y + {mlp.of('y')} - a), of all streams",
        f"x += norm({gate.of('s a' if block.scaled else 'a')}), a the new x_{block.streams.active}; of all but x_0",
        "C - 1, c - 1 = W tanh(Wr norm(.) / H) of the active stream, before and behind",
        *(line for part in (mixer, mlp, gate) for line in part.lines),
    ]


@block_lines.register
def _(block: ResidualSpec) -> list[str]:
    sums: list[str] = []
    lines: list[str] = []
    for sublayer in block.sublayers:
        part = _between_norms(sublayer)
        sums.append(f"x += {times(block.multiplier)}{part.of('x')}")
        lines += part.lines
    scaled = ("x *= s",) if block.scale else ()
    return [*sums, *scaled, *lines]


def _between_norms(sublayer: SublayerSpec) -> Term:
    part = term(sublayer.part)
    call = part.call if sublayer.before is None else part.of(f"{_norm(sublayer.before)}({ARGUMENT})")
    return Term(call if sublayer.after is None else f"{_norm(sublayer.after)}({call})", part.lines)


def _norm(spec: NormSpec) -> str:
    return "norm" if isinstance(spec, TensorParam) else "layernorm"


@term.register
def _(part: SumSpec) -> Term:
    first, second = term(part.first), term(part.second)
    return Term(f"{first.call} + {second.call}", (*first.lines, *second.lines))


@term.register
def _(part: BranchesSpec) -> Term:
    branches = [_between_norms(sublayer) for sublayer in part.sublayers]
    return Term(" + ".join(b.call for b in branches), tuple(line for b in branches for line in b.lines))


@term.register
def _(part: ScalarGateSpec) -> Term:
    inner = term(part.part)
    return Term(f"sigmoid(w {ARGUMENT}) {inner.call}", inner.lines)


@term.register
def _(part: AttentionSpec) -> Term:
    normed = {
        "none": "{}",
        "head": "norm({})",
        "plain": "norm({})",
        "full": "norm of all heads({})",
        "layer": "layernorm({})",
    }[part.qk_norm]
    rotated = "rope({})" if part.rope else "{}"
    inner, outer = (rotated, normed) if part.rope_first else (normed, rotated)
    q, k = (outer.format(inner.format(w)) for w in ("Wq h", "Wk h"))
    scores = f"{part.scale or part.head_dim**-0.5:.4g} {times(part.key_scale)}q·k"
    scores = f"{part.softcap:g} tanh({scores} / {part.softcap:g})" if part.softcap else scores
    out = f"softmax({scores}{' and a sink' if part.sinks else ''}) v"
    gate = "sigmoid(Wg h) " if part.output_gate or part.head_gate else ""
    by = f"{times(part.output_scale)}Wo {gate}{out}"
    sizes = f"{part.head_dim}{f' and {part.value_dim}' if part.value_dim else ''}"
    return Term(
        f"attention({times(part.input_scale)}{ARGUMENT})",
        (
            f"attention(h) = {by}  over {_seen(part)}",
            f"  q = {_grown(part)}{q}, k = {k}, v = {_value(part)}; {part.num_heads} heads of {sizes}, "
            f"{part.num_kv_heads} of KV",
            *_rope(part.rope, interleaved=part.interleaved),
            *_indexer(part.indexer),
        ),
    )


def _seen(part: AttentionSpec) -> str:
    if part.indexer is not None:
        return f"the {part.indexer.index.top_k:,} tokens of the highest s"
    return f"the last {part.sliding_window:,} tokens" if part.sliding_window else "all tokens so far"


def _value(part: AttentionSpec) -> str:
    value = "Wk h" if part.values_from_keys else "Wv h"
    return f"{times(part.value_scale)}{f'norm({value})' if part.value_norm else value}"


def _grown(part: AttentionSpec | LatentAttentionSpec) -> str:
    scale = part.query_scale
    return "" if scale is None else f"(1 + {scale.beta:g} log(1 + floor(position / {scale.length:,}))) "


@term.register
def _(part: CompressedAttentionSpec) -> Term:
    seen = f"the last {part.window:,} tokens"
    entries: tuple[str, ...] = ()
    if part.compressor is not None:
        chosen = f"the {part.indexer.index.top_k:,} entries of the highest s" if part.indexer else "all entries"
        seen += f" and {chosen}"
        of = f"{part.compressor.rate} tokens" + (" and of the block before" if part.compressor.overlap else "")
        entries = (f"  an entry: rope(norm(sum of softmax(Wg h + B) Wc h)) of {of}",)
    if part.indexer is not None:
        index = part.indexer.index
        what = "q' = rope(Wq' norm(Wdq h)), k' an entry of its own, w = Ww h"
        entries += (f"  s = sum over heads of w max(0, q'·k'),  {what}; {index.num_heads} heads of {index.head_dim}",)
    return Term(
        f"attention({ARGUMENT})",
        (
            f"attention(h) = Wo rope^-1(softmax({part.head_dim**-0.5:.4g} q·k and a sink) k)  over {seen}",
            f"  q = rope(norm(Wuq norm(Wdq h))), k = rope(norm(Wk h)); {part.num_heads} heads of {part.head_dim}, "
            f"one of KV; Wo through {part.groups} groups of {part.output_rank:,}",
            *entries,
            *_rope(part.rope, interleaved=True),
        ),
    )


@term.register
def _(part: QueryAttentionSpec) -> Term:
    seen = f"the last {part.sliding_window:,} tokens" if part.sliding_window else "all tokens so far"
    return Term(
        f"attention({ARGUMENT})",
        (
            f"attention(h) = Wo softmax({part.scale:.4g} q·k) v  over {seen}",
            f"  q = rope(norm(Wq h)), k and v as layer {part.kept_by} keeps them; "
            f"{part.num_heads} heads of {part.head_dim}",
            *_rope(part.rope),
        ),
    )


@term.register
def _(part: PerLayerGateSpec) -> Term:
    return Term(f"gate({ARGUMENT}, p)", (f"gate(h, p) = W (gelu(Wg h) p)  of {part.size:,}",))


@term.register
def _(part: LatentAttentionSpec) -> Term:
    latent = part.latent
    c_q = f"norm(Wdq h) of {latent.q_rank}" if latent.q_rank else "h"
    gate = "sigmoid(Wg h) " if part.head_gate else ""
    rotated = "rope" if part.rope else "as they are"
    return Term(
        f"attention({ARGUMENT})",
        (
            f"attention(h) = Wo {gate}softmax({part.scale:.4g} q·k) v  over {_read(part)}",
            f"  c = norm(Wdkv h) of {latent.rank}, q = {_grown(part)}Wuq {c_q}, k = [Wuk c, Wkr h], v = Wuv c",
            f"  {part.num_heads} heads of {latent.nope_dim} + {latent.rope_dim} ({rotated}), "
            f"values of {latent.value_dim}",
            *_rope(part.rope, interleaved=latent.interleaved),
            *_indexer(part.indexer),
        ),
    )


def _read(part: LatentAttentionSpec) -> str:
    if part.shares_selection:
        return "the tokens that the last indexer selected"
    return f"the {part.indexer.index.top_k:,} tokens of the highest s" if part.indexer else "all tokens so far"


def _indexer(part: IndexerSpec | PooledIndexerSpec | MeanIndexerSpec | None) -> tuple[str, ...]:
    if part is None:
        return ()
    index = part.index
    if isinstance(part, MeanIndexerSpec):
        return (
            f"  s = sum over heads of max(0, q'·k'),  q' = rope(norm(Wq' h)), k' = rope(norm(mean of Wk' h of "
            f"{part.index.pool} tokens)); {index.num_heads} heads of {index.head_dim}; and the tokens behind the last "
            "whole pool",
        )
    if isinstance(part, PooledIndexerSpec):
        pool = f"sum of softmax(Wg h + B) layernorm(Wk' h) of {part.index.pool} tokens"
        return (
            f"  s = sum over heads of w max(0, q'·k'),  q' = Wq' norm(Wdq h), k' = {pool}, w = Ww h; "
            f"{index.num_heads} heads of {index.head_dim}; and the tokens behind the last whole pool",
        )
    return (
        f"  s = sum over heads of w max(0, q'·k'),  q' = rope(Wq' norm(Wdq h)), k' = rope(layernorm(Wk' h)), w = Ww h; "
        f"{index.num_heads} heads of {index.head_dim}, {_pairs(index.interleaved)}",
    )


def _pairs(interleaved: bool) -> str:
    """Return which two dimensions the checkpoint rotates together."""
    return "rotary pairs are neighbours" if interleaved else "rotary pairs are in the two halves"


def _rope(rope: RopeSpec | None, *, interleaved: bool = False) -> tuple[str, ...]:
    if rope is None:
        return ()
    scaling = dict(rope.scaling or {})
    factors = scaling.pop("factors", ())
    if factors:
        scaling["factors"] = len(factors)
    kind = scaling.pop("rope_type", "")
    scaled = "".join(f", {name} {value}" for name, value in scaling.items())
    theta = f"theta {rope.theta:,.0f}{f', {kind}{scaled}' if kind else ''}"
    return (f"  rope: {rope.dim} dimensions of a head, {_pairs(interleaved)}, {theta}",)


@term.register
def _(part: Mamba1Spec) -> Term:
    mixer, normed = part.mixer, "" if part.norm is ScanNorm.NONE else "norms of "
    return Term(
        f"mamba({ARGUMENT})",
        (
            "mamba(h) = W (y silu(z)),  S = exp(dt A) S + dt B u,  y = C S + D u",
            f"  u, z = W h of {mixer.intermediate_size:,}; u = silu(conv(u)) over {mixer.width} tokens",
            f"  {normed}dt (rank {mixer.dt_rank}), B, C = W u; a state of {mixer.state_size} for each channel",
        ),
    )


@term.register
def _(part: Mamba2Spec) -> Term:
    gated = "y silu(z)"
    if part.norm is not None:
        gated = "norm(y) silu(z)" if part.norm.norm_first else "norm(y silu(z))"
    mixer, m = part.mixer, part.multipliers
    scales = {"z": m.gate, "x": m.x, "B": m.b, "C": m.c, "dt": m.dt}
    scaled = [f"{name} by {factor:.4g}" for name, factor in scales.items() if factor != 1.0]
    low, high = mixer.dt_limit
    return Term(
        f"mamba2({times(m.inputs)}{ARGUMENT})",
        (
            f"mamba2(h) = {times(m.output)}W {gated},  S = exp(dt A) S + dt B u,  y = C S + D u",
            f"  z, u, B, C, dt = W h{', times ' + ', '.join(scaled) if scaled else ''}; "
            f"u, B, C = silu(conv(u, B, C)) over {mixer.width} tokens",
            f"  {mixer.num_heads} heads of {mixer.head_dim}, {mixer.num_groups} groups, a state of {mixer.state_size}; "
            f"dt in [{low:.4g}, {high:.4g}]",
        ),
    )


@term.register
def _(part: GatedDeltaSpec) -> Term:
    delta, beta = part.delta, f"{times(part.most_beta)}sigmoid(Wb h)"
    return Term(
        f"gated_delta({ARGUMENT})",
        (
            "gated_delta(h) = W (norm(S q) silu(z)),  S = a S + b (v - a S k) k^T",
            f"  q, k, v, z = W h; q, k, v = silu(conv(q, k, v)) over {delta.width} tokens",
            f"  a = exp(-exp(A) softplus(Wa h)), b = {beta}",
            f"  {delta.num_key_heads} heads of keys of {delta.key_head_dim}, {delta.num_value_heads} of values of "
            f"{delta.value_head_dim}",
        ),
    )


@term.register
def _(part: KimiDeltaSpec) -> Term:
    delta = part.delta
    log = f"{delta.lower_bound:.4g} sigmoid(.)" if delta.lower_bound else "-exp(A) softplus(.)"
    rank = f" through {delta.head_dim} dimensions" if part.low_rank else ""
    return Term(
        f"kimi_delta({ARGUMENT})",
        (
            "kimi_delta(h) = W (norm(S q) sigmoid(z)),  S = a S + b (v - a S k) k^T, a for each channel of a key",
            f"  q, k, v = silu(conv(W h)) over {delta.width} tokens; a = exp({log}) of Wa h and z = Wz h{rank}, "
            "b = sigmoid(Wb h)",
            f"  {delta.num_heads} heads of {delta.head_dim}",
        ),
    )


@term.register
def _(part: ShortConvSpec) -> Term:
    line = f"short_conv(h) = W (c conv(b u)),  b, c, u = W h; conv over {part.width} tokens"
    return Term(f"short_conv({ARGUMENT})", (line,))
