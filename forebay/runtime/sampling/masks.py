"""Positions of a step whose next tokens a grammar restricts.

Shape letters: M positions under a grammar, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from forebay.base.parts import I32
from forebay.memory.slots import inside
from forebay.requests.step_plan import StepPlan


class Masked(NamedTuple):
    """Positions [M] of those that are sampled from, and the source of their words [M, V / 32, rounded up]."""

    at: Tensor
    take: Callable[[], I32]

    @classmethod
    def of(cls, plan: StepPlan, take: Callable[[int], I32]) -> Masked | None:
        """None if no sequence is under a grammar. Call it before the model runs: afterwards the CPU's caches hold the
        model's weights, and the interpreter takes a multiple of the time."""
        if not len(plan.masked):
            return None
        if plan.num_seqs == plan.num_tokens and not plan.num_extends:
            return cls(torch.from_numpy(plan.masked.copy()), partial(take, plan.step))
        counts = plan.sample_mask.astype(np.int64)
        counts[plan.num_extends :] *= plan.q_lens[plan.num_extends :]
        firsts, counts = (np.cumsum(counts) - counts)[plan.masked], counts[plan.masked]
        return cls(torch.from_numpy(np.repeat(firsts, counts) + inside(counts)), partial(take, plan.step))
