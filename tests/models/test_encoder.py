"""The encoder beside a language model gives the encodings of transformers, however its work is cut."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers.models.idefics3.configuration_idefics3 import Idefics3VisionConfig
from transformers.models.idefics3.modeling_idefics3 import Idefics3VisionEmbeddings

from forebay.backends import make_ops
from forebay.base.errors import ModelError
from forebay.engine.lifecycle.model_shape import read_shape
from forebay.families.checkpoint import open_checkpoint
from forebay.formats.quantization import Quantization
from forebay.formats.quantize import quantize_into
from forebay.formats.weight_shapes import ValueBytes
from forebay.layers.encoder import position_ids
from forebay.models import load, needs_of
from forebay.models.encoder import encoder_params, layer_costs, load_encoder
from forebay.models.encoders.encoder import Encoder
from forebay.models.quantized_copy import write_quantized
from forebay.ops import Ops
from tests.models.outers import OUTERS, make_outer, save_as_published
from tests.models.visual import oracle_features, tile_sizes

NAMES = [
    "smolvlm",
    "idefics3",
    "internvl",
    "internvl-qwen3",
    "lfm2_vl",
    "mistral3",
    "gemma3",
    "gemma4",
    "gemma4-experts",
    "gemma4_unified",
]
CONNECTOR = "model.connector.modality_projection.proj.weight"
PATCHES = "model.vision_model.embeddings.patch_embedding.weight"

Made = tuple[Any, Path]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Made]:
    """The oracle of a case, and its folder as transformers saves it, made once."""
    known: dict[str, Made] = {}

    def make(name: str) -> Made:
        if name not in known:
            oracle, folder = make_outer(OUTERS[name]), tmp_path_factory.mktemp(name)
            oracle.save_pretrained(folder)
            known[name] = oracle, folder
        return known[name]

    return make


def loaded(folder: Path, ops: Ops, dtype: torch.dtype = torch.float32) -> Encoder:
    return load_encoder(open_checkpoint(folder), ops=ops, dtype=dtype, progress=lambda done, total: None)


def tiles(oracle: Any, count: int) -> list[Tensor]:
    generator, sizes = torch.Generator().manual_seed(count), tile_sizes(oracle.config)
    return [torch.randint(0, 256, (*sizes[i % len(sizes)], 3), generator=generator).byte() for i in range(count)]


def encode(encoder: Encoder, pixels: Tensor) -> Tensor:
    return encoder.finish(encoder.layers(encoder.begin(pixels), 0, encoder.num_layers))


def expected(oracle: Any, pixels: list[Tensor], **numbers: float) -> list[Tensor]:
    return oracle_features(oracle, [tile.numpy() for tile in pixels], **numbers)


@pytest.mark.parametrize("name", NAMES)
def test_encodings_equal_those_of_transformers(name: str, made: Callable[[str], Made], ops: Ops) -> None:
    oracle, folder = made(name)
    encoder, pixels = loaded(folder, ops), tiles(oracle, 3)
    for tile, features in zip(pixels, expected(oracle, pixels), strict=True):
        encoding = encode(encoder, tile)
        assert encoding.shape == features.shape == (len(features), encoder.row_size)
        assert encoding.dtype == encoder.dtype == torch.float32
        torch.testing.assert_close(encoding, features, rtol=0, atol=1e-4)
        assert features.abs().max() > 0.1


@pytest.mark.parametrize("name", [*NAMES, "kimi_k25"])
def test_files_as_published_give_the_same_bits(
    name: str, made: Callable[[str], Made], native: Ops, tmp_path: Path
) -> None:
    oracle, folder = made(name)
    published = save_as_published(oracle, OUTERS[name], tmp_path)
    (tile,) = tiles(oracle, 1)
    assert torch.equal(encode(loaded(published, native), tile), encode(loaded(folder, native), tile))


@pytest.mark.parametrize("name", NAMES)
def test_slices_give_the_bits_of_the_whole_and_leave_their_arguments(
    name: str, made: Callable[[str], Made], ops: Ops
) -> None:
    oracle, folder = made(name)
    encoder, (pixels,) = loaded(folder, ops), tiles(oracle, 1)
    whole = encode(encoder, pixels)
    first = encoder.begin(pixels)
    before = first.x.clone()
    second = encoder.layers(first, 0, 1)
    assert torch.equal(first.x, before)
    between = encoder.layers(second, 1, 1).x.clone()
    assert torch.equal(between, second.x)
    assert torch.equal(encoder.finish(encoder.layers(second, 1, 2)), whole)
    assert torch.equal(between, second.x)


@pytest.mark.quick(2)
@pytest.mark.parametrize("name", ["smolvlm", "lfm2_vl", "mistral3", "gemma4"])
def test_bits_do_not_depend_on_earlier_tiles_nor_on_threads(
    name: str, made: Callable[[str], Made], native: Ops
) -> None:
    oracle, folder = made(name)
    pixels = tiles(oracle, 3)
    for dtype in (torch.float32, torch.bfloat16):
        encoder = loaded(folder, native, dtype)
        forwards = [encode(encoder, tile) for tile in pixels]
        assert torch.equal(encode(encoder, pixels[0]), forwards[0])
        alone = [encode(loaded(folder, make_ops("native", 1), dtype), tile) for tile in reversed(pixels)]
        assert all(torch.equal(*pair) for pair in zip(alone, reversed(forwards), strict=True))


def test_interleaved_tiles_give_the_bits_of_each_alone(made: Callable[[str], Made], native: Ops) -> None:
    oracle, folder = made("lfm2_vl")
    encoder, pixels = loaded(folder, native), tiles(oracle, 2)
    states = [encoder.layers(encoder.begin(tile), 0, 1) for tile in pixels]
    results = [encoder.finish(encoder.layers(state, 1, 2)) for state in states]
    assert all(torch.equal(result, encode(encoder, tile)) for result, tile in zip(results, pixels, strict=True))


def test_positions_of_gemma3_are_those_of_transformers(native: Ops, tmp_path: Path) -> None:
    """As many patches in a row as two of them would share a position by their fractions."""
    side = next(side for side in range(2, 65) if not torch.equal(position_ids(side), torch.arange(side**2)))
    case = OUTERS["gemma3"]
    vision = {**case.vision, "image_size": 2 * side, "patch_size": 2}
    oracle = make_outer(replace(case, vision=vision, more={**case.more, "mm_tokens_per_image": side**2}))
    oracle.save_pretrained(tmp_path)
    pixels = tiles(oracle, 1)
    torch.testing.assert_close(
        encode(loaded(tmp_path, native), pixels[0]), expected(oracle, pixels)[0], rtol=0, atol=1e-4
    )


@pytest.mark.quick(8)
@pytest.mark.parametrize("side", range(1, 65))
def test_position_ids_are_those_of_transformers(side: int) -> None:
    config = Idefics3VisionConfig(hidden_size=1, image_size=side, patch_size=1, num_channels=1)
    embeddings = Idefics3VisionEmbeddings(config)
    with torch.no_grad():
        embeddings.patch_embedding.weight.zero_()
        embeddings.patch_embedding.bias.zero_()
        embeddings.position_embedding.weight.copy_(torch.arange(side * side).view(-1, 1))
        found = embeddings(torch.zeros(1, 1, side, side), torch.ones(1, side, side, dtype=torch.bool))
    assert torch.equal(found.flatten().long(), position_ids(side))


@pytest.mark.parametrize("in_processor", [False, True])
def test_mean_and_deviation_are_those_of_the_image_processor(
    in_processor: bool, made: Callable[[str], Made], native: Ops, tmp_path: Path
) -> None:
    oracle, folder = made("smolvlm")
    for path in folder.iterdir():
        (tmp_path / path.name).symlink_to(path)
    fields = {"image_mean": [0.4] * 3, "image_std": [0.3] * 3}
    if in_processor:
        (tmp_path / "processor_config.json").write_text(json.dumps({"image_processor": fields}))
        fields = {"image_mean": [0.1] * 3}
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(fields))
    pixels = tiles(oracle, 1)
    (features,) = expected(oracle, pixels, mean=0.4, std=0.3)
    torch.testing.assert_close(encode(loaded(tmp_path, native), pixels[0]), features, rtol=0, atol=1e-4)


# -- weights ----------------------------------------------------------------------------------------------------------


def changed(folder: Path, to: Path, change: Callable[[dict[str, Tensor]], object]) -> Path:
    """A copy of the checkpoint with other tensors."""
    to.mkdir(exist_ok=True)
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, to / "model.safetensors")
    (to / "config.json").write_text((folder / "config.json").read_text())
    return to


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda tensors: tensors.pop(CONNECTOR), f"1 weights are missing: {CONNECTOR}"),
        (lambda tensors: tensors.update({CONNECTOR: torch.zeros(48, 24)}), r"the shape \(48, 24\) instead of"),
        (lambda tensors: tensors.update({PATCHES: torch.zeros(24, 3 * 64)}), r"\(24, 192\) instead of \(24, 3, 8, 8\)"),
        (lambda tensors: tensors.update({"model.vision_model.head.probe": torch.zeros(1)}), "1 weights have no use"),
    ],
    ids=["missing", "misshapen", "flat", "extra"],
)
def test_wrong_weights_are_refused_before_they_are_read(
    change: Any, message: str, made: Callable[[str], Made], native: Ops, tmp_path: Path
) -> None:
    """And the text is served all the same."""
    folder = changed(made("smolvlm")[1], tmp_path, change)
    with pytest.raises(ModelError, match=message) as caught:
        loaded(folder, native)
    assert "\n" not in str(caught.value)
    load(open_checkpoint(folder), ops=native, dtype=torch.float32)


def test_files_of_the_text_alone_are_refused_with_the_remedy(
    made: Callable[[str], Made], native: Ops, tmp_path: Path
) -> None:
    def of_text(tensors: dict[str, Tensor]) -> None:
        for name in [name for name in tensors if "text_model" not in name]:
            del tensors[name]

    folder = changed(made("idefics3")[1], tmp_path, of_text)
    with pytest.raises(ModelError, match="none of the 38 weights of the encoder that vision_config describes is in"):
        loaded(folder, native)
    fields = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**fields, "vision_config": None}))
    assert open_checkpoint(folder).config.vision is None
    load(open_checkpoint(folder), ops=native, dtype=torch.float32)


def test_weights_that_pool_a_tile_have_no_use_and_are_left_out(made: Callable[[str], Made]) -> None:
    oracle, folder = made("lfm2_vl")
    assert any(".head." in name for name in oracle.state_dict())
    assert not any(".head." in name for name in open_checkpoint(folder).encoder)


def test_infinite_weights_are_refused(made: Callable[[str], Made], native: Ops, tmp_path: Path) -> None:
    folder = changed(made("smolvlm")[1], tmp_path, lambda tensors: tensors[PATCHES].fill_(float("inf")))
    with pytest.raises(ModelError, match=f"{PATCHES}.*not finite"):
        loaded(folder, native)


def of_bounds(change: Callable[[Tensor], Tensor]) -> Callable[[dict[str, Tensor]], None]:
    """A change of all bounds."""

    def changing(tensors: dict[str, Tensor]) -> None:
        bounds = {name: values for name, values in tensors.items() if name.endswith(("_min", "_max"))}
        assert len(bounds) == 4 * 7 * 2
        assert all(values.shape == () for values in bounds.values())
        tensors.update({name: change(values) for name, values in bounds.items()})

    return changing


def test_infinite_bounds_of_linear_layers_change_nothing(made: Callable[[str], Made], ops: Ops, tmp_path: Path) -> None:
    oracle, folder = made("gemma4")
    infinite = changed(folder, tmp_path / "infinite", of_bounds(lambda bound: bound * torch.inf))
    absent = changed(
        folder,
        tmp_path / "absent",
        lambda tensors: [tensors.pop(name) for name in list(tensors) if name.endswith(("_min", "_max"))],
    )
    fields = json.loads((absent / "config.json").read_text())
    fields["vision_config"]["use_clipped_linears"] = False
    (absent / "config.json").write_text(json.dumps(fields))
    (tile,) = tiles(oracle, 1)
    encoding = encode(loaded(absent, ops), tile)
    assert torch.equal(encode(loaded(infinite, ops), tile), encoding)
    assert not torch.allclose(encode(loaded(folder, ops), tile), encoding, atol=1e-2)


def test_bounds_that_are_no_numbers_are_refused(made: Callable[[str], Made], native: Ops, tmp_path: Path) -> None:
    folder = changed(made("gemma4")[1], tmp_path, of_bounds(lambda bound: bound * torch.nan))
    with pytest.raises(ModelError, match=r"q_proj\.input_min.*not finite"):
        loaded(folder, native)


def test_parts_for_audio_are_left_out_and_logged_once(
    made: Callable[[str], Made], native: Ops, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    audio = ("model.audio_tower.layers.0.norm.weight", "model.embed_audio.embedding_projection.weight")
    oracle, source = made("gemma4")
    folder = changed(source, tmp_path, lambda tensors: tensors.update({name: torch.ones(3) for name in audio}))
    with caplog.at_level("INFO"):
        checkpoint = open_checkpoint(folder)
        encoder = loaded(folder, native)
    (line,) = (record.getMessage() for record in caplog.records if "parts_not_served" in record.getMessage())
    assert "parts=audio_tower,embed_audio" in line
    assert not checkpoint.encoder.keys() & {*audio}
    assert not any("audio" in name for name in checkpoint.tensors)
    (tile,) = tiles(oracle, 1)
    assert torch.equal(encode(encoder, tile), encode(loaded(source, native), tile))


def test_no_part_of_the_encoder_is_logged_as_not_served(
    made: Callable[[str], Made], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("INFO"):
        open_checkpoint(made("idefics3")[1])
    assert "parts_not_served" not in caplog.text


@pytest.mark.parametrize("name", ["smolvlm", "gemma4"])
def test_quantized_copy_has_the_encoder_as_it_was(
    name: str, made: Callable[[str], Made], native: Ops, tmp_path: Path
) -> None:
    oracle, folder = made(name)
    checkpoint = open_checkpoint(folder)
    write_quantized(checkpoint, tmp_path, Quantization.INT8, quantize_into, lambda done, total: None)
    assert checkpoint.encoder.keys() == open_checkpoint(tmp_path).encoder.keys()
    (tile,) = tiles(oracle, 1)
    assert torch.equal(encode(loaded(tmp_path, native), tile), encode(loaded(folder, native), tile))


@pytest.mark.parametrize("name", ["idefics3", "gemma4"])
@pytest.mark.parametrize("quantization", list(Quantization))
def test_plan_counts_the_bytes_that_the_encoder_takes(
    quantization: Quantization, name: str, made: Callable[[str], Made], native: Ops, tmp_path: Path
) -> None:
    """Matrices in bfloat16 stay so, whatever is asked for; all else is in float32."""

    def halved(tensors: dict[str, Tensor]) -> None:
        tensors.update({name: values.to(torch.bfloat16) for name, values in tensors.items()})

    folder = changed(made(name)[1], tmp_path, halved)
    checkpoint, progress = open_checkpoint(folder), list[tuple[int, int]]()
    load_encoder(checkpoint, ops=native, dtype=torch.float32, progress=lambda *at: progress.append(at))
    model = load(checkpoint, ops=native, dtype=torch.float32, quantization=quantization)
    assert progress[-1][0] == progress[-1][1]
    planned = read_shape(folder, draft_head=False).weights
    held = progress[-1][1] + sum(model.held_bytes.values())
    assert planned.held_bytes(quantization, ValueBytes(own=4, bfloat16=2)) == held
    assert planned.num_parameters == sum(
        param.num_elements for param in (*needs_of(checkpoint.config).params, *encoder_params(checkpoint.config))
    )


def test_layer_costs_count_products_of_a_tile_and_of_a_token(made: Callable[[str], Made]) -> None:
    config = open_checkpoint(made("smolvlm")[1]).config
    patches, width = 36, 24
    layer = patches * (4 * width**2 + 2 * width * 40) + 2 * patches**2 * width
    others = patches * 3 * 8 * 8 * width + 4 * 9 * width * 48
    token = sum(param.num_elements for param in needs_of(config).params if "_proj" in param.names[0])
    linear, squared = layer_costs(config)
    assert 4 * linear + 16 * squared == pytest.approx((layer + others / 2) / token)
    assert 16 * squared == pytest.approx(2 * patches**2 * width / token)
