"""How long the hash model's rows are: for certain when a step's turn comes, within bounds when it is launched.

Shape letters: S sequences in the step, X of them extends, R rows.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from forebay.base.parts import I64, Mask
from forebay.requests.step_plan import StepPlan
from tests.simulation.device_memory import RunnerError, some


class Span:
    """What is known of a launched step's sequences, the tenants [S] of its rows: each begins behind at least `least`
    and at most `most` tokens [S]. Those differ while steps before it verify draft tokens."""

    def __init__(self, plan: StepPlan, tenants: I64, least: I64, most: I64) -> None:
        self.rows, self.q_lens, self.tenants = plan.rows, plan.q_lens, tenants
        self.decodes = np.arange(plan.num_seqs) >= plan.num_extends
        self.least, self.most = least, most
        self.ends: I64 = most + plan.q_lens  # the most tokens behind each of its sequences [S]
        self.num_narrowed = 0

    def narrow(self, more: I64, fewer: I64) -> None:
        """By what a step before it accepted beyond the certain, and rejected, of the tokens of each row [R]."""
        self.least += more[self.rows]
        self.most -= fewer[self.rows]
        self.ends -= fewer[self.rows]
        self.num_narrowed += 1


class RowLengths:
    """`kv_lens` [R] are the device's own: an extend's plan sets them, and each step takes them further by what it
    accepted. Of what the launched steps will leave, `least` and `most` [R] are the bounds."""

    def __init__(self, num_rows: int) -> None:
        self.kv_lens = np.zeros(num_rows, dtype=np.int64)
        self.least, self.most = self.kv_lens.copy(), self.kv_lens.copy()

    def launch(self, plan: StepPlan, tenants: I64) -> Span:
        """The step has been launched; its admissions are of new rows."""
        rows, extends = plan.rows, plan.rows[: plan.num_extends]
        new = {admission.row for admission in plan.admissions}
        self._check_starts(plan, np.array([row in new for row in extends.tolist()], dtype=bool))
        self.least[extends] = self.most[extends] = plan.starts
        for admission in plan.admissions:
            if admission.prebuilt:
                self.least[admission.row] = self.most[admission.row] = admission.kv_len
        span = Span(plan, tenants, self.least[rows], self.most[rows])
        self.most[rows] += plan.q_lens
        self.least[extends] += plan.q_lens[: plan.num_extends]
        self.least[rows[plan.num_extends :]] += 1
        return span

    def _check_starts(self, plan: StepPlan, new: Mask) -> None:
        under_way = plan.rows[: plan.num_extends][~new]
        least, most = self.least[under_way], self.most[under_way]
        if some(plan.starts[~new] != least) or some(least != most):
            raise RunnerError(f"step {plan.step} begins at {plan.starts[~new]}, the device has KV up to {most}")

    def begin(self, plan: StepPlan) -> I64:
        """It is the step's turn: how many tokens are in front of each of its sequences [S]."""
        self.kv_lens[plan.rows[: plan.num_extends]] = plan.starts
        starts: I64 = self.kv_lens[plan.rows]
        return starts

    def advance(self, span: Span, accepted: I64, later: Iterable[Span]) -> None:
        """The step computed `accepted` tokens of each sequence [S] that count; the spans of steps in flight, `later`,
        are narrower now."""
        self.kv_lens[span.rows] += accepted
        rejected = span.q_lens - accepted
        certain = np.where(span.decodes, 1, span.q_lens)
        if not (some(accepted > certain) or some(rejected > 0)):
            return
        more, fewer = np.zeros_like(self.kv_lens), np.zeros_like(self.kv_lens)
        more[span.rows], fewer[span.rows] = accepted - certain, rejected
        self.least += more
        self.most -= fewer
        for other in later:
            other.narrow(more, fewer)
