"""Carries plans out on the real model.

Shape letters: S sequences, T tokens, N sequences that sample, V vocabulary, H hidden size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from forebay.base.parts import I32
from forebay.base.sampling import DRAWS
from forebay.memory.slots import NO_IDS, PAD, Ids
from forebay.models.decoder import Model
from forebay.ops import Ops
from forebay.pools.cache_pool import CachePool
from forebay.pools.request_rows import RequestRows
from forebay.requests.sampling_params import SamplingParams
from forebay.requests.step_plan import WORK_OF, Admission, StepPlan, kind_work
from forebay.runtime.bounds import PoolBounds
from forebay.runtime.chooser import Chooser, Masked
from forebay.runtime.decode_step import DecodeInputs, decode_runner
from forebay.runtime.device_proposer import DeviceProposer
from forebay.runtime.extend_step import ExtendInputs, extend_runner, tokens_of
from forebay.runtime.forward import FAILED, Batch, Decoded, Forward, GreedyTokens, HiddenStates
from forebay.runtime.graph_backends import GraphBackend
from forebay.runtime.graph_runner import GraphRunner
from forebay.runtime.launched import LaunchedStep, PromptChunk
from forebay.runtime.logprobs import block_size, token_logprobs
from forebay.runtime.packing import Sections
from forebay.runtime.penalties import Penalties, spans_of
from forebay.runtime.pictures import Encodings
from forebay.runtime.pooling import Pooler
from forebay.runtime.row_options import RowOptions, Sampling
from forebay.runtime.shape import Shape
from forebay.runtime.step_inputs import StepInputs
from forebay.runtime.to_host import ToHost
from forebay.runtime.verify_step import VerifyInputs, verify_runner

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
        model: Model,
        ops: Ops,
        *,
        cache: CachePool,
        rows: RequestRows,
        vocab_size: int,
        max_num_tokens: int,
        graphs: GraphBackend,
        graph_sizes: Sequence[int],
        proposer: Callable[[Forward], DeviceProposer] | None = None,
        taps: tuple[int, ...] = (),
        take_masks: Callable[[int], I32] = no_masks,
        encodings: Encodings | None = None,
    ) -> None:
        self.cache, self.rows, self.encodings, width = cache, rows, encodings, 1 + rows.draft_tokens.shape[1]
        self._model, self._ops = model, ops
        self._vocab_size, self._max_num_tokens = vocab_size, max_num_tokens
        self._bounds = self._pool_bounds(width)
        self._forward = Forward(model, ops, rows, cache, taps, encodings)
        self.proposer = None if proposer is None else proposer(self._forward)
        self.inputs = StepInputs(self._forward, max_num_tokens=max_num_tokens, proposer=self.proposer)
        self.decode = decode_runner(self._forward, sizes=graph_sizes, backend=graphs)
        self.verify: GraphRunner[VerifyInputs, Decoded] | None = None  # None: no decode has drafts
        most = rows.num_rows * width
        if width > 1:
            self.verify = verify_runner(self._forward, most=most, vocab_size=vocab_size, backend=graphs)
        self.extend: GraphRunner[ExtendInputs, HiddenStates] | None = None  # None: steps with prompts are not captured
        if graphs.captures_prompts:
            self.extend = extend_runner(self._forward, max_num_tokens=max_num_tokens, backend=graphs)
        self._options = RowOptions(rows.num_rows)
        self._penalties = Penalties(vocab_size, rows.last_tokens.device)
        self._take_masks = take_masks
        self._chooser = Chooser(ops, rows, self._penalties)
        self._pooler = Pooler(model.logits)
        counts = {kind.name: kind.counts for kind in self._forward.kinds}
        self._counted = {name: len(totals) for name, totals in counts.items() if totals is not None}

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
    def launch(self, plan: StepPlan) -> LaunchedStep:
        """Carry the plan out in its order: copies to the host, admissions and writes, copies from the host, the model,
        the sampling. IndexOutOfPool or NoHostCopy, with nothing done, for a plan that names what there is not.
        """
        self._bounds.check(plan)
        for kind in self._forward.kinds:
            kind.check(plan)
        if plan.host.loads:
            self.inputs.copies.check(plan)
        for admission in plan.admissions:
            self._options.admit(admission)
            self._penalties.admit(admission)
            self._pooler.admit(admission)
        match Shape.of(plan):
            case Shape.DECODES:
                return self._decode(plan)
            case Shape.DRAFTS:
                return self._verify(plan)
            case Shape.TOKENS:
                return self._extend(plan)

    def _decode(self, plan: StepPlan) -> LaunchedStep:
        sampling = self._options.sampling(plan.rows)
        masked = Masked.of(plan, self._take_masks)
        inputs = self._stage(plan, Shape.DECODES, sampling)
        decoded = self.decode.run(inputs.of(DecodeInputs.declared), plan.num_seqs)
        chosen = decoded.greedy
        if masked or sampling.otherwise:
            chosen = self._choose_one(chosen, inputs, sampling, decoded.positions + 1, masked)
        logprobs = self._chooser.logprobs(decoded.logits, chosen, inputs, sampling)
        ids = self._to_host(chosen.or_failed())
        launched = LaunchedStep(self._vocab_size, ids, None, sampling, logprobs, counted=self._counted)
        if self.proposer is not None:
            self.proposer.after(plan, inputs, decoded.input_ids, decoded.seen)
        return launched

    def _verify(self, plan: StepPlan) -> LaunchedStep:
        """Choose a token behind each token of each sequence; only the device knows which of them are accepted."""
        sampling = self._options.sampling(np.repeat(plan.rows, plan.q_lens))
        masked = Masked.of(plan, self._take_masks)
        inputs = self._stage(plan, Shape.DRAFTS, sampling)
        assert self.verify is not None, "its bounds let no drafts pass"
        decoded = self.verify.run(self.inputs.verify_columns(inputs), plan.num_tokens)
        chosen, num_new = decoded.greedy, decoded.num_new[: plan.num_seqs]
        batch = Batch(inputs["req_pool_indices"], inputs["q_start"])
        if masked or sampling.otherwise:
            chosen, settled = self._chooser.choose(
                chosen,
                inputs,
                sampling,
                decoded.positions + 1,
                settle=lambda others: self._forward.accept(others, decoded.positions, batch),
                spans=spans_of(plan.rows, plan.q_lens),
                input_ids=decoded.input_ids,
                masked=masked,
            )
            assert settled is not None
            num_new.copy_(settled)
        self.verify.settle()
        logprobs = self._chooser.logprobs(decoded.logits, chosen, inputs, sampling)
        ids, counted = self._to_host(chosen.or_failed(), num_new), self._counted
        launched = LaunchedStep(self._vocab_size, ids, None, sampling, logprobs, q_lens=plan.q_lens, counted=counted)
        if self.proposer is not None:
            self.proposer.after(plan, inputs, decoded.input_ids, decoded.seen)
        return launched

    def _extend(self, plan: StepPlan) -> LaunchedStep:
        """A step of any shape, whose decodes have a token each."""
        sample_rows = plan.rows[plan.sample_mask]
        sampling = self._options.sampling(sample_rows)
        wanted = [(i, *self._options.prompt_chunk(plan, i)) for i in plan.prompt_logprobs]
        targets = np.concatenate([chunk[1] for chunk in wanted]) if wanted else NO_IDS
        masked = Masked.of(plan, self._take_masks)
        inputs = self._stage(plan, Shape.TOKENS, sampling, targets)
        input_ids = self.inputs.input_ids(plan, inputs)
        hidden, finite, seen = self._hidden(plan, inputs, input_ids)
        chunks = self._prompt_chunks(plan, hidden, wanted, inputs["targets"]) if wanted else ()
        vectors = self._pooler.pool(plan, hidden) if plan.pooled else None
        every = len(sample_rows) == plan.num_tokens
        chosen = raw = self._forward.greedy(hidden if every else hidden.index_select(0, inputs["sample_tokens"]))
        if masked or sampling.otherwise:
            lens = self._ops.gather(self.rows.kv_lens, inputs["sample_rows"])
            chosen = self._choose_one(raw, inputs, sampling, lens, masked)
        else:
            self._ops.scatter(self.rows.last_tokens, inputs["sample_rows"], chosen.token_ids)
        logprobs = self._chooser.logprobs(raw.logits, chosen, inputs, sampling)
        launched = LaunchedStep(
            self._vocab_size,
            self._to_host(_of_all(chosen.or_failed(), finite, inputs)),
            None if len(sample_rows) == plan.num_seqs else plan.sample_mask,
            sampling,
            logprobs,
            chunks,
            vectors=vectors,
            counted=self._counted,
        )
        if self.proposer is not None:
            self.proposer.after(plan, inputs, input_ids, seen)
        return launched

    def _to_host(self, *ids: Tensor) -> ToHost:
        """Send token ids to the host, and behind them the totals that kinds of cache count."""
        parts = [*ids, *(kind.counts for kind in self._forward.kinds if kind.counts is not None)]
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
        return (runner for runner in (self.decode, self.verify, self.extend, self.proposer) if runner is not None)

    def warm_up(self) -> None:
        """Run steps of each kind on the padding row, so that the first request finds code and buffers in memory."""
        examples: dict[str, Any] = {number.name: number.example for number in DRAWS}
        drawing = SamplingParams(**examples)
        greedy = SamplingParams(temperature=0.0)
        row_tokens = self.rows.req_to_token.shape[1] * self.cache.page_size
        steps = warm_up_steps(self._max_num_tokens, row_tokens, self._bounds.width)
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
        return StepPlan(
            step=step,
            num_extends=num_extends,
            q_lens=np.full(1, q_len, dtype=np.int64),
            starts=np.zeros(num_extends, dtype=np.int64),
            input_ids=np.zeros(q_len * num_extends, dtype=np.int64),
            sample_mask=np.ones(1, dtype=np.bool_),
            admissions=(Admission(row=PAD, request_id=0, params=params, token_ids=no_tokens, num_prompt=0),),
            **StepPlan.padding(lengths),
            kinds=kind_work(kinds),
        )

    def _stage(self, plan: StepPlan, shape: Shape, sampling: Sampling, targets: Ids = NO_IDS) -> Sections:
        """Send the step's inputs, with the drafts that it verifies if they are made on the device, and encode."""
        inputs = self.inputs.stage(plan, shape, sampling, targets)
        if self.proposer is not None:
            self.proposer.before(plan, inputs)
        if self.encodings is not None:
            self.encodings.encode(plan.pictures)
        return inputs

    def _hidden(self, plan: StepPlan, inputs: Sections, input_ids: Tensor) -> HiddenStates:
        if self.extend is not None and 0 < plan.num_tokens <= self.extend.sizes[-1]:
            return self.extend.run(self.inputs.extend_columns(inputs, input_ids), plan.num_tokens)
        batch = Batch(inputs["req_pool_indices"], inputs["q_start"])
        return self._forward.hidden(tokens_of(self._forward, batch, inputs, input_ids))

    def _choose_one(
        self, raw: GreedyTokens, inputs: Sections, sampling: Sampling, lens: Tensor, masked: Masked | None
    ) -> GreedyTokens:
        """For each row that samples."""

        def settle(chosen: GreedyTokens) -> None:
            self._ops.scatter(self.rows.last_tokens, inputs["sample_rows"], chosen.token_ids)

        spans = spans_of(sampling.rows)
        return self._chooser.choose(raw, inputs, sampling, lens, settle=settle, spans=spans, masked=masked)[0]

    def _prompt_chunks(
        self, plan: StepPlan, hidden: Tensor, wanted: list[tuple[int, Ids, int]], targets: Tensor
    ) -> tuple[PromptChunk, ...]:
        starts = np.cumsum(plan.q_lens) - plan.q_lens
        chunks, first, most = [], 0, block_size(self._vocab_size)
        for extend, known, num_top in wanted:
            start, blocks = int(starts[extend]), []
            for at in range(0, len(known), most):
                n = min(most, len(known) - at)
                logits = self._model.logits(hidden[start + at : start + at + n])
                blocks.append(ToHost(token_logprobs(logits, targets[first + at : first + at + n], num_top)))
            chunks.append(PromptChunk(extend, int(plan.q_lens[extend]), known, num_top, blocks))
            first += len(known)
        return tuple(chunks)


def _of_all(token_ids: Tensor, finite: Tensor, inputs: Sections) -> Tensor:
    """token_ids [N] of the sequences that sample and finite [T] of all tokens -> one id for each sequence [S]: FAILED
    if a token is not finite, any value if nothing is sampled. The values that a chunk leaves in the caches are finite
    if its hidden states are (decision 0014), so chunks that sample nothing are checked as well."""
    broken = torch.zeros(len(finite) + 1, dtype=torch.int64, device=finite.device)
    torch.cumsum(~finite, 0, out=broken[1:])
    bounds = broken.index_select(0, inputs["q_start"])
    if len(token_ids) < len(bounds) - 1:
        ids = torch.zeros(len(bounds) - 1, dtype=torch.int64, device=finite.device)
        token_ids = ids.index_copy_(0, inputs["sample_seqs"], token_ids)
    return token_ids.masked_fill(bounds[1:] != bounds[:-1], FAILED)
