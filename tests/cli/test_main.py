"""The command line from outside: what it prints and how it exits."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from forebay.cli.arguments import Parser
from forebay.cli.main import COMMANDS, main
from forebay.config.server_args import FLAGS


def test_help_lists_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    text = capsys.readouterr().out
    assert all(f"  {name} " in text for name in COMMANDS)


@pytest.mark.parametrize("command", [name for name in COMMANDS if name != "bench"])
def test_every_command_has_help_and_does_nothing_else(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exited:
        main([command, "--help"])
    assert exited.value.code == 0
    assert f"usage: forebay {command}" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["serv"], "did you mean serve?"),
        (["serve", "--prot", "1"], "did you mean --port?"),
        (["serve", "--port"], "--port"),
        (["serve", "--port", "many"], "--port"),
        (["serve", "a.gguf", "b.gguf"], "b.gguf"),
        (["serve", "a.gguf", "--model", "b.gguf"], "contradict"),
        (["serve", "/nowhere/model.gguf"], "/nowhere/model.gguf"),
        (["serve", "--host", "192.168.1.1"], "--api-key-file"),
        (["models", "push"], "push"),
        (["models", "pull", "x"], "default model"),
        (["bench", "fast"], "fast"),
        (["generate"], "prompt"),
        (["generate", "--file", "/nowhere"], "/nowhere"),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str], embedded_model: Path
) -> None:
    assert main(words) == 2
    captured = capsys.readouterr()
    lines = [line for line in captured.err.splitlines() if line.startswith("forebay: error: ")]
    assert len(lines) == 1
    assert message in lines[0]
    assert captured.out == ""


def test_no_command_is_a_mistake_too(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    assert "usage" in capsys.readouterr().out


def test_a_command_that_cannot_reach_its_server_exits_with_1(
    capsys: pytest.CaptureFixture[str], free_port: int
) -> None:
    assert main(["bench", "serve", "--port", str(free_port)]) == 1
    assert "no server answers" in capsys.readouterr().err


def full_help(word: str) -> str:
    parser = Parser("serve", "", "")
    parser.engine_flags(server=True, model_is_positional=True)
    return parser.help_text(word)


def test_the_short_help_leaves_out_what_is_seldom_needed_and_all_shows_it() -> None:
    assert "--max-header-bytes" not in full_help("")
    assert all(flag.option in full_help("all") and flag.variable in full_help("all") for flag in FLAGS)


def test_help_searches_names_aliases_and_texts() -> None:
    assert "--context-length" in full_help("max-model-len")
    assert "--chunked-prefill-size" in full_help("prompt tokens")
    assert "--port" not in full_help("max-model-len")
    assert "no option" in full_help("zebra")


def test_inspect_prints_the_shape_and_the_memory(capsys: pytest.CaptureFixture[str], embedded_model: Path) -> None:
    assert main(["models", "inspect"]) == 0
    text = capsys.readouterr().out
    assert all(word in text for word in ("llama", "134.5 M", "Q4_1", "22.5 KiB a token", "180.0 MiB for 8,192"))


def test_doctor_names_a_port_that_is_taken(capsys: pytest.CaptureFixture[str], taken_port: int) -> None:
    assert main(["doctor", "--port", str(taken_port)]) in (0, 1)
    text = capsys.readouterr().out
    assert str(taken_port) in text
    assert "cannot be used" in text
    assert sys.executable.rsplit("/", 1)[0][:20] in text.replace("\n", "")


def test_defaults_of_zero_are_shown_too(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["generate", "--help"])
    assert "0 takes the likeliest token [0.0]" in capsys.readouterr().out


def test_a_misspelt_variable_is_a_line_of_the_log_like_any_other(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, embedded_model: Path
) -> None:
    monkeypatch.setenv("FOREBAY_PROT", "1")
    parser = Parser("serve", "", "")
    parser.engine_flags(server=True, model_is_positional=True)
    parser.parse([]).resolve()
    (line,) = capsys.readouterr().err.splitlines()
    assert " W config environment problem=" in line
    assert "did you mean FOREBAY_PORT?" in line


def test_a_path_is_not_broken_over_lines_for_a_script(capsys: pytest.CaptureFixture[str], embedded_model: Path) -> None:
    assert main(["models", "list"]) == 0
    assert str(embedded_model) in capsys.readouterr().out
