"""Settings of adapters: pairs in every spelling, and one line for what cannot work."""

from __future__ import annotations

import argparse

import pytest

from forebay.base.errors import ConfigError
from forebay.config.resolve import resolve
from forebay.config.sources import add_flags
from tests.models.tiny import shared_tiny


def engine_of(**flags: object):
    return resolve({"model": str(shared_tiny("llama").path), **flags}).engine


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_an_engine_with_a_role_has_slots_too(role):
    flags = {"disaggregation_mode": role, "insecure_no_cluster_key": True}
    assert engine_of(enable_lora=True, lora_modules="a=/x", **flags).adapters.enabled


def test_without_the_flag_there_are_no_slots():
    engine = engine_of()
    assert not engine.adapters.enabled
    assert engine.scheduling.max_loras == 0


@pytest.mark.parametrize(
    "written",
    ["a=/x,b=/y", ["a=/x", "b=/y"], ["a=/x,b=/y"], ['{"name": "a", "path": "/x", "base_model_name": "m"}', "b=/y"]],
)
def test_pairs_are_read_in_every_spelling(written):
    engine = engine_of(enable_lora=True, lora_modules=written, max_loras=3, max_lora_rank=8)
    assert engine.adapters.lora_modules == (("a", "/x"), ("b", "/y"))
    assert (engine.adapters.max_loras, engine.adapters.max_lora_rank, engine.scheduling.max_loras) == (3, 8, 3)


@pytest.mark.parametrize("option", ["--lora-modules", "--lora-paths"])
def test_a_command_line_may_have_pairs_in_a_row(option):
    parser = argparse.ArgumentParser()
    add_flags(parser)
    assert parser.parse_args([option, "a=/x", "b=/y", "--enable-lora"]).lora_modules == ["a=/x", "b=/y"]


@pytest.mark.parametrize(
    ("flags", "why"),
    [
        ({"lora_modules": "a=/x"}, "it has no effect without --enable-lora"),
        ({"max_loras": 8}, "it has no effect without --enable-lora"),
        ({"enable_lora": True, "lora_modules": "a"}, "is not NAME=PATH"),
        ({"enable_lora": True, "lora_modules": "{"}, "is not NAME=PATH"),
        ({"enable_lora": True, "lora_modules": "=/x"}, "a name is missing"),
        ({"enable_lora": True, "lora_modules": "a=/x,a=/y"}, "'a' is there twice"),
        ({"enable_lora": True, "lora_modules": f"{'n' * 129}=/x"}, "at most 128"),
        ({"enable_lora": True, "lora_modules": "a\tb=/x"}, "printable"),
        ({"enable_lora": True, "lora_modules": "a=/x,b=/y", "max_loras": 1}, "give --max-loras 2"),
        ({"enable_lora": True, "max_loras": 0}, "at least 1"),
        ({"enable_lora": True, "max_lora_rank": 1 << 20}, "at most 512"),
    ],
)
def test_what_cannot_work_is_one_line(flags, why):
    with pytest.raises(ConfigError, match=why) as refused:
        engine_of(**flags)
    assert "\n" not in refused.value.message
