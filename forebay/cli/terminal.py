"""Lines that a person types, and answers as they come: on a terminal with history and markdown, or in a pipe."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from typing import Protocol

from rich.console import Console
from rich.live import Live
from rich.markdown import Markdown
from rich.text import Text

from forebay.base.paths import history_folder

_FENCES = ("```", "~~~")


class Screen(Protocol):
    """Input and output of a conversation."""

    async def ask(self) -> str | None:
        """Return the typed line; None at the end of input."""
        ...

    async def show(self, reply: AsyncIterator[str], pieces: list[str]) -> None:
        """Print the pieces of a reply as they arrive, and append them to `pieces`."""
        ...

    def say(self, text: str) -> None:
        """Print a line of the program itself."""

    def remark(self, text: str) -> None:
        """Print a remark for people, which a program that reads the output does not get."""
        ...


class Piped(Screen):
    """Plain lines, for scripts."""

    async def ask(self) -> str | None:
        """In a thread, so that the engine's channel is served meanwhile."""
        try:
            return await asyncio.to_thread(input)
        except EOFError:
            return None

    async def show(self, reply: AsyncIterator[str], pieces: list[str]) -> None:
        async for piece in reply:
            pieces.append(piece)
            print(piece, end="", flush=True)
        print()

    def say(self, text: str) -> None:
        print(text)

    def remark(self, text: str) -> None:
        """Print nothing: remarks are for people, not for a pipe."""


class Terminal(Screen):
    """Enter sends, Alt-Enter begins a new line, pasted lines stay together; the history outlives the session."""

    def __init__(self) -> None:
        from prompt_toolkit import PromptSession
        from prompt_toolkit.history import FileHistory
        from prompt_toolkit.key_binding import KeyBindings

        folder = history_folder()
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / "chat_history"
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT, 0o600))  # questions are nobody else's
        keys = KeyBindings()
        keys.add("escape", "enter")(lambda event: event.current_buffer.insert_text("\n"))
        self._session: PromptSession[str] = PromptSession(history=FileHistory(str(path)), key_bindings=keys)
        self._console = Console(highlight=False)

    async def ask(self) -> str | None:
        while True:
            try:
                return await self._session.prompt_async("> ", prompt_continuation="  ")
            except KeyboardInterrupt:
                self.remark("[/exit or Ctrl-D ends]")
            except EOFError:
                return None

    async def show(self, reply: AsyncIterator[str], pieces: list[str]) -> None:
        """Show the text as it arrives, and format a paragraph once it is complete."""
        unfinished = ""
        with Live(console=self._console, refresh_per_second=12, transient=True, vertical_overflow="ellipsis") as live:
            try:
                async for piece in reply:
                    pieces.append(piece)
                    whole, unfinished = split_blocks(unfinished + piece)
                    if whole:
                        live.update(Text())
                        self._console.print(Markdown(whole))
                    live.update(Text(unfinished))
            finally:
                live.update(Text())
                if unfinished.strip():
                    self._console.print(Markdown(unfinished))

    def say(self, text: str) -> None:
        self._console.print(Text(text))

    def remark(self, text: str) -> None:
        self._console.print(Text(text, style="dim"))


def split_blocks(text: str) -> tuple[str, str]:
    """Return the complete paragraphs, lists and blocks of code, and the rest, which may still grow."""
    end, fence = 0, ""
    at = 0
    for line in text.splitlines(keepends=True):
        at += len(line)
        mark = line.lstrip()[:3]
        if mark in _FENCES and fence in ("", mark):
            fence = "" if fence else mark
            end = end if fence or not line.endswith("\n") else at
        elif not fence and not line.strip() and line.endswith("\n"):
            end = at
    return text[:end], text[end:]
