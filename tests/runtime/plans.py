"""Plans made by hand, carried out by a runner: rows, pages and admissions without a scheduler."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain

import numpy as np

from forebay.memory.slots import PAD
from forebay.requests.sampling_params import SamplingParams
from forebay.requests.step_plan import Admission, Launched, StepPlan, StepResult
from forebay.runtime import ModelRunner
from tests.plans import plan_of

Decode = int | tuple[int, Sequence[int] | int]


def ids(values: Sequence[int]) -> np.ndarray:
    return np.array(values, dtype=np.int64)


def known(tokens: Sequence[int]) -> np.ndarray:
    return np.array(tokens, dtype=np.int32)


class Planner:
    """Builds the plan of each step from what rows hold so far. Pages are dealt in a seeded shuffle and never shared."""

    def __init__(
        self, runner: ModelRunner, *, page_size: int, num_rows: int, pages_per_row: int, seed: int = 0
    ) -> None:
        self.runner, self.page_size = runner, page_size
        deal = np.random.default_rng(seed).permutation(num_rows * pages_per_row) + 1
        self.pages = np.concatenate([np.zeros((1, pages_per_row), np.int64), deal.reshape(num_rows, pages_per_row)])
        self.prompts: dict[int, list[int]] = {}
        self.adapters: Mapping[int, int] = {}  # by row the slot of its adapter
        self.lens = np.zeros(num_rows + 1, dtype=np.int64)
        self.wanting_prompt_logprobs: set[int] = set()
        self._admissions: list[Admission] = []
        self._writes: list[tuple[int, int, int]] = []
        self._step = 0

    def admit(
        self, row: int, tokens: Sequence[int], params: SamplingParams | None = None, *, num_prompt: int | None = None
    ) -> None:
        """Hand `row` to a request that brings `tokens`, in the next plan."""
        params = params or SamplingParams(temperature=0.0)
        self.prompts[row], self.lens[row] = list(tokens), 0
        self.wanting_prompt_logprobs.discard(row)
        if params.prompt_logprobs >= 0:
            self.wanting_prompt_logprobs.add(row)
        count = len(tokens) if num_prompt is None else num_prompt
        self._admissions.append(
            Admission(
                row=row,
                request_id=row,
                params=params,
                token_ids=known(tokens),
                num_prompt=count,
                adapter=self.adapters.get(row, PAD),
            )
        )

    def plan(self, extends: Sequence[tuple[int, int]] = (), decodes: Sequence[Decode] = ()) -> StepPlan:
        """Extends are (row, number of tokens); decodes a row, or (row, its drafts), or (row, the number of those that
        are on the device already)."""
        known = [(row, []) if isinstance(row, int) else row for row in decodes]
        counts = [drafts if isinstance(drafts, int) else len(drafts) for _, drafts in known]
        rows, q_lens = [row for row, _ in extends] + [row for row, _ in known], [n for _, n in extends]
        q_lens += [1 + n for n in counts]
        starts = self.lens[rows] if rows else ids([])
        for row, start, n in zip(rows, starts.tolist(), q_lens, strict=True):
            columns = range(-(-start // self.page_size), -(-(start + n) // self.page_size))
            self._writes += [(row, column, int(self.pages[row, column])) for column in columns]
            self.lens[row] = start + n
        brought = (self.prompts[row][start : start + n] for (row, n), start in zip(extends, starts, strict=False))
        sampled = [int(self.lens[row]) == len(self.prompts[row]) for row, _ in extends] + [True] * len(decodes)
        writes, self._writes = self._writes, []
        admissions, self._admissions = tuple(self._admissions), []
        self._step += 1
        return plan_of(
            step=self._step,
            num_extends=len(extends),
            rows=ids(rows),
            q_lens=ids(q_lens),
            starts=starts[: len(extends)].copy(),
            input_ids=ids(list(chain(*brought))),
            drafts=ids([token for _, drafts in known if not isinstance(drafts, int) for token in drafts]),
            sample_mask=np.array(sampled, dtype=np.bool_),
            write_rows=ids([row for row, _, _ in writes]),
            write_columns=ids([column for _, column, _ in writes]),
            write_pages=ids([page for _, _, page in writes]),
            admissions=admissions,
            prompt_logprobs=tuple(i for i, (row, _) in enumerate(extends) if row in self.wanting_prompt_logprobs),
        )

    def launch(self, extends: Sequence[tuple[int, int]] = (), decodes: Sequence[Decode] = ()) -> Launched:
        return self.runner.launch(self.plan(extends, decodes))

    def step(self, extends: Sequence[tuple[int, int]] = (), decodes: Sequence[Decode] = ()) -> StepResult:
        return self.settle(plan := self.plan(extends, decodes), self.runner.launch(plan).result())

    def settle(self, plan: StepPlan, result: StepResult) -> StepResult:
        """Rows are as long as their accepted tokens say."""
        if result.num_new is not None:
            self.lens[plan.rows] -= plan.q_lens - ids(result.num_new)
        return result
