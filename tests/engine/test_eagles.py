"""C16 with an EAGLE head by the command line: its drafts change no token, its memory is counted, what does not fit is
refused before anything is loaded."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from forebay.base.errors import ConfigError, ModelError
from forebay.cli.main import main
from forebay.config.resolve import resolve
from forebay.engine.loop.build import build_engine
from forebay.families import HEADS
from forebay.families.checkpoint import open_checkpoint
from forebay.models import needs_of
from forebay.models.eagle import taps_of
from tests.engine.starts import PROMPTS, tokens_of
from tests.engine.test_draft_models import with_tokens
from tests.kernels import NATIVE
from tests.models.eagles import make_head, make_target
from tests.models.tiny import shared_tiny

KINDS = {"EAGLE": False, "EAGLE3": True}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model and a head of each kind."""
    made = tmp_path_factory.mktemp("eagles")
    oracle = make_target(made)
    for algorithm, third in KINDS.items():
        make_head(oracle, made / algorithm, third=third)
    return made


def flags(target: Path, draft: Path | None = None, algorithm: str = "off", **options: Any) -> dict[str, Any]:
    shape = {"dtype": "float32", "chunked_prefill_size": 5, "page_size": 4, "context_length": 64, "kernels": NATIVE}
    drafting = {"speculative_algorithm": algorithm}
    if draft is not None:
        drafting["speculative_draft_model_path"] = str(draft)
    return {"model": str(target), **shape, **drafting, **options}


@pytest.mark.quick(1)
@pytest.mark.parametrize("algorithm", KINDS)
def test_c16_an_eagle_head_changes_no_token(algorithm: str, folder: Path) -> None:
    plain, _ = build_engine(resolve(flags(folder)).engine)
    core, ready = build_engine(resolve(flags(folder, folder / algorithm, algorithm, overlap_depth=1)).engine)
    assert tokens_of(core, [*PROMPTS, *PROMPTS]) == tokens_of(plain, PROMPTS) * 2
    assert core.scheduler.state(0.0).counters["draft_tokens"] > 0
    (row,) = (row for row in ready.report if row[1] == "kv cache allocated")
    assert row[3] == f"{row[2]} planned"


@pytest.mark.parametrize(
    ("algorithm", "draft", "message"),
    [
        ("EAGLE", "EAGLE3", "fc.weight takes 144 inputs, 3 x 48: an EAGLE3 head, not EAGLE"),
        ("EAGLE3", "EAGLE", "fc.weight takes 96 inputs, 2 x 48: an EAGLE head, not EAGLE3"),
        ("FROZEN_KV_MTP", "EAGLE", "it is an EAGLE head: use EAGLE or EAGLE3"),
        ("NEXTN", "EAGLE3", "it is an EAGLE head: use EAGLE or EAGLE3"),
        ("EAGLE3", ".", "a model of type llama is no EAGLE head"),
        ("STANDALONE", "EAGLE", "it is an EAGLE head: use EAGLE or EAGLE3"),
    ],
)
def test_a_draft_of_another_kind_is_named(algorithm: str, draft: str, message: str, folder: Path) -> None:
    with pytest.raises((ConfigError, ModelError), match=message):
        build_engine(resolve(flags(folder, folder / draft, algorithm)).engine)


def changed(draft: Path, to: Path, *, tensors: dict[str, Any], **config: Any) -> Path:
    """A copy of a head with other fields, and other tensors; None instead of one is none."""
    to.mkdir()
    fields = json.loads((draft / "config.json").read_text())
    (to / "config.json").write_text(json.dumps({**fields, **config}))
    stored = load_file(draft / "model.safetensors") | tensors
    save_file({name: values for name, values in stored.items() if values is not None}, to / "model.safetensors")
    return to


@pytest.mark.parametrize(
    ("tensors", "config", "message"),
    [
        ({"fc.weight": None}, {}, "joins what it is fed with by fc.weight, which is not there"),
        ({"lm_head.weight": None}, {}, "1 weights are missing: lm_head.weight"),
        ({"d2t": None}, {}, "1 weights are missing: d2t"),
        ({"midlayer.other.weight": torch.ones(2)}, {}, "1 weights have no use"),
        ({"d2t": torch.full((40,), 60)}, {}, "d2t names tokens outside of the vocabulary of 96"),
        ({"norm.weight": torch.ones(47)}, {}, r"norm.weight has the shape \(47,\) instead of \(48,\)"),
        ({}, {"vocab_size": 95}, "for a vocabulary of 95, and the model's is 96"),
        ({}, {"num_hidden_layers": 2}, "heads of one are served"),
        ({}, {"target_hidden_size": 64}, "target_hidden_size is 64; it must be 48"),
        ({}, {"eagle_config": {}}, r"layers 2, 3, 3 are given.*lacks eagle_config"),
        ({}, {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 2, 5]}}, "the model has 6"),
        ({}, {"eagle_config": {"use_aux_hidden_state": False}}, "use_aux_hidden_state"),
    ],
    ids=str,
)
def test_a_head_that_does_not_fit_is_refused(
    tensors: dict[str, Any], config: dict[str, Any], message: str, folder: Path, tmp_path: Path
) -> None:
    draft = changed(folder / "EAGLE3", tmp_path / "draft", tensors=tensors, **config)
    with pytest.raises(ModelError, match=message):
        build_engine(resolve(flags(folder, draft, "EAGLE3")).engine)


def test_an_eagle_head_is_for_models_of_its_sizes_and_not_served_alone(folder: Path) -> None:
    config = open_checkpoint(folder / "EAGLE3").config
    assert (config.model_type,) == HEADS
    with pytest.raises(ModelError, match="only drafts for another model"):
        needs_of(config)
    with pytest.raises(ModelError, match=r"fed with what layers 1, 3, 5 are given.*the model has 3"):
        build_engine(resolve(flags(shared_tiny("llama").path, folder / "EAGLE3", "EAGLE3")).engine)


def test_a_head_that_names_no_layers_is_fed_with_an_early_a_middle_and_a_late_one(folder: Path, tmp_path: Path) -> None:
    draft = changed(folder / "EAGLE3", tmp_path / "draft", tensors={}, eagle_config={})
    config, deep = (open_checkpoint(path).config for path in (draft, folder))
    deep = type(deep)(**{name: getattr(deep, name) for name in deep.__slots__} | {"num_layers": 32})
    assert taps_of(config, deep) == (2, 16, 29)


def test_a_plan_counts_the_layers_and_the_weights_of_a_head(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = []
    with_tokens(folder, "abc")
    for words in ((), ("--speculative-algorithm", "EAGLE3", "--speculative-draft-model-path", str(folder / "EAGLE3"))):
        given = ["plan", str(folder), "--memory", "1GiB", "--dtype", "float32", "--json", *words]
        assert main(given) == 0
        found.append(json.loads(capsys.readouterr().out))
    plain, headed = found
    assert sum(row["num_layers"] for row in headed["layers"]) == 1 + sum(row["num_layers"] for row in plain["layers"])
    assert headed["sizes"]["kv_bytes_per_token"] == plain["sizes"]["kv_bytes_per_token"] * 7 // 6
