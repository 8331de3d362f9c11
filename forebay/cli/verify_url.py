"""`forebay verify --url URL`: whether anything around a request changes the answers of a running server."""

from __future__ import annotations

import asyncio
import random
import re
import shlex
import textwrap
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, Final

from rich.console import Console

from forebay.base.errors import ConfigError, ForebayError
from forebay.cli.arguments import Parser, whole
from forebay.verify.remote.questions import make_questions, read_questions
from forebay.verify.remote.report import as_html, as_json, asked_text, left_out_lines, outcome_lines, summary_text
from forebay.verify.remote.run import Comparison, Outcome
from forebay.verify.remote.server import Server
from forebay.verify.verdict import COLUMNS, STYLES, exit_code

_BUDGET: Final = re.compile(r"(\d+(?:\.\d+)?)(s|m|h)?")
_SECONDS: Final = {None: 1, "s": 1, "m": 60, "h": 3600}


def run(words: Sequence[str]) -> int:
    """Print the outcome of each circumstance. Return 0 if no answer differs, 1 if one does or a request fails, and 2 if
    fewer circumstances were shown than `--at-least`."""
    summary = (
        "Ask a running server the same things alone and in all that a client can put around a request (repetition, "
        "streams, other requests, long prompts that arrive, cached prefixes, aborts), and compare the answers. Any "
        "server of the OpenAI API will do. Exit code 1 if an answer differs or a request fails, 2 if fewer "
        "circumstances were shown than --at-least."
    )
    examples = ["--url http://localhost:8000", "--url http://a:8000 --url http://b:8000 --html report.html"]
    parser = Parser("verify", summary, "--url URL [options]", examples)
    parser.option("--url", action="append", metavar="URL", help="the server; further ones are compared with the first")
    parser.option("--model", metavar="NAME", help="one of those that the server lists", default_text="the first one")
    parser.option("--api-key-file", metavar="FILE", help="its first line is the server's key")
    parser.option("--prompts", metavar="FILE", help="ask these: a JSON string or a request's body on each line")
    parser.option("--completions", action="store_true", help="texts instead of chats, for a model without a template")
    parser.option("--max-tokens", "-n", type=whole(1, 4096), default=48, metavar="N", help="tokens of each answer")
    parser.option("--only", metavar="WORD", help="circumstances with this word in their names")
    parser.option("--at-least", type=whole(0), default=1, metavar="N", help="circumstances that must be shown")
    parser.option("--budget", default="5m", metavar="TIME", help="the longest it may take, such as 90s or 5m")
    parser.option("--seed", type=whole(0), metavar="N", help="of the prompts", default_text="random")
    parser.option("--html", metavar="FILE", help="write a page with the differing texts side by side")
    parser.option("--json", action="store_true", help="for programs")
    own = parser.parse(words).own
    budget_s, page = _budget_s(own.budget), _page(own.html)
    console = Console(quiet=own.json, highlight=False, markup=False, soft_wrap=True)
    seed = random.getrandbits(32) if own.seed is None else own.seed
    comparison, outcomes = asyncio.run(_compare(own, seed, budget_s, console))
    command = shlex.join(["forebay", "verify", *words, *([] if own.seed is not None else [f"--seed={seed}"])])
    console.print(f"again: {command}")
    if own.json:
        print(as_json(comparison, outcomes))
    if page is not None:
        page.write_text(as_html(comparison, outcomes, command), "utf-8")
    return exit_code([*outcomes, *comparison.unanswered], own.at_least)


def _budget_s(text: str) -> float:
    match = _BUDGET.fullmatch(text.strip())
    if match is None or not float(match[1]):
        raise ConfigError(f"--budget {text} is no time: write 90s, 5m or 1h")
    return float(match[1]) * _SECONDS[match[2]]


def _page(name: str | None) -> Path | None:
    """Return the path of the page, which can be written. Raises ConfigError before minutes are spent."""
    if name is None:
        return None
    try:
        Path(name).touch()
    except OSError as error:
        raise ConfigError(f"--html {name} cannot be written: {error.strerror}") from None
    return Path(name)


def key_in(name: str | None) -> str:
    """Return the first line of a file of keys, "" for no file. Raises ConfigError for one that has none."""
    if name is None:
        return ""
    try:
        lines = Path(name).read_text("utf-8").split()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--api-key-file {name} cannot be read: {error}") from None
    if not lines:
        raise ConfigError(f"--api-key-file {name} is empty: write the key on its first line")
    return lines[0]


async def _behind(router: Server, key: str, stack: AsyncExitStack, console: Console) -> list[Server]:
    """Connect to the servers behind a router, none of another server. Print those that cannot be compared."""
    found = []
    for url in await router.members():
        try:
            found.append(await Server.find(url, router.model, key))
        except ForebayError as error:
            console.print(f"left out  server behind {router.url}: {error.message}")
            continue
        stack.push_async_callback(found[-1].aclose)
    return found


async def _compare(own: Any, seed: int, budget_s: float, console: Console) -> tuple[Comparison, list[Outcome]]:
    """Print each outcome as it ends, and all of them at the end."""
    began, key = time.monotonic(), key_in(own.api_key_file)
    async with AsyncExitStack() as stack:
        servers = []
        for url in own.url:
            servers.append(await Server.find(url, own.model, key, most_s=budget_s))
            stack.push_async_callback(servers[-1].aclose)
        if len(servers) == 1:
            servers += await _behind(servers[0], key, stack, console)
        context_length = min((server.context_length or 1 << 30 for server in servers), default=0)
        questions = (
            read_questions(Path(own.prompts))
            if own.prompts
            else make_questions(seed, context_length, own.max_tokens, chats=not own.completions)
        )
        comparison = Comparison(servers, questions, max_tokens=own.max_tokens, seed=seed, budget_s=budget_s)
        word = (own.only or "").lower()
        chosen = [one for one in comparison.circumstances if word in one.name.lower()]
        if not chosen:
            known = ", ".join(one.name for one in comparison.circumstances)
            raise ConfigError(f"--only {own.only}: no circumstance has this in its name; there are: {known}")
        outcomes: list[Outcome] = []
        with console.status("alone, one at a time") as status:
            await comparison.ask_alone()
            console.print("\n".join([asked_text(comparison), *left_out_lines(comparison), ""]))
            for circumstance in chosen:
                status.update(circumstance.name)
                outcomes.append(await comparison.outcome(circumstance))
                console.print("\n".join(outcome_lines(outcomes[-1])), style=STYLES.get(outcomes[-1].verdict))
    summary = f"{summary_text(outcomes)} ({time.monotonic() - began:.0f} s)"
    console.print(f"\n{textwrap.fill(summary, COLUMNS - 1)}")
    return comparison, outcomes
