"""Weights in codes: the values of the file, however they are arranged, joined or widened."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType

from forebay.base.errors import ModelError
from forebay.families.checkpoint import open_checkpoint
from forebay.formats.gguf_types import GGML_TYPES, dequantize, split
from forebay.formats.quantized import (
    CodeFormat,
    GroupQuantized,
    Quantization,
    StoredCodes,
    held_format,
    joined_codes,
)
from forebay.formats.stored_tensor import one_below_the_other, read_tensor
from tests.formats.gguf_files import TYPES, llama_metadata, llama_tensors, quantized, write_gguf

IN_CODES = ("Q4_0", "Q4_1", "Q8_0")


def values(weight: GroupQuantized) -> np.ndarray:
    """By the definition, one group at a time."""
    out = np.empty(weight.shape, np.float32)
    for n in range(weight.shape[0]):
        for group in range(weight.shape[1] // 32):
            packed = weight.codes[n].reshape(-1, 32 * weight.bits // 8)[group]
            codes = np.concatenate([packed & 15, packed >> 4]) if weight.bits == 4 else packed
            of_group = (codes.astype(np.float32) - weight.zero) * np.float32(weight.scales[n, group])
            if weight.minimums is not None:
                of_group = of_group + np.float32(weight.minimums[n, group])
            out[n, 32 * group : 32 * group + 32] = of_group
    return out


def stored(type_name, shape=(6, 96), seed=0):
    """Codes of a type and the values that the file gives for them."""
    block = GGML_TYPES[GGMLQuantizationType[type_name].value]
    raw = quantized(type_name, shape, seed)
    return StoredCodes(format=block.codes, read=lambda: split(raw, block.codes)), dequantize(raw, block)


@pytest.mark.parametrize("type_name", IN_CODES)
@pytest.mark.parametrize("shape", [(1, 32), (7, 96), (64, 256)])
def test_codes_of_a_file_are_its_values_to_the_bit(type_name, shape):
    codes, expected = stored(type_name, shape)
    weight = codes.read()
    assert weight.format == codes.format
    assert weight.shape == shape
    assert weight.num_bytes == codes.format.num_bytes(shape[0] * shape[1])
    np.testing.assert_array_equal(values(weight).view(np.uint32), expected.view(np.uint32))


@pytest.mark.parametrize("type_name", TYPES)
def test_each_tensor_of_a_file_offers_its_codes_or_none(type_name, tmp_path):
    path = write_gguf(tmp_path / "m.gguf", llama_metadata(), llama_tensors(type_name), type_name=type_name)
    for name, tensor in open_checkpoint(path).tensors.items():
        assert (tensor.codes is not None) == (type_name in IN_CODES and len(tensor.shape) == 2), name
        if tensor.codes is not None:  # those of q and k are in another order than the file's
            np.testing.assert_array_equal(values(tensor.codes.read()), read_tensor(tensor))


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
        np.testing.assert_array_equal(values(codes.read()), whole[i])


@pytest.mark.parametrize(
    ("types", "form"),
    [
        (("Q4_1", "Q4_1", "Q4_1"), CodeFormat(bits=4, zero=0, minimums=True)),
        (("Q4_0", "Q4_0"), CodeFormat(bits=4, zero=8, minimums=False)),
        (("Q8_0", "Q4_0"), CodeFormat(bits=8, zero=128, minimums=False)),
        (("Q4_1", "Q8_0", "Q4_0"), CodeFormat(bits=8, zero=128, minimums=True)),
    ],
)
def test_joined_matrices_keep_their_values_in_a_format_for_all(types, form):
    parts = [stored(name, (3 + i, 64), seed=i) for i, name in enumerate(types)]
    joined = joined_codes([codes for codes, _ in parts])
    assert joined.format == joined.read().format == form
    np.testing.assert_array_equal(values(joined.read()), np.concatenate([expected for _, expected in parts]))


def test_a_join_with_a_part_that_is_in_no_codes_has_none():
    assert joined_codes([stored("Q4_1")[0], None]) is None
    assert joined_codes([]) is None


@pytest.mark.parametrize("type_name", IN_CODES)
def test_rows_and_whole_groups_of_columns_can_be_rearranged(type_name):
    codes, expected = stored(type_name, (6, 128))
    rows = np.array([5, 0, 0, 3])
    np.testing.assert_array_equal(values(codes.rows(rows).read()), expected[rows])
    columns = np.arange(128).reshape(2, 2, 32).swapaxes(0, 1).reshape(-1)
    np.testing.assert_array_equal(values(codes.columns(columns).read()), expected[:, columns])


@pytest.mark.parametrize("order", [np.arange(128).reshape(8, 16)[::-1].reshape(-1), np.arange(128) ^ 1, np.arange(100)])
def test_columns_that_take_groups_apart_leave_no_codes(order):
    assert stored("Q4_1", (6, 128))[0].columns(order) is None


def test_a_power_of_two_scales_without_loss_and_anything_else_nearly_so():
    weight, expected = stored("Q4_1")[0].read(), stored("Q4_1")[1]
    factors = np.array([0.5, 2, 1, 1, 0.25, 1], np.float32)
    np.testing.assert_array_equal(values(weight.scaled(factors)), expected * factors[:, None])
    factors = np.full(6, 0.22, np.float32)
    largest = np.repeat(np.abs(expected).reshape(6, 3, 32).max(axis=2), 32, axis=1)
    assert (np.abs(values(weight.scaled(factors)) - expected * 0.22) <= 0.22 * largest * 3 / 2048).all()


def test_scales_beyond_float16_are_refused():
    with pytest.raises(ModelError, match="--quantization none"):
        stored("Q8_0")[0].read().scaled(np.full(6, 1e9, np.float32))


def test_tensors_of_different_widths_cannot_be_joined(tmp_path):
    tensors = open_checkpoint(
        write_gguf(tmp_path / "m.gguf", llama_metadata(), llama_tensors("Q4_1"), type_name="Q4_1")
    )
    matrix = tensors.tensors["model.layers.0.mlp.up_proj.weight"]
    both = one_below_the_other(matrix, matrix)
    assert (both.shape, both.codes.read().shape) == ((512, 256), (512, 256))
    with pytest.raises(ModelError, match="cannot be one below the other"):
        one_below_the_other(matrix, tensors.tensors["model.norm.weight"])


Q4_1, Q8_0 = (GGML_TYPES[GGMLQuantizationType[name].value].codes for name in ("Q4_1", "Q8_0"))


@pytest.mark.parametrize(
    ("quantization", "own", "in_features", "min_bits", "bits"),
    [
        (Quantization.NONE, Q4_1, 64, 4, None),
        (Quantization.FILE, Q4_1, 64, 4, 4),
        (Quantization.FILE, Q4_1, 64, 8, 4),  # the file's own, as it is
        (Quantization.FILE, None, 64, 4, None),
        (Quantization.FILE, Q8_0, 64, 16, None),
        (Quantization.INT8, None, 64, 4, 8),
        (Quantization.INT8, Q4_1, 64, 4, 8),
        (Quantization.INT4, None, 64, 4, 4),
        (Quantization.INT4, None, 64, 8, 8),
        (Quantization.INT4, None, 64, 16, None),
        (Quantization.INT4, None, 48, 4, None),  # no whole groups
    ],
)
def test_what_a_matrix_is_held_in(quantization, own, in_features, min_bits, bits):
    form = held_format(quantization, own, in_features=in_features, min_bits=min_bits)
    assert (None if form is None else form.bits) == bits


def test_codes_that_have_the_bits_asked_for_stay_as_they_are():
    assert held_format(Quantization.INT4, Q4_1, in_features=64, min_bits=4) == Q4_1
    assert held_format(Quantization.INT8, Q8_0, in_features=64, min_bits=4) == Q8_0
