"""Histories in the form that a chat template accepts, if it refuses or drops the client's form.

Templates differ in the messages that they accept beyond turns of a user and an assistant. A system text that a template
does not accept at its position joins the user's turn beside it, or the first system text. Turns of one role in a row
join each other, and a user's text behind a tool's result joins the result. Joined texts have an empty line between
them, and all stay in their order.

Messages of the assistant in a row are one answer if one of them has calls or thinking. They stay apart where the
template writes them as the model does, without an end of a turn between them. Otherwise they are one message, which has
the thinking first, then the texts, then the calls.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations, groupby, pairwise
from typing import Any, Final, NamedTuple

from forebay.text.resumption import IMAGE_CHARS, Breakpoint, Message

_BETWEEN: Final = "\n\n"
_ASKED: Final[Message] = {"role": "user", "content": "Probe asked."}
_ANSWERED: Final[Message] = {"role": "assistant", "content": "Probed."}
Writes = Callable[[Sequence[Message]], str | None]
Reads = Callable[[Sequence[Message]], list[str]]


@dataclass(frozen=True, slots=True, kw_only=True)
class HistoryRules:
    """Which histories a template shows. `system`: a system message at the start; `more_systems`: several of them;
    `later_system`: one behind the start. `without_user`: system messages alone. `repeats`: turns of one role in a row.
    `after_result`: a user's message behind a tool's result. `interleaved`: the kinds of parts that the template writes
    in one answer behind parts of a later kind, as the model would."""

    system: bool = True
    more_systems: bool = True
    later_system: bool = True
    without_user: bool = True
    repeats: bool = True
    after_result: bool = True
    interleaved: frozenset[tuple[str, str]] = frozenset()


THINKING, TEXT, CALLS = "thinking", "text", "calls"
KINDS: Final = (THINKING, TEXT, CALLS)  # of the parts of an answer, in the order in which a message has them
ANY_HISTORY: Final = HistoryRules()


def kinds_of(message: Message) -> list[str]:
    """Return the kinds of parts that an assistant's message has, in their order."""
    has = {THINKING: message.get("reasoning_content"), TEXT: message.get("content"), CALLS: message.get("tool_calls")}
    return [kind for kind in KINDS if has[kind]]


def rules_of(writes: Writes, called: Sequence[Message], reads: Reads) -> HistoryRules:
    """Find the rules of a template. `writes` renders messages, None if they are refused. `called` are a question, a
    call and its result in the model's form; none if the template shows no calls. `reads` renders messages of the
    assistant as one answer and returns the kinds of the parts that the model's reader finds in it, in order."""

    def shows(*messages: Message) -> bool:
        text = writes(messages) or ""
        return all(message["content"] in text for message in messages if message["role"] != "assistant")

    system, later = ({"role": "system", "content": f"Probe {word}."} for word in ("system", "later"))
    more: Message = {"role": "user", "content": "Probe more."}
    return HistoryRules(
        system=shows(system, more),
        more_systems=shows(system, later, _ASKED),
        later_system=shows(system, _ASKED, _ANSWERED, later, more) and shows(system, _ASKED, later),
        without_user=shows(system),
        repeats=shows(_ASKED, more) and shows(_ASKED, _ANSWERED, _ANSWERED, more),
        after_result=not called or writes(called) is None or more["content"] in (writes([*called, more]) or ""),
        interleaved=frozenset(
            (later, kind)
            for kind, later in combinations(KINDS, 2)
            if reads([_probe(called, kind, later), _probe(called, kind, later)]) == [kind, later] * 2
        ),
    )


def _probe(called: Sequence[Message], *kinds: str) -> Message:
    """Return a message of the assistant with parts of these kinds, in the form of `called`."""
    own = called[1] if called and CALLS in kinds else _ANSWERED
    thought = _ANSWERED["content"] if THINKING in kinds else ""
    content = _ANSWERED["content"] if TEXT in kinds or CALLS not in kinds else own["content"]
    return {**own, "content": content, **({"reasoning_content": thought, "thinking": thought} if thought else {})}


class Adapted(NamedTuple):
    """Messages for a template. `begins` has for each given message the message that it is in, and the number of
    characters of content before it there."""

    messages: list[Message]
    begins: list[tuple[int, int]]

    def moved(self, point: Breakpoint) -> Breakpoint:
        """Return a breakpoint of the given messages as one of these."""
        message, before = self.begins[point.message]
        return Breakpoint(message, before + point.num_chars)


def adapted(messages: Sequence[Message], rules: HistoryRules) -> Adapted:
    """Return messages as the template takes them; the same ones if it takes all."""
    in_parts = any(before["role"] == after["role"] == "assistant" for before, after in pairwise(messages))
    continued = _continued(messages, rules.interleaved) if in_parts else {}
    if rules == ANY_HISTORY and not continued:
        return Adapted(list(messages), [(number, 0) for number in range(len(messages))])
    made = _Adapting(rules, continued)
    for number, message in enumerate(messages):
        made.add(number, message)
    return made.finished(len(messages))


class _Adapting:
    """The messages so far. `loose` are the places of texts of the system that are a user's now: they join what the user
    says beside them. One between a call and its result waits in `held`."""

    def __init__(self, rules: HistoryRules, continued: Mapping[int, bool]) -> None:
        self._rules, self._continued = rules, continued
        self._messages: list[Message] = []
        self._begins: dict[int, tuple[int, int]] = {}
        self._loose: set[int] = set()
        self._deferred: list[tuple[int, Message]] = []

    def add(self, number: int, message: Message) -> None:
        if message["role"] == "system":
            self._add_system(number, message)
            return
        if message["role"] != "tool":
            self._release()
        self._add(number, message)

    def finished(self, count: int) -> Adapted:
        self._release()
        if not self._rules.without_user and all(message["role"] == "system" for message in self._messages):
            self._messages[-1:] = [{**message, "role": "user"} for message in self._messages[-1:]]
        return Adapted(self._messages, [self._begins[number] for number in range(count)])

    def _add_system(self, number: int, message: Message) -> None:
        rules = self._rules
        at_start = all(each["role"] == "system" for each in self._messages)
        if rules.system and at_start and self._messages and not rules.more_systems:
            self._join(number, message)
        elif rules.system and (at_start or rules.later_system):
            self._append(number, message)
        elif self._messages and self._messages[-1].get("tool_calls"):
            self._deferred.append((number, message))
        else:
            self._add(number, {**message, "role": "user"}, loose=True)

    def _release(self) -> None:
        deferred, self._deferred = self._deferred, []
        for number, message in deferred:
            self._add(number, {**message, "role": "user"}, loose=True)

    def _add(self, number: int, message: Message, *, loose: bool = False) -> None:
        role, before = message["role"], self._messages[-1]["role"] if self._messages else ""
        is_beside = loose or len(self._messages) - 1 in self._loose
        repeats = role == before and role in ("user", "assistant") and (is_beside or not self._rules.repeats)
        repeats = self._continued.get(number, repeats)
        if repeats or (role == "user" and before == "tool" and not self._rules.after_result):
            self._join(number, message)
            return
        self._append(number, message)
        if loose:
            self._loose.add(len(self._messages) - 1)

    def _append(self, number: int, message: Message) -> None:
        self._begins[number] = (len(self._messages), 0)
        self._messages.append(message)

    def _join(self, number: int, message: Message) -> None:
        last = self._messages[-1]
        content = _joined(last["content"], message["content"])
        self._begins[number] = (len(self._messages) - 1, _num_chars(content) - _num_chars(message["content"]))
        joined = {**last, "content": content}
        if message.get("tool_calls"):
            joined["tool_calls"] = [*last.get("tool_calls", ()), *message["tool_calls"]]
        for name in ("reasoning_content", "thinking"):
            if thoughts := [each[name] for each in (last, message) if each.get(name)]:
                joined[name] = _BETWEEN.join(thoughts)
        if content and joined.get("tool_calls"):
            joined.pop("thinking", None)  # templates of that name take it beside one of the two
        self._messages[-1] = joined


def _continued(messages: Sequence[Message], interleaved: Collection[tuple[str, str]]) -> dict[int, bool]:
    """Return the numbers of messages that continue the answer of the message before, and whether each joins it. An
    answer is in several messages if the template writes all of its parts in their order."""
    found: dict[int, bool] = {}
    for role, run in groupby(enumerate(messages), lambda each: each[1]["role"]):
        numbers, parts = zip(*run, strict=True)
        if role == "assistant" and any(each.get("tool_calls") or each.get("reasoning_content") for each in parts):
            joins = _joins([kinds_of(each) for each in parts], interleaved)
            found |= dict(zip(numbers[1:], joins, strict=True))
    return found


def _joins(answer: Sequence[Sequence[str]], interleaved: Collection[tuple[str, str]]) -> list[bool]:
    """Return which messages of an answer join the one before, given the kinds of their parts."""
    joins, last = list[bool](), THINKING
    for number, kinds in enumerate(answer):
        if number:
            joins.append(not kinds or KINDS.index(last) <= KINDS.index(kinds[0]))
            if not joins[-1] and (last, kinds[0]) not in interleaved:
                return [True] * (len(answer) - 1)
        last = kinds[-1] if kinds else last
    return joins


def _joined(one: Any, other: Any) -> Any:
    if not (one and other):
        return other or one
    if isinstance(one, str) and isinstance(other, str):
        return f"{one}{_BETWEEN}{other}"
    return [*_parts(one), {"type": "text", "text": _BETWEEN}, *_parts(other)]


def _parts(content: Any) -> list[dict[str, str]]:
    return [{"type": "text", "text": content}] if isinstance(content, str) else list(content)


def _num_chars(content: Any) -> int:
    if not isinstance(content, list):
        return len(content or "")
    return sum(len(part["text"]) if "text" in part else IMAGE_CHARS for part in content)
