"""The host's copy of each row's sampling options, so that no step has to ask the device."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from forebay.base.sampling import DRAWS
from forebay.memory.slots import NO_IDS, Ids
from forebay.requests.sampling_params import SamplingParams
from forebay.requests.step_plan import Admission, StepPlan
from forebay.runtime.sampling.prompt_logprobs import PromptChunk
from forebay.runtime.sampling.sampler import COLUMNS, Wants


class Sampling(NamedTuple):
    """How tokens are chosen at N positions, each of a row in `rows`: what any of them wants, and at which of them (by
    index) one is drawn; where log-probabilities are wanted, and of how many alternatives each."""

    rows: Ids
    wants: Wants
    drawing: Ids = NO_IDS
    reporting: Ids = NO_IDS
    num_top: Ids = NO_IDS

    @property
    def not_greedy(self) -> bool:
        """Whether any of them wants other than the most likely token."""
        return self.wants != Wants.GREEDY and bool(self.wants & (Wants.ADJUST | Wants.DRAW))


class RowOptions:
    """Indexed by request row; set when a row is handed out."""

    def __init__(self, num_rows: int) -> None:
        self._wants = np.zeros(num_rows, dtype=np.int64)
        self._num_top = np.full(num_rows, -1, dtype=np.int64)  # alternatives per sampled token, -1 for nothing
        self._prompts: dict[int, npt.NDArray[np.int64]] = {}  # of rows whose prompt's log-probabilities are wanted
        self._prompt_top: dict[int, int] = {}

    def admit(self, admission: Admission) -> None:
        row, params = admission.row, admission.params
        self._wants[row] = wants_of(params)
        self._num_top[row] = params.logprobs
        self._prompts.pop(row, None)
        if params.prompt_logprobs >= 0:
            self._prompts[row] = admission.token_ids.astype(np.int64)
            self._prompt_top[row] = params.prompt_logprobs

    def sampling(self, rows: Ids) -> Sampling:
        wants = self._wants[rows]
        bits = int(np.bitwise_or.reduce(wants))
        if not bits:  # first: it costs a step of greedy decodes no arithmetic on flags
            return Sampling(rows, Wants.GREEDY)
        union = Wants(bits)
        drawing = np.flatnonzero(wants & Wants.DRAW) if union & Wants.DRAW else NO_IDS
        if not union & Wants.LOGPROBS:
            return Sampling(rows, union, drawing)
        reporting = np.flatnonzero(wants & Wants.LOGPROBS)
        return Sampling(rows, union, drawing, reporting, self._num_top[rows[reporting]])

    def prompt_chunks(self, plan: StepPlan) -> list[PromptChunk]:
        """Return the extends whose tokens get log-probabilities."""
        if not plan.prompt_logprobs:
            return []
        firsts = np.cumsum(plan.q_lens) - plan.q_lens
        return [self._prompt_chunk(plan, extend, int(firsts[extend])) for extend in plan.prompt_logprobs]

    def _prompt_chunk(self, plan: StepPlan, extend: int, first: int) -> PromptChunk:
        row, start, stop = int(plan.rows[extend]), int(plan.starts[extend]), int(plan.ends[extend])
        return PromptChunk(extend, first, stop - start, self._prompts[row][start + 1 : stop + 1], self._prompt_top[row])


def wants_of(params: SamplingParams) -> Wants:
    wants = Wants.GREEDY
    if params.adjusts:
        wants |= Wants.ADJUST
    if params.logprobs >= 0:
        wants |= Wants.LOGPROBS
    if params.greedy:
        return wants
    for number in DRAWS:
        if getattr(params, number.name) != number.neutral:
            wants |= COLUMNS[number.name]
    return wants
