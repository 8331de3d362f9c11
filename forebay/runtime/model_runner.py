"""Carries plans out on the real model.

Shape letters: S sequences, T tokens, N sequences that sample, V vocabulary, H hidden size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final

import msgspec
import numpy as np
import torch
from torch import Tensor

from forebay.base.parts import I32
from forebay.base.sampling import DRAWS
from forebay.memory.slots import PAD
from forebay.models.network import Network
from forebay.ops import Ops
from forebay.ops.exchange import ALONE, Exchange
from forebay.pools.cache_pool import CachePool
from forebay.pools.mover import Mover
from forebay.pools.request_rows import RequestRows
from forebay.requests.sampling_params import SamplingParams
from forebay.requests.step_plan import NO_HOST_WORK, WORK_OF, Admission, Launched, StepPlan, kind_work
from forebay.runtime.graphs.backends import GraphBackend
from forebay.runtime.graphs.runner import GraphRunner
from forebay.runtime.host.bounds import PoolBounds
from forebay.runtime.host.shape import Shape
from forebay.runtime.host.tier_stores import TierStore
from forebay.runtime.host.to_host import ToHost
from forebay.runtime.sampling.masks import Masked
from forebay.runtime.sampling.penalties import Penalties
from forebay.runtime.sampling.pooling import Pooler, Vectors
from forebay.runtime.sampling.prompt_logprobs import ScoredChunk, score, targets_of
from forebay.runtime.sampling.row_options import RowOptions
from forebay.runtime.steps.chooser import Chooser
from forebay.runtime.steps.decode import DecodeShape
from forebay.runtime.steps.extend import ExtendShape
from forebay.runtime.steps.forward import Forward, HiddenStates
from forebay.runtime.steps.inputs import StepInputs
from forebay.runtime.steps.launched import CopiedStep, LaunchedStep
from forebay.runtime.steps.pictures import Encodings
from forebay.runtime.steps.proposer import DeviceProposer
from forebay.runtime.steps.shape import Step, StepShape
from forebay.runtime.steps.verify import VerifyShape

# More rows than the kernels for few of them take: those of AMX 16. On two cores with AVX2 32 rows of a 4B model in int4
# took 1.9 s of CPU time of the 3.1 of a second start (benchmarks/load.py).
_WARM_UP_TOKENS: Final = 17


def warm_up_steps(max_num_tokens: int, row_tokens: int, width: int) -> list[tuple[int, int]]:
    """Return the steps of one sequence that the warm-up runs, as (number of extends, tokens).

    No step has more than `max_num_tokens`, for which its inputs have memory, nor than `row_tokens`, which a row holds.
    """
    length = min(_WARM_UP_TOKENS, max_num_tokens, row_tokens)
    drafts = [(0, 2)] if width > 1 else []
    return [(1, length), (0, 1), *drafts]


def no_masks(step: int) -> I32:
    raise AssertionError(f"step {step} has sequences under a grammar, and there are no grammars")


class ModelRunner:
    """A `Runner` over a model, its KV pool and its request rows. Launched steps run in the order of their launch.

    `take_masks` says of a step which tokens may come where a grammar decides that, as `Grammars.take` does.

    Owns the device's side of everything: the host learns sampled tokens and log-probabilities, nothing else (C11).
    """

    def __init__(
        self,
        model: Network,
        ops: Ops,
        *,
        cache: CachePool,
        rows: RequestRows,
        vocab_size: int,
        max_num_tokens: int,
        graphs: GraphBackend,
        graph_sizes: Sequence[int],
        proposer: Callable[[Forward], DeviceProposer] | None = None,
        taps: tuple[int, ...] | None = None,
        take_masks: Callable[[int], I32] = no_masks,
        encodings: Encodings | None = None,
        make_tiers: Callable[[Mover], Mapping[str, TierStore]] = lambda mover: {},
        exchange: Exchange = ALONE,
    ) -> None:
        self.cache, self.rows, self.encodings, width = cache, rows, encodings, 1 + rows.draft_tokens.shape[1]
        self._model, self._ops = model, ops
        self._vocab_size, self._max_num_tokens = vocab_size, max_num_tokens
        self._bounds = self._pool_bounds(width)
        self._exchange = exchange
        self._forward = Forward(model, ops, rows, cache, taps, encodings, exchange)
        self.proposer = None if proposer is None else proposer(self._forward)
        self.mover = cache.mover
        self.inputs = StepInputs(
            self._forward,
            self.mover,
            max_num_tokens=max_num_tokens,
            proposer=self.proposer,
            tiers=make_tiers(self.mover),
        )
        self.decode = DecodeShape(self._forward, sizes=graph_sizes, backend=graphs)
        self.verify: VerifyShape | None = None  # None: no decode has drafts
        if width > 1:
            most = rows.num_rows * width
            self.verify = VerifyShape(self._forward, most=most, vocab_size=vocab_size, backend=graphs)
        self.extend = ExtendShape(self._forward, max_num_tokens=max_num_tokens, backend=graphs)
        shapes = (self.decode, self.verify, self.extend)
        self.shapes: dict[Shape, StepShape] = {shape.shape: shape for shape in shapes if shape is not None}
        self._options = RowOptions(rows.num_rows)
        self._penalties = Penalties(vocab_size, rows.last_tokens.device)
        self._take_masks = take_masks
        self._chooser = Chooser(ops, rows, self._penalties, exchange)
        self._pooler = Pooler(model.logits)
        totals = {kind.name: kind.counts for kind in self._forward.kinds if kind.counts is not None}
        self._totals, self._counted = [*totals.values()], {name: len(each) for name, each in totals.items()}

    def _pool_bounds(self, width: int) -> PoolBounds:
        adapters = self._model.adapters
        return PoolBounds(
            num_rows=self.rows.num_rows,
            pages_per_row=self.rows.req_to_token.shape[1],
            page_size=self.cache.page_size,
            vocab_size=self._vocab_size,
            num_slots=self.cache.num_ids,
            width=width,
            num_adapters=0 if adapters is None else adapters.slots.max_loras,
            num_encodings=0 if self.encodings is None else self.encodings.num_rows,
        )

    @torch.inference_mode()
    def launch(self, plan: StepPlan) -> Launched:
        """Carry the plan out in its order: copies to the host, admissions and writes, copies from the host, the model,
        the sampling. IndexOutOfPool or NoHostCopy, with nothing done, for a plan that names what there is not.
        """
        self._check(plan)
        for admission in plan.admissions:
            for by_row in (self._options, self._penalties, self._pooler):
                by_row.admit(admission)
        shape = self.shapes[Shape.of(plan)]
        step = self._stage(plan, shape)
        if plan.num_seqs:
            return self._run(step, shape)
        return CopiedStep(step.lost, self.mover.written() if plan.host.fetches else None)

    def _check(self, plan: StepPlan) -> None:
        self._bounds.check(plan)
        for kind in self._forward.kinds:
            kind.check(plan)
        if plan.host is not NO_HOST_WORK:
            self.inputs.check(plan)

    def _stage(self, plan: StepPlan, shape: StepShape) -> Step:
        """Send the step's inputs, with the drafts that it verifies if they are made on the device, and encode."""
        sampling = self._options.sampling(shape.sampled_rows(plan))
        scored = self._options.prompt_chunks(plan)
        masked = Masked.of(plan, self._take_masks)
        inputs = self.inputs.stage(plan, shape.shape, sampling, targets_of(scored))
        if self.proposer is not None:
            self.proposer.before(plan, inputs)
        if self.encodings is not None:
            self.encodings.encode(plan.pictures)
        lost = () if plan.host is NO_HOST_WORK else self.inputs.tiers.take_lost()
        return Step(plan, inputs, sampling, masked, scored, lost)

    def _run(self, step: Step, shape: StepShape) -> LaunchedStep:
        """Run the model, choose tokens, and send them to the host. Raises EngineError if another rank has ended."""
        plan, sampling, computed = step.plan, step.sampling, shape.run(step)
        decoded = None if plan.num_extends else shape.captured
        chunks, vectors = self._of_prompts(step, computed.hidden) if computed.hidden else ((), None)
        chosen = computed.greedy
        if step.masked or sampling.not_greedy:
            chosen = self._chooser.choose(step, shape, computed)
        shape.settle()
        self._exchange.check()
        launched = LaunchedStep(
            self._vocab_size,
            token_ids=self._to_host(shape.outcome(chosen, step, computed)),
            sample_mask=plan.sample_mask if len(sampling.rows) < plan.num_seqs else None,
            sampling=sampling,
            logprobs=self._chooser.logprobs(computed.greedy.logits, chosen, step.inputs, sampling),
            chunks=chunks,
            q_lens=None if computed.num_new is None else plan.q_lens,
            vectors=vectors,
            counted=self._counted,
            lost=step.lost,
            replayed=decoded is not None and decoded.replayed,
            padded=decoded is not None and decoded.padded,
        )
        if self.proposer is not None:
            self.proposer.after(plan, step.inputs, computed.input_ids, computed.seen)
        return launched

    def _of_prompts(self, step: Step, ran: HiddenStates) -> tuple[tuple[ScoredChunk, ...], Vectors | None]:
        """Compute the log-probabilities and vectors of prompts."""
        logits, targets = self._model.logits, step.inputs["targets"]
        chunks = score(step.scored, ran.hidden, targets, logits, self._vocab_size) if step.scored else ()
        return chunks, self._pooler.pool(step.plan, ran.hidden) if step.plan.pooled else None

    def _to_host(self, ids: list[Tensor]) -> ToHost:
        """Send token ids to the host, and behind them the totals that kinds of cache count."""
        parts = ids + self._totals
        return ToHost(parts[0] if len(parts) == 1 else torch.cat(parts))

    @torch.inference_mode()
    def capture_next(self) -> bool:
        """Capture one more size, in idle time; False when all are. One that is needed sooner does not wait."""
        return any(runner.capture_next() for runner in self._captured)

    def drop_graphs(self) -> None:
        """Nothing may be in flight."""
        for runner in self._captured:
            runner.drop_graphs()

    @property
    def _captured(self) -> Iterator[GraphRunner[Any, Any] | DeviceProposer]:
        captured = (shape.captured for shape in self.shapes.values())
        return (runner for runner in (*captured, self.proposer) if runner is not None)

    def warm_up(self) -> None:
        """Run steps of each kind on the padding row, so that the first request finds code and buffers in memory."""
        examples = {number.name: number.example for number in DRAWS if number.example is not None}
        drawing = msgspec.structs.replace(SamplingParams(), **examples)
        greedy = SamplingParams(temperature=0.0)
        row_tokens = self.rows.req_to_token.shape[1] * self.cache.page_size
        steps = warm_up_steps(self._max_num_tokens, row_tokens, self._bounds.width)
        steps = steps if self._model.generates else steps[:1]
        for step, (num_extends, q_len) in enumerate(steps):
            params = drawing if num_extends else greedy
            self.launch(self._plan_of_padding(step, params, num_extends, q_len)).result()
        # The last admission left the row greedy; what else the steps wrote is put back.
        self.rows.reset_padding()
        self.cache.reset_padding()
        if self.proposer is not None:
            self.proposer.reset_padding()

    def _plan_of_padding(self, step: int, params: SamplingParams, num_extends: int, q_len: int) -> StepPlan:
        """An extend or a decode of the padding row: its KV goes to the padding page, its state to the padding slot."""
        lengths, no_tokens = {"S": 1}, np.empty(0, dtype=np.int32)
        kinds = {name: part.padding(lengths) for name, part in WORK_OF.items() if self.cache.has(name)}
        padding = StepPlan.padding(lengths)
        plan = StepPlan(
            step=step,
            num_extends=num_extends,
            rows=padding["rows"],
            q_lens=np.full(1, q_len, dtype=np.int64),
            starts=np.zeros(num_extends, dtype=np.int64),
            input_ids=np.zeros(q_len * num_extends, dtype=np.int64),
            sample_mask=np.full(1, self._model.generates, dtype=np.bool_),
            admissions=(Admission(row=PAD, request_id=0, params=params, token_ids=no_tokens, num_prompt=0),),
            kinds=kind_work(kinds),
        )
        return msgspec.structs.replace(plan, **padding)
