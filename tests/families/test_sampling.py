"""What a model's authors would have it sampled with is what requests that do not say are sampled with."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from forebay.base.errors import ModelError
from forebay.families.model_config import config_from_folder, config_from_gguf
from forebay.families.sampling import NEUTRAL, SamplingDefaults, of_gguf
from forebay.families.small import small_config
from forebay.formats.gguf import GgufFile
from forebay.requests.sampling_params import SamplingParams

OWN = {"temperature": 0.6, "top_k": 20, "top_p": 0.95, "min_p": 0.01, "repetition_penalty": 1.05}


def of_folder(folder: Path, **generation: Any) -> SamplingDefaults:
    config = small_config("llama", hidden_size=32, num_layers=1, vocab_size=64)
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "generation_config.json").write_text(json.dumps(generation))
    return config_from_folder(folder).sampling


def test_generation_config_is_taken_as_far_as_it_goes(tmp_path: Path) -> None:
    assert of_folder(tmp_path, do_sample=True, eos_token_id=2, **OWN) == SamplingDefaults(OWN, "generation_config.json")
    assert of_folder(tmp_path, top_k=-1, top_p=None).values == {"top_k": 0}
    assert of_folder(tmp_path, eos_token_id=2) == NEUTRAL
    with pytest.raises(ModelError, match=r"generation_config\.json: temperature is 'hot'"):
        of_folder(tmp_path, temperature="hot")


def test_gguf_metadata_are_taken_and_the_embedded_models_card(embedded_model: Path) -> None:
    file = GgufFile(embedded_model)
    assert config_from_gguf(file).sampling.values == {"temperature": 0.2, "top_p": 0.9}
    file.path = Path("another.gguf")
    assert of_gguf(file) == NEUTRAL
    file.metadata |= {"general.sampling.temp": 0.6000000238418579, "general.sampling.penalty_repeat": 1.05}
    assert of_gguf(file).values == {"temperature": 0.6, "repetition_penalty": 1.05}


def test_values_that_no_request_may_have_are_the_models_fault() -> None:
    assert SamplingParams.defaults({}, "") == SamplingParams()
    assert SamplingParams.defaults({"temperature": 1, "top_k": 5}, "") == SamplingParams(temperature=1.0, top_k=5)
    for wrong in ({"top_p": 0.0}, {"temperature": 1000.0}, {"top_k": 1.5}):
        with pytest.raises(ModelError, match="--sampling-defaults openai"):
            SamplingParams.defaults(wrong, "generation_config.json")
