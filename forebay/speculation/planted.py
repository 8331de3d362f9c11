"""Drafts that `forebay verify` plants: the known answer, with a wrong token at a place that changes from step to step.

A natural proposer is right or wrong as the model pleases. With planted drafts each request has drafts that are accepted
up to every length, and so a rejection behind every number of accepted tokens. It has steps without a draft, too.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from forebay.config.engine_config import KnownAnswer
from forebay.requests.request import Request


@dataclass(slots=True)
class _Known:
    """The answers that are known of a request's prompt, and how many drafts the request had."""

    answers: Sequence[KnownAnswer]
    num_drafts: int = 0


class Planted:
    """A `Proposer`. Of the answers to a prompt it takes the first one that begins like the request's output."""

    def __init__(self, answers: Sequence[KnownAnswer]) -> None:
        self._answers: dict[tuple[int, ...], list[KnownAnswer]] = defaultdict(list)
        for answer in answers:
            self._answers[answer.prompt].append(answer)
        self._known: dict[int, _Known] = {}  # by the request's id

    def begin_step(self, num_requests: int) -> None:
        """Do nothing: the work of a step is bounded by its draft tokens."""

    def propose(self, req: Request, most: int) -> Sequence[int]:
        """Return the next tokens of the known answer. In one draft after the other token 0, 1, 2, ... is wrong, then
        none; then there is no draft. Requests begin with different ones."""
        known = self._known.get(req.id)
        if known is None:
            prompt = tuple(req.tokens[: req.num_prompt])
            known = self._known[req.id] = _Known(self._answers.get(prompt, ()), num_drafts=req.id)
        output = tuple(req.tokens[req.num_prompt :])
        start = len(output)
        answer = next((one for one in known.answers if one.tokens[:start] == output), None)
        if answer is None:
            return ()
        draft = list(answer.tokens[start : start + most])
        wrong = known.num_drafts % (most + 2)
        known.num_drafts += 1
        if wrong > most:
            return ()
        if wrong < len(draft):
            draft[wrong] = answer.alternatives[start + wrong]
        return draft

    def ended(self, req: Request) -> None:
        """Forget the request."""
        self._known.pop(req.id, None)
