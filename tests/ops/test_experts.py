from __future__ import annotations

import pytest
import torch

from forebay.ops.interface import Ops
from forebay.ops.native import NativeOps
from forebay.ops.reference import TorchOps
from tests.ops.helpers import assert_close, assert_same_bits, normal

NUM_EXPERTS, HIDDEN, INTERMEDIATE = 5, 40, 24


def _experts(ops: Ops, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    gate_up = [
        ops.pack_linear(normal((2 * INTERMEDIATE, HIDDEN), x.dtype, seed=e, scale=0.15)) for e in range(NUM_EXPERTS)
    ]
    down = [
        ops.pack_linear(normal((HIDDEN, INTERMEDIATE), x.dtype, seed=100 + e, scale=0.2)) for e in range(NUM_EXPERTS)
    ]
    return ops.fused_experts(x, gate_up, down, ids, weights)


def _routing(tokens: int, choices: int) -> tuple[torch.Tensor, torch.Tensor]:
    scores = normal((tokens, NUM_EXPERTS), torch.float32, seed=7)
    weights, ids = scores.softmax(dim=-1).topk(choices, dim=-1)
    return ids, weights


@pytest.mark.parametrize("tokens", [0, 1, 2, 60])
@pytest.mark.parametrize("choices", [1, 2, 5])
def test_fused_experts_equals_the_reference(
    native: NativeOps, reference: TorchOps, dtype: torch.dtype, tokens: int, choices: int
) -> None:
    x = normal((tokens, HIDDEN), dtype, seed=1)
    ids, weights = _routing(tokens, choices)
    assert_close(_experts(native, x, ids, weights), _experts(reference, x, ids, weights))


def test_experts_may_have_another_activation(native: NativeOps, reference: TorchOps, dtype: torch.dtype) -> None:
    def run(ops: Ops) -> torch.Tensor:
        up = [ops.pack_linear(normal((INTERMEDIATE, HIDDEN), dtype, seed=e, scale=0.15)) for e in range(NUM_EXPERTS)]
        down = [ops.pack_linear(normal((HIDDEN, INTERMEDIATE), dtype, seed=50 + e)) for e in range(NUM_EXPERTS)]
        return ops.fused_experts(normal((9, HIDDEN), dtype, seed=1), up, down, *_routing(9, 2), activate=ops.relu2)

    assert_close(run(native), run(reference))


def test_a_token_does_not_depend_on_the_others(native: NativeOps, dtype: torch.dtype) -> None:
    x = normal((60, HIDDEN), dtype, seed=1)
    ids, weights = _routing(60, 2)
    together = _experts(native, x, ids, weights)
    for t in (0, 31, 59):
        alone = _experts(native, x[t : t + 1], ids[t : t + 1], weights[t : t + 1])
        assert_same_bits(alone, together[t : t + 1])
