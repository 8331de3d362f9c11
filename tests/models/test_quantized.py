"""Weights in codes: what a layer multiplies with is what the file says, and the logits stay near those of float32."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType
from torch import Tensor

from forebay import models
from forebay.backends import make_ops
from forebay.engine.lifecycle.weights import GivenTensor
from forebay.families.checkpoint import Checkpoint, open_checkpoint
from forebay.formats.gguf import GgufFile
from forebay.formats.quantization import Quantization
from forebay.formats.quantize import quantize_into, quantize_rows
from forebay.formats.stored_tensor import ComputedTensor, read_tensor
from forebay.layers.params import TensorParam
from forebay.models.loader import Loader
from forebay.models.weight_codes import codes_of_part
from tests.formats.coded import read
from tests.formats.gguf_files import K_TYPES, LARGER, llama_metadata, llama_tensors, write_gguf
from tests.models import (
    test_gguf,
    test_gguf_delta,
    test_gguf_dense,
    test_gguf_gemma4,
    test_gguf_mamba,
    test_gguf_window,
)
from tests.models.drive import Driver
from tests.models.tiny import CASES, Tiny, make_oracle, random_ids

TORCH = make_ops("torch", 1)
FILE, INT8, INT4 = Quantization.FILE, Quantization.INT8, Quantization.INT4

# One of each GGUF architecture, with what makes its rows long enough for groups.
ARCHITECTURES = {
    "llama": {},
    "llama-biases-tied": {},
    "qwen2": {},
    "qwen3": {},
    "smollm3-gguf": {},
    "olmo2": {},
    "qwen3_moe-gguf": {"moe_intermediate_size": 32},
    "qwen3_5_text": {"linear_value_head_dim": 32},
    "qwen3_5_moe_text": {"moe_intermediate_size": 32},
    "qwen3_next": {"linear_value_head_dim": 32},
    "deepseek_v3-gguf": {"moe_intermediate_size": 32},
    "kimi_linear-gguf": {"moe_intermediate_size": 32},
    "mamba": {},
    "mamba2": {"num_heads": 8, "head_dim": 16},
    "falcon_h1": {},
    "granitemoehybrid": {"mamba_n_heads": 8, "mamba_d_head": 16, "shared_intermediate_size": 64},
    "nemotron_h-gguf": {"moe_intermediate_size": 32},
    "jamba": {"head_dim": 16},
    "lfm2": {},
    "lfm2_moe": {"moe_intermediate_size": 32},
    "gemma3_text-gguf": {},
    "gpt_oss": {},
    "olmo3": {},
    "granite": {},
    "granitemoeshared": {"intermediate_size": 32, "shared_intermediate_size": 64},
    "exaone4": {},
    "exaone_moe": {"moe_intermediate_size": 32},
    "hunyuan_v1_dense": {},
    "hunyuan_v1_moe": {"intermediate_size": 32},
    "seed_oss": {},
    "arcee": {},
    "gemma4_text-experts": {"moe_intermediate_size": 32, "hidden_size_per_layer_input": 32},
}
CONVERTERS = {
    case: module
    for module in (test_gguf_delta, test_gguf_dense, test_gguf_mamba, test_gguf_window)
    for case in module.CONVERSIONS
}  # fmt: skip


def in_codes(case: str, folder: Path, type_name: str) -> Path:
    """A GGUF file of a case whose matrices of whole groups are of that type."""
    sizes = {"hidden_size": 64, **({} if "intermediate_size" in CASES[case][1] else {"intermediate_size": 96})}
    oracle = make_oracle(case, **sizes, **ARCHITECTURES[case])
    oracle.save_pretrained(folder)
    plain = folder / "plain.gguf"
    if case in CONVERTERS:
        CONVERTERS[case].convert(folder, case, plain)
    elif case in test_gguf_gemma4.CASES:
        test_gguf_gemma4.convert(folder, plain)
    else:
        test_gguf.convert(Tiny(folder, oracle), case, plain)
    file = GgufFile(plain)
    metadata = {
        name: value.tolist() if isinstance(value, np.ndarray) else value for name, value in file.metadata.items()
    }
    architecture = metadata.pop("general.architecture")
    tensors = {name: _quantized(file, name, type_name) for name in file.tensors}
    return write_gguf(folder / "m.gguf", {}, tensors, type_name=type_name, architecture=architecture, extra=metadata)


def _quantized(file: GgufFile, name: str, type_name: str) -> np.ndarray:
    shape = file.tensors[name].shape
    numbers = file.raw(name).read().view(np.float32).reshape(shape)
    if len(shape) == 1 or shape[-1] % 32 or any(part in name for part in ("norm", "conv", "ssm_a", "ffn_gate_inp")):
        return numbers
    return gguf.quants.quantize(numbers, GGMLQuantizationType[type_name])


def relative_error(got: Tensor, expected: Tensor) -> float:
    return float((got - expected).abs().mean() / expected.abs().mean())


@pytest.fixture(scope="module")
def converted(tmp_path_factory):
    """The path of a case's file with its matrices in Q4_1, made once."""
    made = {}

    def path(case: str) -> Path:
        if case not in made:
            made[case] = in_codes(case, tmp_path_factory.mktemp(case), "Q4_1")
        return made[case]

    return path


@pytest.mark.parametrize("case", ARCHITECTURES)
def test_every_architecture_keeps_the_values_of_its_file(case, converted):
    codes = {name: t for name, t in open_checkpoint(converted(case)).tensors.items() if t.codes is not None}
    assert len(codes) > 3
    for name, tensor in codes.items():
        np.testing.assert_array_equal(read(tensor.codes), read_tensor(tensor), err_msg=name)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("case", ARCHITECTURES)
def test_weights_in_codes_give_the_logits_of_the_same_weights_in_the_dtype(case, dtype, converted):
    native = make_ops("native", 2, activation_bits=16)
    plain, kept = (
        models.load(open_checkpoint(converted(case)), ops=native, dtype=dtype, quantization=quantization)
        for quantization in (Quantization.NONE, FILE)
    )
    assert kept.held_bytes["4 bits"] > 0
    ids = random_ids(20, seed=0)
    expected, got = (Driver(model, dtype=dtype).step([(1, ids)])[0] for model in (plain, kept))
    # Multipliers are in the weights, so that scales are rounded.
    if native.activation_bits or "multiplier" in str(CASES[case]):
        assert relative_error(got, expected) < (3e-3 if dtype == torch.float32 else 0.06)
    else:
        assert torch.equal(got, expected)


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    """The path of a one-layer llama of hidden size 256 in a type."""
    made = {}

    def path(type_name: str) -> Path:
        if type_name not in made:
            file = tmp_path_factory.mktemp("llama") / "m.gguf"
            made[type_name] = write_gguf(file, llama_metadata(), llama_tensors(type_name), type_name=type_name)
        return made[type_name]

    return path


def loader(checkpoint: Checkpoint, params: list[TensorParam], quantization: Quantization, ops) -> Loader:
    return Loader(
        checkpoint,
        params,
        ops=ops,
        dtype=torch.float32,
        device="cpu",
        progress=lambda done, total: None,
        quantization=quantization,
    )


LAYER = "model.layers.0"


def matrix(sizes: dict[str, int], **options) -> TensorParam:
    names = tuple(f"{LAYER}.{name}_proj.weight" for name in sizes)
    return TensorParam(names=names, sizes=tuple(sizes.values()), inner=(256,), min_bits=4, **options)


QKV = matrix({"self_attn.q": 256, "self_attn.k": 128, "self_attn.v": 128})
GATE_UP = matrix({"mlp.gate": 256, "mlp.up": 256})
TURNS = replace(GATE_UP, rows=(range(0, 512, 2), range(7, 8), range(1, 512, 3)))
HALVED = matrix({"mlp.down": 256}, scales=((100, 0.5), (156, 2.0)))


@pytest.mark.parametrize("type_name", ["Q4_0", "Q4_1", "Q8_0", *K_TYPES, *LARGER])
@pytest.mark.parametrize("param", [QKV, GATE_UP, TURNS, HALVED], ids=["qkv", "gate and up", "rows", "scales"])
def test_what_was_packed_are_the_values_of_the_file(type_name, param, llama, ops):
    weights = loader(open_checkpoint(llama(type_name)), [param], FILE, ops)
    packed, expected = weights.linear(param, None), weights.tensor(param)
    every_row = torch.arange(packed.out_features)
    assert torch.equal(ops.linear.embedding_packed(every_row, packed, torch.float32), expected)


def test_parts_in_different_codes_keep_their_own(llama, ops):
    checkpoint = open_checkpoint(llama("Q4_1"))
    others = open_checkpoint(llama("Q8_0")).tensors
    mixed = {name: others[name] if "v_proj" in name else tensor for name, tensor in checkpoint.tensors.items()}
    weights = loader(replace(checkpoint, tensors=mixed), [QKV], FILE, ops)
    assert weights.held_bytes == {"8 bits": 128 * 256 * 34 // 32, "4 bits": 384 * 256 * 20 // 32}
    packed = ops.linear.embedding_packed(torch.arange(512), weights.linear(QKV, None), torch.float32)
    assert torch.equal(packed, weights.tensor(QKV))


@pytest.mark.parametrize(
    "param",
    [
        TensorParam(names=(f"{LAYER}.mlp.down_proj.weight",), sizes=(256,), inner=(256,)),
        TensorParam(names=(f"{LAYER}.mlp.down_proj.weight",), sizes=(256,), inner=(256,), min_bits=4, offset=1.0),
        TensorParam(names=("model.norm.weight",), sizes=(256,), min_bits=4),
    ],
    ids=["for anything else than products", "with an offset", "not a matrix"],
)
@pytest.mark.parametrize("quantization", [FILE, INT8, INT4])
def test_what_cannot_be_in_codes_is_in_the_dtype(param, quantization, llama):
    assert set(loader(open_checkpoint(llama("Q4_1")), [param], quantization, TORCH).held_bytes) == {"float32"}


def test_rows_that_are_no_whole_groups_are_in_the_dtype(tiny):
    model = models.load(open_checkpoint(tiny("llama").path), ops=TORCH, dtype=torch.float32, quantization=INT8)
    # The hidden size is 48, the intermediate size 80; the output of attention has 4 heads of 12.
    assert set(model.held_bytes) == {"float32"}


@pytest.mark.parametrize(("quantization", "bits"), [(INT8, 8), (INT4, 4)])
def test_weights_without_codes_are_rounded_as_they_are_loaded(quantization, bits, llama, ops):
    weights = loader(open_checkpoint(llama("F32")), [GATE_UP], quantization, ops)
    packed = ops.linear.embedding_packed(torch.arange(512), weights.linear(GATE_UP, None), torch.float32)
    expected = quantize_rows(weights.tensor(GATE_UP).numpy(), bits).values()
    np.testing.assert_array_equal(packed.numpy(), expected)


def test_pieces_are_rounded_like_the_whole(llama, monkeypatch):
    def codes() -> np.ndarray:
        return loader(open_checkpoint(llama("BF16")), [GATE_UP], INT4, TORCH).linear(GATE_UP, None).numbers()

    whole = codes()
    monkeypatch.setattr("forebay.formats.gguf_tensor.PIECE_ELEMENTS", 100 * 256)
    assert torch.equal(codes(), whole)


@pytest.mark.parametrize(
    "orders",
    [
        [range(40), range(40, 100)],
        [range(60, 100), range(60)],
        [range(0, 100, 2), range(1, 100, 2)],
        [range(9), (3, 1)],
    ],
    ids=["in order", "the end first", "every other", "again"],
)
def test_rounded_rows_are_those_asked_for_in_any_order(orders):
    values = np.random.default_rng(0).normal(size=(100, 64)).astype(np.float32)
    whole = GivenTensor(torch.from_numpy(values))
    tensor = ComputedTensor(values.shape, [whole], lambda: iter(np.split(values, [30, 31, 31, 90])))
    read, right = codes_of_part(tensor, INT4, 4, quantize_into).sources[0].open(), quantize_rows(values, 4)
    for order in orders:
        found = read(np.array(order))
        for name in ("codes", "scales", "minimums"):
            np.testing.assert_array_equal(getattr(found, name), getattr(right, name)[list(order)])


@pytest.mark.parametrize("quantization", [FILE, INT8])
def test_logits_stay_near_those_of_float32(quantization, llama, ops):
    path, ids = llama("Q8_0"), [token % 32 for token in random_ids(20, seed=0)]
    (expected,) = Driver(models.load(open_checkpoint(path), ops=TORCH, dtype=torch.float32)).step([(1, ids)])
    for dtype in (torch.float32, torch.bfloat16):
        model = models.load(open_checkpoint(path), ops=ops, dtype=dtype, quantization=quantization)
        (logits,) = Driver(model, dtype=dtype).step([(1, ids)])
        assert relative_error(logits, expected) < (0.03 if dtype == torch.float32 else 0.06)


@pytest.mark.parametrize("case", ARCHITECTURES)
def test_chunks_do_not_change_a_bit_of_any_architecture(case, converted, native):
    """C28, with weights in codes."""
    model = models.load(open_checkpoint(converted(case)), ops=native, dtype=torch.bfloat16, quantization=FILE)
    ids = random_ids(24, seed=5)
    (whole,) = Driver(model, dtype=torch.bfloat16).step([(1, ids)])
    assert whole.isfinite().all()
    for chunk in (1, 17):
        driver = Driver(model, dtype=torch.bfloat16)
        parts = [driver.step([(1, ids[first : first + chunk])])[0] for first in range(0, len(ids), chunk)]
        assert torch.equal(torch.cat(parts), whole), f"chunks of {chunk}"


def test_the_bytes_are_those_of_what_is_held(llama):
    calls = []
    model = models.load(
        open_checkpoint(llama("Q4_1")),
        ops=TORCH,
        dtype=torch.bfloat16,
        quantization=FILE,
        progress=lambda done, total: calls.append((done, total)),
    )
    matrices, norms = 32 * 256 + 5 * 256 * 256 + 2 * 128 * 256, 3 * 256
    assert model.held_bytes == {"4 bits": matrices * 20 // 32, "bfloat16": 2 * norms}
    assert calls[-1] == (model.weight_bytes, model.weight_bytes)
    assert [done for done, _ in calls] == sorted(done for done, _ in calls)


class Counting:
    """The torch ops, and what was packed by them."""

    def __init__(self) -> None:
        self.linear, self.packed = self, []

    def __getattr__(self, name):
        return getattr(TORCH if hasattr(TORCH, name) else TORCH.linear, name)

    def pack_quantized(self, weight, bias=None):
        self.packed.append(weight.shape)
        return TORCH.linear.pack_quantized(weight, bias)

    def pack(self, weight, bias=None):
        raise AssertionError("a matrix was packed in the model's dtype")


def test_a_tied_embedding_is_packed_once_for_lookups_and_logits(llama):
    ops = Counting()
    models.load(open_checkpoint(llama("Q4_1")), ops=ops, dtype=torch.float32, quantization=FILE)
    assert sorted(ops.packed) == [(32, 256), (256, 256), (256, 256), (512, 256), (512, 256)]


def test_embedding_and_head_keep_eight_bits_where_the_layers_have_four(llama):
    model = models.load(open_checkpoint(llama("BF16")), ops=TORCH, dtype=torch.bfloat16, quantization=INT4)
    assert model.held_bytes["8 bits"] == 32 * 256 * 34 // 32


def test_routers_stay_in_the_dtype(tmp_path):
    folder = tmp_path / "moe"
    make_oracle("qwen3_moe", hidden_size=64, moe_intermediate_size=32, intermediate_size=96).save_pretrained(folder)
    model = models.load(open_checkpoint(folder), ops=TORCH, dtype=torch.float32, quantization=INT8)
    params = models.needs_of(open_checkpoint(folder).config).params
    small = sum(param.num_elements for param in params if param.min_bits == 16)
    assert any("mlp.gate.weight" in name for param in params if param.min_bits == 16 for name in param.names)
    # All else is rows of 64, but for the heads' outputs of 48.
    heads = sum(param.num_elements for param in params if param.inner == (48,))
    assert model.held_bytes["float32"] == 4 * (small + heads)
