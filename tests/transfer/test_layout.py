"""G-6, C31: what two engines must have in common, and what is said where they have not."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from msgspec import to_builtins
from msgspec.structs import replace

from forebay import __version__
from forebay.config.engine_config import CacheTypes, SpeculativeAlgorithm
from forebay.formats.identity import weights_digest
from forebay.pools.cache_pool import CachePool
from forebay.pools.cache_spec import CacheSpec, FullAttention, RecurrentState
from forebay.transfer.session.layout import columns_of, picture_lines
from forebay.transfer.session.layout import layout_of as layout_of_engine
from forebay.transfer.wire.frames import PROTOCOL, Layout, layout_mismatch, mismatch
from tests.transfer.pair import EIGHT_BITS, EVERYTHING, NUM_SLOTS, PLAIN, layout_of


def cache(specs: tuple[CacheSpec, ...] = EVERYTHING, *, page_size: int = 4, **types: str) -> CachePool:
    return CachePool(specs, CacheTypes(**types), page_size=page_size, num_slots=NUM_SLOTS, device="cpu")


def test_engines_that_keep_the_same_fit_whatever_room_they_have() -> None:
    larger = CachePool(
        EVERYTHING, CacheTypes(), page_size=8, num_slots={"kv": 9, "window": 3, "state": 2}, device="cpu"
    )
    assert mismatch(layout_of(cache()), layout_of(larger)) == ""
    assert layout_of(cache()).digest == layout_of(larger).digest


@pytest.mark.parametrize(
    ("prefill", "decode", "both"),
    [
        ({"weights": "a"}, {"weights": "b"}, ["weights", "'a'", "'b'"]),
        ({"vocab_size": 5}, {"vocab_size": 6}, ["vocab_size", "5", "6"]),
        ({"kernels": "avx2"}, {"kernels": "avx512"}, ["kernels", "avx2", "avx512"]),
        ({"activation_bits": 8}, {"activation_bits": 16}, ["activation_bits", "8", "16"]),
        ({"protocol": 1}, {"protocol": 2}, ["protocol", "1", "2"]),
        ({"version": "1"}, {"version": "2"}, ["version", "'1'", "'2'"]),
        ({"page_size": 4}, {"page_size": 6}, ["page_size", "4", "6"]),
    ],
)
def test_a_mismatch_names_both_values(prefill: dict[str, object], decode: dict[str, object], both: list[str]) -> None:
    said = mismatch(layout_of(cache(), **prefill), layout_of(cache(), **decode))
    assert all(word in said for word in both), said


@pytest.mark.parametrize(
    ("specs", "types", "both"),
    [
        (PLAIN, {}, ["kv 0.k: 2 x 5 float32", "kv 0.k: 2 x 8 float32"]),
        ((*EVERYTHING, FullAttention(num_kv_heads=1, head_dim=3)), {}, ["window 2.k", "kv 4.k: 1 x 3"]),
        (EVERYTHING, {"mamba_ssm_dtype": "bfloat16"}, ["ssm: 2 x 4 x 3 float32", "ssm: 2 x 4 x 3 bfloat16"]),
        (EVERYTHING, {"kv_cache_dtype": "int8"}, ["2 x 5 float32", "2 x 5 int8"]),
    ],
)
def test_so_does_one_of_what_layers_keep(specs: tuple[CacheSpec, ...], types: dict[str, str], both: list[str]) -> None:
    said = mismatch(layout_of(cache()), layout_of(cache(specs, **types)))
    assert said.startswith("columns")
    assert all(word in said for word in both), said


def test_eight_bits_have_scales() -> None:
    assert any("scale" in line for line in layout_of(CachePool(
        PLAIN, EIGHT_BITS, page_size=4, num_slots=NUM_SLOTS, device="cpu")).columns)  # fmt: skip
    states = cache((RecurrentState(ssm=(2, 3)),))
    assert layout_of(states).columns == ["state 0.ssm: 2 x 3 float32"]


def test_weights_are_told_apart_by_any_of_their_samples(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    data = bytearray(torch.randint(0, 255, (1 << 20,), dtype=torch.uint8, generator=generator).numpy().tobytes())
    file = tmp_path / "model.safetensors"
    (tmp_path / "config.json").write_text("{}")
    digests = set()
    half = len(data) // 2
    for part in (slice(0), slice(1), slice(half, half + len(data) // 60), slice(-1, None)):
        data[part] = bytes(byte ^ 1 for byte in data[part])
        file.write_bytes(data)
        digests |= {weights_digest(tmp_path), weights_digest(file)}
    (tmp_path / "config.json").write_text("{ }")
    digests.add(weights_digest(tmp_path))
    (tmp_path / "2_Dense").mkdir()
    (tmp_path / "2_Dense" / "model.safetensors").write_bytes(data[:100])
    assert len(digests | {weights_digest(tmp_path)}) == 10


@pytest.mark.parametrize("part", [1, 2, 3])
def test_weights_digest_covers_every_part_of_a_gguf_model(part: int, tmp_path: Path) -> None:
    """C31: the first part may be the same for two models."""
    parts = [tmp_path / f"m-0000{number}-of-00003.gguf" for number in (1, 2, 3)]
    for path in parts:
        path.write_bytes(b"GGUF" + bytes(100))
    before = weights_digest(parts[0])
    assert weights_digest(parts[2]) == weights_digest(tmp_path) == before
    parts[part - 1].write_bytes(b"GGUF" + bytes(99) + b"1")
    assert weights_digest(parts[0]) != before


def test_layout_of_draft_checkpoint_and_activations_are_compared(tmp_path: Path) -> None:
    """C31: columns of a draft model's own cache are only as equal as its weights."""
    for name in ("model", "draft", "other"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "model.safetensors").write_bytes(name.encode())

    def layout(algorithm: SpeculativeAlgorithm, draft: str | None, bits: int = 16) -> Layout:
        speculation = SimpleNamespace(algorithm=algorithm, draft_model_path=draft and str(tmp_path / draft))
        config = SimpleNamespace(
            model_path=str(tmp_path / "model"),
            speculation=speculation,
            quantization="none",
            types=CacheTypes(dtype="float32"),
            activation_bits=bits,
            pictures=SimpleNamespace(mmproj=None),
        )
        return layout_of_engine(cache(), config, vocab_size=9, kernels="torch")  # type: ignore[arg-type]

    standalone, off = SpeculativeAlgorithm.STANDALONE, SpeculativeAlgorithm.OFF
    assert "draft_weights" in mismatch(layout(standalone, "draft"), layout(standalone, "other"))
    assert "draft_weights" in mismatch(layout(standalone, "draft"), layout(off, None))
    assert mismatch(layout(SpeculativeAlgorithm.FROZEN_KV_MTP, "draft"), layout(off, None)) == "", "it keeps no KV"
    assert "activation_bits" in mismatch(layout(off, None, 8), layout(off, None, 16))
    assert mismatch(layout(standalone, "draft"), layout(standalone, "draft")) == ""
    newer = replace(layout(off, None), weight_version=1)
    assert "weight_version" in mismatch(newer, layout(off, None))
    expected = {
        "protocol": PROTOCOL,
        "version": __version__,
        "page_size": 4,
        "vocab_size": 9,
        "weight_version": 0,
        "weights": weights_digest(tmp_path / "model"),
        "draft_weights": weights_digest(tmp_path / "draft"),
        "quantization": "none",
        "dtype": "float32",
        "kernels": "torch",
        "activation_bits": 8,
        "columns": list(columns_of(cache())),
        "pictures": [],
    }
    assert to_builtins(layout(standalone, "draft", 8)) == expected, "each property of its own source"


@pytest.mark.parametrize("name", ["preprocessor_config.json", "processor_config.json"])
def test_layout_with_other_sizes_of_pictures_names_both_numbers(name: str, tmp_path: Path) -> None:
    """C31: servers that cut pictures otherwise make other tokens of one prompt, whose halves would never meet."""

    def layout(edge: int) -> Layout:
        folder = tmp_path / str(edge)
        folder.mkdir()
        own = {"size": {"longest_edge": edge}, "image_mean": [0.5], "image_processor_type": "a"}
        (folder / name).write_text(json.dumps(own if name.startswith("pre") else {"image_processor": own}))
        return layout_of(cache(), pictures=picture_lines(folder, None))

    small, large = layout(512), layout(1024)
    assert small.pictures == ["image_mean.0: 0.5", "size.longest_edge: 512"]
    said = mismatch(small, large)
    assert said == "pictures: prefill has 'size.longest_edge: 512', decode 'size.longest_edge: 1024'"
    assert layout_mismatch(said).code == "layout_mismatch"
    assert mismatch(small, small) == ""


def test_layout_of_another_encoder_file_of_a_gguf_model_is_another(tmp_path: Path) -> None:
    files = [tmp_path / f"mmproj-{edge}.gguf" for edge in (1, 2)]
    for file in files:
        file.write_bytes(b"GGUF" + file.name.encode())
    first, second = (layout_of(cache(), pictures=picture_lines(tmp_path / "model.gguf", str(file))) for file in files)
    assert mismatch(first, second).startswith("pictures: prefill has 'mmproj: ")
    assert picture_lines(tmp_path / "model.gguf", None) == []
