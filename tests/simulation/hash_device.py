"""A hash runner over pools that a test itself hands out, and the plans of those who hold something of them."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from typing import Any

import numpy as np
import pytest

from forebay.base.parts import I64
from forebay.config.engine_config import Ledger, SchedulerConfig
from forebay.memory.kinds.window.windows import Windows
from forebay.memory.req_to_token_pool import ReqToTokenPool
from forebay.memory.slots import Slots
from forebay.requests.sampling_params import SamplingParams
from forebay.requests.step_plan import Admission, StepPlan
from tests.kinds_of import kind_config
from tests.plans import plan_of
from tests.simulation.device_memory import RunnerError
from tests.simulation.hash_runner import HashRunner, Propose
from tests.simulation.hash_step import Pools
from tests.simulation.hashing import HashModel

PAGE, WINDOW, SALT = 2, 3, 7
MODEL = HashModel(vocab=1000, window=WINDOW, recurrent=True)
PROMPT = [3, 1, 4, 1, 5, 9, 2]


def ids(*values: int) -> I64:
    return np.array(values, dtype=np.int64)


class Tenant:
    """What a request holds, as a scheduler would give it: a row, pages, their windows, a live slot and a spare one."""

    def __init__(
        self,
        device: Device,
        number: int,
        prompt: Sequence[int],
        *,
        row: int | None = None,
        num_pages: int = 6,
        cached: Sequence[int] = (),
    ) -> None:
        self.number, self.prompt, self.row = number, list(prompt), row or number
        own = device.kv.take_ids(num_pages - len(cached), number)
        self.pages = np.concatenate([ids(*cached), own])
        device.windows.take(own, number)
        self.live, self.spare = device.states.take_ids(2, number).tolist()
        self.num_tokens = 0


class Device:
    """A runner over pools that the test itself hands out."""

    def __init__(self, model: HashModel = MODEL, *, propose: Propose | None = None, **changes: Any) -> None:
        self.kv, self.rows, self.states = Slots("kv", 40), Slots("rows", 4), Slots("state", 12)
        self.windows = Windows(40, 40, ReqToTokenPool(4, 80, page_size=PAGE), window=WINDOW)
        config = SchedulerConfig(
            page_size=PAGE,
            num_pages=40,
            max_running_requests=4,
            context_length=16,
            ledger=Ledger.RAISE,
            kinds=kind_config(num_slots=12, num_window_pages=40, window=WINDOW),
            **changes,
        )
        self.rows.take_ids(4, 1)
        pools = Pools(
            kv=self.kv,
            rows=self.rows,
            windows=self.windows if model.window else None,
            states=self.states if model.recurrent else None,
        )
        self.runner = HashRunner(config, pools, model, salt=lambda request_id: SALT, propose=propose)
        self.num_steps = 0

    def step(self, tenant: Tenant, stop: int, *, start: int | None = None, **changes: Any) -> StepPlan:
        """The plan of a tenant's next tokens up to `stop`; the first such plan admits it."""
        first = tenant.num_tokens == 0
        start = tenant.num_tokens if start is None else start
        extends = start < len(tenant.prompt)
        tenant.num_tokens, self.num_steps = stop, self.num_steps + 1
        count = len(tenant.pages) if first else 0
        known: dict[str, Any] = {
            "step": self.num_steps,
            "num_extends": int(extends),
            "rows": ids(tenant.row),
            "q_lens": ids(stop - start),
            "starts": ids(start) if extends else ids(),
            "input_ids": ids(*tenant.prompt[start:stop]),
            "sample_mask": np.array([stop >= len(tenant.prompt)]),
            "write_rows": np.full(count, tenant.row),
            "write_columns": np.arange(count),
            "write_pages": tenant.pages[:count],
            "map_pages": tenant.pages[:count],
            "map_windows": self.windows.map.full_to_window[tenant.pages[:count]].astype(np.int64),
            "state_slots": ids(tenant.live),
            "clears": ids(tenant.live) if first and not start else ids(),
        }
        if first:
            params = SamplingParams(temperature=0.0)
            known["admissions"] = (
                Admission(
                    row=tenant.row,
                    request_id=tenant.number,
                    params=params,
                    token_ids=np.array(tenant.prompt, dtype=np.int32),
                    num_prompt=len(tenant.prompt),
                ),
            )
        return plan_of(**{**known, **changes})

    def run(self, *plans: StepPlan) -> list[int]:
        tokens: list[int] = []
        for plan in plans:
            self.runner.poison_free(())
            tokens += self.runner.launch(plan).result().token_ids
        return tokens


def right(prompt: Sequence[int], count: int, model: HashModel = MODEL) -> list[int]:
    return [generated.token_id for generated in islice(model.generate(prompt, salt=SALT, seed=0), count)]


def refused(device: Device, plan: StepPlan, why: str) -> None:
    with pytest.raises(RunnerError, match=why):
        device.run(plan)
