"""Requests under a grammar: what the scheduler asks of the grammars, and when it waits for them (C16, C25)."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from forebay.base.errors import EngineError, InvalidRequest
from forebay.memory.slots import NO_IDS
from forebay.requests.request import Request
from forebay.requests.sampling_params import Grammar, GrammarKind, SamplingParams
from forebay.scheduler.grammars import Constraints
from forebay.scheduler.halt import weights_changed
from tests.deadlines import HANGS_S, NEVER_S
from tests.scheduler.rig import Rig

REGEX = SamplingParams(max_tokens=8, grammar=Grammar(GrammarKind.REGEX, "a*"))


class Asked:
    """Grammars that note each call. Those of `unready` requests are not compiled, those of `refuses` cannot be."""

    def __init__(self) -> None:
        self.calls: list[Any] = []
        self.unready: set[int] = set()
        self.refuses: set[int] = set()
        self.failure: EngineError | None = None

    def begin(self, req: Request) -> None:
        self.calls.append(("begin", req.id, req.num_output))

    def ready(self, req: Request) -> bool:
        if req.id in self.refuses:
            raise InvalidRequest("it is no grammar")
        return req.id not in self.unready

    def wait(self, timeout_s: float) -> None:
        self.calls.append(("wait", timeout_s))

    def drafts(self, req: Request, drafts: Sequence[int], most: int) -> list[int]:
        return [req.id, most, *drafts]

    def fill(self, step: int, wanted: Sequence[tuple[Request, Sequence[int]]]) -> None:
        self.calls.append((step, [(req.id, [*drafts]) for req, drafts in wanted]))

    def error(self, req: Request) -> EngineError | None:
        return self.failure

    def ended(self, req: Request) -> None:
        self.calls.append(("ended", req.id))


def requests(*with_grammar: bool) -> tuple[Asked, Constraints, list[Request]]:
    """Requests 1, 2, ..., which have or have no grammar."""
    asked = Asked()
    constraints = Constraints(asked)
    reqs = [Request(1 + i, [5] * 9, REGEX if has else SamplingParams()) for i, has in enumerate(with_grammar)]
    for req in reqs:
        if req.params.grammar:
            constraints.begin(req)
    asked.calls.clear()
    return asked, constraints, reqs


def chunk(req: Request, start: int, stop: int) -> tuple[Request, int, int]:
    req.maybe_allocation = SimpleNamespace(extend_target=9)  # type: ignore[assignment]
    return req, start, stop


def test_constraints_of_a_step_are_those_of_last_chunks_and_of_decodes_with_their_drafts() -> None:
    asked, constraints, reqs = requests(True, True, False, True, False, True)
    chunks = [chunk(reqs[0], 0, 9), chunk(reqs[1], 0, 8), chunk(reqs[2], 0, 9)]  # 2 has another chunk to come
    draft = SimpleNamespace(
        step=7, chunks=chunks, num_drafts=np.array([1, 2, 1]), draft_tokens=[40, 50, 51, 60], masked=NO_IDS
    )
    assert constraints.fill(draft, reqs[3:]).tolist() == [0, 3, 5]  # type: ignore[assignment]
    assert asked.calls == [(7, [(1, []), (4, [40]), (6, [60])])]
    draft = SimpleNamespace(step=8, chunks=[], num_drafts=None, draft_tokens=[])
    assert constraints.fill(draft, [reqs[4], reqs[5]]).tolist() == [1]  # type: ignore[assignment]
    assert asked.calls[1:] == [(8, [(6, [])])]


def test_constraints_of_a_step_of_others_are_none() -> None:
    asked, constraints, reqs = requests(True, False, False)
    draft = SimpleNamespace(
        step=1, chunks=[chunk(reqs[0], 0, 8), chunk(reqs[1], 0, 9)], num_drafts=None, draft_tokens=[]
    )
    assert constraints.fill(draft, reqs[2:]).tolist() == []  # type: ignore[assignment]
    assert asked.calls == []


def test_constraints_block_rows_whose_token_is_in_flight_or_whose_grammar_is_not_compiled() -> None:
    asked, constraints, reqs = requests(True, True, False, True)
    asked.unready = {2}
    assert [*constraints.refused()] == []
    assert [*constraints.unready] == [2]
    blocked = constraints.blocked_rows(reqs, [[reqs[0], reqs[2]]])
    assert blocked.tolist() == [True, True, False, False]
    assert blocked.dtype == np.bool_
    constraints.wait(NEVER_S)
    asked.unready.clear()
    assert [*constraints.refused()] == []
    constraints.wait(HANGS_S)
    assert asked.calls == [("wait", NEVER_S)], "nothing is compiled any more"


def test_constraints_refused_grammar_is_named_with_its_request_and_others_go_on() -> None:
    asked, constraints, reqs = requests(True, True)
    asked.refuses = {1}
    [(refused, error)] = constraints.refused()
    assert (refused, str(error)) == (reqs[0], "it is no grammar")
    assert [*constraints.unready] == [1]
    constraints.ended(reqs[0])
    assert ([*constraints.living], [*constraints.unready], asked.calls) == ([2], [], [("ended", 1)])


def test_constraints_leave_requests_without_a_grammar_their_drafts_and_no_error() -> None:
    asked, constraints, [constrained, free] = requests(True, False)
    asked.failure = EngineError("nothing may follow")
    assert constraints.allowed_drafts(constrained, [8, 9], 3) == [1, 3, 8, 9]
    assert constraints.allowed_drafts(free, [8, 9], 3) == [8, 9]
    assert (constraints.error(constrained), constraints.error(free)) == (asked.failure, None)


def test_constraints_of_an_engine_without_grammars_refuse_one() -> None:
    with pytest.raises(InvalidRequest, match="knows no grammars") as caught:
        Constraints(None).begin(Request(1, [5], REGEX))
    assert caught.value.param == "grammar"


def test_c25_output_that_begins_again_with_other_weights_begins_its_grammar_again() -> None:
    rig, asked = Rig(), Asked()
    rig.scheduler.queues.constraints = Constraints(asked)
    begun, free, waits = rig.add(5, params=REGEX), rig.add(5), rig.add(5, params=REGEX)
    for req in (begun, free):  # retracted with tokens of the old weights
        req.tokens.append(6)
        rig.scheduler.queues.num_waiting_tokens += 1
    asked.calls.clear()
    assert [*rig.scheduler.queues.constraints.refused()] == []
    weights_changed(rig.scheduler, 1)
    assert [call[:2] for call in asked.calls] == [("begin", begun.id)]
    assert [*rig.scheduler.queues.constraints.unready] == [begun.id], "its matcher is another one"
    assert [req.num_output for req in (begun, free, waits)] == [0, 0, 0]
