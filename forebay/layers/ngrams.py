"""Embeddings of the n-grams that end with a token, added to each residual stream of a layer.

Qwen 4; checked against transformers' `qwen4_exp`. The tokens before a step's own are kept as the recurrent states of
their request are, so that they are there behind any cut, hit or rejected draft.

Shape letters: T tokens, N streams, H hidden size, E entries of the embeddings, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from forebay.families.base.mixers import Ngrams
from forebay.layers.build import Parts
from forebay.layers.context import ForwardContext
from forebay.layers.norms import normed_streams, norms_of_streams
from forebay.layers.params import TensorParam
from forebay.layers.states import States
from forebay.ops.reference.recurrence import Convolution
from forebay.ops.reference.tables import DIGITS, NgramHashes, RowTable
from forebay.pools.cache_spec import RecurrentState


@dataclass(frozen=True, kw_only=True, slots=True)
class NgramInputsSpec:
    """`table` is the number of the layer's table among those of the model."""

    name: str
    hidden_size: int
    vocab_size: int
    num_streams: int
    ngrams: Ngrams
    table: int
    norm_eps: float
    norm_offset: float
    for_ranks: ClassVar[bool] = True

    def build(self, parts: Parts) -> NgramInputs:
        """Return the part with its weights."""
        return NgramInputs(self, parts)


class TokensBefore:
    """Tokens before each token of a step, as digits. Those before the step are kept with the request."""

    def __init__(self, parts: Parts, vocab_size: int, past: int) -> None:
        self._ops, self._past, self._dtype = parts.ops, past, parts.weights.dtype
        width = past * DIGITS
        self._layer = parts.keep(RecurrentState(conv=(past, width), inputs=width))
        device = parts.weights.device
        numbers = np.arange(1, vocab_size + 1)[:, None] >> (8 * np.arange(DIGITS)) & 255
        taps = np.zeros((past + 1, past, DIGITS), np.float32)
        for i in range(past):
            taps[past - 1 - i, i] = 1.0  # digits of the token that many before
        self._digits = torch.from_numpy(numbers.astype(np.float32)).to(device=device, dtype=self._dtype)
        weight = torch.from_numpy(taps.reshape(past + 1, width)).to(device=device, dtype=self._dtype)
        self._shift = Convolution(weight, None, silu=False)

    def __call__(self, ctx: ForwardContext, ids: Tensor) -> Tensor:
        """ids [T] -> the digits of the tokens before each, as `TableOps.ngram_rows` takes them."""
        own = self._ops.linear.embedding(ids, self._digits, self._dtype)
        state = ctx.cache.state(self._layer).conv
        conv = self._ops.recurrence.causal_conv
        return States.of(ctx).run(conv, self._ops.elementwise.concat([own] * self._past), self._shift, state)


class NgramInputs:
    """Adds embeddings of n-grams to the streams. All streams get one value of the embeddings, each with a gate: how
    far the stream agrees with a key of them. A convolution of these over tokens that lie apart is added, too."""

    def __init__(self, spec: NgramInputsSpec, parts: Parts) -> None:
        parts, ngrams = parts.within(spec.name).without_adapters, spec.ngrams
        self._ops, self._number, self._eps = parts.ops, spec.num_streams, spec.norm_eps
        width = spec.num_streams * spec.hidden_size
        self._before = TokensBefore(parts, spec.vocab_size, ngrams.past)
        self._hashes = _hashes(ngrams, spec.table, parts)
        self._table = _table(ngrams, spec.table, parts)
        self._key = parts.linear({"key_proj": width}, ngrams.size)
        self._value = parts.linear({"value_proj": spec.hidden_size}, ngrams.size)
        self._key_norms, self._query_norms, self._conv_norms = (
            norms_of_streams(parts, f"norm_{name}", spec.hidden_size, spec.num_streams, spec.norm_offset)
            for name in ("key", "query", "conv")
        )
        span = (ngrams.width - 1) * ngrams.longest
        self._layer = parts.keep(RecurrentState(conv=(span, width), inputs=width))
        self._conv = Convolution(_spread_kernel(parts, width, ngrams), None, silu=True)

    def __call__(self, ctx: ForwardContext, streams: Tensor) -> Tensor:
        """streams [T, N * H] -> what is added to them, [T, N * H]."""
        ops, elementwise = self._ops, self._ops.elementwise
        assert ctx.input_ids is not None, "a step without token ids"
        before = self._before(ctx, ctx.input_ids)
        rows = ops.tables.ngram_rows(ctx.input_ids, before, self._hashes, self._table)
        keys = normed_streams(ops, self._key.of(rows), self._key_norms, self._eps)
        queries = normed_streams(ops, streams, self._query_norms, self._eps)
        gates = ops.streams.match_streams(keys, queries, self._number)
        values = elementwise.mul_sigmoid(elementwise.concat([self._value.of(rows)] * self._number), gates)
        normed = normed_streams(ops, values, self._conv_norms, self._eps)
        state = ctx.cache.state(self._layer).conv
        return elementwise.add_(States.of(ctx).run(ops.recurrence.causal_conv, normed, self._conv, state), values)


def _hashes(ngrams: Ngrams, table: int, parts: Parts) -> NgramHashes:
    sizes = np.array(ngrams.sizes[table], np.int64)
    numbers = (np.array(ngrams.multipliers[table], np.int64), sizes, np.cumsum(sizes) - sizes)
    device = parts.weights.device
    multipliers, sizes_of, offsets = (torch.from_numpy(values).to(device) for values in numbers)
    return NgramHashes(multipliers=multipliers, sizes=sizes_of, offsets=offsets, end=ngrams.end)


def _table(ngrams: Ngrams, table: int, parts: Parts) -> RowTable:
    """Declare the table's parts, of which all but the last have as many rows."""
    rows = ngrams.num_rows[table]
    each = -(-rows // ngrams.num_parts)
    sizes = [min(each, rows - first) for first in range(0, rows, each)]
    prefix = f"{parts.prefix}ple_embedding.ngram_embedding"
    names = tuple(f"{prefix}.shard_{i}.weight" for i in range(len(sizes)))
    width = ngrams.size // len(ngrams.sizes[table])
    return parts.weights.row_table(TensorParam(names=names, sizes=tuple(sizes), inner=(width,), by_row=True))


def _spread_kernel(parts: Parts, channels: int, ngrams: Ngrams) -> Tensor:
    """Load the kernel of a convolution whose taps are `ngrams.longest` tokens apart: zeros lie between them."""

    def spread(kernel: Tensor) -> Tensor:
        taps = kernel.new_zeros((ngrams.width - 1) * ngrams.longest + 1, channels)
        taps[:: ngrams.longest] = kernel.squeeze(1).T
        return taps

    param = TensorParam(names=(f"{parts.prefix}conv1d.weight",), sizes=(channels,), inner=(1, ngrams.width))
    return parts.weights.tensor(param, change=spread)
