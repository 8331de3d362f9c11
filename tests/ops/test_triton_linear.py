"""The GPU's linear layers and experts equal the reference; see `test_triton`."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from forebay.ops.interface import Ops
from forebay.ops.reference.experts import ExpertActivation
from tests.formats.coded import FORMATS, random_codes, stored
from tests.ops.helpers import assert_same_bits, normal
from tests.ops.test_triton import device, ops, reference
from tests.ops.triton_device import ALL_ROWS, TritonOps, assert_close, experts

__all__ = ["device", "ops", "reference"]  # fixtures


@pytest.mark.quick(60)
@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("tokens", [0, 3])
def test_linear_in_codes_is_linear_of_the_values(
    device: str, ops: Ops, dtype: torch.dtype, name: str, tokens: int
) -> None:
    width = 96 if FORMATS[name].group == 32 else FORMATS[name].group
    weight, bias = random_codes(FORMATS[name], 37, width, seed=5), normal((37,), torch.float32, seed=3)
    values = torch.from_numpy(weight.values())
    x = normal((tokens, width + 8), dtype, seed=4)[:, :width]
    packed = TritonOps(device, 1).linear.pack_quantized(stored(weight), bias)
    expected = x.float() @ values.T + bias
    got = ops.linear.apply(x, packed)
    assert got.dtype == dtype
    if dtype == torch.float32:
        assert_close(got, expected)
    else:  # the matrix units take values in it, so each product has a rounding of its own
        rounding = torch.finfo(dtype).eps * (x.float().abs() @ values.abs().T + expected.abs())
        assert ((got.float() - expected).abs() <= rounding).all()
    torch.testing.assert_close(ops.linear.apply_f32(x, packed), expected, rtol=1e-2, atol=1e-1)
    ids = torch.tensor([0, 36, 5])
    assert_close(ops.linear.embedding_packed(ids, packed, dtype), values[ids].to(dtype))


def test_formats_one_below_the_other_are_each_multiplied(device: str, ops: Ops) -> None:
    parts = [random_codes(FORMATS[name], rows, 256, seed=rows) for name, rows in (("Q4_K", 32), ("Q6_K", 8))]
    bias, x = normal((40,), torch.float32, seed=1), normal((3, 256), torch.float32, seed=2)
    packed = TritonOps(device, 1).linear.pack_quantized(stored(*parts), bias)
    assert (packed.in_features, packed.out_features) == (256, 40)
    expected = x @ torch.from_numpy(np.concatenate([part.values() for part in parts])).T + bias
    assert_close(ops.linear.apply(x, packed), expected)
    assert_close(ops.linear.apply_f32(x, packed), expected)


@pytest.mark.parametrize("bias", [False, True])
def test_dense_linear_equals_the_reference(ops: Ops, reference: Ops, dtype: torch.dtype, bias: bool) -> None:
    weight, x = normal((9, 40), dtype, seed=1), normal((3, 40), dtype, seed=2)
    b = normal((9,), dtype, seed=3) if bias else None
    ours, theirs = ops.linear.pack(weight, b), reference.linear.pack(weight, b)
    assert_close(ops.linear.apply(x, ours), reference.linear.apply(x, theirs))
    assert ops.linear.apply_f32(x, ours).dtype == torch.float32
    own = replace(ours, own_rows=ALL_ROWS)
    assert_close(ops.linear.apply(x, own), reference.linear.apply(x, theirs))
    sums = x.float() @ weight.float().T
    assert_close(ops.linear.apply_f32(x, own), sums if b is None else sums + b)


@pytest.mark.quick(6)
@pytest.mark.parametrize("name", ["dense", "4 bits by 128", "Q4_0", "Q8_0", "MXFP4", "FP8", "Q3_K", "Q6_K", "IQ4_XS"])
def test_c31_a_row_of_a_product_has_the_same_bits_among_any_number_of_rows(
    device: str, dtype: torch.dtype, name: str
) -> None:
    """In every tile of the table."""
    width, most = 256, 257
    if name == "dense":
        packed = replace(
            TritonOps(device, 1).linear.pack(normal((40, width), dtype, seed=1).to(device)), own_rows=ALL_ROWS
        )
    else:
        packed = TritonOps(device, 1).linear.pack_quantized(stored(random_codes(FORMATS[name], 40, width, seed=5)))
    x = normal((most, width), dtype, seed=4).to(device)
    whole = TritonOps(device, 1).linear.apply(x, packed)
    for count in (1, 17, 65, 129):
        assert_same_bits(TritonOps(device, 1).linear.apply(x[most - count :], packed), whole[most - count :])


EXPERTS, HIDDEN, INTERMEDIATE = 5, 40, 24


def _experts(device: str, tokens: int, choices: int, dtype: torch.dtype, activation: ExpertActivation) -> None:
    """On the device whole: packed experts are no tensors that could come and go."""
    wide = INTERMEDIATE if activation is ExpertActivation.RELU2 else 2 * INTERMEDIATE
    x = normal((tokens, HIDDEN), dtype, seed=1)
    scores = normal((tokens, EXPERTS), torch.float32, seed=7)
    weights, ids = scores.softmax(dim=-1).topk(choices, dim=-1)
    bias = normal((wide,), dtype, seed=9)
    results = []
    for made, where in ((TritonOps(device, 1), device), (Ops(1), "cpu")):
        inner = [
            made.linear.pack(normal((wide, HIDDEN), dtype, seed=e, scale=0.15).to(where), bias.to(where))
            for e in range(EXPERTS)
        ]
        outer = [
            made.linear.pack(normal((HIDDEN, INTERMEDIATE), dtype, seed=50 + e, scale=0.2).to(where))
            for e in range(EXPERTS)
        ]
        experts = made.experts.pack_experts(inner, outer, activation, alpha=1.7, limit=2.0)
        results.append(made.experts.fused_experts(x.to(where), experts, ids.to(where), weights.to(where)).cpu())
    assert_close(*results)


@pytest.mark.quick(8)
@pytest.mark.parametrize(("tokens", "choices"), [(0, 2), (1, 1), (1, 3), (7, 2), (24, 4)])
def test_experts_equal_the_reference(device: str, dtype: torch.dtype, tokens: int, choices: int) -> None:
    _experts(device, tokens, choices, dtype, ExpertActivation.SILU_AND_MUL)


def test_c31_a_token_s_experts_give_it_the_same_bits_in_every_step(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(experts, "_BLOCK", 16)
    ops, tokens = TritonOps(device, 1), 10
    packed = ops.experts.pack_experts(
        [ops.linear.pack(normal((2 * INTERMEDIATE, HIDDEN), torch.float32, seed=e).to(device)) for e in range(EXPERTS)],
        [ops.linear.pack(normal((HIDDEN, INTERMEDIATE), torch.float32, seed=9 + e).to(device)) for e in range(EXPERTS)],
    )
    weights, ids = normal((tokens, EXPERTS), torch.float32, seed=7).softmax(dim=-1).topk(4, dim=-1)
    x = normal((tokens, HIDDEN), torch.float32, seed=1)
    whole = ops.experts.fused_experts(x.to(device), packed, ids.to(device), weights.to(device))
    for step in ([5], list(range(tokens - 1, -1, -1))):
        own = (part[step].to(device) for part in (x, ids, weights))
        assert_same_bits(ops.experts.fused_experts(next(own), packed, *own), whole[step])


@pytest.mark.parametrize("activation", [ExpertActivation.RELU2, ExpertActivation.CLAMPED_SWIGLU])
def test_experts_may_have_another_activation(device: str, activation: ExpertActivation) -> None:
    _experts(device, 7, 2, torch.float32, activation)


def test_experts_in_codes_are_those_of_their_values(device: str) -> None:
    ops, dense = TritonOps(device, 1), Ops(1)
    inner = [random_codes(FORMATS["Q4_1"], 2 * 256, 64, seed=e) for e in range(3)]
    outer = [random_codes(FORMATS["Q6_K"], 64, 256, seed=9 + e) for e in range(3)]
    x, ids = normal((5, 64), torch.float32, seed=1), torch.tensor([[0, 2], [2, 1], [1, 0], [2, 0], [0, 1]])
    weights = torch.full((5, 2), 0.5)
    ours, theirs = (
        ops.experts.pack_experts(
            [ops.linear.pack_quantized(stored(w)) for w in inner], [ops.linear.pack_quantized(stored(w)) for w in outer]
        )
        for ops in (ops, dense)
    )
    out = ops.experts.fused_experts(*(t.to(device) for t in (x,)), ours, ids.to(device), weights.to(device))
    torch.testing.assert_close(out.cpu(), dense.experts.fused_experts(x, theirs, ids, weights), rtol=1e-4, atol=1e-3)


def test_linear_heads_equal_the_reference(device: str, dtype: torch.dtype) -> None:
    weights = [normal((6, 10), dtype, seed=h) for h in range(3)]
    x = normal((4, 3 * 12), dtype, seed=9).view(4, 3, 12)[..., :10]
    results = [
        ops.experts.linear_heads(
            x.to(where), ops.experts.pack_heads([ops.linear.pack(w.to(where)) for w in weights])
        ).cpu()
        for ops, where in ((TritonOps(device, 1), device), (Ops(1), "cpu"))
    ]
    assert_close(*results)


def test_c31_a_token_s_heads_have_the_same_bits_among_any_number_of_tokens(device: str) -> None:
    ops, most = TritonOps(device, 1), 70
    heads = ops.experts.pack_heads(
        [ops.linear.pack(normal((40, 48), torch.float32, seed=h).to(device)) for h in range(3)]
    )
    x = normal((most, 3, 48), torch.float32, seed=9).to(device)
    whole = ops.experts.linear_heads(x, heads)
    for count in (1, 2, 17, 65):
        assert_same_bits(ops.experts.linear_heads(x[most - count :], heads), whole[most - count :])
    assert_close(whole[:, 1].cpu(), x[:, 1].cpu() @ normal((40, 48), torch.float32, seed=1).T)


def rounded_to_fp8(x: torch.Tensor) -> torch.Tensor:
    """Each 128 inputs of a row as codes of E4M3 and a scale, float64."""
    groups = x.float().unflatten(1, (-1, 128))
    scales = groups.abs().amax(dim=-1, keepdim=True) / 448
    codes = (groups / scales).nan_to_num(nan=0.0).to(torch.float8_e4m3fn)
    return (codes.double() * scales.double()).flatten(1)


@pytest.mark.parametrize("group", [128, 256])
def test_fp8_inputs_are_multiplied_as_they_are_rounded(device: str, dtype: torch.dtype, group: int) -> None:
    weight, bias = random_codes(replace(FORMATS["FP8"], group=group), 37, 512, seed=5), normal((37,), torch.float32, 3)
    ops = TritonOps(device, 1, fp8_inputs=True)
    packed = ops.linear.pack_quantized(stored(weight), bias)
    x = normal((5, 512 + 8), dtype, seed=4)[:, :512]
    x[1, 128:256] = 0
    found = ops.linear.apply_f32(x.to(device), packed).cpu()
    expected = rounded_to_fp8(x) @ torch.from_numpy(weight.values()).double().T + bias
    torch.testing.assert_close(found.double(), expected, rtol=1e-3, atol=1e-3 * float(expected.abs().max()))
    exact = TritonOps(device, 1).linear.apply_f32(x.to(device), packed).cpu()
    assert not torch.equal(found, exact)
    x[2, 3] = torch.nan
    assert ops.linear.apply(x.to(device), packed).isnan().all(dim=1).tolist() == [False, False, True, False, False]


def test_fp8_inputs_leave_weights_of_other_groups_and_codes_alone(device: str) -> None:
    x = normal((3, 256), torch.float32, seed=4).to(device)
    for name in ("FP8", "Q8_0", "Q4_K"):  # groups of 32, and no floats
        weight = stored(random_codes(FORMATS[name], 40, 256, seed=5))
        rounding, exact = (TritonOps(device, 1, fp8_inputs=fp8) for fp8 in (True, False))
        assert_same_bits(
            rounding.linear.apply(x, rounding.linear.pack_quantized(weight)),
            exact.linear.apply(x, exact.linear.pack_quantized(weight)),
        )


@pytest.mark.slow
@pytest.mark.quick(1)
def test_c31_a_row_in_fp8_has_the_same_bits_among_any_number_of_rows(device: str, dtype: torch.dtype) -> None:
    ops, most = TritonOps(device, 1, fp8_inputs=True), 257
    packed = ops.linear.pack_quantized(stored(random_codes(FORMATS["FP8 by 128"], 40, 256, seed=5)))
    x = normal((most, 256), dtype, seed=4).to(device)
    whole = ops.linear.apply(x, packed)
    for count in (1, 17, 65, 129):
        assert_same_bits(ops.linear.apply(x[most - count :], packed), whole[most - count :])


def test_experts_in_fp8_are_those_of_rounded_rows(device: str) -> None:
    ops, x = TritonOps(device, 1, fp8_inputs=True), normal((5, 128), torch.float32, seed=1)
    form = FORMATS["FP8 by 128"]
    inner, outer = (
        [random_codes(form, rows, 128, seed=seed + e) for e in range(3)] for rows, seed in ((256, 1), (128, 9))
    )
    ids, weights = torch.tensor([[2, 0], [1, 2], [0, 1], [1, 0], [2, 1]]), torch.rand(5, 2)
    packed = ops.experts.pack_experts(
        *([ops.linear.pack_quantized(stored(w)) for w in side] for side in (inner, outer))
    )
    found = ops.experts.fused_experts(x.to(device), packed, ids.to(device), weights.to(device)).cpu()
    for token in range(5):
        expected = torch.zeros(128, dtype=torch.float64)
        for e, weight in zip(ids[token].tolist(), weights[token].tolist(), strict=True):
            hidden = rounded_to_fp8(x[token : token + 1]) @ torch.from_numpy(inner[e].values()).double().T
            hidden = Ops(1).elementwise.silu_and_mul(hidden.float())
            expected += weight * (rounded_to_fp8(hidden) @ torch.from_numpy(outer[e].values()).double().T)[0]
        torch.testing.assert_close(found[token].double(), expected, rtol=1e-2, atol=1e-2 * float(expected.abs().max()))
