"""From a configuration to an engine that can step: memory divided, weights loaded, kernels warm. The torch side; only
the engine process and `LLM` import it."""

from __future__ import annotations

import contextlib
import ctypes
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Final

import msgspec
import torch
from llguidance import LLTokenizer

from forebay.backends import make_ops
from forebay.base import fault
from forebay.base.errors import ConfigError, ModelError
from forebay.base.heap import give_back_freed_memory, is_out_of_memory
from forebay.base.log import event, get_logger
from forebay.base.parts import I32
from forebay.base.units import human_bytes
from forebay.config.config import SETTINGS
from forebay.config.engine_config import (
    ActivationDtype,
    EngineConfig,
    Exact,
    SchedulerConfig,
    SpeculationOptions,
    SpeculativeAlgorithm,
)
from forebay.config.machine import Amount, available_memory
from forebay.config.pictures import PictureConfig
from forebay.engine.frames import Ready
from forebay.engine.lifecycle.adapter_memory import ModelAdapters
from forebay.engine.lifecycle.drafting import by_draft_model, draft_cache_specs
from forebay.engine.lifecycle.environment import environment_of
from forebay.engine.lifecycle.exchanges import make_exchange, make_exchange_file
from forebay.engine.lifecycle.occupation import Occupation
from forebay.engine.lifecycle.packed_cache import PackedCache
from forebay.engine.lifecycle.pictures import picture_config
from forebay.engine.lifecycle.sizing import (
    divided_among_ranks,
    divided_settings,
    memory_demand,
    most_prompt_tokens,
    scheduler_config,
    within_memory,
)
from forebay.engine.lifecycle.sleep import Memory
from forebay.engine.lifecycle.tiers import EngineTiers
from forebay.engine.lifecycle.weights import DTYPES, EngineWeights, Loaded
from forebay.engine.loop.cache_checks import CacheChecks
from forebay.engine.loop.cache_events import make_cache_events
from forebay.engine.loop.core import EngineCore
from forebay.engine.loop.mixed import MixedChunks
from forebay.engine.loop.roles import Listening, role_of, shared_caches, transfers_for
from forebay.engine.loop.start_report import Report, start_report
from forebay.engine.ranks.broadcast import RankBroadcast, RankMemory
from forebay.engine.ranks.processes import EndingRunner, RankProcesses
from forebay.families.base.rope import long_rope
from forebay.families.checkpoint import Checkpoint, open_checkpoint
from forebay.families.config.model_config import ModelConfig
from forebay.formats.quantization import Quantization
from forebay.formats.quantized import FP8_GROUP
from forebay.formats.weight_shapes import WeightShapes
from forebay.grammar.matching import Grammars
from forebay.grammar.vocabulary import Vocabulary
from forebay.memory.budget import MemoryBudget
from forebay.memory.division import divide_memory
from forebay.models import needs_of
from forebay.models.encoders.encoder import Encoder
from forebay.ops import Ops
from forebay.ops.exchange import WHOLE, Share, share_of
from forebay.ops.weight_memory import WeightMemory
from forebay.pools.cache_spec import cache_sizes
from forebay.pools.mover import Mover
from forebay.pools.regions import Regions, Tag
from forebay.requests.end_tokens import EndTokens
from forebay.requests.step_plan import CapturingRunner
from forebay.runtime import ModelRunner, build_runner
from forebay.runtime.graphs.backends import Eager, graphs_for
from forebay.runtime.graphs.runner import default_sizes
from forebay.runtime.host.tier_stores import TierStore
from forebay.runtime.model_runner import no_masks
from forebay.runtime.overlap import OverlappedRunner
from forebay.runtime.steps.pictures import Encodings
from forebay.scheduler.limits import most_requests
from forebay.scheduler.proposer import Proposer
from forebay.scheduler.scheduler import Scheduler
from forebay.speculation.adaptive import Widths
from forebay.speculation.ngram import Ngram
from forebay.speculation.planted import Planted

PROGRESS_STEP: Final = 0.25  # of the weights, between two log lines
_M_TRIM_THRESHOLD: Final = -1  # numbers of glibc's malloc.h
_M_MMAP_THRESHOLD: Final = -3
_LARGEST_RESULT_BYTES: Final = 1 << 30
_PROPOSERS: Final[dict[SpeculativeAlgorithm, Callable[[SpeculationOptions], Proposer]]] = {
    SpeculativeAlgorithm.NGRAM: Ngram,
}

log = get_logger("engine")


def build_engine(config: EngineConfig, clock: Callable[[], float] = time.monotonic) -> tuple[EngineCore, Ready]:
    """An engine core over the real model, and what there is to say about it. Takes as long as the weights do.

    Raises ModelError for a checkpoint that cannot be served, ConfigError for memory that holds not one page.
    """
    begin = time.monotonic()
    if config.types.dtype not in DTYPES:
        raise ConfigError(f"dtype {config.types.dtype!r}: use {' or '.join(DTYPES)}")
    config = replace(config, speculation=by_draft_model(config.speculation))
    proposer = _proposer(config.speculation)
    torch.set_num_threads(config.num_threads)
    fault.point("engine.load")
    draft_head = config.speculation.by_own_head
    checkpoint = open_checkpoint(config.model_path, draft_head=draft_head, mmproj=config.pictures.mmproj)
    _name_what_is_not_used(checkpoint, draft_head)
    if config.activation_dtype is ActivationDtype.FP8:
        check_fp8(config.quantization, checkpoint.weight_shapes())
    asked, (config, budget) = config, _divided(config, checkpoint.config, draft_head)
    regions = _regions(config)
    ops = _ops(config, regions)
    ranks = RankProcesses(asked, make_exchange_file(config, ops)) if config.ranks.size > 1 else None
    share = WHOLE
    if ranks is not None:
        share = share_of(make_exchange(config, ops, 0, ranks.exchange, ranks.descriptors()))
    with _within_memory(config), _ended_on_error(ranks):
        cache = PackedCache(config, ops, regions)
        weights = EngineWeights(config, checkpoint, ops, cache, num_positions=budget.context_length, share=share)
        with regions.inside(Tag.WEIGHTS):
            loaded = weights.load(checkpoint, _progress_log, partial(_progress_log, "writing_weights_cache"))
        ends = EndTokens(checkpoint.config.eos_token_ids, vocab_size=checkpoint.config.num_ids)
        grammars = _grammars(config, ends)
        pictures = picture_config(config, checkpoint.config, loaded.encoder)
        kernels = _computing(ops, checkpoint.config, budget)
        tiers = EngineTiers(config, budget, ops, kernels)
        runner = _runner(config, budget, checkpoint, loaded, ops, regions, grammars.take, pictures, tiers.make, share)
        _keep_freed_memory()
        runner.warm_up()
        if ranks is not None:
            ranks.loaded()
    limits = scheduler_config(config, budget, loaded.model.weight_bytes, pictures)
    transfers = transfers_for(config, runner.cache, checkpoint.config.vocab_size, kernels, regions)
    scheduler = Scheduler(limits, proposer, role_of(limits.disaggregation, transfers), grammars)
    tiers.restore(scheduler)
    memory: Memory = Occupation(regions, runner, weights, trim=trim)
    device: CapturingRunner = runner
    if ranks is not None:
        device = broadcast = RankBroadcast(EndingRunner(runner, ranks.ring.lost), ranks.ring)
        memory = RankMemory(memory, broadcast)
    beside = _beside_the_host(config, device)
    slots = loaded.model.adapters
    core = EngineCore(
        scheduler,
        beside,
        vocab_size=ends.vocab_size,
        end_tokens=ends,
        clock=clock,
        in_idle_time=beside.capture_next,
        widths=_widths(config.speculation),
        mixed=_mixed(config),
        transfers=transfers,
        memory=memory,
        adapters=None if slots is None else ModelAdapters(slots, checkpoint.config),
        tiers=tiers,
        checks=_checks(config, scheduler, runner, tiers, clock()),
        cache_events=make_cache_events(config, scheduler),
        end_ranks=(lambda: None) if ranks is None else ranks.close,
        measures_loads=bool(scheduler.memory.tiers.all),
        wake_on_request=config.wake_on_request,
        keep_prefix_cache=config.keep_prefix_cache,
    )
    _finish(config, core, cache)
    load_seconds = time.monotonic() - begin
    report = start_report(config, budget, loaded.model, runner, ops, (load_seconds, cache))
    report += tiers.report
    divided = divided_settings(replace(asked, memory=config.memory), budget)
    report += [(SETTINGS, name, *of_setting) for name, of_setting in divided.items()]
    ready = _ready(limits, budget, checkpoint, report, load_seconds, transfers, loaded.model.weight_bytes)
    ready = msgspec.structs.replace(ready, environment=environment_of(config, ops, kernels))
    if core.adapters is not None:
        ready = msgspec.structs.replace(ready, adapters=core.adapters.report)
    log.info(event("ready", pid=ready.pid, load_s=load_seconds, max_total_tokens=ready.max_total_tokens))
    return core, ready


def build_rank(
    config: EngineConfig, rank: int, exchange: int, processes: Sequence[int]
) -> tuple[ModelRunner, Occupation, int]:
    """Return the runner, the memory and the bytes of weights of a rank above 0, which makes them as `build_engine`
    makes those of rank 0. `exchange` is the file that the ranks share, `processes` are those of all ranks. Raises as
    `build_engine`."""
    torch.set_num_threads(config.num_threads)
    checkpoint = open_checkpoint(config.model_path, mmproj=config.pictures.mmproj)
    config, budget = _divided(config, checkpoint.config, draft_head=False)
    regions = _regions(config)
    ops = _ops(config, regions)
    others = [os.pidfd_open(process) for process in processes if process != os.getpid()]
    share = share_of(make_exchange(config, ops, rank, exchange, others))
    with _within_memory(config):
        cache = PackedCache(config, ops, regions)
        weights = EngineWeights(config, checkpoint, ops, cache, num_positions=budget.context_length, share=share)
        with regions.inside(Tag.WEIGHTS):
            loaded = weights.load(checkpoint, _progress_log, _progress_log)
        tiers = EngineTiers(config, budget, ops, _computing(ops, checkpoint.config, budget))
        runner = _runner(config, budget, checkpoint, loaded, ops, regions, no_masks, None, tiers.make, share)
        _keep_freed_memory()
        runner.warm_up()
    return runner, Occupation(regions, runner, weights, trim=trim), loaded.model.weight_bytes


@contextlib.contextmanager
def _ended_on_error(ranks: RankProcesses | None) -> Iterator[None]:
    """End the other ranks if rank 0 cannot load its share."""
    try:
        yield
    except BaseException:
        if ranks is not None:
            ranks.close()
        raise


def _ops(config: EngineConfig, regions: Regions) -> Ops:
    return make_ops(
        config.kernels,
        config.num_threads,
        config.activation_bits,
        _weight_memory(regions),
        exact=config.exact is Exact.ON,
        fp8_inputs=config.activation_dtype is ActivationDtype.FP8,
        most_rows=config.scheduling.chunked_prefill_size,
        of_ranks=config.ranks.size > 1,
    )


def _computing(ops: Ops, model: ModelConfig, budget: MemoryBudget) -> str:
    """Return what decides the bits of caches beside weights and types: the kernels' variant, and which angles a
    LongRoPE has for this context (C31)."""
    long = long_rope(model.rope_scaling, budget.context_length)
    return f"{ops.name}, with a LongRoPE's long factors" if long else ops.name


def _finish(config: EngineConfig, core: EngineCore, cache: PackedCache) -> None:
    """Load the adapters that the configuration names, and have mapped weights checked. Raises ModelError with the name
    of the adapter."""
    core.sleeper.contents = cache.contents
    for name, path in config.adapters.lora_modules:
        assert core.adapters is not None, "adapters without slots"
        try:
            core.adapters.load_now(name, path)
        except ModelError as error:
            raise ModelError(f"--lora-modules {name}: {error.message}") from error


def _divided(config: EngineConfig, model: ModelConfig, draft_head: bool) -> tuple[EngineConfig, MemoryBudget]:
    """The memory, and the configuration with steps as wide as there is room for. The memory for caches is that of all
    ranks; each has an equal part, and as many slots as fit into it on the rank with the largest share, the last one."""
    config, size = divided_among_ranks(config), config.ranks.size
    needs = needs_of(model, draft_head=draft_head, share=Share(rank=size - 1, size=size))
    sizes = cache_sizes((*needs.cache_specs, *draft_cache_specs(config, model)), config.types)
    budget = divide_memory(memory_demand(config, sizes, model))
    return replace(config, speculation=within_memory(config.speculation, budget)), budget


def _weight_memory(regions: Regions) -> WeightMemory:
    """Return the memory for weights. Those of a GPU are loaded inside its region, so that torch's memory is of it."""
    if regions.device.type == "cpu":
        return WeightMemory(partial(regions.take, Tag.WEIGHTS, large_pages=True))
    return WeightMemory(partial(torch.empty, dtype=torch.uint8, device=regions.device))


def _regions(config: EngineConfig) -> Regions:
    saver, backed_up = None, (Tag.WEIGHTS,) if config.weights_cpu_backup else ()
    if config.device != "cpu" and config.enable_memory_saver:
        try:
            from forebay.pools.gpu_saver import make_saver
        except ImportError as error:
            raise ConfigError(f"--enable-memory-saver: {error}: use pip to install forebay[cuda]") from error
        saver = make_saver()
    return Regions(config.device, shared=shared_caches(config), saver=saver, backed_up=backed_up)


def _checks(
    config: EngineConfig, scheduler: Scheduler, runner: ModelRunner, tiers: EngineTiers, now: float
) -> CacheChecks | None:
    """Make the checks of the prefix cache in idle time; None for none."""
    rate, compare = config.tiers.cache_check_rate, runner.inputs.tiers.differing
    return CacheChecks(scheduler, compare, forget=tiers.forget, per_minute=rate, now=now) if rate else None


def _beside_the_host(config: EngineConfig, runner: CapturingRunner) -> CapturingRunner:
    """Return a runner whose steps run beside the host, as far as steps may overlap; those of a GPU do by themselves."""
    return OverlappedRunner(runner) if config.scheduling.overlap_depth and config.device == "cpu" else runner


def _widths(options: SpeculationOptions) -> Widths | None:
    return Widths(options) if options.num_draft_tokens > 1 else None


def _mixed(config: EngineConfig) -> MixedChunks | None:
    """Make the limit of mixed steps by time; None for no limit, which is the default."""
    most_ms = config.scheduling.max_step_ms
    return None if most_ms is None else MixedChunks(most_ms / 1e3 or None, config.memory.page_size)


def _proposer(options: SpeculationOptions) -> Proposer | None:
    """Make the proposer of draft tokens on the host; None without one."""
    if not options.algorithm.on_host:
        return None
    return Planted(options.known_answers) if options.known_answers else _PROPOSERS[options.algorithm](options)


def _grammars(config: EngineConfig, ends: EndTokens) -> Grammars:
    def make_tokenizer() -> LLTokenizer:
        from forebay.text.tokenizer import Tokenizer  # who has no grammars has no use for text here

        tokenizer = Tokenizer.from_path(config.model_path)
        vocabulary = Vocabulary.of(tokenizer.table, ends.ids, ends.vocab_size)
        return vocabulary.tokenizer(partial(tokenizer.encode, add_special_tokens=False))

    return Grammars(make_tokenizer, ends.vocab_size)


def _name_what_is_not_used(checkpoint: Checkpoint, draft_head: bool) -> None:
    if checkpoint.config.unknown_options:
        names = ", ".join(checkpoint.config.unknown_options)
        log.warning(event("unknown_model_options", names=names, effect="ignored: if they change results, not here"))
    if draft_head and checkpoint.num_draft_heads > 1:
        log.info(event("draft_heads", found=checkpoint.num_draft_heads, used=1, effect="the first drafts all tokens"))


def check_fp8(quantization: Quantization, weights: WeightShapes) -> None:
    """Raise ConfigError if no weight is multiplied by inputs in FP8."""
    if not weights.multiplies_fp8(quantization):
        raise ConfigError(
            f"--activation-dtype fp8: with --quantization {quantization} no weights are held in FP8 (E4M3) in groups "
            f"of whole {FP8_GROUP} inputs: take a checkpoint that has them and --quantization file, or leave it out"
        )


@contextlib.contextmanager
def _within_memory(config: EngineConfig) -> Iterator[None]:
    """Raises ConfigError where the system, the GPU, or a limit that it holds us to, refuses the memory."""
    try:
        yield
    except (MemoryError, OSError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        left, remedy = available_memory(), "lower --kv-cache-bytes, raise the limit or take a smaller model"
        if config.device == "cuda":
            left = Amount(torch.cuda.mem_get_info()[0], "free on the GPU")
            remedy = "lower --mem-fraction-static or --kv-cache-bytes, free the GPU or take a smaller model"
        raise ConfigError(
            f"the model and {human_bytes(config.memory.kv_cache_bytes)} for its caches do not fit in memory; "
            f"{human_bytes(left.value)} are {left.why}: {remedy}"
        ) from error


def _keep_freed_memory() -> None:
    """Let glibc keep large freed blocks instead of giving them back to the system and asking for them again.

    The logits of 64 rows are 12 MiB, which every step would otherwise map, fault in page by page and unmap: 11.4 ms
    instead of 4.6 ms for the head of the embedded model at 64 rows on two cores. For the whole process; elsewhere than
    on glibc it does nothing. To be called after loading, whose blocks are better returned.
    """
    with contextlib.suppress(OSError, AttributeError):
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(_M_MMAP_THRESHOLD, _LARGEST_RESULT_BYTES)
        mallopt(_M_TRIM_THRESHOLD, _LARGEST_RESULT_BYTES)


def trim() -> None:
    """Give back what glibc and torch keep of freed memory."""
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.empty_cache()
    give_back_freed_memory()


def _runner(
    config: EngineConfig,
    budget: MemoryBudget,
    checkpoint: Checkpoint,
    loaded: Loaded,
    ops: Ops,
    regions: Regions,
    take_masks: Callable[[int], I32],
    pictures: PictureConfig | None,
    tiers: Callable[[Mover], Mapping[str, TierStore]],
    share: Share,
) -> ModelRunner:
    # A recorded step has as many texts as rows, each of which the kernels plan for.
    eager = config.disable_cuda_graph or config.scheduling.text_encoder or not share.exchange.in_graphs
    graphs = Eager() if eager else graphs_for(ops, config.device, regions)
    most, width = min(config.cuda_graph_max_bs, budget.max_running_requests), config.speculation.num_draft_tokens
    return build_runner(
        loaded.model,
        sizes=budget,
        ops=ops,
        max_num_tokens=max_step_tokens(
            most_prompt_tokens(config, checkpoint.config), num_rows=budget.max_running_requests, width=width
        ),
        vocab_size=checkpoint.config.num_ids,
        types=config.types,
        hisparse=config.hisparse,
        device=config.device,
        graphs=graphs,
        graph_sizes=default_sizes(most, quickly=graphs.captures_quickly),
        width=width,
        regions=regions,
        draft_model=loaded.draft_model,
        assistant=loaded.assistant,
        drafter=loaded.drafter,
        take_masks=take_masks,
        encodings=_encodings(loaded.encoder, pictures, regions),
        make_tiers=tiers,
        exchange=share.exchange,
    )


def _encodings(encoder: Encoder | None, pictures: PictureConfig | None, regions: Regions) -> Encodings | None:
    if encoder is None or pictures is None:
        return None
    take = partial(regions.take, Tag.KV_CACHE)
    both = pictures.longest_span > 0
    return Encodings(encoder, pictures.num_rows, bidirectional=both, device=regions.device, take=take)


def max_step_tokens(chunk_size: int, *, num_rows: int, width: int) -> int:
    """Return the most tokens of one step: a chunk beside decodes of one token, or decodes of `width` tokens."""
    return max(chunk_size + num_rows, num_rows * width)


def _ready(
    limits: SchedulerConfig,
    budget: MemoryBudget,
    checkpoint: Checkpoint,
    report: Report,
    load_seconds: float,
    transfers: Listening | None,
    weight_bytes: int,
) -> Ready:
    return Ready(
        max_total_tokens=budget.max_total_tokens,
        max_running_requests=budget.max_running_requests,
        max_requests=most_requests(limits),
        context_length=budget.context_length,
        page_size=budget.page_size,
        vocab_size=checkpoint.config.vocab_size,
        eos_token_ids=list(checkpoint.config.eos_token_ids),
        load_seconds=load_seconds,
        report=report,
        pid=os.getpid(),
        wants_resume_points=bool(budget.demand.kinds),
        bootstrap_port=transfers.port if transfers else 0,
        hidden_size=checkpoint.config.hidden_size,
        vector_size=checkpoint.config.vector_size,
        slot_bytes=budget.slot_bytes,
        model_type=checkpoint.config.model_type,
        weight_bytes=weight_bytes,
    )


def _progress_log(name: str = "loading") -> Callable[[int, int], None]:
    """A line for each quarter of the weights; a fast load says little, a slow one shows that it lives."""
    next_share = PROGRESS_STEP

    def progress(done: int, total: int) -> None:
        nonlocal next_share
        if done >= next_share * total:
            fault.point("engine.load_weights")
            log.info(event(name, done=human_bytes(done), of=human_bytes(total)))
            next_share += PROGRESS_STEP

    return progress
