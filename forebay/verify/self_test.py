"""A test of the verification itself: faults are planted in its engines, one at a time, and must be found."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from forebay.base import fault
from forebay.memory.kv_allocator import KV
from forebay.verify.circumstances import Circumstance
from forebay.verify.pictures import PICTURES
from forebay.verify.run import Verification
from forebay.verify.verdict import Verdict

LEAST_QUESTIONS: Final = 18
"""With 8 questions, too few decode at once on deepseek_v3, glm_moe_dsa and deepseek_v4 for an unpadded tail to change a
token."""
LEAST_TOKENS: Final = 24
"""With answers of 8 to 16 tokens, too few decode at once on llama and deepseek_v4."""


@dataclass(frozen=True, slots=True)
class PlantedFault:
    """A fault of `engine/loop/planted.py`, what it does, and the circumstance that must find it. A model without slots
    of the kind `needs`, or without pictures, cannot have it."""

    name: str
    about: str
    circumstance: str
    needs: str = ""


FAULTS: Final = (
    PlantedFault("page_of_another", "a page of another request", "coming and going", needs=KV),
    PlantedFault("state_late", "a state one token late", "from the prefix cache", needs="state"),
    PlantedFault("uncleared_slot", "an uncleared slot", "coming and going", needs="state"),
    # If a model keeps states alone, a padded row writes that of the padding slot, and its last token is written again
    # by a step that draws.
    PlantedFault("unpadded_tail", "an unpadded tail", "coming and going", needs=KV),
    PlantedFault("penalties_of_previous", "penalties of an earlier request", "one by one again, backwards"),
    PlantedFault("penalties_lost", "penalties lost in a retraction", "retracted"),
    PlantedFault("stale_host_copy", "a stale host copy", "retracted to the host"),
    PlantedFault("chunk_altered", "a chunk altered after checking", "prefill and decode apart, tcp"),
    PlantedFault("adapter_of_neighbour", "an adapter's neighbour", "adapters beside the model"),
    PlantedFault("delta_of_previous", "a picture's delta", "pictures beside texts", needs=PICTURES),
)


class Found(StrEnum):
    """The result of one fault."""

    DETECTED = "detected"
    MISSED = "missed"
    LEFT_OUT = "left out"  # the model or the machine cannot have it
    NOT_SHOWN = "not shown"  # the circumstance is not the same without the fault


@dataclass(frozen=True, slots=True)
class Detection:
    """The result of one fault. `what` says how its circumstance ended, or why it was left out."""

    fault: PlantedFault
    found: Found
    what: str


async def self_test(verification: Verification, faults: Sequence[PlantedFault] = FAULTS) -> AsyncIterator[Detection]:
    """Yield the result of each fault. The questions must have been asked alone, without a fault.

    A fault counts as detected only if its circumstance changes no answer without it."""
    by_name = {one.name: one for one in verification.circumstances}
    clean: dict[str, Detection | None] = {}
    for planted in faults:
        if planted.needs and planted.needs not in verification.baseline.kinds:
            yield Detection(planted, Found.LEFT_OUT, f"the model has no {planted.needs}")
            continue
        circumstance = by_name[planted.circumstance]
        if circumstance.name not in clean:
            clean[circumstance.name] = await _unfit(verification, circumstance, planted)
        unfit = clean[circumstance.name]
        yield unfit or await _detection(verification, circumstance, planted)


async def _unfit(verification: Verification, circumstance: Circumstance, planted: PlantedFault) -> Detection | None:
    """Run the circumstance without a fault. Return the result if it can find none, None if it can."""
    outcome = await verification.outcome(circumstance)
    if outcome.verdict is Verdict.SAME:
        return None
    found = Found.LEFT_OUT if outcome.verdict is Verdict.LEFT_OUT else Found.NOT_SHOWN
    return Detection(planted, found, f"without a fault {outcome.verdict}: {outcome.what}")


async def _detection(verification: Verification, circumstance: Circumstance, planted: PlantedFault) -> Detection:
    with fault.plants(planted.name):
        outcome = await verification.first_difference(circumstance)
    found = Found.DETECTED if outcome.verdict in (Verdict.DIFFERENT, Verdict.FAILED) else Found.MISSED
    differences = outcome.findings.differences
    first = f", token {differences[0].place} of prompt {differences[0].number}" if differences else f": {outcome.what}"
    return Detection(planted, found, f"{outcome.verdict}{first}")
