"""The native twins of the ops in streams.py: thin calls into the compiled kernels."""

from __future__ import annotations

import torch
from torch import Tensor

from forebay.ops.native.kernels import Kernels
from forebay.ops.reference.streams import Mixing, MixWeights, StreamOps


class NativeStreams(StreamOps):
    """See `StreamOps`. Every tensor is contiguous."""

    def __init__(self, kernels: Kernels) -> None:
        self._kernels, self._pool = kernels, kernels.pool
        self._mix_weights = kernels.by_dtype("fb_mix_weights_{}")
        self._last_weights = kernels.by_dtype("fb_last_weights_{}")
        self._collapse_streams = kernels.by_dtype("fb_collapse_streams_{}")
        self._mix_streams = kernels.by_dtype("fb_mix_streams_{}")
        self._match_streams = kernels.by_dtype("fb_match_streams_{}")
        self._spread_streams = kernels.by_dtype("fb_spread_streams_{}")

    def mix_weights(self, streams: Tensor, mixing: Mixing) -> MixWeights:
        rows, width = streams.shape
        n = mixing.num_streams
        made = MixWeights(*(torch.empty(rows, *shape) for shape in ((n,), (n,), (n, n))))
        given = (tensor.data_ptr() for tensor in (streams, mixing.fn, mixing.scale, mixing.base, *made))
        sizes = (rows, width, n, mixing.iterations, mixing.norm_eps, mixing.eps)
        self._mix_weights[streams.dtype](self._pool, *given, *sizes)
        return made

    def last_weights(self, streams: Tensor, mixing: Mixing) -> Tensor:
        rows, width = streams.shape
        weights = torch.empty(rows, mixing.num_streams)
        given = (tensor.data_ptr() for tensor in (streams, mixing.fn, mixing.scale, mixing.base, weights))
        sizes = (rows, width, mixing.num_streams, mixing.norm_eps, mixing.eps)
        self._last_weights[streams.dtype](self._pool, *given, *sizes)
        return weights

    def collapse_streams(self, streams: Tensor, weights: Tensor) -> Tensor:
        rows, n = weights.shape
        hidden = streams.shape[1] // n
        out = streams.new_empty(rows, hidden)
        given = streams.data_ptr(), weights.data_ptr(), out.data_ptr()
        self._collapse_streams[streams.dtype](self._pool, *given, rows, n, hidden)
        return out

    def mix_streams_(self, streams: Tensor, between: Tensor) -> None:
        rows, n, _ = between.shape
        hidden = streams.shape[1] // n
        self._mix_streams[streams.dtype](self._pool, streams.data_ptr(), between.data_ptr(), rows, n, hidden)

    def spread_streams(self, x: Tensor, weights: Tensor) -> Tensor:
        rows, n = weights.shape
        hidden = x.shape[1]
        out = x.new_empty(rows, n * hidden)
        self._spread_streams[x.dtype](self._pool, x.data_ptr(), weights.data_ptr(), out.data_ptr(), rows, n, hidden)
        return out

    def match_streams(self, x: Tensor, y: Tensor, num_streams: int) -> Tensor:
        rows, width = x.shape
        out = x.new_empty(rows, num_streams)
        given = x.data_ptr(), y.data_ptr(), out.data_ptr()
        self._match_streams[x.dtype](self._pool, *given, rows, num_streams, width // num_streams)
        return out
