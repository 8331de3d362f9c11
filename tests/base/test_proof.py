"""The proof of the cluster key: bound to its message, for one use, for a minute."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.base.proof import VALID_S, BadProof, Fault, Message, Proofs, digest_of, prove

KEY = b"cluster-canary-0123456789"
NOW = 1_800_000_000.0
ROOM = {"x-forebay-bootstrap-room": "5"}
SENT = Message(method="POST", target="/v1/completions?a=1", host="10.0.0.2:30000", bootstrap=ROOM)
BODY = digest_of(b'{"prompt": "a"}')


class Clock:
    now = NOW

    def __call__(self) -> float:
        return self.now


def proofs(clock: Clock | None = None, most: int = 100) -> Proofs:
    return Proofs(KEY, clock or Clock(), most)


def fault_of(checked: Proofs, value: str, message: Message = SENT) -> Fault:
    with pytest.raises(BadProof) as bad:
        checked.check(value, message)
    return bad.value.fault


def test_proof_holds_for_its_message_and_returns_the_digest_of_the_body() -> None:
    assert proofs().check(prove(KEY, SENT, BODY, NOW), SENT) == BODY


@pytest.mark.parametrize(
    "changed",
    [
        replace(SENT, method="GET"),
        replace(SENT, target="/v1/completions"),
        replace(SENT, target="/v1/completions?a=2"),
        replace(SENT, host="10.0.0.3:30000"),
        replace(SENT, bootstrap={}),
        replace(SENT, bootstrap={**ROOM, "x-forebay-bootstrap-host": "10.0.0.7"}),
        replace(SENT, bootstrap={"x-forebay-bootstrap-room": "6"}),
        replace(SENT, bootstrap={"x-forebay-bootstrap-port": "5"}),
    ],
)
def test_proof_of_another_message_is_refused(changed: Message) -> None:
    checked = proofs()
    assert fault_of(checked, prove(KEY, SENT, BODY, NOW), changed) == Fault.WRONG
    assert checked.check(prove(KEY, changed, BODY, NOW), changed) == BODY


def test_proof_of_another_key_and_each_altered_character_are_refused() -> None:
    checked, value = proofs(), prove(KEY, SENT, BODY, NOW)
    assert fault_of(checked, prove(b"another", SENT, BODY, NOW)) == Fault.WRONG
    for place, char in enumerate(value):
        other = value[:place] + ("0" if char != "0" else "1") + value[place + 1 :]
        assert fault_of(checked, other) == Fault.WRONG, place
    assert checked.check(value, SENT) == BODY, "what was refused has used nothing up"


@given(
    st.text(max_size=200) | st.from_regex(r"[0-9]{1,20}\.[0-9a-f]{30,34}\.[0-9a-f]{64}\.[0-9a-f]{64}", fullmatch=True)
)
def test_proof_in_any_other_form_is_refused(value: str) -> None:
    assert fault_of(proofs(), value) == Fault.WRONG


def test_proof_is_taken_once() -> None:
    checked, value = proofs(), prove(KEY, SENT, BODY, NOW)
    checked.check(value, SENT)
    assert fault_of(checked, value) == Fault.USED
    checked.check(prove(KEY, SENT, BODY, NOW), SENT)  # the same message again, with a proof of its own


@pytest.mark.parametrize(
    ("late_s", "holds"), [(VALID_S, True), (VALID_S + 1, False), (-VALID_S, True), (-VALID_S - 1, False)]
)
def test_proof_of_another_minute_is_refused_with_the_difference_of_the_clocks(late_s: float, holds: bool) -> None:
    clock = Clock()
    clock.now = NOW - 10 * VALID_S
    checked = proofs(clock)
    clock.now = NOW
    value = prove(KEY, SENT, BODY, NOW - late_s)
    if holds:
        assert checked.check(value, SENT) == BODY
        return
    with pytest.raises(BadProof, match=r"61 s (behind|ahead of) this machine's, and 60 s are allowed") as bad:
        checked.check(value, SENT)
    assert bad.value.fault == Fault.EXPIRED


def test_proof_is_never_taken_twice_however_many_come_and_however_long_it_is_kept() -> None:
    clock = Clock()
    checked, sent = proofs(clock, most=10), []
    for number in range(60):
        clock.now = NOW + 3 * number
        sent.append(prove(KEY, SENT, BODY, clock.now))
        checked.check(sent[-1], SENT)
        for value in sent:
            assert fault_of(checked, value) in (Fault.USED, Fault.EXPIRED)
    assert len(checked._seen) <= 10


def test_proofs_that_are_forgotten_in_another_order_than_they_were_made_stay_used() -> None:
    clock = Clock()
    checked = proofs(clock, most=3)
    clock.now = NOW + 30
    made = [prove(KEY, SENT, BODY, NOW + at) for at in (20, 5, 10, 25, 30, 28)]
    for value in made:
        try:
            checked.check(value, SENT)
        except BadProof as bad:
            assert bad.fault == Fault.USED  # older than one that is forgotten  # noqa: PT017
    assert {fault_of(checked, value) for value in made} == {Fault.USED}


def test_proof_from_before_the_start_of_the_process_is_refused() -> None:
    """The process before this one may have taken it."""
    clock = Clock()
    value = prove(KEY, SENT, BODY, NOW)
    clock.now = NOW + 1
    assert fault_of(proofs(clock), value) == Fault.USED
