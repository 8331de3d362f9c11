"""Weights in codes: the values of the file, however they are arranged, joined or widened."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType

from forebay.base.errors import ModelError
from forebay.families.checkpoint import open_checkpoint
from forebay.formats.gguf_types import GGML_TYPES, split
from forebay.formats.held_format import held_format
from forebay.formats.quantization import Quantization
from forebay.formats.quantized import FP8, joined_codes
from forebay.formats.small_floats import E4M3
from forebay.formats.stored_tensor import one_below_the_other, read_tensor
from tests.formats.coded import FORMATS, random_codes, read, stored
from tests.formats.gguf_files import (
    K_TYPES,
    LARGER,
    TYPES,
    llama_metadata,
    llama_tensors,
    quantized,
    set_scales,
    write_gguf,
)

AS_LARGE = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "MXFP4", *K_TYPES)
IN_CODES = (*AS_LARGE, *LARGER)


def from_file(type_name, shape=(6, 512), seed=0, scales=None):
    """Codes of a type and the values that the file gives for them; the least and the largest of its scales."""
    block = GGML_TYPES[GGMLQuantizationType[type_name].value]
    raw = quantized(type_name, shape, seed)
    if scales is not None:
        blocks = raw.reshape(-1, block.num_bytes)
        set_scales(blocks, type_name, np.geomspace(*scales, len(blocks)).astype(np.float16)[:, None])
    return stored(split(raw, block)), gguf.quants.dequantize(raw, GGMLQuantizationType[type_name])


@pytest.mark.parametrize("type_name", LARGER)
@pytest.mark.parametrize("shape", [(1, 256), (7, 768)])
def test_codes_in_a_larger_form_are_the_values_of_the_file(type_name, shape):
    codes, expected = from_file(type_name, shape, scales=(2**-11, 0.1))
    np.testing.assert_array_equal(read(codes), expected)
    assert codes.num_bytes * 8 == LARGER[type_name] * expected.size


@pytest.mark.parametrize(("type_name", "unit"), [("IQ1_S", 1 / 8), ("IQ1_M", 1 / 8), ("IQ3_XXS", 1 / 2), ("IQ3_S", 1)])
def test_codes_of_small_scales_are_rounded_to_the_least_float16(type_name, unit):
    """The step of a code is the scale times the unit in float16, whose least numbers are multiples of 2^-24."""
    codes, expected = from_file(type_name, (16, 1024), scales=(2**-24, 2**-12))
    wrong = np.abs(read(codes) - expected)
    largest_factor, largest_code = 31 if "3" in type_name else 15, 31 if "3" in type_name else 9
    assert wrong.max() <= 2**-25 * largest_factor * largest_code
    assert (wrong.max() > 0) == (unit < 1)
    assert wrong[np.abs(expected) > 0].mean() < 0.02 * np.abs(expected).mean()


@pytest.mark.parametrize("type_name", AS_LARGE)
@pytest.mark.parametrize("shape", [(1, 256), (7, 768)])
def test_codes_of_a_file_are_its_values_to_the_bit_and_its_size_within_five_per_cent(type_name, shape):
    codes, expected = from_file(type_name, shape)
    assert codes.shape == shape
    np.testing.assert_array_equal(read(codes).view(np.uint32), expected.view(np.uint32))
    block = GGML_TYPES[GGMLQuantizationType[type_name].value]
    in_file = shape[0] * shape[1] // block.elements * block.num_bytes
    assert in_file <= codes.num_bytes <= 1.05 * in_file


@pytest.mark.parametrize("type_name", TYPES)
def test_each_tensor_of_a_file_offers_its_codes_or_none(type_name, tmp_path):
    path = write_gguf(tmp_path / "m.gguf", llama_metadata(), llama_tensors(type_name), type_name=type_name)
    for name, tensor in open_checkpoint(path).tensors.items():
        assert (tensor.codes is not None) == (type_name in IN_CODES and len(tensor.shape) == 2), name
        if tensor.codes is not None:  # those of q and k are in another order than the file's
            np.testing.assert_array_equal(read(tensor.codes), read_tensor(tensor))


def test_scale_of_nvfp4_that_is_nan_with_a_sign_is_refused():
    raw = quantized("NVFP4", (2, 128), seed=1)
    raw[1, 37] = 0xFF
    with pytest.raises(ModelError, match="not finite"):
        read(stored(split(raw, GGML_TYPES[GGMLQuantizationType.NVFP4.value])))


def test_each_of_a_stack_of_experts_has_its_own_codes(tmp_path):
    experts = quantized("Q4_1", (4 * 16, 64), seed=3)
    metadata = {
        "block_count": 1,
        "context_length": 64,
        "embedding_length": 64,
        "feed_forward_length": 64,
        "attention.head_count": 4,
        "attention.head_count_kv": 4,
        "attention.layer_norm_rms_epsilon": 1e-5,
        "expert_count": 4,
        "expert_used_count": 2,
        "expert_feed_forward_length": 16,
    }
    tensors = {"token_embd.weight": np.ones((8, 64), np.float32)}
    tensors["blk.0.ffn_gate_exps.weight"] = experts.reshape(4, 16, -1)
    path = write_gguf(tmp_path / "m.gguf", metadata, tensors, type_name="Q4_1", architecture="qwen3moe")
    found = open_checkpoint(path).tensors
    whole = gguf.quants.dequantize(experts, GGMLQuantizationType.Q4_1).reshape(4, 16, 64)
    for i in range(4):
        codes = found[f"model.layers.0.mlp.experts.{i}.gate_proj.weight"].codes
        np.testing.assert_array_equal(read(codes), whole[i])


@pytest.mark.parametrize("types", [("Q4_K", "Q4_K", "Q6_K"), ("Q8_0", "Q4_0"), ("Q4_1", "Q8_0", "Q4_1")])
def test_joined_matrices_keep_their_values_and_formats(types):
    parts = [from_file(name, (32 * (1 + i), 256), seed=i) for i, name in enumerate(types)]
    joined = joined_codes([codes for codes, _ in parts])
    assert joined.packs
    assert len(joined.runs) == len(
        [name for name, before in zip(types, (None, *types), strict=False) if name != before]
    )
    assert joined.num_bytes == sum(codes.num_bytes for codes, _ in parts)
    np.testing.assert_array_equal(read(joined), np.concatenate([expected for _, expected in parts]))


def test_rows_of_joined_matrices_in_any_order_are_read_in_pieces(monkeypatch):
    """As families have them that interleave a gate and what it gates, or heads."""
    parts = [from_file("Q4_K", (48, 256), seed=i) for i in range(3)]
    order = np.random.default_rng(0).permutation(144)
    codes = joined_codes([codes for codes, _ in parts]).rows(order)
    expected = np.concatenate([expected for _, expected in parts])[order]
    np.testing.assert_array_equal(read(codes), expected)
    pieces = list(codes.pieces(range(144), most_elements=40 * 256))
    assert [len(piece.codes) for piece in pieces] == [32, 32, 32, 32, 16]
    np.testing.assert_array_equal(np.concatenate([piece.values() for piece in pieces]), expected)


def test_formats_that_meet_inside_a_panel_cannot_be_packed():
    parts = [from_file(name, (rows, 256))[0] for name, rows in (("Q4_K", 40), ("Q6_K", 64))]
    assert not joined_codes(parts).packs
    assert joined_codes(parts[::-1]).packs
    assert not joined_codes(parts[::-1]).rows(np.arange(104)[::-1]).packs


def test_a_join_with_a_part_that_is_in_no_codes_has_none():
    assert joined_codes([from_file("Q4_1")[0], None]) is None
    assert joined_codes([]) is None


@pytest.mark.parametrize("type_name", IN_CODES)
def test_rows_and_whole_groups_of_columns_can_be_rearranged(type_name):
    codes, expected = from_file(type_name)
    rows = np.array([5, 0, 0, 3])
    np.testing.assert_array_equal(read(codes.rows(rows)), expected[rows])
    for size in (256, 64, 32):  # smaller ones repeat the scales of 256
        columns = np.arange(512).reshape(2, -1, size).swapaxes(0, 1).reshape(-1)
        changed = codes.columns(columns)
        assert codes.num_bytes <= changed.num_bytes <= codes.num_bytes * 1.4
        np.testing.assert_array_equal(read(changed), expected[:, columns])


@pytest.mark.parametrize(
    "order", [np.arange(512).reshape(32, 16)[::-1].reshape(-1), np.arange(512) ^ 1, np.arange(100)]
)
def test_columns_that_take_groups_apart_leave_no_codes(order):
    assert from_file("Q4_K")[0].columns(order) is None


def test_a_power_of_two_scales_without_loss_and_anything_else_nearly_so():
    codes, expected = from_file("Q4_1")
    factors = np.array([0.5, 2, 1, 1, 0.25, 1], np.float32)
    np.testing.assert_array_equal(read(codes.scaled(factors)), expected * factors[:, None])
    rows = np.array([1, 4, 0])
    np.testing.assert_array_equal(read(codes.scaled(factors).rows(rows)), (expected * factors[:, None])[rows])
    factors = np.full(6, 0.22, np.float32)
    largest = np.repeat(np.abs(expected).reshape(6, 16, 32).max(axis=2), 32, axis=1)
    assert (np.abs(read(codes.scaled(factors)) - expected * 0.22) <= 0.22 * largest * 3 / 2048).all()


def test_factors_of_rows_are_held_in_float32_exactly_and_not_in_powers_of_two():
    factors = np.linspace(0.1, 3, 6, dtype=np.float32)
    assert from_file("MXFP4")[0].scaled(factors) is None
    weight = random_codes(FP8, 6, 64, seed=1)
    expected = weight.scales * factors[:, None]
    np.testing.assert_array_equal(
        read(stored(weight).scaled(factors)), E4M3[weight.codes] * expected.repeat(32, axis=1)
    )
    weight.scales.fill(1)
    with pytest.raises(ModelError, match="not finite"):
        read(stored(weight).scaled(np.full(6, 1e38, np.float32)))


def test_scales_beyond_float16_are_refused():
    with pytest.raises(ModelError, match="--quantization none"):
        read(from_file("Q8_0")[0].scaled(np.full(6, 1e9, np.float32)))


def test_tensors_of_different_widths_cannot_be_joined(tmp_path):
    tensors = open_checkpoint(
        write_gguf(tmp_path / "m.gguf", llama_metadata(), llama_tensors("Q4_1"), type_name="Q4_1")
    )
    matrix = tensors.tensors["model.layers.0.mlp.up_proj.weight"]
    both = one_below_the_other(matrix, matrix)
    assert (both.shape, both.codes.shape) == ((512, 256), (512, 256))
    with pytest.raises(ModelError, match="cannot be one below the other"):
        one_below_the_other(matrix, tensors.tensors["model.norm.weight"])


Q4_1, Q8_0, Q6_K = (FORMATS[name] for name in ("Q4_1", "Q8_0", "Q6_K"))


@pytest.mark.parametrize(
    ("quantization", "own", "in_features", "min_bits", "bits"),
    [
        (Quantization.NONE, Q4_1, 64, 4, None),
        (Quantization.FILE, Q4_1, 64, 4, 4),
        (Quantization.FILE, Q4_1, 64, 8, 4),  # the file's own, as it is
        (Quantization.FILE, None, 64, 4, None),
        (Quantization.FILE, Q8_0, 64, 16, None),
        (Quantization.INT8, None, 64, 4, 8),
        (Quantization.INT8, Q4_1, 64, 4, 4),  # no more bits than were asked for
        (Quantization.INT8, Q6_K, 256, 8, 6),
        (Quantization.INT4, Q6_K, 256, 4, 4),
        (Quantization.INT4, Q6_K, 256, 8, 6),
        (Quantization.INT4, Q8_0, 64, 4, 4),
        (Quantization.INT4, None, 64, 4, 4),
        (Quantization.INT4, None, 64, 8, 8),
        (Quantization.INT4, None, 64, 16, None),
        (Quantization.INT4, None, 48, 4, None),  # no whole groups
        (Quantization.FILE, Q8_0, 64, 12, 8),
        (Quantization.INT8, Q8_0, 64, 12, 8),
        (Quantization.INT8, None, 64, 12, None),  # of more bits than codes have that are made
    ],
)
def test_what_a_matrix_is_held_in(quantization, own, in_features, min_bits, bits):
    form = held_format(quantization, own, in_features=in_features, min_bits=min_bits)
    assert (None if form is None else form.bits) == bits


def test_codes_that_have_the_bits_asked_for_stay_as_they_are():
    assert held_format(Quantization.INT4, Q4_1, in_features=64, min_bits=4) == Q4_1
    assert held_format(Quantization.INT8, Q8_0, in_features=64, min_bits=4) == Q8_0
