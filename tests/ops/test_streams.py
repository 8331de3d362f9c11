"""Hyper-connections: native kernels against the definition in torch."""

from __future__ import annotations

import pytest
import torch

from forebay.ops.interface import Ops
from forebay.ops.native.ops import NativeOps
from forebay.ops.reference.streams import Mixing
from tests.ops.helpers import assert_close, normal


def mixing(streams: int, hidden: int, *, last: bool) -> Mixing:
    count = streams if last else (2 + streams) * streams
    return Mixing(
        num_streams=streams,
        fn=normal((count, streams * hidden), torch.float32, 1) / 4,
        scale=normal((1 if last else 3,), torch.float32, 2),
        base=normal((count,), torch.float32, 3),
        norm_eps=1e-6,
        eps=1e-6,
        iterations=20,
    )


@pytest.mark.parametrize("tokens", [0, 1, 5])
@pytest.mark.parametrize(("streams", "hidden"), [(1, 3), (2, 20), (4, 33), (16, 8)])
def test_streams_are_mixed_as_the_reference_mixes_them(
    native: NativeOps, reference: Ops, dtype: torch.dtype, streams: int, hidden: int, tokens: int
) -> None:
    x, out = normal((tokens, streams * hidden), dtype, 4), normal((tokens, hidden), dtype, 5)
    made, last = mixing(streams, hidden, last=False), mixing(streams, hidden, last=True)
    weights = reference.streams.mix_weights(x, made)
    for ours, theirs in zip(native.streams.mix_weights(x, made), weights, strict=True):
        assert_close(ours, theirs)
    assert_close(native.streams.last_weights(x, last), reference.streams.last_weights(x, last))
    assert_close(
        native.streams.collapse_streams(x, weights.before), reference.streams.collapse_streams(x, weights.before)
    )
    assert_close(
        native.streams.spread_streams(out, weights.behind), reference.streams.spread_streams(out, weights.behind)
    )
    ours, theirs = x.clone(), x.clone()
    native.streams.mix_streams_(ours, weights.between)
    reference.streams.mix_streams_(theirs, weights.between)
    assert_close(ours, theirs)


def test_sinkhorn_makes_rows_and_columns_sum_to_one(native: NativeOps, reference: Ops) -> None:
    for ops in (native, reference):
        between = ops.streams.mix_weights(normal((7, 4 * 12), torch.float32, 6), mixing(4, 12, last=False)).between
        for dim in (1, 2):
            torch.testing.assert_close(between.sum(dim=dim), torch.ones(7, 4), rtol=0, atol=1e-3)


@pytest.mark.parametrize(("num_streams", "hidden"), [(1, 5), (2, 64), (3, 33)])
def test_agreement_of_streams_is_the_signed_root_of_their_product(
    native: NativeOps, reference: Ops, dtype: torch.dtype, num_streams: int, hidden: int
) -> None:
    x, y = (normal((7, num_streams * hidden), dtype, seed) for seed in (1, 2))
    x[3], y[4] = 0, -x[4]
    got, expected = (ops.streams.match_streams(x, y, num_streams) for ops in (native, reference))
    assert_close(got, expected)
    assert (expected[3] == 0).all()
    assert (expected[4] < 0).all()
