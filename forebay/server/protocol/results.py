"""Calls of a history and their results: each call has one result, behind the answer with the call."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final, Generic, Protocol, TypeVar

from forebay.base.errors import InvalidRequest
from forebay.server.protocol.validation import INVALID_COMBINATION


class _Call(Protocol):
    @property
    def id(self) -> str: ...


class _Message(Protocol):
    """The fields of a chat's message that matter here."""

    @property
    def role(self) -> str: ...

    @property
    def tool_calls(self) -> Sequence[_Call] | None: ...

    @property
    def tool_call_id(self) -> str | None: ...


M = TypeVar("M", bound=_Message)
_MOST_NAMED: Final = 3  # ids in an error


@dataclass(slots=True)
class _Round(Generic[M]):
    """Messages of the assistant in a row, the ids of their calls, and the messages behind them up to the next answer.
    `results` are the results of these calls, also those from behind later messages."""

    calls: list[str] = field(default_factory=list)
    messages: list[M] = field(default_factory=list)
    num_answers: int = 0
    results: list[M] = field(default_factory=list)

    def has_open(self, call: str) -> bool:
        """Return whether a call of this id has no result yet."""
        return self.calls.count(call) > sum(result.tool_call_id == call for result in self.results)

    def check_ids(self) -> None:
        """Raise InvalidRequest for two calls of one id, and for a result of no call or a second one."""
        for call in self.calls:
            if self.calls.count(call) > 1:
                raise _refused(f"two calls of one answer have the id {call!a}: give each call an id of its own")
        for message in self.messages:
            if message.role == "tool":
                raise _refused(
                    f"the result of {message.tool_call_id!a} is of no call before it, or the second one of its call: "
                    "send each call, and behind it one result with its id"
                )

    def check_whole(self) -> None:
        """Raise InvalidRequest for calls without a result."""
        if open_calls := [call for call in self.calls if self.has_open(call)]:
            ids = ", ".join(f"{call!a}" for call in open_calls[:_MOST_NAMED])
            what = f"{len(open_calls)} of {len(self.calls)} calls have no result ({ids})"
            raise _refused(f"{what}: send one for each call")

    def ordered(self) -> Iterator[M]:
        """Yield the answer, the results in the order of its calls, and the other messages."""
        yield from self.messages[: self.num_answers]
        yield from sorted(self.results, key=lambda result: self.calls.index(result.tool_call_id or ""))
        yield from self.messages[self.num_answers :]


def _rounds(messages: Sequence[M]) -> Iterator[_Round[M]]:
    rounds = [_Round[M]()]
    for message in messages:
        last = rounds[-1]
        if message.role == "tool":
            call = message.tool_call_id or ""
            own = next((each for each in reversed(rounds) if each.has_open(call)), None)
            if own is None:
                last.messages.append(message)
            else:
                own.results.append(message)
            continue
        if message.role == "assistant":
            if len(last.messages) > last.num_answers or last.results:
                last = _Round[M]()
                rounds.append(last)
            last.num_answers += 1
            last.calls += [call.id for call in message.tool_calls or ()]
        last.messages.append(message)
    yield from rounds


def in_order(messages: list[M]) -> list[M]:
    """Return the history with the results of an answer's calls behind it, in the order of the calls. Most templates
    show no id with a result, so that the model knows a result by its place. Results of no call stay where they are."""
    return [message for each in _rounds(messages) for message in each.ordered()]


def check_results(messages: Sequence[M], *, unfinished: bool = False) -> None:
    """Raise InvalidRequest unless the ids of one answer's calls differ and each call has exactly one result behind it.
    The servers of OpenAI and Anthropic refuse these, too. If `unfinished`, the calls of the last answer may have none:
    the model continues it."""
    rounds = [*_rounds(messages)]
    for each in rounds:
        each.check_ids()
    for each in rounds[:-1] if unfinished else rounds:
        each.check_whole()


def _refused(what: str) -> InvalidRequest:
    return InvalidRequest(what, code=INVALID_COMBINATION, param="messages")
