"""Recorded plans on a small random model, in memory whose free parts are poisoned: `forebay replay FILE --on tiny`.

The model has the layers of the recorded one. Its tokens are made of the recorded ones, and the device chooses these, as
if a grammar allowed no others. So lengths, hits, retractions and accepted drafts are the recorded ones.

The likeliest token at each position, and its log-probability, is compared to the bit with each request computed alone:
by another scheduler, without drafts, in memory that is cleared before. The last one is also computed in one step with
all before it. A difference is a fault of what decided the plans, since the kernels give the same bits in every batch
(C28). Encodings of pictures are random numbers of their digests. Adapters are left out of both.
"""

from __future__ import annotations

import hashlib
import json
import math
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final, NamedTuple, Self

import msgspec
import numpy as np
import torch
from torch import Tensor

from forebay.backends import make_ops
from forebay.base.errors import ConfigError
from forebay.base.parts import I32
from forebay.base.units import ceil_div, human_bytes
from forebay.config.engine_config import CacheTypes, Ledger, SchedulerConfig
from forebay.config.pictures import PictureConfig
from forebay.engine.recorder.replay import NotExecuted, Outcome, Replay
from forebay.families.checkpoint import open_checkpoint
from forebay.families.config.model_config import config_from_folder
from forebay.families.small import small_config
from forebay.memory.budget import PoolSizes
from forebay.memory.kv_allocator import KV
from forebay.memory.slots import FREE, NO_IDS, Ids, Slots
from forebay.models import load
from forebay.models.encoders.encoder import Encoder, State
from forebay.models.network import Network
from forebay.models.random_weights import write_random_weights
from forebay.ops import Ops
from forebay.pools.cache_spec import cache_sizes
from forebay.requests.pictures import Picture
from forebay.requests.request import Request
from forebay.requests.sampling_params import SamplingParams
from forebay.requests.step_plan import StepPlan, StepResult
from forebay.runtime import ModelRunner, build_runner
from forebay.runtime.graphs.backends import Eager
from forebay.runtime.steps.pictures import Encodings
from forebay.scheduler.journal import Added, Committed, HaltPlanning, Origin, Planning, Record
from forebay.scheduler.scheduler import Scheduler

MOST_BYTES: Final = 2 << 30  # of one of the two pools
_VOCAB: Final = 512
_HIDDEN: Final = 64
_LAYERS: Final = 4
_POISON: Final = 3e4  # finite: what is masked is multiplied by zero
_TYPES: Final = CacheTypes()
_GREEDY: Final = SamplingParams(temperature=0.0, logprobs=1, ignore_eos=True)


class Chosen(NamedTuple):
    """The token that the model chooses, and its log-probability."""

    token: int
    logprob: float


class Compared(NamedTuple):
    """A position of a request, counted from its first token, with what is chosen there by the recorded plans, in this
    step, and for the request alone."""

    step: int
    request: int
    position: int
    recorded: Chosen
    alone: Chosen


class Executed(NamedTuple):
    """The outcome of a replay whose plans were executed: how many choices were compared, and the first that differs.
    `error` says why a plan could not be executed, "" if all could."""

    outcome: Outcome
    error: str
    num_compared: int
    num_requests: int
    fault: Compared | None


class _Forced(NamedTuple):
    """The tokens that a step chooses, and how many of them each of its sequences gets that sample."""

    tokens: Sequence[int]
    num_new: Sequence[int]

    @classmethod
    def of(cls, record: Committed) -> Self:
        """Return those of a recorded result."""
        tokens = [token % _VOCAB for token in record.token_ids]
        return cls(tokens, record.num_new or [1] * len(tokens))

    def drafts(self, num_drafts: Sequence[int]) -> Iterator[int]:
        """Yield as many draft tokens of each sequence: those that it accepts, and behind them a wrong one."""
        ends = np.cumsum(self.num_new).tolist()
        for count, num_new, end in zip(num_drafts, self.num_new, ends, strict=True):
            accepted, wrong = self.tokens[end - num_new : end - 1], (self.tokens[end - 1] + 1) % _VOCAB
            yield from (*accepted, *[wrong] * (count - len(accepted)))

    def words(self, counts: Sequence[int], num_words: int) -> I32:
        """Return the masks of `counts` positions of each sequence, which allow one token each: of those behind the last
        that is chosen, any one."""
        found, at = np.zeros((sum(counts), num_words), dtype=np.int32), 0
        ends = np.cumsum(self.num_new).tolist()
        for count, num_new, end in zip(counts, self.num_new, ends, strict=True):
            tokens = [*self.tokens[end - num_new : end], *[0] * (count - num_new)]
            for place, token in enumerate(tokens):
                found.view(np.uint32)[at + place, token // 32] = 1 << token % 32
            at += count
        return found


class _DigestEncoder(Encoder):
    """Encodes a tile as random numbers of its pixels, which are those of its picture's digest."""

    def __init__(self, config: PictureConfig) -> None:
        self.dtype, self.num_layers, self.row_size = torch.float32, config.num_layers, _HIDDEN
        self._edge = config.token_edge

    @property
    def weight_bytes(self) -> int:
        return 0

    def begin(self, pixels: Tensor) -> State:
        height, width, _ = pixels.shape
        seed = int.from_bytes(hashlib.blake2b(pixels.numpy().tobytes(), digest_size=7).digest(), "little")
        return State(torch.tensor(seed), (height // self._edge, width // self._edge))

    def layers(self, state: State, first: int, last: int) -> State:
        return state

    def finish(self, state: State) -> Tensor:
        rows, columns = state.grid
        numbers = np.random.default_rng(int(state.x)).standard_normal((rows * columns, _HIDDEN), dtype=np.float32)
        return torch.from_numpy(numbers)


class _Engine:
    """The small model, with the memory of one recorded engine."""

    def __init__(self, model: Network, ops: Ops, config: SchedulerConfig, width: int = 1) -> None:
        self._num_words = ceil_div(model.logits(torch.zeros(1, _HIDDEN)).shape[1], 32)
        self._words = np.zeros((0, self._num_words), dtype=np.int32)  # of the masks of the next step
        sizes = PoolSizes(
            page_size=config.page_size,
            num_slots={KV: config.num_pages, **config.kinds.num_slots},
            max_running_requests=config.max_running_requests,
            pre_alloc_size=config.disaggregation.decode_extra_slots,
            context_length=config.context_length,
        )
        self.runner: ModelRunner = build_runner(
            model,
            ops=ops,
            sizes=sizes,
            types=replace(_TYPES, width=width),
            max_num_tokens=max(config.chunked_prefill_size + sizes.num_rows, sizes.num_rows * width),
            vocab_size=_VOCAB,
            device="cpu",
            graphs=Eager(),
            width=width,
            take_masks=lambda step: self._words,
            encodings=_encodings(config.pictures),
        )

    def run(self, plan: StepPlan, forced: _Forced | None) -> Iterator[tuple[int, int, Chosen]]:
        """Execute a plan with forced tokens; without, their values are any. Yield the row of each token, the length
        behind which it comes, and what the model would choose there."""
        plan = _in_vocabulary(plan)
        if forced is not None and plan.sample_mask.any():
            plan = self._forcing(plan, forced)
        result = self.runner.launch(plan).result()
        if forced is None or not plan.sample_mask.any():
            return
        rows = plan.rows[plan.sample_mask]
        lengths = self.runner.rows.kv_lens[torch.from_numpy(rows)].tolist()
        logprobs = iter(result.logprobs or [None] * len(result.token_ids))
        num_new = result.num_new or [1] * len(rows)
        for row, length, count in zip(rows.tolist(), lengths, num_new, strict=True):
            for place in range(length - count + 1, length + 1):
                found = next(logprobs)
                choice = Chosen(-1, math.nan) if found is None else Chosen(found.top_ids[0], found.top_logprobs[0])
                yield row, place, choice

    def _forcing(self, plan: StepPlan, forced: _Forced) -> StepPlan:
        """Return a plan whose sequences choose these tokens, and accept as many drafts as they did."""
        samples = np.flatnonzero(plan.sample_mask)
        counts = np.where(samples < plan.num_extends, 1, plan.q_lens[samples])
        self._words = forced.words(counts.tolist(), self._num_words)
        drafts = np.fromiter(forced.drafts((counts - 1).tolist()), dtype=np.int64)
        return msgspec.structs.replace(plan, masked=samples, drafts=drafts)

    def fill(self, kind: str, ids: Ids, value: float) -> None:
        """Set all that layers keep in these pages or slots."""
        for tensor in self.runner.cache.tables[kind].tensors:
            if tensor.is_floating_point():
                tensor[torch.from_numpy(ids)] = value

    def clear(self) -> None:
        """Set all memory of the caches to zero."""
        for table in self.runner.cache.tables.values():
            for tensor in table.tensors:
                tensor.zero_()


class Execution:
    """Executes the plans of one replay."""

    def __init__(self, engine: _Engine, records: Sequence[Record]) -> None:
        self._engine = engine
        self._committed = {record.step: record for record in records if isinstance(record, Committed)}
        self._free: dict[str, np.ndarray[tuple[int], np.dtype[np.bool_]]] = {}
        self.scheduler: Scheduler
        self.chosen: dict[tuple[int, int], tuple[int, Chosen]] = {}  # by request and position, with the step
        self.forced: dict[tuple[int, int], int] = {}

    def execute(self, plan: StepPlan) -> None:
        """Poison what was freed since the last plan, execute this one, and give its rows the recorded tokens."""
        self._poison()
        recorded = self._committed.get(plan.step)
        forced = None if recorded is None else _Forced.of(recorded)
        sampled = [*self._engine.run(plan, forced)]
        ids = self.scheduler.pools.table.request_id
        for (row, length, choice), token in zip(sampled, forced.tokens if forced and sampled else (), strict=True):
            at = int(ids[row]), length
            self.chosen[at], self.forced[at] = (plan.step, choice), token

    def _poison(self) -> None:
        pools = self.scheduler.pools
        kept: list[tuple[str, Slots]] = [(KV, pools.kv), *((kind.name, kind.slots) for kind in pools.kinds)]
        for name, slots in kept:
            free = slots.owner <= FREE
            if name in self._engine.runner.cache.tables:
                before = self._free.get(name)
                freed = np.arange(1, slots.num_rows) if before is None else np.flatnonzero(free & ~before)
                if len(freed):
                    self._engine.fill(name, freed, _POISON)
            self._free[name] = free


def run_on_tiny(origin: Origin, records: Sequence[Record], model_type: str) -> Executed:
    """Replay with a small model of this type. Raises ConfigError for an engine that it cannot stand for."""
    config = replace(origin.config, ledger=Ledger.COUNT)
    _check_whole(config)
    ops = make_ops("native", 1)
    with tempfile.TemporaryDirectory() as folder:
        model = _small_model(Path(folder), model_type, config, ops)
    width = max((record.width for record in records if isinstance(record, Planning | HaltPlanning)), default=1)
    recorded = Execution(_Engine(model, ops, config, width), records)
    origin = msgspec.structs.replace(origin, config=config)
    replay = Replay(origin=origin, records=records, execute=recorded.execute)
    recorded.scheduler = replay.scheduler
    failure = ""
    try:
        replay.run()
    except NotExecuted as error:
        failure = f"{error} ({type(error.__cause__).__name__})"
    alone = _Alone(model, ops, config, max((length for _, length in recorded.chosen), default=1))
    pairs = [pair for each in records if isinstance(each, Added) for pair in _pairs(alone, recorded, each)]
    faults = [pair for pair in pairs if pair.recorded != pair.alone]
    fault = min(faults, key=lambda fault: fault.step, default=None)
    return Executed(replay.outcome, failure, len(pairs), len({pair.request for pair in pairs}), fault)


def _check_whole(config: SchedulerConfig) -> None:
    """Raise ConfigError if a part of what requests need comes from elsewhere."""
    role = config.disaggregation
    if config.tiers:
        raise ConfigError("--on tiny has no tiers of the prefix cache behind the device: replay without --on")
    if role.is_prefill or role.is_decode:
        raise ConfigError("--on tiny lacks the other engine, which computes one half: replay without --on")


class _Alone:
    """Computes one request after the other, each in memory that is cleared, prompts of up to `longest` tokens in one
    step."""

    def __init__(self, model: Network, ops: Ops, config: SchedulerConfig, longest: int) -> None:
        num_pages = ceil_div(longest, config.page_size) + 1
        num_slots = {name: max(2 * num_pages + 16, num) for name, num in config.kinds.num_slots.items()}
        self._config = replace(
            config,
            radix_cache=False,
            overlap_depth=0,
            num_pages=num_pages,
            max_running_requests=1,
            chunked_prefill_size=longest,
            kinds=replace(config.kinds, num_slots=num_slots),
        )
        self._engine = _Engine(model, ops, self._config)

    def choices(self, prompt: list[int], outputs: list[int], pictures: Sequence[Picture]) -> dict[int, Chosen]:
        """Return by position what is chosen if the request goes on with these outputs: step by step, and the last one
        from all of them in one step."""
        found = self._decoded(prompt, outputs, pictures)
        return found | self._decoded(prompt + outputs[:-1], outputs[-1:], pictures)

    def _decoded(self, prompt: list[int], outputs: list[int], pictures: Sequence[Picture]) -> dict[int, Chosen]:
        self._engine.clear()
        scheduler, found = Scheduler(self._config), dict[int, Chosen]()
        params = msgspec.structs.replace(_GREEDY, max_tokens=len(outputs))
        scheduler.add(Request(1, prompt, params), 0.0, pictures)
        while not scheduler.idle and (plan := scheduler.plan(0.0)) is not None:
            tokens = outputs[len(found) :][: int(plan.sample_mask.sum())]
            sampled = self._engine.run(plan, _Forced(tokens, [1] * len(tokens)))
            found.update((length, choice) for _, length, choice in sampled)
            scheduler.commit(plan, StepResult(token_ids=tokens), 0.0)
            scheduler.take_updates()
        return found


def _pairs(alone: _Alone, recorded: Execution, added: Added) -> Iterator[Compared]:
    """Yield each choice of a request beside that of the request alone."""
    prompt = memoryview(added.tokens).cast("i").tolist()
    outputs = list[int]()
    while (token := recorded.forced.get((added.id, len(prompt) + len(outputs)))) is not None:
        outputs.append(token)
    pictures = [shown.picture() for shown in added.pictures]
    choices = alone.choices(prompt, outputs, pictures) if outputs else {}
    for position, choice in choices.items():
        step, other = recorded.chosen[added.id, position]
        yield Compared(step, added.id, position, other, choice)


def _in_vocabulary(plan: StepPlan) -> StepPlan:
    """Return a plan whose tokens the small model knows, that samples greedily and gives log-probabilities. Its draft
    tokens are any."""
    admissions = tuple(
        msgspec.structs.replace(
            start,
            params=_GREEDY,
            token_ids=(start.token_ids % _VOCAB).astype(np.int32),
            stop_ids=(),
            adapter=0,
        )
        for start in plan.admissions
    )
    return msgspec.structs.replace(
        plan,
        input_ids=plan.input_ids % _VOCAB,
        admissions=admissions,
        masked=NO_IDS,
        drafts=NO_IDS,
        prompt_logprobs=(),
        pooled=(),
    )


def _encodings(config: PictureConfig | None) -> Encodings | None:
    if config is None:
        return None
    return Encodings(_DigestEncoder(config), config.num_rows, bidirectional=config.longest_span > 0)


def _small_model(folder: Path, model_type: str, config: SchedulerConfig, ops: Ops) -> Network:
    """Make and load a model with the layers of `model_type` that keeps what the recorded one does."""
    fields = small_config(model_type, hidden_size=_HIDDEN, num_layers=_LAYERS, vocab_size=_VOCAB)
    num_read = [*config.kinds.num_read.values()]
    text = fields.get("text_config", fields)
    if "sliding_window" in text and num_read:
        text["sliding_window"] = num_read[0]
    (folder / "config.json").write_text(json.dumps({**fields, "dtype": "float32"}), "utf-8")
    write_random_weights(
        config_from_folder(folder), folder / "model.safetensors", dtype="float32", seed=0, progress=lambda *_: None
    )
    model = load(open_checkpoint(folder), ops=ops, dtype=torch.float32)
    sizes = cache_sizes(model.cache_specs(), _TYPES)
    kinds = {name for name in sizes.kinds if name != KV}
    if kinds != {*config.kinds.num_slots}:
        raise ConfigError(
            f"the recorded engine keeps {', '.join(sorted(config.kinds.num_slots)) or 'full KV alone'}, and a small "
            f"{model_type} {', '.join(sorted(kinds)) or 'full KV alone'}: replay without --on"
        )
    num_bytes = sizes.kinds[KV].num_bytes * config.page_size * config.num_pages if KV in sizes.kinds else 0
    if num_bytes > MOST_BYTES:
        raise ConfigError(
            f"the recorded engine has memory for {config.num_pages * config.page_size:,} tokens, which is "
            f"{human_bytes(num_bytes)} for the small model, twice: at most {human_bytes(MOST_BYTES)} fits"
        )
    return model
