"""Carries plans out on the real model.

Shape letters: S sequences, T tokens, N sequences that sample, V vocabulary, H hidden size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import compress
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from forebay.memory.slots import NO_IDS, PAD, Ids
from forebay.models.decoder import Model
from forebay.ops import Ops
from forebay.pools.cache_pool import CachePool
from forebay.pools.request_rows import RequestRows
from forebay.requests.sampling_params import SamplingParams
from forebay.requests.step_plan import KIND_PARTS, Admission, StepPlan, StepResult, TokenLogprob
from forebay.runtime.bounds import PoolBounds
from forebay.runtime.decode_step import DecodeInputs, decode_runner
from forebay.runtime.extend_step import ExtendInputs, extend_runner, tokens_of
from forebay.runtime.forward import Batch, Forward, GreedyTokens, HiddenStates
from forebay.runtime.graph_backends import GraphBackend
from forebay.runtime.graph_runner import GraphRunner
from forebay.runtime.kinds import check_kinds
from forebay.runtime.logprobs import token_logprobs, unpack
from forebay.runtime.packing import Sections
from forebay.runtime.penalties import Penalties
from forebay.runtime.row_options import RowOptions, Sampling
from forebay.runtime.sampler import Wants, draw
from forebay.runtime.step_inputs import Shape, StepInputs

_PROMPT_BLOCK: Final = 256  # positions whose logits exist at a time while a prompt's log-probabilities are taken
_WARM_UP_TOKENS: Final = 32  # more rows than the kernels for few of them take
_FAILED: Final = -1  # instead of a token id, where the logits were not finite


class _ToHost:
    """A tensor on its way to the host."""

    def __init__(self, tensor: Tensor) -> None:
        self._event: torch.cuda.Event | None = None
        self._host = tensor
        if tensor.is_cuda:
            self._host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            self._host.copy_(tensor, non_blocking=True)
            self._event = torch.cuda.current_stream(tensor.device).record_event()

    def wait(self) -> npt.NDArray[Any]:
        if self._event is not None:
            self._event.synchronize()
        array: npt.NDArray[Any] = self._host.numpy()
        return array


@dataclass(frozen=True, slots=True)
class _Chunk:
    """The log-probabilities of one extend's positions: the tokens asked about, and the blocks they come in."""

    extend: int
    num_positions: int
    targets: Ids
    num_top: int
    blocks: list[_ToHost]


@dataclass(frozen=True, slots=True)
class LaunchedStep:
    """A step whose sampled tokens are on their way."""

    vocab_size: int
    token_ids: _ToHost  # [S]
    sample_mask: npt.NDArray[np.bool_] | None  # [S]; None where all of them sample
    sampling: Sampling
    logprobs: _ToHost | None
    chunks: tuple[_Chunk, ...]

    def result(self) -> StepResult:
        """Wait for the tokens. A sequence whose id is outside the vocabulary, for whatever reason, has failed."""
        array = self.token_ids.wait()
        token_ids = array.tolist()
        failed: tuple[int, ...] = ()
        if token_ids and not (min(token_ids) >= 0 and max(token_ids) < self.vocab_size):
            failed = tuple(np.flatnonzero((array < 0) | (array >= self.vocab_size)).tolist())
            token_ids = [PAD if i in failed else token for i, token in enumerate(token_ids)]
        if self.sample_mask is not None:
            token_ids = list(compress(token_ids, self.sample_mask.tolist()))
        return StepResult(
            token_ids=token_ids,
            failed=failed,
            logprobs=None if self.logprobs is None else self._reported(token_ids, self.logprobs.wait()),
            prompt_logprobs={chunk.extend: _prompt_entries(chunk) for chunk in self.chunks} or None,
        )

    def _reported(self, token_ids: list[int], packed: npt.NDArray[Any]) -> list[TokenLogprob | None]:
        entries: list[TokenLogprob | None] = [None] * len(token_ids)
        which, num_top = self.sampling.reporting.tolist(), self.sampling.num_top.tolist()
        for i, entry in zip(which, unpack(packed, [token_ids[i] for i in which], num_top), strict=True):
            entries[i] = entry
        return entries


class ModelRunner:
    """A `Runner` over a model, its KV pool and its request rows. Launched steps run in the order of their launch.

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
    ) -> None:
        self.cache, self.rows = cache, rows
        self._model, self._ops = model, ops
        self._vocab_size = vocab_size
        self._bounds = PoolBounds(
            num_rows=rows.num_rows,
            pages_per_row=rows.req_to_token.shape[1],
            page_size=cache.page_size,
            vocab_size=vocab_size,
            num_slots=cache.num_ids,
            width=1 + rows.draft_tokens.shape[1],
        )
        self.inputs = StepInputs(rows, cache, max_num_tokens=max_num_tokens)
        self._forward = Forward(model, ops, rows, cache)
        self.decode = decode_runner(self._forward, sizes=graph_sizes, backend=graphs)
        self.extend: GraphRunner[ExtendInputs, HiddenStates] | None = None  # None: steps with prompts are not captured
        if graphs.captures_prompts:
            self.extend = extend_runner(self._forward, max_num_tokens=max_num_tokens, backend=graphs)
        self._options = RowOptions(rows.num_rows)
        self._penalties = Penalties(vocab_size, rows.last_tokens.device)

    @torch.inference_mode()
    def launch(self, plan: StepPlan) -> LaunchedStep:
        """Carry the plan out in its order: copies to the host, admissions and writes, copies from the host, the model,
        the sampling. IndexOutOfPool or NoHostCopy, with nothing done, for a plan that names what there is not.
        """
        self._bounds.check(plan)
        check_kinds(plan)
        if plan.host.loads:
            self.inputs.copies.check(plan)
        for admission in plan.admissions:
            self._options.admit(admission)
            self._penalties.admit(admission)
        shape = Shape.of(plan)
        sample_rows = plan.rows[plan.sample_mask] if shape is Shape.TOKENS else plan.rows
        sampling = self._options.sampling(sample_rows)
        wanted = [(i, *self._options.prompt_chunk(plan, i)) for i in plan.prompt_logprobs]
        targets = np.concatenate([chunk[1] for chunk in wanted]) if wanted else NO_IDS
        inputs = self.inputs.stage(plan, shape, sampling, targets)
        chunks: tuple[_Chunk, ...] = ()
        if shape is Shape.DECODES:
            decoded = self.decode.run(inputs.of(DecodeInputs.declared), plan.num_seqs)
            token_ids, logprobs = self._choose(decoded, inputs, sampling)
        else:
            hidden, finite = self._hidden(plan, inputs)
            chunks = self._prompt_chunks(plan, hidden, wanted, inputs["targets"]) if wanted else ()
            every = len(sample_rows) == plan.num_tokens
            last = hidden if every else hidden.index_select(0, inputs["sample_tokens"])
            decoded = self._forward.greedy(last)
            self._ops.scatter(self.rows.last_tokens, inputs["sample_rows"], decoded.token_ids)
            token_ids, logprobs = self._choose(decoded, inputs, sampling)
            token_ids = _of_all(token_ids, finite, inputs)
        return LaunchedStep(
            self._vocab_size,
            _ToHost(token_ids),
            None if len(sample_rows) == plan.num_seqs else plan.sample_mask,
            sampling,
            logprobs,
            chunks,
        )

    @torch.inference_mode()
    def capture_next(self) -> bool:
        """Capture one more size, in idle time; False when all are. One that is needed sooner does not wait."""
        return self.decode.capture_next() or (self.extend is not None and self.extend.capture_next())

    def warm_up(self) -> None:
        """Run steps of each kind on the padding row, so that the first request finds code and buffers in memory."""
        drawing = SamplingParams(top_k=2, top_p=0.9, min_p=0.1)
        greedy = SamplingParams(temperature=0.0)
        length = min(_WARM_UP_TOKENS, self.rows.req_to_token.shape[1] * self.cache.page_size)
        for step, (params, num_extends) in enumerate([(drawing, 1), (greedy, 0)]):
            self.launch(self._plan_of_padding(step, params, num_extends, length)).result()
        # The last admission left the row greedy; what else the steps wrote is put back.
        self.rows.reset_padding()
        self.cache.reset_padding()

    def _plan_of_padding(self, step: int, params: SamplingParams, num_extends: int, length: int) -> StepPlan:
        """An extend of `length` tokens or one decode of the padding row: its KV goes to the padding pages, its state to
        the padding slot."""
        q_len = length if num_extends else 1
        lengths, no_tokens = {"S": 1}, np.empty(0, dtype=np.int32)
        by_kind = {kind: (field, part(**part.padding(lengths))) for kind, (field, part) in KIND_PARTS.items()}
        parts: dict[str, Any] = dict(part for kind, part in by_kind.items() if self.cache.has(kind))
        return StepPlan(
            step=step,
            num_extends=num_extends,
            q_lens=np.full(1, q_len, dtype=np.int64),
            starts=np.zeros(num_extends, dtype=np.int64),
            input_ids=np.zeros(q_len * num_extends, dtype=np.int64),
            sample_mask=np.ones(1, dtype=np.bool_),
            admissions=(Admission(row=PAD, request_id=0, params=params, token_ids=no_tokens, num_prompt=0),),
            **StepPlan.padding(lengths),
            **parts,
        )

    def _hidden(self, plan: StepPlan, inputs: Sections) -> HiddenStates:
        """A step of any shape."""
        if self.extend is not None and 0 < plan.num_tokens <= self.extend.sizes[-1]:
            return self.extend.run(self.inputs.extend_columns(plan, inputs), plan.num_tokens)
        batch, input_ids = Batch(inputs["req_pool_indices"], inputs["q_start"]), self.inputs.input_ids(plan, inputs)
        return self._forward.hidden(tokens_of(self._forward, batch, inputs, input_ids, inputs["snap_start"]))

    def _choose(self, decoded: GreedyTokens, inputs: Sections, sampling: Sampling) -> tuple[Tensor, _ToHost | None]:
        """The tokens of the sequences that sample: the most likely ones, unless they want others."""
        ids, finite, raw = decoded
        if len(sampling.rows) == 0:
            return ids, None
        if sampling.wants & (Wants.ADJUST | Wants.DRAW):
            ids, finite = self._adjust_and_draw(decoded, inputs, sampling)
        logprobs = None
        if len(sampling.reporting):
            which, k = inputs["reporting"], int(sampling.num_top.max())
            logprobs = _ToHost(token_logprobs(raw.index_select(0, which), ids.index_select(0, which), k))
        return torch.where(finite, ids, _FAILED), logprobs

    def _adjust_and_draw(self, decoded: GreedyTokens, inputs: Sections, sampling: Sampling) -> tuple[Tensor, Tensor]:
        (ids, finite, logits), rows, wants = decoded, sampling.rows.tolist(), sampling.wants
        if wants & Wants.ADJUST:
            logits = self._penalties.apply(logits, rows)
            ids, finite = self._ops.argmax_rows(logits)
        if wants & Wants.DRAW:
            ids = self._draw(logits, ids, inputs, wants)
        self._ops.scatter(self.rows.last_tokens, inputs["sample_rows"], ids)
        if wants & Wants.ADJUST:
            self._penalties.record(ids, rows)
        return ids, finite

    def _draw(self, logits: Tensor, greedy: Tensor, inputs: Sections, wants: Wants) -> Tensor:
        rows, which = inputs["sample_rows"], inputs["drawing"]
        lens = self._ops.gather(self.rows.kv_lens, rows)
        if len(which) == len(greedy):
            return draw(self._ops, logits, rows, lens, self.rows, wants)
        logits, rows, lens = (of_all.index_select(0, which) for of_all in (logits, rows, lens))
        return greedy.index_copy(0, which, draw(self._ops, logits, rows, lens, self.rows, wants))

    def _prompt_chunks(
        self, plan: StepPlan, hidden: Tensor, wanted: list[tuple[int, Ids, int]], targets: Tensor
    ) -> tuple[_Chunk, ...]:
        starts = np.cumsum(plan.q_lens) - plan.q_lens
        chunks, first = [], 0
        for extend, known, num_top in wanted:
            start, blocks = int(starts[extend]), []
            for at in range(0, len(known), _PROMPT_BLOCK):
                n = min(_PROMPT_BLOCK, len(known) - at)
                logits = self._model.logits(hidden[start + at : start + at + n])
                blocks.append(_ToHost(token_logprobs(logits, targets[first + at : first + at + n], num_top)))
            chunks.append(_Chunk(extend, int(plan.q_lens[extend]), known, num_top, blocks))
            first += len(known)
        return tuple(chunks)


def _of_all(token_ids: Tensor, finite: Tensor, inputs: Sections) -> Tensor:
    """token_ids [N] of the sequences that sample and finite [T] of all tokens -> one id for each sequence [S]: _FAILED
    where a token is not finite, anything where nothing is sampled. What a chunk leaves in the caches is finite where
    its hidden states are (decision 0014), so those that sample nothing are looked at as well."""
    broken = torch.zeros(len(finite) + 1, dtype=torch.int64, device=finite.device)
    torch.cumsum(~finite, 0, out=broken[1:])
    bounds = broken.index_select(0, inputs["q_start"])
    if len(token_ids) < len(bounds) - 1:
        ids = torch.zeros(len(bounds) - 1, dtype=torch.int64, device=finite.device)
        token_ids = ids.index_copy_(0, inputs["sample_seqs"], token_ids)
    return token_ids.masked_fill(bounds[1:] != bounds[:-1], _FAILED)


def _prompt_entries(chunk: _Chunk) -> list[TokenLogprob | None]:
    entries: list[TokenLogprob | None] = []
    for block in chunk.blocks:
        packed = block.wait()
        known = chunk.targets[len(entries) : len(entries) + len(packed)].tolist()
        entries += unpack(packed, known, [chunk.num_top] * len(packed))
    return entries + [None] * (chunk.num_positions - len(entries))
