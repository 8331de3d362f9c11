"""The runner's interface to proposers that draft tokens on the device. The host knows how many, and not which."""

from __future__ import annotations

from typing import Final, Protocol

import torch
from torch import Tensor

from forebay.requests.step_plan import StepPlan
from forebay.runtime.host.packing import Array, Sections

DRAFTING: Final = {
    "drafting_rows": torch.int32,  # of decodes with drafts
    "num_drafts": torch.int32,  # of each
    "chunk_rows": torch.int32,  # of prompts that go on behind the step
    "chunk_next": torch.int64,  # their next tokens
    "built_before": torch.int64,  # of rows that begin with what came from elsewhere the last tokens that have KV
}
"""What the device is told for its proposer besides the plan's own columns."""


class DeviceProposer(Protocol):
    """A drafter cannot change a token: a draft is accepted if the sampler chooses the same token."""

    def arrays(self, plan: StepPlan) -> dict[str, Array]:
        """Return the arrays of `DRAFTING` that this plan has."""
        ...

    def before(self, plan: StepPlan, inputs: Sections) -> None:
        """A step is about to run, whose changes to the page table are made: write the drafts that the plan asks for to
        `RequestRows.draft_tokens`. Only now do a row's pages reach as far as these."""
        ...

    def after(self, plan: StepPlan, inputs: Sections, input_ids: Tensor, seen: Tensor) -> None:
        """A step has run: its tokens input_ids [T] and what the model made of them, seen [T, F], valid until the next
        graph runs or is captured. `last_tokens` and `kv_lens` are as it leaves them."""
        ...

    def capture_next(self) -> bool:
        """As `ModelRunner.capture_next`."""
        ...

    def drop_graphs(self) -> None: ...

    def reset_padding(self) -> None: ...
