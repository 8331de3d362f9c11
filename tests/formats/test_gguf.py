"""GGUF files: values as the gguf package has them, and every kind of unsound file refused."""

from __future__ import annotations

import random
import struct
import tracemalloc

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType

from forebay.base.errors import ModelError
from forebay.families.checkpoint import open_checkpoint
from forebay.formats import gguf_grids
from forebay.formats.gguf import GgufFile
from forebay.formats.gguf_types import GGML_TYPES, dequantize, split
from forebay.formats.stored_tensor import read_tensor
from tests.formats.gguf_files import SMALL_TYPES, TYPES, llama_metadata, llama_tensors, quantized, write_gguf

TOKENIZER = {
    "tokenizer.ggml.tokens": [f"token {i} ü" for i in range(32)],
    "tokenizer.ggml.token_type": [1] * 32,
    "tokenizer.ggml.eos_token_id": 3,
    "tokenizer.ggml.eot_token_id": 4,
    "tokenizer.ggml.bos_token_id": 1,
    "tokenizer.ggml.add_bos_token": True,
    "tokenizer.chat_template": "{{ messages }}",
}


@pytest.fixture(scope="module")
def sound(tmp_path_factory):
    """A small file with everything a real one has."""
    path = tmp_path_factory.mktemp("gguf") / "sound.gguf"
    tensors = llama_tensors("Q4_0")
    return write_gguf(path, llama_metadata(), tensors, type_name="Q4_0", extra=TOKENIZER)


@pytest.mark.parametrize("type_name", TYPES)
def test_values_equal_those_of_the_gguf_package_to_the_bit(type_name):
    kind = GGMLQuantizationType[type_name]
    raw = quantized(type_name, (7, 768), seed=5)
    expected = gguf.quants.dequantize(raw, kind)
    got = dequantize(raw, GGML_TYPES[kind.value])
    np.testing.assert_array_equal(got.view(np.uint32), expected.view(np.uint32))


@pytest.mark.parametrize("type_name", TYPES)
def test_a_file_of_each_type_reads_as_the_gguf_package_reads_it(type_name, tmp_path):
    tensors = llama_tensors(type_name)
    path = write_gguf(tmp_path / "m.gguf", llama_metadata(), tensors, type_name=type_name)
    checkpoint = open_checkpoint(path)
    for ours, theirs in (("mlp.down_proj", "ffn_down"), ("self_attn.v_proj", "attn_v")):
        expected = gguf.quants.dequantize(tensors[f"blk.0.{theirs}.weight"], GGMLQuantizationType[type_name])
        np.testing.assert_array_equal(read_tensor(checkpoint.tensors[f"model.layers.0.{ours}.weight"]), expected)


@pytest.mark.parametrize("name", ["mlp.up_proj", "self_attn.q_proj"])
def test_a_tensor_is_the_same_in_one_piece_and_in_many(name, sound, monkeypatch):
    tensor = open_checkpoint(sound).tensors[f"model.layers.0.{name}.weight"]
    assert [len(piece) for piece in tensor.pieces()] == [256]
    whole = read_tensor(tensor)
    monkeypatch.setattr("forebay.formats.gguf_tensor.PIECE_ELEMENTS", 100 * 256)
    assert [len(piece) for piece in tensor.pieces()] == [100, 100, 56]
    np.testing.assert_array_equal(read_tensor(tensor), whole)


def test_metadata_has_the_tokenizer_and_the_template(sound):
    metadata = open_checkpoint(sound).gguf_metadata
    assert metadata["tokenizer.ggml.tokens"] == TOKENIZER["tokenizer.ggml.tokens"]
    assert metadata["tokenizer.ggml.token_type"].tolist() == [1] * 32
    assert metadata["tokenizer.ggml.add_bos_token"] is True
    assert metadata["tokenizer.chat_template"] == "{{ messages }}"


def test_configuration_comes_from_the_metadata(sound):
    config = open_checkpoint(sound).config
    assert (config.model_type, config.num_layers, config.num_heads, config.num_kv_heads) == ("llama", 1, 4, 2)
    assert (config.head_dim, config.vocab_size, config.tie_word_embeddings) == (64, 32, True)
    assert (config.bos_token_id, config.eos_token_ids) == (1, (3, 4))
    assert config.rms_norm_eps == pytest.approx(1e-5)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"attention.head_count_kv": [2, 2]}, "different shapes"),
        ({"attention.head_count_kv": 3}, "divisor"),
        ({"attention.scale": 0.5}, "attention.scale"),
        ({"attention.value_length": 32}, "value_length"),
        ({"rope.scaling.type": "longrope"}, "longrope"),
        ({"rope.scaling.type": "linear"}, "needs factor"),
        ({"expert_weights_scale": 2.5}, "expert_weights_scale"),
        ({"block_count": "many"}, "num_hidden_layers"),
        ({"context_length": 2**31}, "max_position_embeddings"),
    ],
)
def test_metadata_that_is_not_honoured_is_refused(overrides, message, tmp_path):
    path = write_gguf(tmp_path / "m.gguf", llama_metadata(**overrides), llama_tensors("F32"))
    with pytest.raises(ModelError, match=message):
        open_checkpoint(path)


def test_other_architectures_and_split_files_are_refused(tmp_path):
    path = write_gguf(tmp_path / "a.gguf", {}, llama_tensors("F32"), architecture="gptoss")
    with pytest.raises(ModelError, match="gptoss"):
        open_checkpoint(path)
    split = {"split.count": 3}
    path = write_gguf(tmp_path / "b.gguf", llama_metadata(), llama_tensors("F32"), extra=split)
    with pytest.raises(ModelError, match="split"):
        open_checkpoint(path)


def test_a_tensor_that_the_architecture_does_not_have_is_refused(tmp_path):
    tensors = {**llama_tensors("F32"), "blk.0.attn_sinks.weight": np.ones(4, np.float32)}
    with pytest.raises(ModelError, match="attn_sinks"):
        open_checkpoint(write_gguf(tmp_path / "m.gguf", llama_metadata(), tensors))


def test_ggml_types_are_all_that_the_gguf_package_has_for_weights():
    """Q8_1 and Q8_K are of activations, the others of no weights; I32 is of tables of experts."""
    others = {GGMLQuantizationType[name] for name in ("Q8_1", "Q8_K", "I8", "I16", "I64", "F64")}
    assert set(GGML_TYPES) == set(GGMLQuantizationType) - others
    for number, block in GGML_TYPES.items():
        assert block.name == GGMLQuantizationType(number).name
        assert (block.elements, block.num_bytes) == gguf.GGML_QUANT_SIZES[GGMLQuantizationType(number)]


@pytest.mark.parametrize("name", ["IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S", "IQ1_S"])
def test_every_codeword_of_a_grid_is_that_of_the_gguf_package(name):
    theirs = getattr(gguf.quants, name)
    theirs.init_grid()
    grid = {"IQ1_S": gguf_grids._IQ1}.get(name) or getattr(gguf_grids, f"_{name}")
    ours = gguf_grids._codewords(grid).view(np.int8).reshape(theirs.grid_shape)
    unit = {"IQ1_S": 8, "IQ3_XXS": 0.5}.get(name, 1)
    np.testing.assert_array_equal(ours, theirs.grid.reshape(theirs.grid_shape) * unit)


def test_q1_0_bits_are_signs_of_the_scale():
    """The package has the size of this type alone."""
    bits = np.random.default_rng(0).integers(0, 2, (3, 128), dtype=np.uint8)
    scales = np.array([[0.5], [-3e-7], [0]], np.float16)
    raw = np.concatenate([scales.view(np.uint8), np.packbits(bits, axis=1, bitorder="little")], axis=1)
    expected = np.where(bits, scales, -scales).astype(np.float32)
    np.testing.assert_array_equal(dequantize(raw, GGML_TYPES[41]), expected)


def test_unsupported_tensor_types_are_named(tmp_path):
    tensors = {"token_embd.weight": np.zeros((32, 292), np.uint8)}
    path = write_gguf(tmp_path / "m.gguf", llama_metadata(), tensors, type_name="Q8_K")
    with pytest.raises(ModelError, match=r"token_embd.*ggml type 15"):
        open_checkpoint(path)


def test_files_that_are_not_gguf_are_refused(tmp_path):
    for name, data in {"empty": b"", "short": b"GGUF", "zip": b"PK\x03\x04" + bytes(100)}.items():
        path = tmp_path / f"{name}.gguf"
        path.write_bytes(data)
        with pytest.raises(ModelError, match=name):
            GgufFile(path)
    with pytest.raises(ModelError, match="cannot be read"):
        GgufFile(tmp_path / "absent.gguf")


def _header_size(path):
    return min(tensor.offset for tensor in GgufFile(path).tensors.values())


def _open_and_read(path):
    """Whatever the file says, this ends in a ModelError or in values."""
    try:
        checkpoint = open_checkpoint(path)
        for tensor in checkpoint.tensors.values():
            if tensor.num_bytes < 1 << 16:
                read_tensor(tensor)
    except ModelError:
        return
    assert checkpoint.config.num_layers >= 1


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("number", GGML_TYPES)
def test_blocks_of_any_bytes_give_values_and_codes(number):
    """Every bit pattern is a block: numbers of codewords, signs and scales have no bound to be checked."""
    block, rng = GGML_TYPES[number], np.random.default_rng(number)
    raw = rng.integers(0, 256, (64, 4 * block.num_bytes), dtype=np.uint8)
    raw[:3] = np.array([0, 127, 255], np.uint8)[:, None]
    assert dequantize(raw, block).shape == (64, 4 * block.elements)
    if block.codes is not None:
        codes = split(raw, block)
        assert codes.codes.max() < 1 << block.codes.bits
        assert codes.shape == (64, 4 * block.elements)


@pytest.mark.quick(2)
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("type_name", SMALL_TYPES)
def test_damaged_types_and_shapes_are_refused_or_read(type_name, tmp_path):
    """Any type in the header of a file of another: sizes then do not fit, or the values are others."""
    path = tmp_path / "m.gguf"
    tensors = llama_tensors(type_name)
    original = write_gguf(path, llama_metadata(), tensors, type_name=type_name).read_bytes()
    header = _header_size(path)
    rng = random.Random(type_name)
    for number in [*range(45), 1 << 31]:
        data = bytearray(original)
        at = data.index(b"blk.0.ffn_up.weight") + len(b"blk.0.ffn_up.weight") + 4 + 2 * 8
        struct.pack_into("<I", data, at, number)
        path.write_bytes(data)
        _open_and_read(path)
    for _ in range(60):
        data = bytearray(original)
        for _ in range(rng.randint(1, 3)):
            data[rng.randrange(header)] = rng.randrange(256)
        path.write_bytes(data[: rng.randrange(len(data))] if rng.random() < 0.3 else data)
        _open_and_read(path)


@pytest.mark.quick(1)
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # mutated scales overflow float32
@pytest.mark.parametrize("seed", range(3))
def test_randomly_damaged_files_are_refused_or_read_but_never_crash(seed, sound, tmp_path):
    rng, original, header = random.Random(seed), sound.read_bytes(), _header_size(sound)
    path = tmp_path / "damaged.gguf"
    for _ in range(700):
        data = bytearray(original)
        for _ in range(rng.randint(1, 3)):
            data[rng.randrange(header)] = rng.randrange(256)
        if rng.random() < 0.2:
            del data[rng.randrange(len(data)) :]
        if rng.random() < 0.2:
            start = rng.randrange(header)
            data[start:start] = rng.randbytes(rng.randint(1, 9))
        path.write_bytes(data)
        _open_and_read(path)


@pytest.mark.quick(1)
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("value", [0, 1 << 20, 1 << 31, (1 << 32) - 1, 1 << 40, (1 << 63) - 1, 1 << 63, (1 << 64) - 1])
def test_extreme_numbers_anywhere_in_the_header_allocate_nothing_large(value, sound, tmp_path):
    original, header = sound.read_bytes(), _header_size(sound)
    path = tmp_path / "extreme.gguf"
    tracemalloc.start()
    for start in range(4, header - 8, 5):
        data = bytearray(original)
        struct.pack_into("<Q", data, start, value)
        path.write_bytes(data)
        tracemalloc.reset_peak()
        _open_and_read(path)
        peak = tracemalloc.get_traced_memory()[1]
        assert peak < 4 * len(original) + (1 << 20), (start, peak)
    tracemalloc.stop()
