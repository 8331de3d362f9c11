"""Mixtures of experts, and one layer per head: many small linear layers in one call."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from forebay.formats.quantize import quantize_rows
from forebay.ops import ExpertActivation, LinearWeight
from forebay.ops.interface import Ops
from forebay.ops.native.ops import NativeOps
from forebay.ops.reference.experts import Experts
from tests.formats.coded import stored
from tests.ops.helpers import assert_close, assert_same_bits, normal

pytestmark = pytest.mark.quick(12)

NUM_EXPERTS = 5
ACTIVATIONS = list(ExpertActivation)
BITS = [16, 8, 4]  # of the weights


def _pack(ops: Ops, rows: int, columns: int, dtype: torch.dtype, bits: int, seed: int) -> LinearWeight:
    weight, bias = normal((rows, columns), dtype, seed, scale=columns**-0.5), normal((rows,), dtype, seed + 1)
    if bits == 16:
        return ops.linear.pack(weight, bias)
    return ops.linear.pack_quantized(stored(quantize_rows(weight.float().numpy(), bits)), bias)


def _experts(
    ops: Ops,
    dtype: torch.dtype,
    *,
    hidden: int = 64,
    intermediate: int = 32,
    bits: int = 16,
    activation: ExpertActivation = ExpertActivation.SILU_AND_MUL,
) -> Experts:
    width = intermediate if activation is ExpertActivation.RELU2 else 2 * intermediate
    first = [_pack(ops, width, hidden, dtype, bits, seed=10 * e) for e in range(NUM_EXPERTS)]
    second = [_pack(ops, hidden, intermediate, dtype, bits, seed=500 + 10 * e) for e in range(NUM_EXPERTS)]
    return ops.experts.pack_experts(first, second, activation, alpha=1.7, limit=1.5)


def _routing(tokens: int, choices: int) -> tuple[Tensor, Tensor]:
    weights, ids = normal((tokens, NUM_EXPERTS), torch.float32, seed=7).softmax(dim=-1).topk(choices, dim=-1)
    return ids, weights


@pytest.mark.parametrize("tokens", [0, 1, 2, 60, 700])
@pytest.mark.parametrize("choices", [1, 2, 5])
@pytest.mark.parametrize(("hidden", "intermediate"), [(40, 24), (300, 160)])
def test_fused_experts_equals_the_reference(
    native: NativeOps,
    reference: Ops,
    dtype: torch.dtype,
    tokens: int,
    choices: int,
    hidden: int,
    intermediate: int,
) -> None:
    x = normal((tokens, hidden + 9), dtype, seed=1)[:, 9:]
    ours, theirs = (
        ops.experts.fused_experts(
            x, _experts(ops, dtype, hidden=hidden, intermediate=intermediate), *_routing(tokens, choices)
        )
        for ops in (native, reference)
    )
    assert_close(ours, theirs)


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("bits", BITS)
def test_experts_of_every_activation_and_form_equal_the_reference(
    native: NativeOps, reference: Ops, dtype: torch.dtype, activation: ExpertActivation, bits: int
) -> None:
    x = normal((33, 64), dtype, seed=1)
    ours, theirs = (
        ops.experts.fused_experts(x, _experts(ops, dtype, bits=bits, activation=activation), *_routing(33, 2))
        for ops in (native, reference)
    )
    if bits == 16:
        assert_close(ours, theirs)
    else:  # another rounding of what comes between the layers, and so other codes of it
        assert (ours - theirs).float().norm() < 0.02 * theirs.float().norm()


@pytest.mark.parametrize("bits", BITS)
def test_a_token_is_given_what_its_experts_layers_give_it_alone(
    native: NativeOps, dtype: torch.dtype, bits: int
) -> None:
    """To the bit, whoever else is in the call."""
    x, (ids, weights) = normal((600, 64), dtype, seed=1), _routing(600, 2)
    together = native.experts.fused_experts(x, _experts(native, dtype, bits=bits), ids, weights)
    for t in (0, 31, 599):
        parts = []
        for e in ids[t].tolist():
            hidden = native.elementwise.silu_and_mul(
                native.linear.apply(x[t : t + 1], _pack(native, 64, 64, dtype, bits, seed=10 * e))
            )
            parts.append(native.linear.apply(hidden, _pack(native, 64, 32, dtype, bits, seed=500 + 10 * e)))
        first, second = (part.float() * weight for part, weight in zip(parts, weights[t], strict=True))
        assert_same_bits(together[t : t + 1], (first + second).to(dtype))


@pytest.mark.parametrize("bits", BITS)
def test_neither_other_tokens_nor_threads_matter(
    native: NativeOps, single_threaded: NativeOps, dtype: torch.dtype, bits: int
) -> None:
    x, (ids, weights) = normal((60, 64), dtype, seed=1), _routing(60, 2)
    together = native.experts.fused_experts(x, _experts(native, dtype, bits=bits), ids, weights)
    experts = _experts(single_threaded, dtype, bits=bits)
    assert_same_bits(single_threaded.experts.fused_experts(x, experts, ids, weights), together)
    poisoned = x.clone()
    poisoned[1::2] = float("nan")
    alone = native.experts.fused_experts(poisoned, _experts(native, dtype, bits=bits), ids, weights)
    assert_same_bits(alone[::2], together[::2])


@pytest.mark.parametrize("tokens", [0, 1, 17, 600])
@pytest.mark.parametrize(("heads", "inputs", "outputs"), [(1, 16, 40), (6, 32, 16), (5, 23, 130)])
def test_heads_have_linear_layers_of_their_own(
    native: NativeOps, reference: Ops, dtype: torch.dtype, tokens: int, heads: int, inputs: int, outputs: int
) -> None:
    x = normal((tokens, heads, inputs + 7), dtype, seed=1)[..., 7:]
    ours, theirs = (
        ops.experts.linear_heads(
            x, ops.experts.pack_heads([_pack(ops, outputs, inputs, dtype, 16, seed=h) for h in range(heads)])
        )
        for ops in (native, reference)
    )
    assert_close(ours, theirs)
    for h in range(heads):
        assert_same_bits(ours[:, h], native.linear.apply(x[:, h], _pack(native, outputs, inputs, dtype, 16, seed=h)))
