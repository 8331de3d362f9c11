"""The comparison as a whole: ask alone, then in every circumstance, until a budget of time is spent."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from forebay.base.errors import ForebayError, Unavailable
from forebay.verify.remote.circumstances import Circumstance, Group, at_another, circumstances
from forebay.verify.remote.questions import Question
from forebay.verify.remote.server import Options, RateLimited, Refused, Server, new_salt
from forebay.verify.remote.session import Alone, Findings, Session
from forebay.verify.verdict import Verdict, first_error

_ALONE_SHARE: Final = 1 / 16  # of the budget; each circumstance takes at least as long
_CACHE_OPTIONS: Final = {"vllm": "--enable-prompt-tokens-details", "sglang": "--enable-cache-report"}  # by `owned_by`


@dataclass(slots=True)
class Outcome:
    """The result of one circumstance. `what`: how far it came about, or why it did not. `size` is that of a batch."""

    name: str
    group: Group
    verdict: Verdict
    what: str
    size: int = 0
    findings: Findings = field(default_factory=Findings)
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Unanswered:
    """A question without an answer alone: left out if the server does not take it or limits the rate, else failed."""

    question: Question
    reason: str
    verdict: Verdict


class Comparison:
    """Answers of `servers[0]` in all circumstances, and those of the other servers, beside its answers alone.

    `budget_s` is the time that all of it may take.
    """

    def __init__(
        self, servers: Sequence[Server], questions: Sequence[Question], *, max_tokens: int, seed: int, budget_s: float
    ) -> None:
        self.servers, self.questions, self.max_tokens = servers, questions, max_tokens
        self._seed, self._budget_s = seed, budget_s
        self._deadline = time.monotonic() + budget_s
        self.alone: list[Alone] = []
        self.unanswered: list[Unanswered] = []
        others = [at_another(server.url) for server in servers[1:]]
        self.circumstances = [*circumstances(), *others]

    async def ask_alone(self) -> None:
        """Ask each question alone, short prompts first, until a share of the budget is spent or a request fails.

        Raises Refused if the server takes none of them, Unavailable if none is answered within the budget, and
        whatever else the first of them failed with.
        """
        server = self.servers[0]
        until = time.monotonic() + self._budget_s * _ALONE_SHARE
        for question in self.questions:
            if self.alone and time.monotonic() > until:
                break
            salt = new_salt()
            try:
                async with asyncio.timeout(self._deadline - time.monotonic()):
                    reply = await server.ask(question.fields, self.max_tokens, Options(salt=salt))
            except TimeoutError:
                if self.alone:
                    break
                raise Unavailable(
                    f"{server.url} has answered nothing within the budget of {self._budget_s:g} s"
                ) from None
            except ForebayError as error:
                self.unanswered.append(_unanswered(question, error))
                if isinstance(error, Refused):
                    continue
                if not self.alone:
                    raise
                break
            server.gives_logprobs = server.gives_logprobs and bool(reply.tokens or not reply.text)
            self.alone.append(Alone(question, reply, salt))
        if not self.alone:
            raise Refused(f"no question was answered; the first error: {self.unanswered[0].reason}")

    async def outcome(self, circumstance: Circumstance) -> Outcome:
        """Ask the questions in one circumstance, at most until the budget is spent."""
        began = time.monotonic()
        if began >= self._deadline:
            return self._ended(circumstance, Verdict.LEFT_OUT, f"the budget of {self._budget_s:.0f} s was spent")
        if not self.alone:
            return self._ended(circumstance, Verdict.LEFT_OUT, "no question has the same answer twice")
        rng = random.Random(f"{self._seed} {circumstance.name}")
        session = Session(self._server(circumstance), self.alone, self.max_tokens, rng)
        outcome = await self._played(circumstance, session)
        if circumstance.group is Group.REPEATED:
            self._leave_out(session.findings)
        return replace(outcome, findings=session.findings, seconds=time.monotonic() - began)

    def _leave_out(self, findings: Findings) -> None:
        """Ask no further the questions that are answered differently when repeated: any circumstance would seem to
        change them."""
        unstable = {difference.question for difference in findings.differences}
        self.alone = [one for one in self.alone if one.question.number not in unstable]

    def _server(self, circumstance: Circumstance) -> Server:
        others = {f"at {server.url}": server for server in self.servers[1:]}
        return others.get(circumstance.name, self.servers[0])

    async def _played(self, circumstance: Circumstance, session: Session) -> Outcome:
        findings, cut = session.findings, ""
        try:
            async with asyncio.timeout(self._deadline - time.monotonic()):
                await circumstance.play(session)
        except TimeoutError:
            cut = "the budget ended meanwhile"
        except (ForebayError, ExceptionGroup) as failure:
            return self._ended(circumstance, Verdict.FAILED, first_error(failure).message)
        shown = circumstance.shown(session)
        what = ", ".join(filter(None, (shown, cut)))
        if findings.differences:
            return self._ended(circumstance, Verdict.DIFFERENT, what)
        if not shown or not findings.num_answers:
            return self._ended(circumstance, Verdict.NOT_SHOWN, what or _why_not(circumstance, session))
        return self._ended(circumstance, Verdict.SAME, what)

    def _ended(self, circumstance: Circumstance, verdict: Verdict, what: str) -> Outcome:
        return Outcome(circumstance.name, circumstance.group, verdict, what, circumstance.size)


def _unanswered(question: Question, error: ForebayError) -> Unanswered:
    verdict = Verdict.LEFT_OUT if isinstance(error, (Refused, RateLimited)) else Verdict.FAILED
    return Unanswered(question, error.message, verdict)


def _why_not(circumstance: Circumstance, session: Session) -> str:
    if circumstance.group is Group.CACHE and session.findings.cached_tokens is None:
        option = _CACHE_OPTIONS.get(session.server.owner)
        return "the server does not report cached tokens" + (f", unless it is started with {option}" if option else "")
    if circumstance.group is Group.FORM and not session.server.gives_logprobs:
        return "the server returns no log-probabilities"
    return ""


def verdict_text(outcomes: Sequence[Outcome]) -> str:
    """Return what the answers depend on and where requests failed, in one sentence."""
    different = [outcome for outcome in outcomes if outcome.verdict is Verdict.DIFFERENT]
    shown = sum(outcome.verdict in (Verdict.SAME, Verdict.DIFFERENT) for outcome in outcomes)
    found = [_unrepeated(outcome) for outcome in different if outcome.group is Group.REPEATED]
    if causes := _causes(different):
        found.append(f"answers depend on {' and on '.join(causes)}")
    if not shown:
        found.append("no circumstance was shown")
    elif not different:
        found.append(f"no answer differs in the {shown} circumstances that were shown")
    if num_failed := sum(outcome.verdict is Verdict.FAILED for outcome in outcomes):
        found.append(f"requests failed in {num_failed}")
    return "; ".join(found)


def _causes(different: Sequence[Outcome]) -> list[str]:
    """Return what answers depend on: the smallest batch that changes one first, then each other group once."""
    sizes = [outcome.size for outcome in different if outcome.group is Group.BATCH]
    batch = [f"the batch, from {min(sizes)} request{'s' * (min(sizes) > 1)} beside it on"] if sizes else []
    groups = {outcome.group for outcome in different}
    return [*batch, *(cause for group, cause in _CAUSES.items() if group in groups)]


def _unrepeated(outcome: Outcome) -> str:
    differences = outcome.findings.differences
    ways = ", ".join(dict.fromkeys(difference.way for difference in differences))
    num, salted = len(differences), outcome.findings.num_salted
    how = "with another cache_salt" if salted == num else "when repeated"
    return f"{num} of {outcome.findings.num_answers} requests ({ways}) are answered differently {how}"


_CAUSES: Final = {
    Group.ARRIVALS: "prompts that arrive meanwhile",
    Group.FORM: "the form in which they are asked for",
    Group.CACHE: "the prefix cache",
    Group.ABORTS: "an aborted request before them",
    Group.SERVERS: "the server that is asked",
}
