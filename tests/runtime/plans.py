"""Plans made by hand, carried out by a runner: rows, pages and admissions without a scheduler."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from forebay.requests.sampling_params import SamplingParams
from forebay.requests.step_plan import Admission, StepPlan, StepResult
from forebay.runtime import LaunchedStep, ModelRunner
from tests.plans import plan_of


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
            Admission(row=row, request_id=row, params=params, token_ids=known(tokens), num_prompt=count)
        )

    def plan(self, extends: Sequence[tuple[int, int]] = (), decodes: Sequence[int] = ()) -> StepPlan:
        """Extends are (row, number of tokens)."""
        q_lens = [n for _, n in extends] + [1] * len(decodes)
        rows = [row for row, _ in extends] + list(decodes)
        locations: list[int] = []
        input_ids: list[int] = []
        for i, (row, n) in enumerate(zip(rows, q_lens, strict=True)):
            start, stop = int(self.lens[row]), int(self.lens[row]) + n
            if i < len(extends):
                input_ids += self.prompts[row][start:stop]
            for position in range(start, stop):
                page, offset = divmod(position, self.page_size)
                if offset == 0 or (position == start and start == 0):
                    self._writes.append((row, page, int(self.pages[row, page])))
                locations.append(int(self.pages[row, page]) * self.page_size + offset)
            self.lens[row] = stop
        seq_lens = self.lens[rows] if rows else ids([])
        sampled = [int(self.lens[row]) == len(self.prompts[row]) for row, _ in extends] + [True] * len(decodes)
        writes, self._writes = self._writes, []
        admissions, self._admissions = tuple(self._admissions), []
        self._step += 1
        return plan_of(
            step=self._step,
            num_extends=len(extends),
            rows=ids(rows),
            q_lens=ids(q_lens),
            seq_lens=seq_lens.copy(),
            out_cache_loc=ids(locations),
            input_ids=ids(input_ids),
            sample_mask=np.array(sampled, dtype=np.bool_),
            write_rows=ids([row for row, _, _ in writes]),
            write_columns=ids([column for _, column, _ in writes]),
            write_pages=ids([page for _, _, page in writes]),
            admissions=admissions,
            prompt_logprobs=tuple(i for i, (row, _) in enumerate(extends) if row in self.wanting_prompt_logprobs),
        )

    def launch(self, extends: Sequence[tuple[int, int]] = (), decodes: Sequence[int] = ()) -> LaunchedStep:
        return self.runner.launch(self.plan(extends, decodes))

    def step(self, extends: Sequence[tuple[int, int]] = (), decodes: Sequence[int] = ()) -> StepResult:
        return self.launch(extends, decodes).result()
