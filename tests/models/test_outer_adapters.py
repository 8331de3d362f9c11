"""Adapters that PEFT saves of models with images: whatever part of the model was trained, and whatever it is called."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from forebay import models
from forebay.base.errors import ModelError
from forebay.families.checkpoint import open_checkpoint
from forebay.families.config.model_config import family
from forebay.families.config.outer import OUTER_NAMES
from forebay.formats.adapters import Adapter
from tests.models.adapters import MAX_RANK, SLOTS, as_they_are, randomize
from tests.models.drive import Driver
from tests.models.outers import OUTERS, logits_of, make_outer, save_as_published
from tests.models.tiny import random_ids

IDS: Final = random_ids(24, seed=3)
_PREFIX: Final = "base_model.model."


@dataclass(frozen=True)
class Trained:
    """A model with images in `folder`, the adapter that PEFT saved of all of its language model's layers, and the
    logits of the two."""

    folder: Path
    adapter: Path
    logits: Tensor
    tensors: Mapping[str, Tensor]
    body: str  # how the names of the language model's layers begin


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Trained]:
    known: dict[str, Trained] = {}

    def make(name: str) -> Trained:
        if name not in known:
            known[name] = _train(name, tmp_path_factory.mktemp(name))
        return known[name]

    return make


def _train(name: str, root: Path) -> Trained:
    """Train the layers by a regular expression, as those who fine-tune name them."""
    oracle = make_outer(OUTERS[name])
    folder = save_as_published(oracle, OUTERS[name], root / "model")
    config = open_checkpoint(folder).config
    layers, names = models.needs_of(config, adapters=SLOTS).adaptable, family(config.model_type).names
    modules = [module for module, kind in oracle.named_modules() if isinstance(kind, nn.Linear)]
    chosen = [
        module for module in modules
        if "vision" not in module and "visual" not in module
        and names.layer(f"model.{OUTER_NAMES.sub('', module)}", config.num_layers) in layers
    ]  # fmt: skip
    assert len(chosen) == len(layers)
    pattern = f"({'|'.join(map(re.escape, chosen))})"
    with as_they_are():
        model = get_peft_model(oracle, LoraConfig(r=4, lora_alpha=6, target_modules=pattern)).eval()
        randomize(model, seed=1)
        model.save_pretrained(root / "adapter")
        logits = logits_of(model, IDS)
    (body,) = {OUTER_NAMES.match(module)[0] for module in chosen}
    return Trained(folder, root / "adapter", logits, load_file(root / "adapter" / "adapter_model.safetensors"), body)


def renamed(made: Trained, body: str, folder: Path) -> Path:
    """Write the adapter with names that begin with `body`."""
    before = f"{_PREFIX}{made.body}"
    assert all(name.startswith(before) for name in made.tensors)
    folder.mkdir()
    tensors = {f"{_PREFIX}{body}{name.removeprefix(before)}": values for name, values in made.tensors.items()}
    save_file(tensors, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text((made.adapter / "adapter_config.json").read_text())
    return folder


def read(made: Trained, folder: Path) -> Adapter:
    config = open_checkpoint(made.folder).config
    return models.adapter_of(
        folder, config, layers=models.needs_of(config, adapters=SLOTS).adaptable, max_rank=MAX_RANK
    )


@pytest.mark.quick(3)
@pytest.mark.parametrize("name", OUTERS)
def test_adapter_of_a_model_with_images_gives_the_logits_of_peft(
    name: str, trained: Callable[[str], Trained], native: Any, tmp_path: Path
) -> None:
    made = trained(name)
    adapter = read(made, made.adapter)
    model = models.load(open_checkpoint(made.folder), ops=native, dtype=torch.float32, adapters=SLOTS)
    for _ in model.adapters.write(1, model.adapters.pack(adapter)):
        pass
    driver = Driver(model)
    driver.slots = [0, 1, *[0] * (len(driver.lens) - 2)]
    torch.testing.assert_close(driver.step([(1, IDS)])[0], made.logits, rtol=0, atol=2e-4)
    # Of the whole or without its head, as transformers has named it, or the language model alone.
    bodies = ("model.language_model.", "language_model.model.", "language_model.", "text_model.", "model.", "")
    for number, body in enumerate({*bodies, "model.text_model."}):
        assert read(made, renamed(made, body, tmp_path / str(number))).digest == adapter.digest, body


def test_adapter_of_the_encoder_is_refused_by_its_part(trained: Callable[[str], Trained], tmp_path: Path) -> None:
    for name, layer in (
        ("gemma3", "model.vision_tower.encoder.layers.0.self_attn.q_proj"),
        ("qwen2_5_vl", "visual.blocks.0.attn.qkv"),
        ("smolvlm", "model.connector.modality_projection.proj"),
        ("llava", "multi_modal_projector.linear_1"),
    ):
        made = trained(name)
        folder = renamed(made, made.body, tmp_path / name)
        parts = {f"{_PREFIX}{layer}.lora_{part}.weight": torch.ones(4, 4) for part in "AB"}
        save_file({**load_file(folder / "adapter_model.safetensors"), **parts}, folder / "adapter_model.safetensors")
        with pytest.raises(
            ModelError, match=f"{re.escape(layer)}' is beside the language model.*target_modules.*merge_and_unload"
        ):
            read(made, folder)


def test_two_names_of_one_layer_are_refused(trained: Callable[[str], Trained], tmp_path: Path) -> None:
    made = trained("gemma3")
    folder = renamed(made, "language_model.model.", tmp_path / "both")
    save_file({**made.tensors, **load_file(folder / "adapter_model.safetensors")}, folder / "adapter_model.safetensors")
    with pytest.raises(ModelError, match="are the same layer of this model"):
        read(made, folder)


def test_modules_that_were_saved_whole_are_refused_by_the_field(
    trained: Callable[[str], Trained], tmp_path: Path
) -> None:
    made = trained("gemma3")
    folder = renamed(made, made.body, tmp_path / "saved")
    path = folder / "adapter_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "modules_to_save": ["multi_modal_projector"]}))
    with pytest.raises(ModelError, match=r"modules_to_save is .*multi_modal_projector.*merge the adapter"):
        read(made, folder)
