"""A conversation in the terminal: what commands do to it, what Ctrl-C ends, and what is typed and shown."""

from __future__ import annotations

import asyncio
import base64
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from prompt_toolkit.application import create_app_session
from prompt_toolkit.input import create_pipe_input
from prompt_toolkit.output import DummyOutput

from forebay.base.errors import ConfigError, InvalidRequest
from forebay.cli.chat import Conversation
from forebay.cli.local import Took
from forebay.cli.talker import Local, Message
from forebay.cli.terminal import Piped, Terminal, split_blocks


class Parrot:
    """Answers with a number and the question."""

    name = "parrot"
    why_no_images = Local.why_no_images

    def __init__(self, accepts_images: bool = True) -> None:
        self.answers, self.accepts_images = 0, accepts_images

    async def reply(self, messages: list[Message], took: Took) -> AsyncIterator[str]:
        self.answers += 1
        question = messages[-1]["content"]
        if question == "fail":
            raise InvalidRequest("no such thing")
        yield f"{self.answers} "
        if question == "interrupt":
            os.kill(os.getpid(), signal.SIGINT)
            await asyncio.Event().wait()
        took.came()
        took.prompt_tokens, took.cached_tokens, took.output_tokens = 5, 3, 2
        yield question if isinstance(question, str) else str(len(question))

    async def choose(self, name: str) -> None:
        raise ConfigError(f"there is no {name}")


class Script(Piped):
    def __init__(self, *lines: str) -> None:
        self.lines, self.said, self.remarks = list(lines), list[str](), list[str]()

    async def ask(self) -> str | None:
        return self.lines.pop(0) if self.lines else None

    def say(self, text: str) -> None:
        self.said.append(text)

    def remark(self, text: str) -> None:
        self.remarks.append(text)


async def held(*lines: str, system: str | None = None) -> tuple[list[tuple[str, str]], Script]:
    screen = Script(*lines)
    conversation = Conversation(Parrot(), system, screen)
    await conversation.hold()
    return [(message["role"][0], message["content"]) for message in conversation.messages], screen


@pytest.mark.parametrize(
    ("lines", "messages"),
    [
        (["a", "b"], [("u", "a"), ("a", "1 a"), ("u", "b"), ("a", "2 b")]),
        (["a", "/retry"], [("u", "a"), ("a", "2 a")]),
        (["a", "b", "/undo"], [("u", "a"), ("a", "1 a")]),
        (["a", "/reset", "b"], [("u", "b"), ("a", "2 b")]),
        (["a", "/system brief", "/reset"], [("s", "brief")]),
        (["a", "fail", "b"], [("u", "a"), ("a", "1 a"), ("u", "b"), ("a", "3 b")]),
        (["interrupt", "b"], [("u", "interrupt"), ("a", "1 "), ("u", "b"), ("a", "2 b")]),
        (["", " ", "/undo", "/retry", "/model x", "/zebra", "/exit", "b"], []),
    ],
)
async def test_commands_change_the_conversation(lines: list[str], messages: list[tuple[str, str]]) -> None:
    found, screen = await held(*lines)
    assert found == messages
    assert any("stopped" in remark for remark in screen.remarks) == ("interrupt" in lines)


async def test_an_answer_says_what_it_took_and_a_conversation_is_kept_in_a_file(tmp_path: Path) -> None:
    path = tmp_path / "talk.json"
    found, screen = await held("a", f"/save {path}", "/stats", system="brief")
    assert "3 of 5 prompt tokens reused" in screen.remarks[0]
    assert screen.said[-1].startswith("1. 2 tokens")
    again, _ = await held(f"/load {path}", "b")
    assert again == [*found, ("u", "b"), ("a", "1 b")]
    path.write_text("[]")
    assert await held(f"/load {path}", "/save /nowhere/x", "a") != ([], None)  # each is one line, and we go on


@pytest.mark.parametrize(
    ("content", "kind"),
    [
        (b"\x89PNG\r\n\x1a\nrest", "png"),
        (b"\xff\xd8\xff\xe0", "jpeg"),
        (b"RIFF1234WEBPVP8 ", "webp"),
        (b"GIF89a", "gif"),
        (b"RIFF1234WAVE", None),
        (b"", None),
    ],
)
async def test_image_command_adds_a_file_to_the_next_message(tmp_path: Path, content: bytes, kind: str | None) -> None:
    path, talk = tmp_path / "a b", tmp_path / "talk.json"
    path.write_bytes(content)
    found, _ = await held(f"/image {path}", "what?", "/retry", f"/save {talk}")
    text = {"type": "text", "text": "what?"}
    if kind is None:
        assert found == [("u", "what?"), ("a", "2 what?")]
        return
    url = f"data:image/{kind};base64,{base64.b64encode(content).decode()}"
    assert found == [("u", [{"type": "image_url", "image_url": {"url": url}}, text]), ("a", "2 2")]
    again, screen = await held(f"/load {talk}", "next", "/undo", "/undo")
    assert again == []
    assert screen.said[-2:] == ["taken back: next", "taken back: what?"]


async def test_image_command_without_a_server_or_a_file_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "a.png"
    path.write_bytes(b"\x89PNG\r\n\x1a\n")
    for accepts, name, line in ((False, path, "images need a server"), (True, tmp_path / "none", "none")):
        conversation = Conversation(Parrot(accepts), None, Script(f"/image {name}", "a"))
        await conversation.hold()
        assert [message["content"] for message in conversation.messages] == ["a", "1 a"]
        assert line in capsys.readouterr().err


@pytest.mark.parametrize(("line", "says"), [("/rest", "did you mean /reset?"), ("/nonsense", "/help lists all")])
async def test_unknown_command_is_named_and_sends_nothing(
    line: str, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    found, screen = await held(line, "a")
    assert found == [("u", "a"), ("a", "1 a")]
    told = capsys.readouterr().err
    assert f"there is no command {line}: " in told
    assert says in told
    assert not any("/system [TEXT]" in text for text in screen.said)


async def test_image_command_before_a_reset_adds_nothing(tmp_path: Path) -> None:
    path = tmp_path / "a.png"
    path.write_bytes(b"\x89PNG\r\n\x1a\n")
    assert (await held(f"/image {path}", "/reset", "a"))[0] == [("u", "a"), ("a", "1 a")]


async def test_pasted_and_broken_lines_are_one_message_and_the_history_is_private(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    with create_pipe_input() as keys, create_app_session(input=keys, output=DummyOutput()):
        terminal = Terminal()
        keys.send_text("\x1b[200~one\ntwo\x1b[201~\x1b\rthree\r")
        assert await terminal.ask() == "one\ntwo\nthree"
        keys.send_text("\x03four\r")  # Ctrl-C leaves the line, and not the program
        assert await terminal.ask() == "four"
        keys.send_text("\x04")
        assert await terminal.ask() is None
    history = tmp_path / "forebay" / "chat_history"
    assert history.stat().st_mode & 0o077 == 0
    assert "+one\n+two\n+three\n" in history.read_text()


@pytest.mark.parametrize(
    ("text", "whole"),
    [
        ("a b", ""),
        ("a\n\nb", "a\n\n"),
        ("a\n```\nx\n\ny", ""),
        ("a\n```\nx\n\ny\n```\nb", "a\n```\nx\n\ny\n```\n"),
        ("```\nx\n```", ""),
    ],
)
def test_what_may_still_go_on_is_not_laid_out(text: str, whole: str) -> None:
    assert split_blocks(text) == (whole, text[len(whole) :])
