"""The real engine core over a real model, its shape chosen per run and its weights read once."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from random import Random

import torch

from forebay import models
from forebay.backends import make_ops
from forebay.base.pixels import CHANNELS
from forebay.config.engine_config import (
    DisaggregationMode,
    DisaggregationOptions,
    HisparseOptions,
    Ledger,
    SchedulerConfig,
    StateStrategy,
)
from forebay.config.pictures import PictureConfig
from forebay.engine.frames import AddRequest
from forebay.engine.lifecycle.adapter_memory import ModelAdapters
from forebay.engine.lifecycle.adapters import AdapterMemory
from forebay.engine.lifecycle.pictures import sizes_of
from forebay.engine.loop.cache_checks import CacheChecks
from forebay.engine.loop.core import EngineCore
from forebay.engine.loop.exchange import Connected
from forebay.families.base.rope import RopeSections
from forebay.families.checkpoint import open_checkpoint
from forebay.families.config.model_config import ModelConfig
from forebay.grammar.matching import Grammars
from forebay.memory.budget import PoolSizes
from forebay.memory.kinds.declared import KindSize
from forebay.memory.kinds.ring.rings import RING
from forebay.memory.kinds.state.hybrid_rows import tracking_slots
from forebay.memory.kinds.window.demand import window_pages_in_flight, window_pages_per_request
from forebay.memory.retention import RetentionRequest
from forebay.models.decoder import Model
from forebay.models.drafter import Drafter, OwnHead
from forebay.models.encoder import load_encoder
from forebay.ops import Ops
from forebay.pools.cache_pool import CachePool
from forebay.pools.cache_spec import cache_sizes
from forebay.pools.mover import Mover
from forebay.requests.pictures import Picture
from forebay.requests.sampling_params import SamplingParams
from forebay.requests.step_plan import TokenLogprob
from forebay.requests.updates import FinishReason, MissReason, Update
from forebay.runtime import ModelRunner, build_runner
from forebay.runtime.host.disk_store import DiskStore
from forebay.runtime.host.tier_stores import HostStore, TierStore
from forebay.runtime.model_runner import no_masks
from forebay.runtime.overlap import OverlappedRunner
from forebay.runtime.steps.pictures import Encodings
from forebay.scheduler.handoff import Handoff
from forebay.scheduler.proposer import Proposer
from forebay.scheduler.scheduler import Scheduler
from tests.kinds_of import kind_config
from tests.models.drive import of_whole_entries
from tests.pools.caches import cache_types

BLOCK_ROWS = 4  # of encodings

WHOLE = DisaggregationOptions()


@dataclass(slots=True)
class Result:
    token_ids: list[int] = field(default_factory=list)
    finish: FinishReason | None = None
    cached_tokens: int = 0
    miss_reason: MissReason | None = None
    tiers: dict[str, int] = field(default_factory=dict)
    vector: bytes = b""
    logprobs: list[TokenLogprob] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprob | None] | None = None

    def take(self, update: Update) -> None:
        assert self.finish is None, "news of a request that has ended"
        self.token_ids += update.token_ids
        self.finish = update.finish
        if update.cache is not None:
            self.cached_tokens, self.miss_reason = update.cache.cached_tokens, update.cache.miss_reason
            self.tiers = update.cache.tiers
        self.vector = update.vector
        self.logprobs += update.logprobs or []
        if update.prompt_logprobs is not None:
            assert self.prompt_logprobs is None, "prompt log-probabilities twice"
            self.prompt_logprobs = update.prompt_logprobs


class Files:
    """What an engine does about the files of its prefix cache."""

    def __init__(self, store: DiskStore) -> None:
        self._store = store

    def save(self) -> None:
        self._store.flush()

    def close(self) -> None:
        self._store.close()


class Engine:
    """An `EngineCore` whose pools raise at the first mistake and are audited after each run."""

    def __init__(self, core: EngineCore, stores: Mapping[str, TierStore] | None = None, folder: str = "") -> None:
        self.core, self.stores, self.folder = core, stores or {}, folder
        self._next_id = 1

    def run(
        self,
        prompts: Sequence[list[int]],
        params: SamplingParams | Sequence[SamplingParams],
        *,
        adapters: Sequence[str] = (),
        pictures: Sequence[Sequence[Picture]] = (),
        retentions: Sequence[RetentionRequest] = (),
        apart: int = 0,
        abort: Callable[[int, Result], bool] = lambda number, result: False,
    ) -> list[Result]:
        """Each prompt's outcome, with its own of the `adapters` and `pictures`, if any, and with all `retentions`.
        `apart` steps pass between two arrivals; `abort(number, result)` says after each step whether a request is to be
        given up."""
        listed = [params] * len(prompts) if isinstance(params, SamplingParams) else list(params)
        results = {self._next_id + i: Result() for i in range(len(prompts))}
        first, self._next_id = self._next_id, self._next_id + len(prompts)
        names = adapters or [""] * len(prompts)
        shown = pictures or [()] * len(prompts)
        for request_id, prompt, wanted, name, seen in zip(results, prompts, listed, names, shown, strict=True):
            add = AddRequest(
                request_id=request_id,
                prompt_token_ids=prompt,
                params=wanted,
                adapter=name,
                pictures=tuple(seen),
                retentions=list(retentions),
            )
            self._take(results, self.core.add(add))
            for _ in range(apart):
                self._take(results, self.core.step())
        while not self.core.idle:
            self._take(results, self.core.step())
            for request_id, result in results.items():
                if result.finish is None and abort(request_id - first, result):
                    self._take(results, self.core.abort(request_id))
        self.core.scheduler.audit()
        return list(results.values())

    def tokens(
        self, prompts: Sequence[list[int]], params: SamplingParams | Sequence[SamplingParams]
    ) -> list[list[int]]:
        return [result.token_ids for result in self.run(prompts, params)]

    def count(self, name: str) -> float:
        return self.core.scheduler.state(0.0).counters.get(name, 0)

    def bytes_on_host(self) -> int:
        """What retracted requests keep in host memory."""
        runner = self.core._runner
        runner = runner._runner if isinstance(runner, OverlappedRunner) else runner
        assert isinstance(runner, ModelRunner), runner
        return runner.inputs.copies.num_bytes

    def flush_cache(self) -> None:
        self.core.scheduler.flush_cache()

    @staticmethod
    def _take(results: dict[int, Result], updates: list[Update]) -> None:
        for update in updates:
            assert update.failure is None, update.failure
            results[update.request_id].take(update)


class Rig:
    """A loaded model; `engine` makes an engine over it in milliseconds. `kv_dtype` None: KV is of `dtype`. With its
    `draft_head` it drafts for itself, else what `draft` makes does, or the model at `draft_model`. Each engine loads
    the `adapters`, by name and in this order; they are in the model, which only one engine at a time may use then. With
    `rope_sections` the model has M-RoPE, whatever its files say. `mmproj` is the encoder's file of a GGUF model."""

    def __init__(
        self,
        path: Path,
        *,
        dtype: torch.dtype,
        kv_dtype: torch.dtype | None = None,
        kernels: str,
        num_threads: int,
        context_length: int,
        draft_head: bool = False,
        draft: Callable[[Model, ModelConfig, Ops], Drafter] | None = None,
        draft_model: Path | None = None,
        adapters: Mapping[str, Path] | None = None,
        rope_sections: RopeSections | None = None,
        mmproj: Path | None = None,
    ) -> None:
        checkpoint = open_checkpoint(str(path), draft_head=draft_head, mmproj=mmproj)
        if rope_sections is not None:
            config = replace(checkpoint.config, rope_sections=rope_sections)
            checkpoint = replace(checkpoint, config=config)
        self.ops = make_ops(kernels, num_threads)
        self._cache_types = cache_types(dtype, kv_dtype=kv_dtype)
        self._context_length = context_length
        self._vocab_size = checkpoint.config.vocab_size
        self._adapters, self._config = adapters or {}, checkpoint.config
        slots = models.AdapterSlots(max_loras=len(self._adapters), max_rank=16, dtype=torch.float32)
        model = models.load(
            checkpoint,
            ops=self.ops,
            dtype=dtype,
            context_length=context_length,
            draft_head=draft_head,
            adapters=slots if adapters else None,
        )
        assert isinstance(model, Model), "a decoder"
        self._model = model
        self.encoder = None
        if checkpoint.config.vision is not None:
            device = "cpu"
            self.encoder = load_encoder(
                checkpoint, ops=self.ops, dtype=dtype, device=device, progress=lambda done, total: None
            )
        self._drafter: Drafter | None = OwnHead(self._model, self.ops) if draft_head else None
        if draft is not None:
            self._drafter = draft(self._model, checkpoint.config, self.ops)
        self._draft_model: Model | None = None
        if draft_model is not None:
            beside, first = open_checkpoint(str(draft_model)), len(self._model.cache_specs())
            drafts = models.load(beside, ops=self.ops, dtype=dtype, first_entry=first)
            assert isinstance(drafts, Model), "a decoder"
            self._draft_model = drafts

    def engine(
        self,
        *,
        page_size: int = 16,
        num_tokens: int = 4096,
        chunked_prefill_size: int = 512,
        overlap_depth: int = 0,
        radix_cache: bool = False,
        max_running_requests: int = 16,
        schedule_conservativeness: float = 1.0,
        cached_states: int = 24,
        strategy: StateStrategy = StateStrategy.EXTRA_BUFFER,
        track_interval: int = 16,
        retraction_host_bytes: int = 0,
        width: int = 1,
        proposer: Proposer | None = None,
        role: Handoff | None = None,
        options: DisaggregationOptions = WHOLE,
        transfers: Callable[[CachePool], Connected] | None = None,
        grammars: Grammars | None = None,
        hot_columns: int = 0,
        num_resident: int = 8,
        host_path: str = "",
        num_rows_of_pictures: int = 256,
        layer_tokens: float = 2.0,
        host_tokens: int = 0,
        disk: tuple[Path, Mapping[str, str]] | None = None,
        checks: bool = False,
    ) -> Engine:
        """`num_tokens` is the size of the KV cache. Where layers keep states there are `cached_states` slots besides
        those that running requests need, where they have windows as few pages as can do. Decodes compute `width` tokens
        at most; `proposer` guesses on the host. With a `role` it computes a half, and `transfers` moves the other;
        `grammars` are there for who asks for one. With `hot_columns` HiSparse is on, with `num_resident` pages and the
        host tier perhaps in a file. The encodings
        of pictures have so many rows, and a layer's work on a tile of 4 tokens costs as much as `layer_tokens`.
        With `host_tokens` the prefix cache has a host tier with KV of so many; with `disk` one of 3,200 tokens in files
        of a folder, with this identity. With `checks` each idle moment is for a check of the prefix cache."""
        page_size = of_whole_entries(page_size, self._model)
        num_rows = max_running_requests + options.decode_extra_slots
        num_pages = num_tokens // page_size
        movable = options.mode is not DisaggregationMode.NULL
        types = replace(self._cache_types, sparse_kv_on_host=hot_columns > 0, width=width, movable=movable)
        resident = {"resident": num_resident} if hot_columns else {}
        sizes = cache_sizes(self._model.cache_specs(), types)
        slots_per_req = 1 + tracking_slots(radix_cache and strategy is StateStrategy.EXTRA_BUFFER, overlap_depth)
        per_request = window_pages_per_request(
            sizes.num_read("window"), page_size, overlap_depth, track_interval, width=width
        )
        longest = 0 if self._config.vision is None else self._config.vision.longest_span
        most_prompt = max(chunked_prefill_size, longest)
        in_flight = window_pages_in_flight(most_prompt, page_size, overlap_depth)
        state = kind_config(
            num_slots=num_rows * slots_per_req + cached_states if sizes.num_bytes("state") else 0,
            strategy=strategy,
            track_interval=track_interval,
            num_window_pages=num_rows * per_request + in_flight if sizes.num_read("window") else 0,
            window=sizes.num_read("window"),
            slot_bytes={
                "kv": page_size * sizes.kv_bytes_per_token,
                "window": page_size * sizes.num_bytes("window") + sizes.kinds.get("window", KindSize(0)).page_bytes,
                "state": sizes.num_bytes("state"),
            },
            retraction_host_bytes=retraction_host_bytes,
            recompute_bytes_per_token=1 << 20,
        )
        state = replace(state, num_slots={**state.num_slots, **resident})
        if num_bytes := sizes.num_bytes(RING):
            state = replace(
                state,
                num_slots={**state.num_slots, RING: num_rows},
                slot_bytes={**state.slot_bytes, RING: num_bytes},
            )
        pictures = self._pictures(num_rows_of_pictures, layer_tokens)
        tiers: dict[str, dict[str, int]] = {}
        for name, tier_tokens in (("host", host_tokens), ("disk", 3200 if disk else 0)):
            if tier_tokens:
                num_slots = {kind: num * tier_tokens // num_tokens for kind, num in state.num_slots.items()}
                tiers[name] = {kind: num for kind, num in num_slots.items() if kind in ("window", "state")}
                tiers[name]["kv"] = tier_tokens // page_size
        stores: dict[str, TierStore] = {}

        def make_tiers(mover: Mover) -> dict[str, TierStore]:
            if host_tokens:
                stores["host"] = HostStore(mover, tiers["host"])
            if disk is not None:
                stores["disk"] = DiskStore(mover, *disk, limit_bytes=1 << 30)
            return stores

        runner = build_runner(
            self._model,
            sizes=PoolSizes(
                num_slots={"kv": num_pages, **state.num_slots},
                page_size=page_size,
                max_running_requests=max_running_requests,
                pre_alloc_size=options.decode_extra_slots,
                context_length=self._context_length,
            ),
            width=width,
            drafter=self._drafter if width > 1 else None,
            draft_model=self._draft_model if width > 1 else None,
            ops=self.ops,
            max_num_tokens=max(most_prompt + max_running_requests, max_running_requests * width),
            vocab_size=self._vocab_size,
            types=types,
            hisparse=HisparseOptions(device_buffer_size=hot_columns, host_path=host_path),
            device="cpu",
            take_masks=grammars.take if grammars else no_masks,
            make_tiers=make_tiers,
            encodings=Encodings(self.encoder, pictures.num_rows, bidirectional=longest > 0)
            if self.encoder and pictures
            else None,
        )
        scheduler = Scheduler(
            SchedulerConfig(
                page_size=page_size,
                num_pages=num_pages,
                max_running_requests=max_running_requests,
                context_length=self._context_length,
                chunked_prefill_size=chunked_prefill_size,
                radix_cache=radix_cache,
                overlap_depth=overlap_depth,
                schedule_conservativeness=schedule_conservativeness,
                ledger=Ledger.RAISE,
                kinds=state,
                disaggregation=options,
                max_loras=len(self._adapters),
                pictures=pictures,
                tiers=tiers,
            ),
            proposer,
            role,
            grammars,
        )
        if isinstance(files := stores.get("disk"), DiskStore):
            files.retained = scheduler.memory.tiers.named("disk").retained_slots
            scheduler.memory.tiers.restore("disk", files.records(), writable=lambda: files.writes)
        beside = OverlappedRunner(runner) if overlap_depth else runner
        carried = transfers(runner.cache) if transfers else None
        core = EngineCore(
            scheduler,
            beside,
            vocab_size=self._vocab_size,
            transfers=carried,
            adapters=self._adapter_memory(),
            tiers=Files(files) if isinstance(files, DiskStore) else None,
            checks=CacheChecks(
                scheduler,
                runner.inputs.tiers.differing,
                forget=files.forget if isinstance(files, DiskStore) else lambda prefix, first: None,
                per_minute=math.inf,
                now=-math.inf,
                rng=Random(0),
            )
            if checks
            else None,
        )
        for name, path in self._adapters.items():
            assert core.adapters is not None
            core.adapters.load_now(name, str(path))
        return Engine(core, stores, str(disk[0]) if disk else "")

    def _pictures(self, num_rows: int, layer_tokens: float) -> PictureConfig | None:
        vision = self._config.vision
        if self.encoder is None or vision is None:
            return None
        its = sizes_of(vision, self.encoder, (layer_tokens / BLOCK_ROWS, 0.0), self._vocab_size, 0)
        pixel_bytes = 2 * num_rows * CHANNELS * vision.token_edge**2  # some fill no patch
        cache_bytes = num_rows * its.row_bytes + pixel_bytes
        mrope = self._config.rope_sections is not None
        return replace(its, block_rows=BLOCK_ROWS, num_rows=num_rows, cache_bytes=cache_bytes, mrope=mrope)

    def _adapter_memory(self) -> AdapterMemory | None:
        return ModelAdapters(self._model.adapters, self._config) if self._model.adapters else None
