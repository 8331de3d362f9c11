"""Flags, environment and file: one declaration, three spellings."""

from __future__ import annotations

import argparse
import re
from pathlib import Path

import pytest

from forebay.base.errors import ConfigError
from forebay.base.foreign import ABSENT_OPTIONS, as_key, why_option_is_absent
from forebay.config.server_args import FLAGS
from forebay.config.sources import BY_KEY, add_flags, from_environment, from_file, from_flags, refuse_unknown
from tests.together import together


def parse(*words: str) -> dict[str, object]:
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    add_flags(parser)
    values = vars(parser.parse_args(words))
    return {name: values[name] for name in values if name != "spelled"}


def test_no_two_flags_share_a_spelling_or_a_variable() -> None:
    spellings = [option for flag in FLAGS for option in flag.options]
    variables = [flag.variable for flag in FLAGS]
    assert len(set(spellings)) == len(spellings)
    assert len(set(variables)) == len(variables)


@together("flag", FLAGS)
def test_every_alias_sets_its_flag(flag: object) -> None:
    given = [parse(option, "1") for option in flag.options]  # type: ignore[attr-defined]
    assert given == [given[0]] * len(given)


@pytest.mark.parametrize(
    ("words", "name", "value"),
    [
        (("--max-model-len", "32k"), "context_length", 32768),
        (("--max-num-seqs", "8"), "max_running_requests", 8),
        (("-c", "512"), "context_length", 512),
        (("-np", "4"), "max_running_requests", 4),
        (("--gpu-memory-utilization", "0.4"), "mem_fraction_static", 0.4),
        (("--no-enable-prefix-caching",), "disable_radix_cache", True),
        (("--disable-radix-cache=false",), "disable_radix_cache", False),
    ],
)
def test_other_projects_names_are_understood(words: tuple[str, ...], name: str, value: object) -> None:
    assert from_flags(parse(*words))[name].value == value


def test_two_spellings_of_one_setting_must_agree() -> None:
    assert parse("--context-length", "4k", "--max-model-len", "4k") == {"context_length": "4k"}
    with pytest.raises(ConfigError, match=r"--context-length 4k and --max-model-len 8k"):
        parse("--context-length", "4k", "--max-model-len", "8k")


def test_a_contradicted_key_is_not_repeated() -> None:
    with pytest.raises(ConfigError) as caught:
        parse("--api-key", "first-secret", "--api-key", "second-secret")
    assert "secret" not in caught.value.message


def test_an_unknown_variable_is_a_warning_with_a_guess() -> None:
    given, warnings = from_environment({"FOREBAY_PROT": "1", "FOREBAY_PORT": "2", "HOME": "/x", "FOREBAY_FAULTS": ""})
    assert given["port"].value == 2
    assert len(warnings) == 1
    assert "did you mean FOREBAY_PORT?" in warnings[0]


@pytest.mark.parametrize(
    ("key", "name"),
    [("max_model_len", "context_length"), ("model", "model_path"), ("gpu_memory_utilization", "mem_fraction_static")],
)
def test_an_alias_is_a_key_and_a_variable_too(key: str, name: str, tmp_path: Path) -> None:
    file = tmp_path / "forebay.toml"
    file.write_text(
        f'{key} = "64"\n' if name == "model_path" else f"{key} = 0.5\n" if "mem" in name else f"{key} = 64\n"
    )
    text = "0.5" if "mem" in name else "64"
    given, warnings = from_environment({f"FOREBAY_{key.upper()}": text})
    assert (set(given), warnings) == ({name}, [])
    assert from_file(file)[name].value == given[name].value == from_flags({key: text})[name].value


def test_no_alias_is_the_key_of_another_setting() -> None:
    keys = {as_key(option): flag for flag in FLAGS for option in flag.options if option.startswith("--")}
    assert keys == BY_KEY
    assert all(keys[flag.name] is flag for flag in FLAGS)


def test_two_keys_of_one_setting_must_agree(tmp_path: Path) -> None:
    file = tmp_path / "forebay.toml"
    file.write_text("context_length = 64\nmax_model_len = 64\n")
    assert from_file(file)["context_length"].value == 64
    file.write_text("context_length = 64\nmax_model_len = 65\n")
    with pytest.raises(ConfigError, match=r"context_length and .*max_model_len set context_length to different values"):
        from_file(file)


def test_a_callers_two_names_of_one_setting_must_agree() -> None:
    assert from_flags({"model": "a", "model_path": "a"})["model_path"].value == "a"
    with pytest.raises(ConfigError, match="model and --model-path set model_path to different values"):
        from_flags({"model": "a", "model_path": "b"})


OPTIONS = [option for flag in FLAGS for option in flag.options]


@together("key", [*ABSENT_OPTIONS, "speculative_token_map", "disaggregation_ib_device"])
def test_what_the_field_has_and_we_have_not_is_said_in_every_place(key: str, tmp_path: Path) -> None:
    key = key.replace("*", "x")
    option, line = "--" + key.replace("_", "-"), why_option_is_absent(key)
    assert line
    assert option not in OPTIONS
    with pytest.raises(ConfigError, match=re.escape(line)):
        refuse_unknown([option], OPTIONS)
    assert from_environment({"FOREBAY_" + key.upper(): "1"})[1][0].endswith(line)
    file = tmp_path / "forebay.toml"
    file.write_text(f"{key} = 1\n")
    with pytest.raises(ConfigError, match=re.escape(line)):
        from_file(file)


@pytest.mark.parametrize("option", ["--frobnicate", "--wide-mode", "--api-clients"])
def test_there_is_no_guess_where_nothing_is_near(option: str) -> None:
    with pytest.raises(ConfigError) as caught:
        refuse_unknown([option], OPTIONS)
    assert caught.value.message == f"there is no flag {option}"


def test_an_alias_is_guessed_where_it_is_nearest() -> None:
    with pytest.raises(ConfigError, match=r"did you mean --max-model-len\?"):
        refuse_unknown(["--max-model-length", "4"], OPTIONS)


@pytest.mark.parametrize("dtype", ["float16", "half"])
def test_a_type_that_is_not_computed_in_names_those_that_are(dtype: str) -> None:
    with pytest.raises(ConfigError, match=r"--dtype: float16 .* use bfloat16"):
        from_flags({"dtype": dtype})


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("gguf", "use file"),
        ("awq", "use file"),
        ("mxfp4", "use file"),
        ("fp8", "use file, or leave it out; of others use int8"),
        ("bitsandbytes", "bfloat16 and use int8 or int4"),
        ("q4_1", "use int4"),
    ],
)
def test_codes_that_are_not_made_name_those_that_are(name: str, words: str) -> None:
    with pytest.raises(ConfigError, match=f"--quantization: .* {words}|--quantization: {words}"):
        from_flags({"quantization": name})


def test_an_unknown_flag_is_an_error_with_a_guess() -> None:
    with pytest.raises(ConfigError, match=r"--page-sise: did you mean --page-size\?"):
        refuse_unknown(["--page-sise=4"], [option for flag in FLAGS for option in flag.options])


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("prot = 1", r"did you mean port\?"),
        ("port = [1]", "port"),
        ('port = "x"', "port"),
        ("port = ", "TOML"),
        ("[server]\nport = 1", "server"),
    ],
)
def test_a_file_is_refused_by_name_and_key(tmp_path: Path, text: str, words: str) -> None:
    file = tmp_path / "forebay.toml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=words) as caught:
        from_file(file)
    assert str(file) in caught.value.message


def test_a_missing_file_is_refused() -> None:
    with pytest.raises(ConfigError, match="/nowhere"):
        from_file(Path("/nowhere"))
