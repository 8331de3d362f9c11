"""What a model's authors would have it sampled with is what requests that do not say are sampled with."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from forebay.base.errors import ModelError
from forebay.families.base.sampling import NEUTRAL, SamplingDefaults, of_gguf
from forebay.families.config.model_config import config_from_folder, config_from_gguf
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


NEUTRAL_FIELDS = {
    "suppress_tokens": None,
    "begin_suppress_tokens": [],
    "bad_words_ids": None,
    "no_repeat_ngram_size": 0,
    "num_beams": 1,
    "typical_p": 1.0,
    "min_length": 0,
    "guidance_scale": 1,
    "max_length": 4096,
    "pad_token_id": 0,
}
UNUSED_FIELDS = {
    "suppress_tokens": [5, 6],
    "begin_suppress_tokens": [5],
    "bad_words_ids": [[5]],
    "no_repeat_ngram_size": 3,
    "num_beams": 4,
    "typical_p": 0.9,
    "min_length": 8,
    "guidance_scale": 1.5,
    "stop_strings": ["x"],
}


def test_generation_fields_that_are_not_applied_are_named_with_their_file(tmp_path: Path) -> None:
    def unused(of_config: dict[str, Any], of_generation: dict[str, Any]) -> set[str]:
        config = small_config("llama", hidden_size=32, num_layers=1, vocab_size=64)
        (tmp_path / "config.json").write_text(json.dumps(config | of_config))
        (tmp_path / "generation_config.json").write_text(json.dumps(of_generation))
        return set(config_from_folder(tmp_path).unknown_options)

    assert unused(NEUTRAL_FIELDS, NEUTRAL_FIELDS) == set()
    for name, value in UNUSED_FIELDS.items():
        assert unused({}, {name: value}) == {f"generation_config.{name}"}
    old = {name: value for name, value in UNUSED_FIELDS.items() if name in ("suppress_tokens", "num_beams")}
    assert unused(old, {}) == old.keys()


def test_gguf_file_that_suppresses_tokens_is_named_as_a_folder_that_does(embedded_model: Path) -> None:
    file = GgufFile(embedded_model)
    assert config_from_gguf(file).unknown_options == ()
    file.metadata |= {"tokenizer.ggml.suppress_tokens": [5, 6]}
    assert config_from_gguf(file).unknown_options == ("tokenizer.ggml.suppress_tokens",)


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
