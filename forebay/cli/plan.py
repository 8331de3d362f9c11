"""`forebay plan`: the caches of a model, the division of the memory, and the number of requests that fit. Only the
shape of the model is read: a folder with nothing but a config.json is sufficient, and the memory may be another
machine's."""

from __future__ import annotations

import contextlib
import functools
import json
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Final, NamedTuple

from forebay.backends import kernels_on
from forebay.base.cpu import this_cpu
from forebay.base.errors import ConfigError, NotEnoughMemory
from forebay.base.units import ceil_div, human_bytes, parse_bytes
from forebay.cli.arguments import Parsed, Parser, whole
from forebay.cli.changes import Changes, find_changes
from forebay.cli.startup_table import capacity_text, is_enough
from forebay.config.config import Config
from forebay.config.estimates import process_bytes
from forebay.config.gpu import GpuMemory
from forebay.config.machine import Amount, available_memory
from forebay.config.resolve import Survey
from forebay.config.rules import value_bytes
from forebay.engine.lifecycle.bring import described
from forebay.engine.lifecycle.model_shape import Shape, read_shape
from forebay.engine.lifecycle.served_files import check_served_files
from forebay.engine.lifecycle.sizing import divided_among_ranks, divided_settings, memory_demand
from forebay.families.config.model_config import ModelConfig
from forebay.formats.store import find_model, model_title
from forebay.formats.weight_shapes import HeldWeights, WeightShapes
from forebay.memory.budget import BudgetLine, MemoryBudget
from forebay.memory.division import bytes_by_kind, divide_memory
from forebay.memory.holding import num_at_once
from forebay.memory.kinds.build import KINDS, per_request, per_token
from forebay.memory.kinds.declared import CacheSizes
from forebay.pools.cache_spec import CacheSpec, cache_sizes

EXIT_FITS: Final = 0
EXIT_DOES_NOT_FIT: Final = 2  # as for weights that do not
CONTEXTS: Final = (1024, 4096, 16384, 65536, 262144)
# The settings that bear on memory, and the width of activations.
SETTINGS: Final = (
    "dtype",
    "quantization",
    "activation_bits",
    "kv_cache_dtype",
    "mamba_ssm_dtype",
    "mem_fraction_static",
    "retraction_host_bytes",
    "host_cache_bytes",
    "kv_cache_bytes",
    "disaggregation_mode",
    "disable_radix_cache",
    "mamba_scheduler_strategy",
    "page_size",
    "mamba_track_interval",
    "anchor_interval",
    "overlap_depth",
    "chunked_prefill_size",
    "max_running_requests",
    "disaggregation_decode_extra_slots",
    "max_mamba_cache_size",
    "mamba_full_memory_ratio",
    "swa_full_tokens_ratio",
    "max_total_tokens",
    "context_length",
)


class LayerRow(NamedTuple):
    """Layers that keep the same: how many, what, and the bytes of one of them."""

    num_layers: int
    cache: str
    bytes_per_token: int
    bytes_per_request: int


class RankRow(NamedTuple):
    """The bytes that one of several ranks has of the weights and of the caches."""

    rank: int
    weight_bytes: int
    cache_bytes: int


class SettingRow(NamedTuple):
    """A setting as it was written (`auto` if it was not), its effective value, and the reason."""

    name: str
    asked: str
    effective: str
    reason: str


class Capacity(NamedTuple):
    """How many requests of one length, prompt and output together, may run at once; and how many conversations of that
    length the prefix cache holds beside them, and when nothing runs."""

    context: int
    num_requests: int
    num_cached_beside: int
    num_cached_idle: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """Memory plan of a model on a machine, as `forebay plan` prints it; sizes in bytes. With several `ranks` the
    layers, their sizes and the rows about memory are those of the last one, which decides how many tokens fit."""

    model: str
    model_type: str
    num_parameters: int
    weight_bytes: int
    held_weights: tuple[HeldWeights, ...]
    memory_bytes: int
    memory_source: str
    ranks: tuple[RankRow, ...]  # none for a single one
    layers: tuple[LayerRow, ...]
    sizes: CacheSizes
    settings: tuple[SettingRow, ...]
    memory: tuple[BudgetLine, ...]
    kv_cache_bytes: int
    needed_bytes: int  # of the host's memory, for the processes of one engine and all that they hold
    capacity: tuple[Capacity, ...]
    fits: bool  # with a context that is worth serving
    capacity_words: str
    lowered: bool  # the context, below what the model or somebody wants
    num_running: int  # most requests at once, of any length

    @property
    def size(self) -> tuple[int, int]:
        """Return the longest context, and how many requests of it run at once."""
        return self.capacity[-1].context, self.capacity[-1].num_requests


def run(words: Sequence[str]) -> int:
    """Print the plan and return the exit code; only the model's configuration is read, no weights."""
    summary = "Say what a model would need and how many requests fit, before it is there. MODEL may be a config.json."
    parser = Parser("plan", summary, "[MODEL] [options as for serve]")
    parser.option(
        "--memory",
        help="plan for a machine, or with --device cuda for a GPU, with so much memory, such as 80GiB",
        default_text="this one's",
    )
    parser.option(
        "--concurrency", type=whole(1), metavar="N", help="plan for so many requests at once", default_text="what fits"
    )
    parser.option("--json", action="store_true", help="for programs")
    parser.engine_flags(server=False, model_is_positional=True)
    parser.accept_foreign()
    parsed = parser.parse(words)
    memory = _memory(parsed.own.memory)
    if (num := parsed.own.concurrency) is not None:
        if "max_running_requests" in parsed.flags:
            raise ConfigError("--concurrency and --max-running-requests are two words for one thing: give one")
        parsed = replace(parsed, flags={**parsed.flags, "max_running_requests": num})
    with described(model) if (model := parsed.absent_model()) else contextlib.nullcontext(None) as path:
        read, check = functools.cache(read_shape), functools.cache(check_served_files)
        of_gpu = parsed.own.memory is not None and parsed.values.get("device") == "cuda"
        planned = functools.partial(make_plan, path=path, read=read, check=check, of_gpu=of_gpu)
        try:
            plan = planned(parsed, memory)
        except NotEnoughMemory as error:
            changes = find_changes(parsed, memory, planned, None)
            first = f"{_title(parsed, path)} does not fit: {error.message}; {changes.most_helpful}"
            raise NotEnoughMemory("\n".join([first, *changes.lines])) from error
        wanting = (plan.lowered or not plan.fits) and not parsed.own.json
        changes = find_changes(parsed, memory, planned, plan) if wanting else Changes(())
    print(json.dumps(_as_dict(plan), indent=2) if parsed.own.json else as_text(plan, changes))
    return EXIT_FITS if plan.fits else EXIT_DOES_NOT_FIT


def _title(parsed: Parsed, path: Path | None) -> str:
    named = str(parsed.values["model_path"]) if "model_path" in parsed.values else None
    return model_title(named, path or find_model(named))


def _memory(text: str | None) -> Amount:
    if text is None:
        return available_memory()
    try:
        return Amount(parse_bytes(text), "given with --memory")
    except ConfigError as error:
        raise ConfigError(f"--memory: {error.message}") from None


def make_plan(
    parsed: Parsed,
    memory: Amount,
    *,
    path: Path | None,
    read: Callable[..., Shape],
    check: Callable[..., None],
    of_gpu: bool = False,
) -> Plan:
    """Plan the memory of the model at `path`, or of the named model, as `read_shape` reads it. Raises NotEnoughMemory
    where the weights or not a single request would fit, as serving would, and ModelError if `check` does. `of_gpu` says
    that the memory is that of a GPU, which need not be here."""
    survey = Survey(model=lambda *which: read(*which)[::2], memory=lambda: memory, adapter=Path)
    if path is not None:
        survey = replace(survey, find=lambda *named: path)
    if of_gpu:
        survey = replace(survey, gpu=lambda: GpuMemory(memory.value, memory.value), memory=available_memory)
    config = parsed.resolve(survey)
    check(Path(config.engine.model_path), config.server.chat_template)
    encoder = config.engine.pictures.mmproj
    which = Path(config.engine.model_path), config.engine.speculation.by_own_head, encoder and Path(encoder)
    model, needs, weights = read(*which)
    held, shares = _held_weights(config, weights), _shares(config, functools.partial(read, *which))
    needs = shares[-1].needs if shares else needs
    drafting = _draft_cache_specs(config, model)
    sizes = cache_sizes((*needs.cache_specs, *drafting), config.engine.types)
    budget = divide_memory(memory_demand(divided_among_ranks(config.engine), sizes, model))
    kv_cache_bytes = budget.demand.kv_cache_bytes * config.engine.ranks.size
    contexts = sorted({c for c in CONTEXTS if c < budget.context_length} | {budget.context_length})
    return Plan(
        model=config.engine.served_model_name,
        model_type=model.model_type,
        num_parameters=weights.num_parameters,
        weight_bytes=sum(row.num_bytes for row in held),
        held_weights=tuple(held),
        memory_bytes=memory.value,
        memory_source=memory.why,
        ranks=_ranks(config, shares, budget),
        layers=_layers(config, (*needs.kept_by_block, *((spec,) for spec in drafting))),
        sizes=sizes,
        settings=tuple(_settings(config, parsed.written, budget)),
        memory=budget.lines,
        kv_cache_bytes=kv_cache_bytes,
        needed_bytes=_needed_bytes(config, model, sum(row.num_bytes for row in held), kv_cache_bytes),
        capacity=tuple(capacity(budget, context) for context in contexts),
        fits=is_enough(budget.context_length, config.engine.memory.context_length),
        capacity_words=capacity_text(
            budget.num_pages, budget.page_size, budget.max_running_requests, budget.context_length
        ),
        num_running=budget.max_running_requests,
        lowered=budget.context_length < config.engine.memory.context_length,
    )


def _held_weights(config: Config, weights: WeightShapes) -> list[HeldWeights]:
    kernels = kernels_on(this_cpu(), config.engine.kernels)
    return weights.held(config.engine.quantization, value_bytes(config.engine.types.dtype, kernels))


def _shares(config: Config, read: Callable[[int, int], Shape]) -> list[Shape]:
    """Return what each rank has of the model; [] for a single one. `read` takes a rank and the number of ranks."""
    size = config.engine.ranks.size
    return [read(rank, size) for rank in range(size)] if size > 1 else []


def _ranks(config: Config, shares: Sequence[Shape], budget: MemoryBudget) -> tuple[RankRow, ...]:
    """Return the bytes of each rank's share. All ranks have the pages and slots of the `budget`."""
    rows = []
    for rank, share in enumerate(shares):
        sizes = cache_sizes(share.needs.cache_specs, config.engine.types)
        demand = memory_demand(divided_among_ranks(config.engine), sizes, share.config)
        weight_bytes = sum(row.num_bytes for row in _held_weights(config, share.weights))
        rows.append(RankRow(rank, weight_bytes, sum(bytes_by_kind(demand, budget.num_slots).values())))
    return tuple(rows)


def _needed_bytes(config: Config, model: ModelConfig, weight_bytes: int, kv_cache_bytes: int) -> int:
    """Weights and caches are in the memory of a GPU, if that computes."""
    on_host = process_bytes(model) + config.engine.kinds.retraction_host_bytes + config.engine.tiers.host_cache_bytes
    if model.vision is not None:
        on_host += config.engine.pictures.mm_cache_bytes
    return on_host if config.engine.device == "cuda" else on_host + weight_bytes + kv_cache_bytes


def _draft_cache_specs(config: Config, model: ModelConfig) -> tuple[CacheSpec, ...]:
    from forebay.engine.lifecycle.drafting import draft_cache_specs  # as below

    return draft_cache_specs(config.engine, model)


def _layers(config: Config, kept: Iterable[tuple[CacheSpec, ...]]) -> tuple[LayerRow, ...]:
    rows = []
    for specs, count in Counter(kept).items():
        sizes = cache_sizes(specs, config.engine.types)
        words = " + ".join(map(str, specs)) or "nothing"
        rows.append(LayerRow(count, words, per_token(sizes), per_request(sizes)))
    return tuple(rows)


def _settings(config: Config, written: dict[str, str], budget: MemoryBudget) -> list[SettingRow]:
    """Return the settings as given, and as they are once the memory is divided."""
    by_name = {setting.name: setting for setting in config.settings}
    there = {kind.name for kind in budget.demand.kinds}
    demands = [declared.demand_type for declared in KINDS]
    absent = {name: kind.absent for kind in demands if kind.name not in there for name in kind.settings}
    divided = divided_settings(divided_among_ranks(config.engine), budget)
    rows = []
    for name in SETTINGS:
        effective, reason = by_name[name].value, by_name[name].reason
        if name in absent:
            effective, reason = "-", absent[name]
        elif name in divided:
            effective, reason = divided[name]
        rows.append(SettingRow(name, written.get(name, "auto"), effective, reason))
    return rows


def capacity(budget: MemoryBudget, context: int) -> Capacity:
    """Return how many requests of `context` tokens run at once, and how many more the prefix cache can keep."""
    pages = ceil_div(context, budget.page_size)
    num_requests = num_at_once(budget.num_pages, budget.page_size, budget.max_running_requests, context)

    def cached_beside(num_running: int) -> int:
        """Return the number of cached conversations: each has all its pages, and one entry of the other kinds of
        cache."""
        if not budget.demand.radix_cache:
            return 0
        room = (budget.num_pages - num_running * pages) // pages
        return max(0, min([room, *(kind.num_cached(budget, num_running, context) for kind in budget.demand.kinds)]))

    return Capacity(context, num_requests, cached_beside(num_requests), cached_beside(0))


def _sizes_as_dict(sizes: CacheSizes) -> dict[str, object]:
    """Full KV by token, then each kind that layers keep by its name."""
    kinds = {name: size._asdict() for name, size in sizes.kinds.items()}
    return {"kv_bytes_per_token": sizes.kv_bytes_per_token, "kinds": kinds}


def _as_dict(plan: Plan) -> dict[str, object]:
    return {
        **asdict(plan),
        "held_weights": [row._asdict() for row in plan.held_weights],
        "ranks": [row._asdict() for row in plan.ranks],
        "layers": [row._asdict() for row in plan.layers],
        "sizes": _sizes_as_dict(plan.sizes),
        "settings": [row._asdict() for row in plan.settings],
        "memory": [line._asdict() for line in plan.memory],
        "capacity": [row._asdict() for row in plan.capacity],
    }


def as_text(plan: Plan, changes: Changes[Plan]) -> str:
    """Format the plan as aligned tables, below what helps a model that does not fit."""
    num_layers = sum(row.num_layers for row in plan.layers)
    layers = [(str(n), cache, _bytes(token), _bytes(request)) for n, cache, token, request in plan.layers]
    sizes = plan.sizes
    total = (str(num_layers), "all", _bytes(per_token(sizes)))
    ranks = [(str(rank), _bytes(weights), _bytes(caches)) for rank, weights, caches in plan.ranks]
    tables: tuple[tuple[tuple[str, ...], Sequence[tuple[str, ...]]], ...] = (
        (("rank", "weights", "caches"), ranks),
        (
            ("tokens each", "requests at once", "cached beside them", "cached when idle"),
            [tuple(f"{number:,}" for number in row) for row in plan.capacity],
        ),
        (("layers", "one keeps", "per token", "per state"), [*layers, (*total, _bytes(per_request(sizes)))]),
        (("setting", "asked", "effective", "why"), plan.settings),
        (("memory", "amount", "why"), plan.memory),
    )
    head = [
        f"{plan.model} fits: {plan.capacity_words}"
        if plan.fits
        else f"{plan.model} does not fit: {plan.capacity_words}; {changes.most_helpful}",
        *changes.lines,
        f"{plan.model} ({plan.model_type}): {num_layers} layers, {_millions(plan.num_parameters)} weights, "
        f"{human_bytes(plan.weight_bytes)}",
        *_held(plan),
        f"memory: {human_bytes(plan.memory_bytes)} {plan.memory_source}",
        *([f"{len(ranks)} ranks; layers and memory below are those of rank {ranks[-1][0]}"] if ranks else []),
    ]
    return "\n\n".join(["\n".join(head), *(_table(header, rows) for header, rows in tables if rows)])


def _held(plan: Plan) -> list[str]:
    """`weights: 86.6 MiB in codes of 4 bits (5.00 each with scales), 5.5 MiB in numbers of 32 bits`; nothing if all are
    numbers."""
    if len(plan.held_weights) < 2:
        return []
    rows = [
        f"{human_bytes(size)} in codes of {bits} bits ({8 * size / count:.2f} each with scales)"
        if bits <= 8
        else f"{human_bytes(size)} in numbers of {bits} bits"
        for bits, count, size in plan.held_weights
        if count
    ]
    return [f"weights: {', '.join(rows)}"]


def _millions(count: int) -> str:
    return f"{count / 1e9:,.2f} G" if count >= 1e9 else f"{count / 1e6:,.1f} M"


def _bytes(num_bytes: int) -> str:
    return human_bytes(num_bytes) if num_bytes else "-"


def _table(header: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    """Columns of plain text, so that it can be pasted and compared."""
    lines = [header, *rows]
    widths = [max(len(line[i]) for line in lines) for i in range(len(header))]
    padded = ("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) for line in lines)
    return "\n".join(line.rstrip() for line in padded)
