"""How much of a prompt and its answer a client's next request repeats, by format and dialect.

    python -m tests.server.round_trips              (prints the table)
    python -m tests.server.round_trips --write      (writes it into docs/guide/tools-and-thinking.md)

The scripted model thinks and calls tools, in the form that the chat template writes. The client sends the answer back
as clients of the dialect do, with the results, and then asks again.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, NamedTuple

import pytest

from forebay.requests.updates import CacheReport, MissReason
from forebay.server.api.core.answered import Answered, Reason
from forebay.text.answers.formats import THINK_TAGS
from forebay.text.answers.probes import find_formats
from tests.server.fake_engine import FakeEngine, FakeStream
from tests.server.scripted_server import ScriptedServer
from tests.text.answers.templates import MANNERS, Manner
from tests.text.in_process import templates_in_this_process

PARAMETERS: Final[dict[str, Any]] = {"type": "object", "properties": {"city": {"type": "string"}}}
TOOL: Final = {"type": "function", "function": {"name": "weather", "description": "Now.", "parameters": PARAMETERS}}
ASK: Final = {"role": "user", "content": "Is it warmer in Oslo or in Lima?"}
AGAIN: Final = {"role": "user", "content": "And in Rome?"}
_END: Final = re.compile(r"\s*(<[^<>]+>)")
THOUGHT: Final = "I need both."
CITIES: Final = ("Oslo", "Lima")
GUIDE: Final = Path(__file__).parents[2] / "docs/guide/tools-and-thinking.md"
HEAD: Final = ("| format | chat | `/v1/messages` | `/v1/responses` | Ollama |", "|---|---|---|---|---|")


class Trip(NamedTuple):
    """Tokens of the answer that the next prompt repeats, of those that it has; the reason why not all."""

    reused: int
    possible: int
    reason: str

    def __str__(self) -> str:
        return f"{self.reused} of {self.possible}" + (f", `{self.reason}`" if self.reason else "")


class Client:
    """A client of one dialect: `history` is what it sends."""

    path: str
    more: dict[str, Any]
    field = "messages"

    def __init__(self) -> None:
        self.history: list[dict[str, Any]] = [ASK]

    def body(self) -> dict[str, Any]:
        return {"model": "tiny", **self.more, self.field: self.history}

    def take(self, answer: dict[str, Any]) -> None:
        """Append the answer, and a result for each call."""
        raise NotImplementedError


class Chat(Client):
    path = "/v1/chat/completions"
    more = {"tools": [TOOL], "max_tokens": 900, "user": "me"}

    def take(self, answer: dict[str, Any]) -> None:
        message = answer["choices"][0]["message"]
        self.history.append({key: value for key, value in message.items() if value is not None})
        for call in message.get("tool_calls", ()):
            self.history.append({"role": "tool", "tool_call_id": call["id"], "content": "20"})


class Messages(Client):
    path = "/v1/messages"
    more = {
        "tools": [{"name": "weather", "description": "Now.", "input_schema": PARAMETERS}],
        "thinking": {"type": "adaptive"},
        "max_tokens": 900,
        "metadata": {"user_id": "me"},
    }

    def take(self, answer: dict[str, Any]) -> None:
        self.history.append({"role": "assistant", "content": answer["content"]})
        calls = [block["id"] for block in answer["content"] if block["type"] == "tool_use"]
        results = [{"type": "tool_result", "tool_use_id": call, "content": "20"} for call in calls]
        if results:
            self.history.append({"role": "user", "content": results})


class Responses(Client):
    path = "/v1/responses"
    more = {"tools": [{"type": "function", **TOOL["function"]}], "max_output_tokens": 900, "user": "me"}  # type: ignore[dict-item]
    field = "input"

    def take(self, answer: dict[str, Any]) -> None:
        self.history += answer["output"]
        calls = [item["call_id"] for item in answer["output"] if item["type"] == "function_call"]
        self.history += [{"type": "function_call_output", "call_id": call, "output": "20"} for call in calls]


class Ollama(Client):
    path = "/api/chat"
    more = {"tools": [TOOL], "stream": False, "options": {"num_predict": 900}}

    def take(self, answer: dict[str, Any]) -> None:
        message = answer["message"]
        self.history.append(message)
        for call in message.get("tool_calls", ()):
            self.history.append({"role": "tool", "tool_name": call["function"]["name"], "content": "20"})


CLIENTS: Final = (Chat, Messages, Responses, Ollama)


def num_common(one: Sequence[Any], other: Sequence[Any]) -> int:
    """Return how many letters or tokens both begin with."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(one), len(other)))


def written(manner: Manner, prompt: str, rendered: str) -> str:
    """Return the answer that a model would have written, whose message the template has rendered: also the thinking
    that the prompt begins, if the template does not show it."""
    common = num_common(prompt, rendered)
    while common < len(prompt) and not (rendered[common - 1].isspace() or rendered[common - 1] in ">]"):
        common -= 1  # tags begin alike
    begun, body = prompt[common:], rendered[common:]
    tags = THINK_TAGS.get(manner.thinking or "")
    opens = tags is not None and prompt.rstrip().endswith(tags.opens)
    if opens and tags is not None and begun.strip():
        return f"{THOUGHT}\n{tags.closes}\n\n{body.lstrip()}"
    return body


class RememberingEngine(FakeEngine):
    """Reports how much of a prompt a request before has had, with its answer, and where the prompt left that."""

    known: list[int]

    def submit(self, **order: Any) -> FakeStream:
        prompt, known = order["prompt_token_ids"], getattr(self, "known", [])
        common = num_common(known, prompt)
        self.cache = CacheReport(common, MissReason.NOT_CACHED)
        if common < len(known):
            there = {"differs_at": common, "token_here": prompt[common], "token_there": known[common]}
            self.cache = CacheReport(common, MissReason.DIVERGED, **there)
        return super().submit(**order)


class Rig:
    """A server for one manner, with the answer that its model gives."""

    def __init__(self, manner: Manner) -> None:
        self.scripted, self.manner = ScriptedServer(manner.template, RememberingEngine), manner
        self.found = find_formats(self.scripted.server.tokenizer)

    def close(self) -> None:
        self.scripted.server.close()

    def ask(self, client: Client) -> dict[str, Any]:
        with self.scripted.server.client() as http:
            answer = http.post(client.path, json=client.body())
        assert answer.status_code == 200, (client.path, answer.text)
        found: dict[str, Any] = answer.json()
        return found

    def prompt(self, client: Client) -> str:
        self.ask(client)
        return self.scripted.prompt()

    def answer(self) -> str:
        """Return an answer with thinking and calls, in the form of the template."""
        self.scripted.answer = "Well."
        prompt, spoken = self.prompt(Chat()), Chat()
        cities = CITIES[:1] if self.found.calls.one_call else CITIES
        calls = [
            {"id": city, "type": "function", "function": {"name": "weather", "arguments": json.dumps({"city": city})}}
            for city in cities
        ]
        thought = {"reasoning_content": THOUGHT} if self.manner.thinking else {}
        answer = {"role": "assistant", "tool_calls": calls, **thought}
        texts = []
        for content in ("20", "#"):
            results = [{"role": "tool", "tool_call_id": city, "content": content} for city in cities]
            spoken.history = [ASK, answer, *results]
            texts.append(self.prompt(spoken))
        return self._without_end(written(self.manner, prompt, texts[0][: num_common(*texts)]))

    def _without_end(self, text: str) -> str:
        """Return an answer without the end of its turn, which the engine stops at."""
        said = Chat()
        said.history += [{"role": "assistant", "content": "Said."}, AGAIN]
        ending = _END.match(self.prompt(said).rpartition("Said.")[2])
        ends = [*([ending[1]] if ending else []), "<|call|>", "<|calls|>", "<|eom_id|>", "<|observation|>", "[e~["]
        return text[: max(map(text.rfind, ends))].rstrip() if any(end in text for end in ends) else text


@contextmanager
def noted_reasons() -> Iterator[list[str]]:
    """Yield the reasons that a server gives inside: not every dialect has a field for them."""
    reasons: list[str] = []
    real = Answered.reason

    def reason(self: Answered, session: str, prompt: Sequence[int], position: int) -> Reason:
        reasons.append(real(self, session, prompt, position))
        return reasons[-1]  # type: ignore[return-value]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Answered, "reason", reason)
        yield reasons


def trips(rig: Rig, kind: type[Client]) -> tuple[Trip, Trip]:
    """Return what is repeated in the prompt with the results, and in that of the next question."""
    client, server = kind(), rig.scripted.server
    text = rig.answer()
    rig.scripted.answer = text
    answer = rig.ask(client)
    prompt, ids = server.engine.submitted[-1].prompt, server.tokenizer.encode(text)
    server.engine.known = [*prompt, *ids]  # type: ignore[attr-defined]
    client.take(answer)
    rig.scripted.answer = "Lima is."
    found = []
    for more in ((), (AGAIN,)):
        client.history += more
        with noted_reasons() as reasons:
            client.take(rig.ask(client))
        reused = server.engine.cache.cached_tokens - len(prompt)
        told = "" if kind is Ollama else "".join(sorted({*reasons}))  # it names no session
        found.append(Trip(max(0, reused), len(ids), told))
    server.engine.known = []  # type: ignore[attr-defined]
    return found[0], found[1]


def cell(results: Trip, question: Trip) -> str:
    return str(results) if results == question else f"{results}; behind the next question {question}"


def row_of(name: str, found: Sequence[tuple[Trip, Trip]]) -> str:
    """Return the line of the table for one manner of `MANNERS`, from the trips of each client."""
    return f"| {name} | {' | '.join(cell(*each) for each in found)} |"


def row(name: str) -> str:
    rig = Rig(MANNERS[name])
    try:
        return row_of(name, [trips(rig, kind) for kind in CLIENTS])
    finally:
        rig.close()


def table() -> str:
    """Return the table of all formats."""
    with templates_in_this_process():
        return "".join(f"{line}\n" for line in (*HEAD, *map(row, MANNERS)))


def write(made: str) -> None:
    """Replace the table of the guide."""
    before, head, behind = GUIDE.read_text().partition(HEAD[0])
    assert head, f"{GUIDE} has no table"
    GUIDE.write_text(before + made + "\n" + behind.partition("\n\n")[2])


if __name__ == "__main__":
    made = table()
    if "--write" in sys.argv:
        write(made)
    else:
        print(made, end="")
