"""The last answers of each session: the reasons for which a later prompt leaves one of them."""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Final, Literal, TypeAlias

from forebay.engine.client.choice import Run
from forebay.text.answers.parts import CallArguments, Thought

Reason: TypeAlias = Literal["thinking_removed", "arguments_rewritten", "text_changed", "template"]

MOST_SESSIONS: Final = 256
MOST_ANSWERS: Final = 32  # of one session
MOST_RUNS: Final = 256  # of one answer
TAIL_TOKENS: Final = 32  # of a prompt: more than a template writes there for the model to begin an answer with
_START_TOKENS: Final = 4  # of the thinking, which the text behind it may have in common with it


@dataclass(frozen=True, slots=True)
class _Answer:
    """`prompt` is the digest of the prompt without its tail. If `opened`, the prompt ends within the thinking."""

    prompt: bytes
    num_prompt_tokens: int
    opened: bool
    runs: tuple[Run, ...]

    def reason(self, offset: int) -> Reason | None:
        """Return why the token `offset` of the answer has changed, a negative one of the prompt's tail; None behind the
        answer."""
        if offset < 0:
            return "thinking_removed" if self.opened else "template"
        for number, run in enumerate(self.runs):
            if offset < run.num_tokens:
                return self._reason_in(number, offset)
            offset -= run.num_tokens
        return None

    def _reason_in(self, number: int, offset: int) -> Reason:
        """Return why the token `offset` of a run has changed. Marks before the thinking go with it."""
        kind = self.runs[number].kind
        if kind is None:
            thinks = [run.kind for run in self.runs[number + 1 : number + 2]] == [Thought]
            return "thinking_removed" if thinks else "template"
        if kind is CallArguments:
            return "arguments_rewritten"
        return "thinking_removed" if kind is Thought and offset < _START_TOKENS else "text_changed"


@dataclass(slots=True)
class Answered:
    """Belongs to the event loop. No text is kept. The sessions whose last answer is oldest are dropped first."""

    _sessions: OrderedDict[str, OrderedDict[bytes, _Answer]] = field(default_factory=OrderedDict)

    def note(self, session: str, prompt: Sequence[int], runs: Sequence[Run], *, opened: bool) -> None:
        """Keep the kinds of an answer's tokens; no-op for an answer that was not read."""
        if not runs or len(runs) > MOST_RUNS:
            return
        digest = _digest(prompt, len(prompt) - TAIL_TOKENS)
        answers = self._sessions.setdefault(session, OrderedDict())
        self._sessions.move_to_end(session)
        answers[digest] = _Answer(digest, len(prompt), opened, tuple(runs))
        answers.move_to_end(digest)
        if len(answers) > MOST_ANSWERS:
            answers.popitem(last=False)
        if len(self._sessions) > MOST_SESSIONS:
            self._sessions.popitem(last=False)

    def reason(self, session: str, prompt: Sequence[int], position: int) -> Reason:
        """Return why a prompt of the session left a cached one at `position`. Outside of all known answers a text of
        the client's has changed."""
        known = self._sessions.get(session, OrderedDict[bytes, _Answer]()).values()
        for answer in sorted(known, key=lambda each: each.num_prompt_tokens, reverse=True):
            end = answer.num_prompt_tokens - TAIL_TOKENS
            if end <= position and _digest(prompt, end) == answer.prompt:
                found = answer.reason(position - answer.num_prompt_tokens)
                if found is not None:
                    return found
        return "text_changed"


def _digest(prompt: Sequence[int], num_tokens: int) -> bytes:
    return blake2b(array("I", prompt[: max(0, num_tokens)]).tobytes(), digest_size=16).digest()
