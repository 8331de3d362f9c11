"""`--lora` of chat and generate: which adapter it means, and that it answers."""

from __future__ import annotations

import argparse
import io
from pathlib import Path
from typing import Any

import pytest

from forebay.base.errors import ConfigError
from forebay.cli.adapter import with_adapter
from forebay.cli.arguments import Parsed
from forebay.cli.main import main
from tests.engine.adapters import make_adapter, merged
from tests.engine.conftest import make_chat_model

SMALL = ["--dtype=float32", "--num-threads=1", "--kv-cache-bytes=4MiB", "--max-tokens=12", "--temperature=0"]


@pytest.mark.parametrize(
    ("lora", "written", "name", "modules"),
    [
        ("./adapters/support", (), "support", ("support=./adapters/support",)),
        ("org/legal@v2", (), "legal@v2", ("legal@v2=org/legal@v2",)),
        ("one", ("one=a", "two=b"), "one", ("one=a", "two=b")),
        ("./c", ("one=a",), "c", ("one=a", "c=./c")),
        ("a=b", (), "a", ("a=a=b",)),
    ],
)
def test_lora_option_is_a_name_of_the_modules_or_one_more_of_them(
    lora: str, written: tuple[str, ...], name: str, modules: tuple[str, ...]
) -> None:
    flags: dict[str, Any] = {"lora_modules": written} if written else {}
    parsed, found = with_adapter(Parsed(argparse.Namespace(lora=lora), flags, None))
    assert (found, parsed.flags["enable_lora"], parsed.values["lora_modules"]) == (name, True, modules)


def test_lora_option_absent_changes_nothing_and_a_second_adapter_of_a_name_is_refused() -> None:
    parsed = Parsed(argparse.Namespace(lora=None), {}, None)
    assert with_adapter(parsed) == (parsed, "")
    with pytest.raises(ConfigError, match="two adapters of the name one"):
        with_adapter(Parsed(argparse.Namespace(lora="./other/one"), {"lora_modules": ("one=a",)}, None))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_chat_model(tmp_path_factory.mktemp("model"), context_length=256).path


@pytest.fixture(scope="module")
def adapter(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_adapter(model, tmp_path_factory.mktemp("adapters") / "support", seed=1)


@pytest.mark.slow
def test_chat_with_an_adapter_answers_with_it_until_the_model_is_chosen(
    model: Path, adapter: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = ["hello", f"/model {model.name}", "/retry", "/model support", "/retry", "/model other"]
    monkeypatch.setattr("sys.stdin", io.StringIO("\n".join(lines) + "\n"))
    assert main(["chat", str(model), "--lora", str(adapter), *SMALL]) == 0
    printed = capsys.readouterr()
    title, first, chosen, plain, again, second = printed.out.rstrip("\n").split("\n", 5)
    assert title.startswith(f"{model.name} with support. /help")
    assert (chosen, again) == (model.name, f"{model.name} with support")
    assert first == second != plain
    assert f"this engine has {model.name}, support alone" in printed.err


@pytest.mark.slow  # its parts: above
def test_generate_with_an_adapter_continues_as_the_merged_model(
    model: Path, adapter: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["generate", "hello", "--model", str(model), "--lora", str(adapter), *SMALL]) == 0
    adapted = capsys.readouterr().out
    together = merged(model, adapter, tmp_path / "merged")
    assert main(["generate", "hello", "--model", str(together), *SMALL]) == 0
    assert capsys.readouterr().out == adapted
