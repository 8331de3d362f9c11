"""The programs of `examples/` run: four against a server of a tiny model with images, two with an `LLM`."""

from __future__ import annotations

import re
import runpy
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

import forebay
from forebay.cli.main import main
from scripts.site.pages import ROOT
from tests.integration.tree import Tree, serving

EXAMPLES = ROOT / "examples"
SMALL: dict[str, Any] = {"dtype": "float32", "num_threads": 1, "kv_cache_bytes": "16MiB", "context_length": 2048}
Run = Callable[..., str]


@pytest.fixture(scope="module")
def model(embedded_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("examples") / "tiny"
    assert main(["models", "make", "tiny", "--like", "smolvlm", "--out", str(folder)]) == 0
    return folder


@pytest.fixture(scope="module")
def server(model: Path) -> Iterator[Tree]:
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in SMALL.items()]
    with serving(model.parent / "tree", model, *flags) as tree:
        yield tree


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Return a function that runs a program of `examples/` with arguments, and returns its output."""

    def go(program: str, *words: str | Path) -> str:
        monkeypatch.setattr(sys, "argv", [program, *map(str, words)])
        runpy.run_path(str(EXAMPLES / program), run_name="__main__")
        return capsys.readouterr().out

    return go


@pytest.fixture
def run_alone(run: Run, model: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Return `run` for programs with an `LLM`, which gets the tiny model and small pools."""

    class Small(forebay.LLM):
        def __init__(self, name: str | None) -> None:
            super().__init__(name, **SMALL)

    monkeypatch.setattr(forebay, "LLM", Small)
    return lambda program, *words: run(program, "--model", model, *words)


def test_examples_each_program_is_listed_and_run() -> None:
    programs = {path.name for path in EXAMPLES.glob("*.py")}
    listed = set(re.findall(r"\((\w+\.py)\)", (EXAMPLES / "README.md").read_text()))
    assert programs == listed == set(re.findall(r'run(?:_alone)?\("(\w+\.py)"', Path(__file__).read_text()))


def test_chat_second_turn_finds_the_first_in_the_cache(server: Tree, run: Run) -> None:
    told = run("chat.py", "Why is the sky blue?", "And at sunset?", "--url", server.url, "--max-tokens", "8")
    cached = [int(count) for count in re.findall(r"\[(\d+) of \d+ prompt tokens were cached\]", told)]
    assert len(cached) == 2
    assert cached[1] > cached[0]


def test_tools_a_call_is_made_and_answered(server: Tree, run: Run) -> None:
    told = run("tools.py", "--url", server.url, "--max-tokens", "8")
    assert re.match(r"get_temperature\('(Oslo|Lima|Cairo)'\) -> \d+ degrees\n.", told), told


def test_schema_an_object_is_read(server: Tree, run: Run) -> None:
    told = run("schema.py", "Oslo", "--url", server.url)
    assert re.search(r"\((Africa|America|Asia|Europe|Oceania)\): [\d,]+ inhabitants\n$", told), told


def test_images_tokens_of_the_image_are_counted(server: Tree, run: Run, tmp_path: Path) -> None:
    Image.new("RGB", (90, 60), "orange").save(tmp_path / "photo.png")
    told = run("images.py", tmp_path / "photo.png", "--url", server.url, "--max-tokens", "8")
    assert int(re.findall(r"\[(\d+) of \d+ prompt tokens are the image\]", told)[0]) > 0


def test_batch_each_prompt_is_completed(run_alone: Run) -> None:
    told = run_alone("batch.py", "--max-tokens", "4")
    assert len(re.findall(r"(?m)^The capital of \w+ is ->.*\((?:length|stop)\)$", told)) == 8, told


def test_embeddings_most_similar_document_comes_first(run_alone: Run) -> None:
    told = run_alone("embeddings.py", "good morning", "the violin", "good morning")
    (first, text), (second, _) = (line.split("  ", 1) for line in told.splitlines())
    assert (first, text) == ("1.000", "good morning")
    assert float(second) < 1
