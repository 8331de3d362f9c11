"""The recurrences against loops that know nothing of ours: one in float64 here, and transformers'."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.models.falcon_h1.modeling_falcon_h1 import FalconH1RMSNormGated
from transformers.models.kimi_linear.modeling_kimi_linear import (
    KimiLinearRMSNormGated,
    recurrent_kimi_delta_attention,
)
from transformers.models.mamba.modeling_mamba import mamba_selective_scan
from transformers.models.mamba2.modeling_mamba2 import MambaRMSNormGated, mamba2_chunk_scan
from transformers.models.qwen3_next.modeling_qwen3_next import (
    Qwen3NextRMSNormGated,
    torch_recurrent_gated_delta_rule,
)

from forebay.ops.interface import Ops
from forebay.ops.reference.norms import GatedNorm
from forebay.ops.reference.recurrence import Scan
from tests.ops.helpers import assert_close, normal
from tests.ops.recurrences import CASES, Case, Conv, Delta, Mamba1, Mamba2, state_batch, state_table

pytestmark = pytest.mark.quick(16)

TOKENS = 37


def _run(ops: Ops, case: Case, inputs: dict[str, Tensor], state: Tensor) -> Tensor:
    return case.call(ops, inputs, state, state_batch([TOKENS], [1]))


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_recurrences_equal_a_loop_over_tokens_in_float64(each_ops: Ops, case: Case) -> None:
    inputs, state = case.inputs(TOKENS, torch.float32, seed=11), state_table(case, 2, torch.float32, seed=7)
    loop_state = state[1].double().numpy().copy()
    expected = case.naive({name: x.double().numpy() for name, x in inputs.items()}, loop_state)
    assert_close(_run(each_ops, case, inputs, state), torch.from_numpy(expected).float())
    assert_close(state[1], torch.from_numpy(loop_state).float())


@pytest.mark.parametrize("name", ["conv", "conv-of-2"])
def test_the_convolution_equals_torchs(each_ops: Ops, name: str) -> None:
    case = CASES[name]
    assert isinstance(case, Conv)
    inputs, state = case.inputs(TOKENS, torch.float32, seed=11), state_table(case, 2, torch.float32, seed=7)
    weight, bias = case.weights(torch.float32)
    padded = torch.cat([state[1], inputs["x"]]).T
    expected = F.silu(F.conv1d(padded, weight.T.unsqueeze(1), bias, groups=case.channels)).T
    assert_close(_run(each_ops, case, inputs, state), expected)


def test_mamba2_equals_transformers_chunked_scan(each_ops: Ops) -> None:
    case = Mamba2(heads=4, groups=2, head_size=16, state_size=32, dt_limits=(0.05, 2.0))
    inputs, state = case.inputs(TOKENS, torch.float32, seed=11), state_table(case, 2, torch.float32, seed=7)
    a, d, dt_bias = case.weights()
    x, dt, b, c = (inputs[name].unsqueeze(0) for name in ("x", "dt", "b", "c"))
    expected, expected_state = mamba2_chunk_scan(
        x,
        dt,
        a,
        b,
        c,
        8,
        D=d,
        dt_bias=dt_bias,
        dt_softplus=True,
        dt_limit=case.dt_limits,
        initial_states=state[1:2].transpose(-1, -2),  # theirs is [head size, state size]
        return_final_states=True,
    )
    assert_close(_run(each_ops, case, inputs, state), expected[0])
    assert_close(state[1], expected_state[0].transpose(-1, -2))


def test_mamba1_equals_transformers_selective_scan(each_ops: Ops) -> None:
    case = Mamba1(channels=40, state_size=16)
    inputs, state = case.inputs(TOKENS, torch.float32, seed=11), torch.zeros(2, *case.state_shape())
    a, d, dt_bias = case.weights()
    x, dt, b, c = (inputs[name].T.unsqueeze(0) for name in ("x", "dt", "b", "c"))
    expected, expected_state = mamba_selective_scan(
        x, dt, a, b, c, D=d, delta_bias=dt_bias, delta_softplus=True, return_last_state=True
    )
    assert_close(_run(each_ops, case, inputs, state), expected[0].T)
    assert_close(state[1], expected_state[0])


@pytest.mark.parametrize("per_channel", [False, True])
def test_the_delta_rule_equals_transformers(each_ops: Ops, per_channel: bool) -> None:
    case = Delta(key_heads=2, value_heads=2, key_size=32, value_size=48, per_channel=per_channel)
    inputs, state = case.inputs(TOKENS, torch.float32, seed=11), state_table(case, 2, torch.float32, seed=7)
    theirs = recurrent_kimi_delta_attention if per_channel else torch_recurrent_gated_delta_rule
    expected, expected_state = theirs(
        *(inputs[name].unsqueeze(0) for name in ("q", "k", "v", "log_decay", "beta")),
        initial_state=state[1:2].clone(),
        output_final_state=True,
        use_qk_l2norm_in_kernel=True,
    )
    assert_close(_run(each_ops, case, inputs, state), expected[0])
    assert_close(state[1], expected_state[0])


@pytest.mark.parametrize(
    ("theirs", "group_size", "norm_first", "sigmoid"),
    [
        (MambaRMSNormGated(96, group_size=32, eps=1e-5), 32, False, False),
        (FalconH1RMSNormGated(96, eps=1e-5, n_groups=2, norm_before_gate=False), 48, False, False),
        (FalconH1RMSNormGated(96, eps=1e-5, n_groups=2, norm_before_gate=True), 48, True, False),
        (Qwen3NextRMSNormGated(32, eps=1e-5), 32, True, False),
        (KimiLinearRMSNormGated(32, eps=1e-5), 32, True, True),
    ],
    ids=["mamba2", "falcon_h1", "falcon_h1-norm-first", "qwen3_next", "kimi_linear"],
)
@torch.no_grad()
def test_the_gated_norm_equals_transformers(
    each_ops: Ops, theirs: nn.Module, group_size: int, norm_first: bool, sigmoid: bool
) -> None:
    x, gate = normal((1, 5, 96), torch.float32, seed=1), normal((1, 5, 96), torch.float32, seed=2)
    weight = theirs.get_parameter("weight")
    weight.copy_(normal(tuple(weight.shape), torch.float32, seed=3))
    shape = (1, 5, -1) if len(weight) == 96 else (-1, len(weight))  # the latter norm head by head
    expected = theirs(x.reshape(shape), gate.reshape(shape)).reshape(5, 96)
    norm = GatedNorm(weight, 1e-5, group_size, norm_first, sigmoid)
    assert_close(each_ops.norms.gated_rms_norm(x[0], gate[0], norm), expected)


def _ulps(actual: Tensor, exact: np.ndarray[tuple[int], np.dtype[np.float64]]) -> float:
    """The largest distance from the float64 value, in units of its last float32 place."""
    return float(np.max(np.abs(actual.double().numpy() - exact) / np.spacing(np.abs(exact).astype(np.float32))))


def test_step_widths_are_within_a_few_ulps_of_softplus(each_ops: Ops) -> None:
    dt = normal((1, 4099), torch.float32, seed=1, scale=12)
    channels, one = dt.shape[1], torch.ones(1, 1)
    # From a state of zeros, with everything else 1, a token's output is its step's width.
    scan = Scan(torch.zeros(channels, 1), torch.zeros(channels), torch.zeros(channels))
    state = torch.zeros(2, channels, 1)
    widths = each_ops.recurrence.mamba1_scan(torch.ones_like(dt), dt, one, one, scan, state, state_batch([1], [1]))
    assert _ulps(widths[0], np.logaddexp(0, dt[0].double().numpy())) < 4


def test_decays_are_within_a_few_ulps_of_exp(each_ops: Ops) -> None:
    log_decay = -normal((1, 4099), torch.float32, seed=1, scale=20).abs()
    heads = log_decay.shape[1]
    state = torch.ones(2, heads, 1, 1)
    # A key and a value of zeros only let the state decay.
    zero, one = torch.zeros(1, heads, 1), torch.ones(1, heads)
    each_ops.recurrence.gated_delta_rule(zero, zero, zero, log_decay, one, state, state_batch([1], [1]))
    assert _ulps(state[1].flatten(), np.exp(log_decay[0].double().numpy())) < 3
