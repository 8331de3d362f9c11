"""What the documents tell people to type works: blocks marked `run` against a server, and every `forebay` line as far
as its words go."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
from markdown_it import MarkdownIt

from forebay.cli import commands as cli
from forebay.cli.arguments import Parsed, Parser
from forebay.text.tokenizer import Tokenizer
from scripts.site.pages import DOCS, ROOT
from tests.server.conftest import MODEL, Running, start
from tests.server.fake_engine import FakeEngine
from tests.together import together

ADDRESS = "http://127.0.0.1:30000"  # as it stands in the documents
PAGES = [ROOT / "README.md", ROOT / "examples" / "README.md", *sorted((DOCS / "guide").glob("*.md"))]


@cache
def blocks(path: Path) -> list[tuple[str, str]]:
    """Of each fenced block its language, with what follows that, and its text."""
    tokens = MarkdownIt("commonmark").disable("inline").parse(path.read_text())
    return [(token.info.strip(), token.content) for token in tokens if token.type == "fence"]


def marked(language: str) -> list[object]:
    return [
        pytest.param(text, id=f"{path.stem}-{place}")
        for path in PAGES
        for place, (info, text) in enumerate(blocks(path))
        if info == f"{language} run"
    ]


def commands(text: str) -> Iterator[list[str]]:
    """The words of each command of a shell's block, without comments, variables and what follows a pipe."""
    lines = text.replace("\\\n", " ")
    for line in re.sub(r"'[^']*'", lambda quoted: quoted[0].replace("\n", " "), lines).splitlines():
        words = shlex.split(line.removeprefix("$ "), comments=True)
        while words and re.fullmatch(r"[A-Z_]+=.*", words[0]):
            words.pop(0)
        yield words[: next((at for at, word in enumerate(words) if word in ("|", "&&", ";")), len(words))]


COMMANDS = [
    words[1:]
    for path in PAGES
    for info, text in blocks(path)
    if info.split(" ")[0] in ("sh", "")
    for words in commands(text if info else "\n".join(re.findall(r"^\$ .*|^forebay .*", text, re.MULTILINE)))
    if words and words[0] == "forebay"
]


@pytest.fixture(scope="module")
def server(tokenizer: Tokenizer, patience: None) -> Iterator[Running]:
    """It says nothing of sense, under the default model's name."""
    running = start(tokenizer, FakeEngine, model=replace(MODEL, name="SmolLM2-135M-Instruct"))
    yield running
    running.close()


class Understood(Exception):
    """The words of a command have been read, and it would begin."""


@pytest.fixture
def only_read(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Commands end where they have read their words."""
    parse = Parser.parse

    def read(self: Parser, words: list[str]) -> Parsed:
        parse(self, words).values  # noqa: B018 - which reads them
        raise Understood

    monkeypatch.setattr(Parser, "parse", read)
    monkeypatch.chdir(tmp_path)


@pytest.mark.usefixtures("only_read")
@together("words", COMMANDS)
def test_every_command_is_one(words: list[str]) -> None:
    with pytest.raises(Understood):
        cli._dispatch(words)


@pytest.mark.usefixtures("only_read")
def test_a_command_that_is_none_is_found() -> None:
    with pytest.raises(cli.ConfigError):
        cli._dispatch(["serve", "--context-size-of-it", "4k"])
    with pytest.raises(cli.ConfigError):
        cli._dispatch(["serve", "--context-length", "many"])


@pytest.mark.parametrize("text", marked("python"))
def test_every_program_runs(server: Running, text: str, capsys: pytest.CaptureFixture[str]) -> None:
    exec(compile(text.replace(ADDRESS, server.url), "an example", "exec"), {"__name__": "__main__"})
    assert capsys.readouterr().out.strip()


@pytest.mark.parametrize("text", marked("sh"))
def test_every_request_is_answered(server: Running, text: str) -> None:
    asked = [words for words in commands(text) if words]
    assert {words[0] for words in asked} == {"curl"}
    for words in asked:
        request = of_curl(words[1:])
        with server.client() as client:
            answer = client.request(request.pop("method"), request.pop("url").removeprefix(ADDRESS), **request)
        assert answer.status_code == 200, answer.text
        assert answer.text.startswith("data: ") or answer.json()


def of_curl(words: list[str]) -> dict[str, object]:
    """What curl would send. KeyError for an option that it is not known of here."""
    request: dict[str, object] = {"method": "GET", "headers": {}}
    rest = iter(words)
    for word in rest:
        match word:
            case "-H" | "--header":
                name, _, value = next(rest).partition(": ")
                request["headers"][name] = value  # type: ignore[index]
            case "-d" | "--data":
                request |= {"content": next(rest).encode(), "method": "POST"}
                json.loads(request["content"])  # type: ignore[arg-type]
            case "-X":
                request["method"] = next(rest)
            case "-N":
                pass
            case _:
                assert word.startswith("http"), f"curl {word}"
                request["url"] = word if word.startswith("http") else f"http://{word}"
    return request
