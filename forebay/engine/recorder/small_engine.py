"""A small random model with the layers and the memory of a recorded engine, which executes its plans.

Its tokens are made of the recorded ones, and the device chooses these, as if a grammar allowed no others. So lengths,
hits, retractions and accepted drafts are the recorded ones. Encodings of pictures are random numbers of their digests,
and tiers of the prefix cache are in memory.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final, NamedTuple, Self

import msgspec
import numpy as np
import torch
from torch import Tensor

from forebay.base.errors import ConfigError
from forebay.base.parts import I32
from forebay.base.units import ceil_div, human_bytes
from forebay.config.engine_config import CacheTypes, DisaggregationMode, SchedulerConfig
from forebay.config.pictures import PictureConfig
from forebay.families.checkpoint import open_checkpoint
from forebay.families.config.model_config import config_from_folder
from forebay.families.small import small_config
from forebay.memory.budget import PoolSizes
from forebay.memory.kv_allocator import KV
from forebay.memory.slots import NO_IDS, Ids, as_ids
from forebay.models import load
from forebay.models.encoders.encoder import Encoder, State
from forebay.models.network import Network
from forebay.models.random_weights import write_random_weights
from forebay.ops import Ops
from forebay.pools.cache_spec import cache_sizes
from forebay.pools.mover import Rows
from forebay.requests.sampling_params import SamplingParams
from forebay.requests.step_plan import StepPlan, TierCopy
from forebay.requests.transfers import Span
from forebay.runtime import ModelRunner, build_runner
from forebay.runtime.graphs.backends import Eager
from forebay.runtime.steps.pictures import Encodings
from forebay.scheduler.journal import Committed

MOST_BYTES: Final = 2 << 30  # of one of the two pools
VOCAB: Final = 512
POISON: Final = 3e4  # finite: what is masked is multiplied by zero
GREEDY: Final = SamplingParams(temperature=0.0, logprobs=1, ignore_eos=True)
_HIDDEN: Final = 64
_LAYERS: Final = 4
_TYPES: Final = CacheTypes()
_FIRST: Final = as_ids([1])  # slot of any kind


class Chosen(NamedTuple):
    """The token that the model chooses, and its log-probability."""

    token: int
    logprob: float


UNKNOWN: Final = Chosen(-1, math.nan)
"""The choice of a step whose log-probability is not a number."""


class Forced(NamedTuple):
    """The tokens that a step chooses, and how many of them each of its sequences gets that sample."""

    tokens: Sequence[int]
    num_new: Sequence[int]

    @classmethod
    def of(cls, record: Committed) -> Self:
        """Return those of a recorded result."""
        tokens = [token % VOCAB for token in record.token_ids]
        return cls(tokens, record.num_new or [1] * len(tokens))

    def drafts(self, num_drafts: Sequence[int]) -> Iterator[int]:
        """Yield as many draft tokens of each sequence: those that it accepts, and behind them a wrong one."""
        ends = np.cumsum(self.num_new).tolist()
        for count, num_new, end in zip(num_drafts, self.num_new, ends, strict=True):
            accepted, wrong = self.tokens[end - num_new : end - 1], (self.tokens[end - 1] + 1) % VOCAB
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


class TierRows:
    """A tier of the prefix cache: the rows that were copied there, by kind of cache and slot. Slots without a row, and
    rows of copies that the recorded engine `lost`, are poisoned."""

    def __init__(self, lost: Collection[int]) -> None:
        self._lost, self._rows = lost, dict[tuple[str, int], Tensor]()
        self.poison: Mapping[str, Tensor] = {}  # by kind, a row

    def store(self, copy: TierCopy, rows: Rows) -> None:
        """Keep rows, unless the copy is lost."""
        for kind, ids in copy.there.items():
            if copy.number in self._lost:
                self.drop(kind, ids)
            else:
                self._rows.update(zip(((kind, slot) for slot in ids.tolist()), rows[kind], strict=True))

    def fetch(self, copy: TierCopy) -> Rows:
        """Return the rows of slots."""
        kept = {} if copy.number in self._lost else self._rows
        return {
            kind: torch.stack([kept.get((kind, slot), self.poison[kind]) for slot in ids.tolist()])
            if len(ids)
            else self.poison[kind].new_empty((0, len(self.poison[kind])))
            for kind, ids in copy.there.items()
        }

    def drop(self, kind: str, ids: Ids) -> None:
        """Poison slots."""
        for slot in ids.tolist():
            self._rows.pop((kind, slot), None)


class SmallEngine:
    """The small model, with the memory of one recorded engine. Copies of tiers whose numbers are in `lost` fail."""

    def __init__(
        self, model: Network, ops: Ops, config: SchedulerConfig, width: int = 1, lost: Collection[int] = ()
    ) -> None:
        self._page_size = config.page_size
        self._num_words = ceil_div(model.logits(torch.zeros(1, _HIDDEN)).shape[1], 32)
        self._words = np.zeros((0, self._num_words), dtype=np.int32)  # of the masks of the next step
        sizes = PoolSizes(
            page_size=config.page_size,
            num_slots={KV: config.num_pages, **config.kinds.num_slots},
            max_running_requests=config.max_running_requests,
            pre_alloc_size=config.disaggregation.decode_extra_slots,
            context_length=config.context_length,
        )
        self.tiers = {name: TierRows(lost) for name in config.tiers}
        self.runner: ModelRunner = build_runner(
            model,
            ops=ops,
            sizes=sizes,
            types=replace(_TYPES, width=width, movable=config.disaggregation.mode is not DisaggregationMode.NULL),
            max_num_tokens=max(config.chunked_prefill_size + sizes.num_rows, sizes.num_rows * width),
            vocab_size=VOCAB,
            device="cpu",
            graphs=Eager(),
            width=width,
            take_masks=lambda step: self._words,
            encodings=_encodings(config.pictures),
            make_tiers=lambda mover: self.tiers,
        )
        for tier in self.tiers.values():
            tier.poison = self._poison_rows()

    def run(self, plan: StepPlan, forced: Forced | None) -> Iterator[tuple[int, int, Chosen]]:
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
                choice = UNKNOWN if found is None else Chosen(found.top_ids[0], found.top_logprobs[0])
                yield row, place, choice

    def _forcing(self, plan: StepPlan, forced: Forced) -> StepPlan:
        """Return a plan whose sequences choose these tokens, and accept as many drafts as they did."""
        samples = np.flatnonzero(plan.sample_mask)
        counts = np.where(samples < plan.num_extends, 1, plan.q_lens[samples])
        self._words = forced.words(counts.tolist(), self._num_words)
        drafts = np.fromiter(forced.drafts((counts - 1).tolist()), dtype=np.int64)
        return msgspec.structs.replace(plan, masked=samples, drafts=drafts)

    def _poison_rows(self) -> dict[str, Tensor]:
        """Return by kind of cache the row of a slot that is poisoned, [row bytes]."""
        found = dict[str, Tensor]()
        for kind in filter(self.runner.cache.has, self.runner.cache.tables):
            self.fill(kind, _FIRST, POISON)
            found[kind] = self.runner.mover.read(self.runner.mover.places({kind: _FIRST}))[kind][0]
        return found

    def fill(self, kind: str, ids: Ids, value: float) -> None:
        """Set all that layers keep in these pages or slots."""
        for tensor in self.runner.cache.tables[kind].tensors:
            if tensor.is_floating_point():
                tensor[torch.from_numpy(ids.copy())] = value

    def read(self, spans: Mapping[str, Span]) -> Rows:
        """Return what these places hold."""
        mover = self.runner.mover
        return mover.read(mover.places({kind: span.ids for kind, span in spans.items()}))

    def poison(self, spans: Mapping[str, Span]) -> None:
        """Poison these places."""
        for kind, span in spans.items():
            self.fill(kind, span.ids, POISON)

    def write(self, spans: Mapping[str, Span], sent: Mapping[str, Span], rows: Rows) -> None:
        """Write rows that were read from the places `sent` of another engine, as far as these places have their
        tokens."""
        mover = self.runner.mover
        for kind in spans.keys() & sent.keys():
            ahead = (spans[kind].start - sent[kind].start) // self._page_size
            theirs = slice(max(0, ahead), max(0, ahead + len(spans[kind].ids)))
            ours = slice(max(0, -ahead), max(0, -ahead + len(sent[kind].ids)))
            mover.write({kind: rows[kind][theirs]}, mover.places({kind: spans[kind].ids[ours]}))

    def clear(self) -> None:
        """Set all memory of the caches to zero."""
        for table in self.runner.cache.tables.values():
            for tensor in table.tensors:
                tensor.zero_()


def _in_vocabulary(plan: StepPlan) -> StepPlan:
    """Return a plan whose tokens the small model knows, that samples greedily and gives log-probabilities. Its draft
    tokens are any."""
    admissions = tuple(
        msgspec.structs.replace(
            start,
            params=GREEDY,
            token_ids=(start.token_ids % VOCAB).astype(np.int32),
            stop_ids=(),
            adapter=0,
        )
        for start in plan.admissions
    )
    return msgspec.structs.replace(
        plan,
        input_ids=plan.input_ids % VOCAB,
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


def small_model(folder: Path, model_type: str, config: SchedulerConfig, ops: Ops) -> Network:
    """Make and load a model with the layers of `model_type` that keeps what the recorded one does."""
    fields = small_config(model_type, hidden_size=_HIDDEN, num_layers=_LAYERS, vocab_size=VOCAB)
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
