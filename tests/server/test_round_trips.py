"""Answers that clients send back: the next prompt repeats what the chat template can, and says why not more."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from forebay.engine.client.choice import Run
from forebay.server.api.core.answered import MOST_ANSWERS, MOST_SESSIONS, TAIL_TOKENS, Answered
from forebay.text.answers.parts import CallArguments, Said, Thought
from tests.server.round_trips import CLIENTS, GUIDE, HEAD, Chat, Rig, row_of, trips
from tests.text.answers.templates import MANNERS, QWEN3_THINKING, Manner
from tests.text.in_process import templates_in_this_process

PROMPT = list(range(100, 200))
RUNS = [Run(None, 2), Run(Thought, 10), Run(None, 2), Run(Said, 5), Run(None, 3), Run(CallArguments, 8), Run(None, 2)]
# Removes the thinking of answers before the last question, as Qwen 3's own template does.
FORGETS = QWEN3_THINKING.replace("m.reasoning_content %}", "m.reasoning_content and messages[-1].role != 'user' %}")


@pytest.fixture(scope="module", autouse=True)
def in_this_process() -> Iterator[None]:
    with templates_in_this_process():
        yield


@pytest.mark.quick(2)
@pytest.mark.parametrize("name", MANNERS)
def test_round_trip_of_each_format_is_whole_or_has_a_reason_and_that_of_the_guide(name: str) -> None:
    """`python -m tests.server.round_trips --write` makes the guide's table."""
    rig = Rig(MANNERS[name])
    try:
        found = [trips(rig, kind) for kind in CLIENTS]
    finally:
        rig.close()
    for results, question in found[:3]:  # Ollama's clients name no session, which is told of no difference
        assert (results.reused == results.possible) == (results.reason == "")
        assert (question.reused == question.possible) == (question.reason == "")
    assert row_of(name, found) in guide_rows()


def guide_rows() -> list[str]:
    """Return the lines of the guide's table of round trips."""
    return GUIDE.read_text().partition(HEAD[0])[2].partition("\n\n")[0].splitlines()[2:]


def test_guide_has_the_round_trip_of_each_format_in_their_order() -> None:
    assert [line.split(" | ")[0] for line in guide_rows()] == [f"| {name}" for name in MANNERS]


def test_thinking_that_a_template_removes_later_is_named_behind_the_next_question() -> None:
    rig = Rig(Manner(FORGETS, "hermes", "think", opens=True))
    try:
        for kind in CLIENTS[:3]:
            results, question = trips(rig, kind)
            assert (results.reused, results.reason) == (results.possible, "")
            assert (question.reused, question.reason) == (0, "thinking_removed")
    finally:
        rig.close()


class Careless(Chat):
    """Sends arguments with another white space, and no thinking, back."""

    def take(self, answer: dict) -> None:  # type: ignore[type-arg]
        super().take(answer)
        for message in self.history:
            message.pop("reasoning_content", None)


def test_client_that_drops_thinking_learns_that_it_is_removed() -> None:
    rig = Rig(MANNERS["Qwen 3"])
    try:
        results, _ = trips(rig, Careless)
    finally:
        rig.close()
    assert results.reason == "thinking_removed"
    assert results.reused < results.possible


def noted(*, opened: bool = False, runs: list[Run] = RUNS) -> Answered:
    answered = Answered()
    answered.note("me", PROMPT, runs, opened=opened)
    return answered


@pytest.mark.parametrize(
    ("offset", "reason"),
    [
        (-TAIL_TOKENS - 1, "text_changed"),
        (-1, "template"),
        (0, "thinking_removed"),
        (2, "thinking_removed"),
        (9, "text_changed"),
        (12, "template"),
        (14, "text_changed"),
        (19, "template"),
        (22, "arguments_rewritten"),
        (29, "arguments_rewritten"),
        (31, "template"),
        (40, "text_changed"),
    ],
)
def test_reason_is_that_of_the_part_at_the_place(offset: int, reason: str) -> None:
    prompt = [*PROMPT, *range(1000, 1100)]
    assert noted().reason("me", prompt, len(PROMPT) + offset) == reason


def test_reason_in_the_tail_of_an_opened_prompt_is_the_thinking() -> None:
    assert noted(opened=True).reason("me", PROMPT, len(PROMPT) - 2) == "thinking_removed"


def test_reason_is_not_that_of_another_session_or_another_prompt() -> None:
    answered, at = noted(), len(PROMPT) + 22
    assert answered.reason("other", [*PROMPT, *range(100)], at) == "text_changed"
    assert answered.reason("me", [1, *PROMPT[1:], *range(100)], at) == "text_changed"


@pytest.mark.parametrize("num_tokens", [1, TAIL_TOKENS, TAIL_TOKENS + 1])
def test_reason_tail_of_a_prompt_is_whatever_the_template_wrote_there(num_tokens: int) -> None:
    answered, changed = Answered(), [1] * TAIL_TOKENS
    answered.note("me", PROMPT[:num_tokens], RUNS, opened=False)
    head = PROMPT[: max(0, num_tokens - TAIL_TOKENS)]
    assert answered.reason("me", [*head, *changed], len(head)) == "template"


def test_reason_is_that_of_the_longest_prompt_that_is_repeated() -> None:
    answered = noted()
    longer = [*PROMPT, *range(1000, 1100)]
    answered.note("me", longer, [Run(CallArguments, 9)], opened=False)
    assert answered.reason("me", [*longer, *range(50)], len(longer) + 3) == "arguments_rewritten"
    assert answered.reason("me", [*longer, *range(50)], len(PROMPT)) == "thinking_removed"


def test_answers_are_bounded_by_session_and_in_all() -> None:
    answered = Answered()
    for number in range(MOST_ANSWERS + 5):
        answered.note("me", [*PROMPT, *range(number, number + TAIL_TOKENS)], RUNS, opened=False)
        answered.note("me", [number, *PROMPT], RUNS, opened=False)
    assert len(answered._sessions["me"]) == MOST_ANSWERS
    for number in range(MOST_SESSIONS + 5):
        answered.note(str(number), PROMPT, RUNS, opened=False)
    assert len(answered._sessions) == MOST_SESSIONS
    assert "me" not in answered._sessions


def test_thinking_that_the_prompt_opens_is_read_whatever_the_length_of_its_tag() -> None:
    """Each byte of the tag is a token here: `<think:opensource>` has 18."""
    rig = Rig(MANNERS["Hy3 as published"])
    try:
        found = [trips(rig, kind) for kind in CLIENTS]
    finally:
        rig.close()
    assert {(trip.reused == trip.possible, trip.reason) for pair in found for trip in pair} == {(True, "")}
