"""Recorded plans on a small random model, in memory whose free parts are poisoned: `forebay replay FILE --on tiny`.

The model has the layers of the recorded one. Its tokens are made of the recorded ones, and after each step the device
gets the recorded tokens, so that lengths, hits and retractions are the recorded ones. What the model chooses for each
position, and its log-probability, is compared to the bit with each request computed alone: by another scheduler, in
memory that is cleared before, and at its last token also in one step. A difference is a fault of what decided the
plans, since the kernels give the same bits in every batch (C28). Adapters are left out of both.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final, NamedTuple

import msgspec
import numpy as np
import torch

from forebay.backends import make_ops
from forebay.base.errors import ConfigError
from forebay.base.units import ceil_div, human_bytes
from forebay.config.engine_config import CacheTypes, Ledger, SchedulerConfig
from forebay.engine.recorder.replay import NotExecuted, Outcome, Replay
from forebay.families.checkpoint import open_checkpoint
from forebay.families.config.model_config import config_from_folder
from forebay.families.small import small_config
from forebay.memory.budget import PoolSizes
from forebay.memory.kv_allocator import KV
from forebay.memory.slots import FREE, NO_IDS, Ids, Slots
from forebay.models import load
from forebay.models.network import Network
from forebay.models.random_weights import write_random_weights
from forebay.ops import Ops
from forebay.pools.cache_spec import cache_sizes
from forebay.requests.request import Request
from forebay.requests.sampling_params import SamplingParams
from forebay.requests.step_plan import StepPlan, StepResult
from forebay.runtime import ModelRunner, build_runner
from forebay.runtime.graphs.backends import Eager
from forebay.scheduler.journal import Added, Committed, Origin, Record
from forebay.scheduler.scheduler import Scheduler

MOST_BYTES: Final = 2 << 30  # of one of the two pools
_VOCAB: Final = 512
_HIDDEN: Final = 64
_LAYERS: Final = 4
_POISON: Final = 3e4  # finite: what is masked is multiplied by zero
_TYPES: Final = CacheTypes()
_GREEDY: Final = SamplingParams(temperature=0.0, logprobs=0, ignore_eos=True)


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


class NotExecutable(Exception):
    """The plans have work that a small model cannot do."""


class Executed(NamedTuple):
    """The outcome of a replay whose plans were executed: how many choices were compared, and the first that differs.
    `error` says why a plan could not be executed, "" if all could."""

    outcome: Outcome
    error: str
    num_compared: int
    num_requests: int
    fault: Compared | None


class _Engine:
    """The small model, with the memory of one recorded engine."""

    def __init__(self, model: Network, ops: Ops, config: SchedulerConfig) -> None:
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
            types=_TYPES,
            max_num_tokens=config.chunked_prefill_size + sizes.num_rows,
            vocab_size=_VOCAB,
            device="cpu",
            graphs=Eager(),
        )

    def run(self, plan: StepPlan) -> tuple[list[tuple[int, int]], list[Chosen]]:
        """Execute a plan. Return the rows that sample, each with its length, and what is chosen for them."""
        if plan.drafts.size or plan.width > 1:
            raise NotExecutable("a step verifies draft tokens, and another model accepts others")
        if plan.pictures.encodes or len(plan.pictures.picture_tokens):
            raise NotExecutable("a step has a picture, whose pixels no record has")
        if not plan.num_seqs:
            self.runner.launch(_in_vocabulary(plan)).result()
            return [], []
        result = self.runner.launch(_in_vocabulary(plan)).result()
        rows = plan.rows[plan.sample_mask]
        lengths = self.runner.rows.kv_lens[torch.from_numpy(rows)].tolist()
        logprobs = result.logprobs or [None] * len(result.token_ids)
        chosen = [
            Chosen(token, float("nan") if logprob is None else logprob.logprob)
            for token, logprob in zip(result.token_ids, logprobs, strict=True)
        ]
        return [*zip(rows.tolist(), lengths, strict=True)], chosen

    def force(self, rows: Sequence[int], tokens: Sequence[int]) -> None:
        """Let these rows go on with these tokens."""
        last = self.runner.rows.last_tokens
        last[torch.tensor(rows, dtype=torch.int64)] = torch.tensor(tokens, dtype=last.dtype)

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
        sampled, chosen = self._engine.run(plan)
        recorded = self._committed.get(plan.step)
        if recorded is None or not sampled:
            return
        tokens = [token % _VOCAB for token in recorded.token_ids]
        self._engine.force([row for row, _ in sampled], tokens)
        ids = self.scheduler.pools.table.request_id
        for (row, length), choice, token in zip(sampled, chosen, tokens, strict=True):
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
    recorded = Execution(_Engine(model, ops, config), records)
    origin = msgspec.structs.replace(origin, config=config)
    replay = Replay(origin=origin, records=records, execute=recorded.execute)
    recorded.scheduler = replay.scheduler
    failure = ""
    try:
        replay.run()
    except NotExecuted as error:
        if isinstance(error.__cause__, NotExecutable):
            replay.outcome.ended = str(error)
        else:
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

    def choices(self, prompt: list[int], outputs: list[int]) -> dict[int, Chosen]:
        """Return by position what is chosen if the request goes on with these outputs: step by step, and the last one
        from all of them in one step."""
        found = self._decoded(prompt, outputs)
        return found | self._decoded(prompt + outputs[:-1], outputs[-1:])

    def _decoded(self, prompt: list[int], outputs: list[int]) -> dict[int, Chosen]:
        self._engine.clear()
        scheduler, found = Scheduler(self._config), dict[int, Chosen]()
        params = msgspec.structs.replace(_GREEDY, max_tokens=len(outputs))
        scheduler.add(Request(1, prompt, params), 0.0)
        while not scheduler.idle and (plan := scheduler.plan(0.0)) is not None:
            sampled, chosen = self._engine.run(plan)
            tokens = [outputs[length - len(prompt)] for _, length in sampled]
            found.update((length, choice) for (_, length), choice in zip(sampled, chosen, strict=True))
            self._engine.force([row for row, _ in sampled], tokens)
            scheduler.commit(plan, StepResult(token_ids=tokens), 0.0)
            scheduler.take_updates()
        return found


def _pairs(alone: _Alone, recorded: Execution, added: Added) -> Iterator[Compared]:
    """Yield each choice of a request beside that of the request alone."""
    prompt = [token % _VOCAB for token in memoryview(added.tokens).cast("i").tolist()]
    outputs = list[int]()
    while (token := recorded.forced.get((added.id, len(prompt) + len(outputs)))) is not None:
        outputs.append(token)
    choices = alone.choices(prompt, outputs) if outputs else {}
    for position, choice in choices.items():
        step, other = recorded.chosen[added.id, position]
        yield Compared(step, added.id, position, other, choice)


def _in_vocabulary(plan: StepPlan) -> StepPlan:
    """Return a plan whose tokens the small model knows, that samples greedily and gives log-probabilities."""
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
        prompt_logprobs=(),
        pooled=(),
    )


def _small_model(folder: Path, model_type: str, config: SchedulerConfig, ops: Ops) -> Network:
    """Make and load a model with the layers of `model_type` that keeps what the recorded one does."""
    fields = small_config(model_type, hidden_size=_HIDDEN, num_layers=_LAYERS, vocab_size=_VOCAB)
    num_read = [*config.kinds.num_read.values()]
    if "sliding_window" in fields and num_read:
        fields["sliding_window"] = num_read[0]
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
