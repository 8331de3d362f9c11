"""`forebay chat`: a conversation in the terminal, with a running server or with an engine of its own."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import Awaitable, Callable, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Final

from forebay.base.errors import ConfigError, ForebayError, Unavailable
from forebay.base.http_client import Origin, get_json
from forebay.cli.adapter import add_lora, with_adapter
from forebay.cli.arguments import Parsed, Parser, note
from forebay.cli.generate import add_sampling
from forebay.cli.images import image_part
from forebay.cli.local import Took, local_model
from forebay.cli.talker import Local, Message, Remote, Talker
from forebay.cli.terminal import Piped, Screen, Terminal
from forebay.formats.files import MAX_JSON_BYTES, read_bytes

DEFAULT_URL: Final = "http://127.0.0.1:30000"
HELP: Final = """\
/system [TEXT]  show or set the system message     /retry  answer the last question anew
/undo           take back the last question        /reset  start over
/save FILE      write the conversation as JSON     /load FILE  go on with one
/model [NAME]   who answers                        /stats  what the answers took
/image FILE     add an image to the next message   /help   this
/exit, Ctrl-D   end
Ctrl-C stops an answer; Alt-Enter begins a new line; what is pasted may have several."""


def run(words: Sequence[str]) -> int:
    """Run the conversation until its end and return the exit code."""
    parser = Parser(
        "chat",
        f"Talk to the server at --url ({DEFAULT_URL} if one answers there), else to an engine that is "
        "started for it. A MODEL always starts an engine.",
        "[MODEL] [options]",
        examples=(
            "",
            "Qwen/Qwen3-0.6B --temperature 0.7",
            "Qwen/Qwen3-0.6B --lora ./adapters/support",
            "--url https://models.example.org",
        ),
    )
    parser.option("--url", metavar="URL", help="a running server")
    parser.option("--system", metavar="TEXT", help="the system message")
    add_lora(parser)
    add_sampling(parser, max_tokens=None)
    parser.engine_flags(server=False, model_is_positional=True)
    parser.option("--api-key", metavar="KEY", dest="key", help="for the server; better in FOREBAY_API_KEY")
    parsed = parser.parse(words)
    asyncio.run(_chat(parsed))
    return 0


async def _chat(parsed: Parsed) -> None:
    own = parsed.own
    origin = Origin(own.url or DEFAULT_URL, own.key or os.environ.get("FOREBAY_API_KEY", ""))
    if own.url or (not parsed.flags and await _answers(origin, own.lora)):
        await Conversation(await Remote.find(origin, own), own.system).hold()
        return
    parsed, adapter = with_adapter(parsed)
    config = parsed.resolve(max_running_requests=1, log_level="warning")
    note("loading the model")
    async with local_model(config, adapter) as model:
        await Conversation(Local(config.engine.served_model_name, model, own), own.system).hold()


async def _answers(origin: Origin, adapter: str | None) -> bool:
    """Return whether a server is there, which has that adapter."""
    try:
        models = (await get_json(origin, "/v1/models"))["data"]
    except ForebayError:
        return False
    return adapter is None or adapter in {model["id"] for model in models}


class Conversation:
    """Messages so far, and what a person types."""

    def __init__(self, talker: Talker, system: str | None, screen: Screen | None = None) -> None:
        self._talker = talker
        self._screen = screen or (Terminal() if sys.stdin.isatty() and sys.stdout.isatty() else Piped())
        self.messages: list[Message] = [{"role": "system", "content": system}] if system else []
        self._took: list[Took] = []
        self._images: list[Message] = []  # parts of the next message

    async def hold(self) -> None:
        """Until the person ends it."""
        self._screen.say(f"{self._talker.name}. /help lists commands, Ctrl-D ends")
        while (line := await self._screen.ask()) is not None and line.strip() not in ("/exit", "/quit", "/bye"):
            try:
                await self._take(line)
            except Unavailable:
                raise
            except ForebayError as error:
                note(error.message)

    async def _take(self, line: str) -> None:
        if not line.startswith("/"):
            if line.strip():
                content = [*self._images, {"type": "text", "text": line}] if self._images else line
                self._images = []
                self.messages.append({"role": "user", "content": content})
                await self._answer()
            return
        word, _, argument = line.partition(" ")
        commands: dict[str, Callable[[str], Awaitable[None]]] = {
            "/system": self._system, "/retry": self._retry, "/undo": self._undo, "/reset": self._reset,
            "/save": self._save, "/load": self._load, "/stats": self._stats, "/model": self._model,
            "/image": self._image,
        }  # fmt: skip
        if word in commands:
            await commands[word](argument.strip())
        elif word == "/help":
            self._screen.say(HELP)
        else:
            near = get_close_matches(word, [*commands, "/help", "/exit"], n=1)
            hint = f"did you mean {near[0]}? " if near else ""
            raise ConfigError(f"there is no command {word}: {hint}/help lists all; a message begins with another sign")

    async def _answer(self) -> None:
        """Answer the last question. If it fails, the question is removed; if it is stopped, the text so far is kept."""
        took, pieces = Took(), list[str]()
        stopped, failed = False, True
        try:
            stopped = not await self._until_ctrl_c(self._screen.show(self._talker.reply(self.messages, took), pieces))
            failed = False
        finally:
            if failed:
                self._pop_question()
        self._took.append(took)
        if not pieces and stopped:
            self._pop_question()
        else:
            self.messages.append({"role": "assistant", "content": "".join(pieces)})
        self._screen.remark(f"[{took}{'; stopped' if stopped else ''}]")

    async def _until_ctrl_c(self, work: Awaitable[None]) -> bool:
        """Return whether the work ended by itself. Ctrl-C ends the work and not the program."""
        loop, task = asyncio.get_running_loop(), asyncio.ensure_future(work)
        loop.add_signal_handler(signal.SIGINT, task.cancel)
        try:
            await task
        except asyncio.CancelledError:
            return False
        finally:
            loop.remove_signal_handler(signal.SIGINT)
        return True

    def _pop_question(self) -> Any:
        """And what came of it. A question with images is a list of parts."""
        while self.messages and self.messages[-1]["role"] != "system":
            last = self.messages.pop()
            if last["role"] == "user":
                return last["content"]
        raise ConfigError("there is no question yet")

    async def _system(self, text: str) -> None:
        turns = [message for message in self.messages if message["role"] != "system"]
        own = next((str(message["content"]) for message in self.messages if message["role"] == "system"), "none")
        if text:
            self.messages = [{"role": "system", "content": text}, *turns]
        self._screen.say(f"system message: {text or own}")

    async def _retry(self, _: str) -> None:
        self.messages.append({"role": "user", "content": self._pop_question()})
        await self._answer()

    async def _undo(self, _: str) -> None:
        self._screen.say(f"taken back: {_text(self._pop_question())[:200]}")

    async def _reset(self, _: str) -> None:
        self._images = []
        self.messages = [message for message in self.messages if message["role"] == "system"]
        self._screen.say("a new conversation")

    async def _save(self, name: str) -> None:
        try:
            Path(name).expanduser().write_text(json.dumps({"messages": self.messages}, indent=2) + "\n", "utf-8")
        except OSError as error:
            raise ConfigError(f"{name or 'no file'} cannot be written ({error}): /save FILE") from error
        self._screen.say(f"{len(self.messages)} messages are in {name}")

    async def _load(self, name: str) -> None:
        try:
            messages = json.loads(read_bytes(Path(name).expanduser(), MAX_JSON_BYTES))["messages"]
            loaded = [{"role": str(message["role"]), "content": _content(message["content"])} for message in messages]
        except (ValueError, KeyError, TypeError) as error:
            raise ConfigError(f"{name} is no conversation that /save wrote ({error!r})") from error
        self.messages = loaded
        self._screen.say(f"{len(loaded)} messages from {name}")

    async def _stats(self, _: str) -> None:
        self._screen.say("\n".join(f"{number}. {took}" for number, took in enumerate(self._took, 1)) or "no answer yet")

    async def _model(self, name: str) -> None:
        if name:
            await self._talker.choose(name)
        self._screen.say(self._talker.name)

    async def _image(self, name: str) -> None:
        if not self._talker.accepts_images:
            raise ConfigError(self._talker.why_no_images)
        self._images.append(image_part(Path(name).expanduser()))
        self._screen.say(f"{name} is sent with the next message, as image {len(self._images)}")


def _content(given: Any) -> Any:
    return given if isinstance(given, list) and all(isinstance(part, dict) for part in given) else str(given)


def _text(content: Any) -> str:
    return content if isinstance(content, str) else "\n".join(str(part["text"]) for part in content if "text" in part)
