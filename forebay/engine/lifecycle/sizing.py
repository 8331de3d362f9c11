"""From a configuration and what a model's layers keep to the division of memory and the scheduler's limits. No torch:
`forebay plan` asks the same questions without an engine."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from forebay.base.units import human_bytes
from forebay.base.values import values_of
from forebay.config import estimates
from forebay.config.engine_config import (
    EngineConfig,
    KindConfig,
    SchedulerConfig,
    SpeculationOptions,
    SpeculativeAlgorithm,
)
from forebay.config.pictures import PictureConfig
from forebay.config.rules import ITEM_BYTES
from forebay.families.config.model_config import ModelConfig
from forebay.memory.budget import MemoryBudget, MemoryDemand
from forebay.memory.kinds.build import KIND_OF, make_demands
from forebay.memory.kinds.declared import CacheSizes, KindSize, Sizing
from forebay.memory.kinds.resident.declaration import hot_row_bytes
from forebay.memory.kinds.resident.residents import RESIDENT
from forebay.memory.kv_allocator import KV
from forebay.memory.miss_reason import MissReason
from forebay.memory.tier import DISK, HOST

# A token is computed in the time in which this part of the weights' bytes is copied to the host and back. For the
# embedded model (269 MB, 512-token prompts, two cores) that was 480 us and, at 6.3 GB/s each way, 1.5 MB.
RECOMPUTE_SHARE: Final = 1 / 180
_LENGTHS_BYTES: Final = 16  # that is known of a row beside that


def most_prompt_tokens(config: EngineConfig, model: ModelConfig) -> int:
    """Return the most prompt tokens of one step."""
    return estimates.most_prompt_tokens(config.scheduling.chunked_prefill_size, model)


def memory_demand(config: EngineConfig, sizes: CacheSizes, model: ModelConfig) -> MemoryDemand:
    """Return what the memory budget must hold: rows, pages and states by their sizes, with the engine's limits. The
    context length is at most what the model was made for."""
    memory, extra = config.memory, config.disaggregation.decode_extra_slots
    scheduling = replace(config.scheduling, chunked_prefill_size=most_prompt_tokens(config, model))
    certain = memory.max_running_requests + extra if config.disaggregation.is_decode else 0
    speculation = config.speculation
    state = model.draft_size if speculation.algorithm is SpeculativeAlgorithm.NEXTN else model.hidden_size
    hidden_bytes = state * ITEM_BYTES[config.types.dtype] if speculation.algorithm.keeps_hidden else 0
    resident, options = sizes.kinds.get(RESIDENT, KindSize(0)), config.hisparse
    # On a CPU the host tier is memory of the same kind as the device's, unless it is a file.
    elsewhere = resident.num_bytes if options.host_path or config.device == "cuda" else 0
    return MemoryDemand(
        **values_of(replace(memory, context_length=min(memory.context_length, model.max_position_embeddings))),
        width=speculation.num_draft_tokens,
        logits_bytes=4 * model.vocab_size if speculation.num_draft_tokens > 1 else 0,
        inputs_bytes=sizes.inputs_bytes_per_token,
        draft_row_bytes=hidden_bytes + _LENGTHS_BYTES if speculation.algorithm.on_device else 0,
        kv_bytes_per_token=sizes.kv_bytes_per_token - elsewhere,
        host_bytes_per_token=elsewhere,
        hot_tokens=options.device_buffer_size,
        hot_row_bytes=hot_row_bytes(options.device_buffer_size, memory.page_size, resident),
        radix_cache=scheduling.radix_cache,
        pre_alloc_size=extra,
        kinds=make_demands(
            Sizing(sizes, memory.page_size, config.kinds, scheduling, speculation.num_draft_tokens, certain, options)
        ),
    )


def divided_among_ranks(config: EngineConfig) -> EngineConfig:
    """Return the configuration of one rank: its part of the memory for caches, and of the host's for copies of them."""
    size, memory, kinds, tiers = config.ranks.size, config.memory, config.kinds, config.tiers
    return replace(
        config,
        memory=replace(memory, kv_cache_bytes=memory.kv_cache_bytes // size),
        kinds=replace(kinds, retraction_host_bytes=kinds.retraction_host_bytes // size),
        tiers=replace(tiers, host_cache_bytes=tiers.host_cache_bytes // size),
    )


def divided_settings(config: EngineConfig, budget: MemoryBudget) -> dict[str, tuple[str, str]]:
    """Return value and reason of each setting that the division of memory decides, or lowers below `config`'s."""
    memory, reasons = config.memory, {line.item: line.reason for line in budget.lines}
    lowered: list[tuple[str, int, int, str]] = [
        ("max_running_requests", budget.max_running_requests, memory.max_running_requests, "request rows"),
        ("context_length", budget.context_length, memory.context_length, "context length"),
        (
            "disaggregation_decode_extra_slots",
            budget.pre_alloc_size,
            config.disaggregation.decode_extra_slots,
            "request rows",
        ),
        (
            "speculative_num_draft_tokens",
            budget.demand.width,
            config.speculation.num_draft_tokens,
            "tokens verified per request",
        ),
    ]
    found = {name: (str(value), reasons[line]) for name, value, asked, line in lowered if value < asked}
    found["max_total_tokens"] = str(budget.max_total_tokens), reasons["KV pages"]
    if (num_bytes := budget.demand.kv_cache_bytes) < memory.kv_cache_bytes:
        found["kv_cache_bytes"] = human_bytes(num_bytes), reasons["KV pages"]
    for kind in budget.demand.kinds:
        if kind.sized_by:
            found[kind.sized_by] = str(budget.num_slots[kind.name]), reasons[kind.unit]
    return found


def within_memory(options: SpeculationOptions, budget: MemoryBudget) -> SpeculationOptions:
    """As wide as the budget has room for; its lines say why that is less."""
    return replace(options, num_draft_tokens=budget.demand.width)


def scheduler_config(
    config: EngineConfig, budget: MemoryBudget, weight_bytes: int, pictures: PictureConfig | None = None
) -> SchedulerConfig:
    """Return the scheduler's configuration, with the sizes and limits that the memory budget has settled.
    `weight_bytes` estimates what recomputing a token costs. `pictures` None: no encoder."""
    kinds = budget.demand.kinds
    return SchedulerConfig(
        **values_of(config.scheduling),
        page_size=budget.page_size,
        num_pages=budget.num_pages,
        max_running_requests=budget.max_running_requests,
        context_length=budget.context_length,
        speculation=config.speculation,
        pictures=pictures,
        disaggregation=replace(config.disaggregation, decode_extra_slots=budget.pre_alloc_size),
        kinds=KindConfig(
            **values_of(config.kinds),
            num_slots={kind.name: budget.num_slots[kind.name] for kind in kinds},
            num_read={kind.name: num_read for kind in kinds if (num_read := kind.num_read(budget.demand))},
            slot_bytes={KV: budget.demand.whole_page_bytes, **{kind.name: kind.slot_bytes for kind in kinds}},
            recompute_bytes_per_token=int(weight_bytes * RECOMPUTE_SHARE),
        ),
        tiers=tier_slots(config, budget),
    )


def tier_slots(config: EngineConfig, budget: MemoryBudget) -> dict[str, dict[str, int]]:
    """Return by name the tiers of the prefix cache behind the device, and of each the slots by kind of cache: its
    memory is divided as that of the device. A tier without a slot of each kind does not exist."""
    if not config.scheduling.radix_cache:
        return {}
    cached = [kind for kind in budget.demand.kinds if KIND_OF[kind.name].kind.missing is not MissReason.NONE]
    sizes = {KV: (budget.num_pages, budget.demand.whole_page_bytes)}
    sizes |= {kind.name: (budget.num_slots[kind.name], kind.slot_bytes) for kind in cached}
    on_device = sum(num * slot_bytes for num, slot_bytes in sizes.values())
    found = {}
    options = config.tiers
    disk_bytes = options.prefix_cache_disk_bytes if options.prefix_cache_dir else 0
    for name, num_bytes in ((HOST, options.host_cache_bytes), (DISK, disk_bytes)):
        slots = {kind: num * num_bytes // on_device for kind, (num, _) in sizes.items()}
        if all(slots.values()):
            found[name] = slots
    return found
