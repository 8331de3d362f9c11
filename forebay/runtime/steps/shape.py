"""The shapes of steps: what of a step is captured, how its columns are padded, and which positions are sampled from.

- `DecodeShape` captures last tokens to their successors, by the number of sequences. It samples each position.
- `VerifyShape` captures last tokens and drafts to the accepted ones, by the number of tokens. It samples each position.
- `ExtendShape` captures token ids to hidden states, by the number of tokens. It samples the last position of each
  sequence in `sample_mask`.

Shape letters: S sequences, T tokens, N positions that are sampled from, F entries of a proposer's input.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import Any, ClassVar, NamedTuple

from torch import Tensor

from forebay.memory.slots import Ids
from forebay.requests.step_plan import StepPlan
from forebay.runtime.graphs.runner import GraphRunner
from forebay.runtime.host.packing import Sections
from forebay.runtime.host.shape import Shape
from forebay.runtime.sampling.masks import Masked
from forebay.runtime.sampling.penalties import Span, spans_of
from forebay.runtime.sampling.prompt_logprobs import PromptChunk
from forebay.runtime.sampling.row_options import Sampling
from forebay.runtime.steps.forward import Forward, GreedyTokens, HiddenStates


class Step(NamedTuple):
    """A plan whose inputs are on the device. `sampling` and `masked` are of its N positions; `scored` are the extends
    whose prompt positions get log-probabilities."""

    plan: StepPlan
    inputs: Sections
    sampling: Sampling
    masked: Masked | None
    scored: list[PromptChunk]
    lost: tuple[int, ...] = ()  # copies of tiers that failed


class Computed(NamedTuple):
    """Results of the model for a step, valid until the next step of any runner. The greedy tokens are in `RequestRows`
    already."""

    greedy: GreedyTokens  # [N]
    input_ids: Tensor  # [T]
    seen: Tensor  # [T, F], as of `HiddenStates`
    positions: Tensor | None = None  # [T], of decodes
    num_new: Tensor | None = None  # [S], of decodes with drafts: the tokens that each sequence gets
    hidden: HiddenStates | None = None  # of steps with prompts


class StepShape(ABC):
    """One shape of steps. `captured` runs their fixed part, None if it is never captured; it pads each of the `padded`
    columns with the declared pad, and no other code pads."""

    shape: ClassVar[Shape]
    padded: ClassVar[Iterable[str]]
    captured: GraphRunner[Any, Any] | None

    def __init__(self, forward: Forward) -> None:
        self._forward = forward

    @abstractmethod
    def sampled_rows(self, plan: StepPlan) -> Ids:
        """Return the row of each position that is sampled from [N]."""

    @abstractmethod
    def run(self, step: Step) -> Computed:
        """Run the model over the step, in the smallest captured size that holds it."""

    def next_positions(self, step: Step, computed: Computed) -> Tensor:
        """Return the positions of the sampled tokens [N]."""
        assert computed.positions is not None
        return computed.positions + 1

    def accept(self, chosen: GreedyTokens, step: Step, computed: Computed) -> None:
        """Write `chosen` to `RequestRows` in place of the greedy tokens, and to `computed.num_new` how many stay."""
        rows = self._forward.rows
        self._forward.ops.steps.scatter(rows.last_tokens, step.inputs["sample_rows"], chosen.token_ids)

    def spans(self, step: Step) -> list[Span]:
        """Return the sampled positions of each row."""
        return spans_of(step.sampling.rows)

    def settle(self) -> None:
        """Do the work that follows the choice of tokens, if the captured step has any."""
        if self.captured is not None:
            self.captured.settle()

    def outcome(self, chosen: GreedyTokens, step: Step, computed: Computed) -> list[Tensor]:
        """Return what the host is sent: a token id of each sequence [S], FAILED if a value of it is not finite."""
        return [chosen.or_failed()]
