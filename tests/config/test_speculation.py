"""What is said about speculation on the command line, and what it comes to."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from forebay.base.errors import ConfigError
from forebay.config.engine_config import SpeculationOptions, SpeculativeAlgorithm
from forebay.config.gpu import GpuMemory
from forebay.config.resolve import Survey, resolve
from forebay.config.server_args import FLAGS
from forebay.config.sources import from_flags
from forebay.config.speculation import CHAIN_WIDTH, NGRAM_WIDTH


@pytest.fixture(autouse=True)
def _with_model(embedded_model: Path) -> None:
    """The rules look at a checkpoint."""


def options(**flags: Any) -> SpeculationOptions:
    return resolve({f"speculative_{name}": value for name, value in flags.items()}).engine.speculation


def refusal(flags: dict[str, Any]) -> str:
    with pytest.raises(ConfigError) as caught:
        resolve(flags)
    return caught.value.message


def test_what_pays_is_guessed_unless_that_is_off():
    assert options() == options(algorithm="auto")
    assert options(algorithm="off") == SpeculationOptions()


@pytest.mark.parametrize(
    ("word", "algorithm"),
    [("NGRAM", "NGRAM"), ("ngram", "NGRAM"), ("MTP", "NEXTN"), ("mtp", "NEXTN"), ("Off", "off")],
)
def test_an_algorithm_is_named_in_any_case_and_mtp_is_nextn(word: str, algorithm: str):
    assert options(algorithm=word).algorithm == SpeculativeAlgorithm(algorithm)


def test_auto_is_ngram_on_a_cpu_and_takes_the_width_that_pays():
    auto, named = options(algorithm="auto"), options(algorithm="NGRAM")
    assert (auto.algorithm, auto.adaptive, auto.num_draft_tokens) == (SpeculativeAlgorithm.NGRAM, True, NGRAM_WIDTH)
    assert (named.algorithm, named.adaptive, named.num_draft_tokens) == (SpeculativeAlgorithm.NGRAM, False, NGRAM_WIDTH)


@pytest.mark.parametrize("flags", [{"device": "cuda"}, {"overlap_depth": 1}], ids=str)
def test_auto_is_off_where_the_last_token_is_not_known(flags: dict[str, Any]):
    gpu = GpuMemory(total=80 << 30, free=79 << 30)
    config = resolve({"speculative_algorithm": "auto", **flags}, survey=Survey(gpu=lambda: gpu))
    assert config.engine.speculation == SpeculationOptions()
    setting = next(item for item in config.settings if item.name == "speculative_algorithm")
    assert (setting.value, setting.source) == ("off", "rule")
    assert setting.reason


def test_the_width_is_the_guesses_and_the_token_that_is_certain():
    assert options(algorithm="NGRAM", num_steps=3).num_draft_tokens == 4
    assert options(algorithm="NGRAM", num_steps=3, num_draft_tokens=4).num_draft_tokens == 4
    assert options(algorithm="NEXTN", eagle_topk=1).num_draft_tokens == CHAIN_WIDTH
    settings = {item.name: item.value for item in resolve({"speculative_algorithm": "NGRAM"}).settings}
    assert settings["speculative_num_steps"] == str(NGRAM_WIDTH - 1)


@pytest.mark.parametrize("spelling", ["--num-speculative-tokens", "--draft-max", "--draft"])
def test_others_count_the_guesses(spelling: str):
    key = spelling.strip("-").replace("-", "_")
    assert {name: item.value for name, item in from_flags({key: "5"}).items()} == {"speculative_num_steps": 5}


def test_guesses_that_continue_the_last_token_are_planned_without_overlap():
    gpu = GpuMemory(total=80 << 30, free=79 << 30)
    config = resolve({"device": "cuda", "speculative_algorithm": "NGRAM"}, survey=Survey(gpu=lambda: gpu))
    assert config.engine.scheduling.overlap_depth == 0


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ({"algorithm": "NGRAM", "overlap_depth": 1}, ("--overlap-depth (1)", "--speculative-algorithm (NGRAM)")),
        ({"algorithm": "off", "num_draft_tokens": 4}, ("--speculative-num-draft-tokens (4)", "algorithm (off)")),
        ({"algorithm": "off", "ngram_capacity": 9}, ("--speculative-ngram-capacity (9)", "--speculative-algorithm")),
        ({"algorithm": "NGRAM", "num_steps": 4, "num_draft_tokens": 4}, ("--speculative-num-steps (4)", "give one")),
        ({"algorithm": "EAGLE", "draft_model_path": "x", "eagle_topk": 4}, ("topk (4)", "one path at most", "use 1")),
        ({"algorithm": "EAGLE3"}, ("--speculative-algorithm (EAGLE3)", "--speculative-draft-model-path")),
        ({"algorithm": "NGRAM", "draft_model_path": "x"}, ("--speculative-draft-model-path (x)", "STANDALONE")),
        ({"algorithm": "DFLASH"}, ("--speculative-algorithm", "block")),
        ({"algorithm": "dspark"}, ("--speculative-algorithm", "block")),
        ({"algorithm": "UNO"}, ("--speculative-algorithm", "adapter")),
        ({"algorithm": "MEDUSA"}, ("'MEDUSA' is not one of", "NGRAM")),
        ({"algorithm": "NGRAM", "num_draft_tokens": 1}, ("--speculative-num-draft-tokens", "at least 2")),
        ({"use_rejection_sampling": True}, ("sampled tokens are the same as without",)),
        ({"accept_threshold_single": 0.9}, ("sampled tokens are the same as without",)),
    ],
    ids=str,
)
def test_what_cannot_be_is_refused_by_name(flags: dict[str, Any], words: tuple[str, ...]):
    here = {"overlap_depth"}
    message = refusal({name if name in here else f"speculative_{name}": value for name, value in flags.items()})
    assert all(word in message for word in words), message


def test_every_flag_of_speculation_is_spelled_as_in_the_field():
    spelled = {flag.option for flag in FLAGS if flag.group == "speculation"}
    assert all(option.startswith("--speculative-") for option in spelled)
    assert {"--speculative-eagle-topk", "--speculative-num-steps", "--speculative-ngram-capacity"} < spelled
