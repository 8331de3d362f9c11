"""The shapes of steps."""

from __future__ import annotations

from enum import Enum, auto

from forebay.requests.step_plan import StepPlan


class Shape(Enum):
    """The shape of a step that runs a plan: a step of decodes of one token each, of decodes with drafts, or of any
    tokens."""

    DECODES = auto()
    DRAFTS = auto()
    TOKENS = auto()

    @classmethod
    def of(cls, plan: StepPlan) -> Shape:
        """Return the shape that the plan needs. A plan without sequences is of any tokens."""
        if plan.num_extends or not plan.num_seqs:
            return cls.TOKENS
        return cls.DECODES if plan.num_tokens == plan.num_seqs else cls.DRAFTS
