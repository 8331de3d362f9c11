"""A model runner and the pools it runs on."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TypedDict

import torch

from forebay.base.parts import I32
from forebay.base.units import ceil_div
from forebay.config.engine_config import NO_HISPARSE, CacheTypes, HisparseOptions
from forebay.memory.budget import PoolSizes
from forebay.models.assistant import Assistant
from forebay.models.drafter import Drafter
from forebay.models.network import Network
from forebay.ops import Ops
from forebay.ops.exchange import ALONE, Exchange
from forebay.pools.cache_pool import CachePool
from forebay.pools.cache_spec import CacheSpec
from forebay.pools.mover import Mover
from forebay.pools.regions import Regions, Tag
from forebay.pools.request_rows import RequestRows
from forebay.pools.tiers import HotSizes
from forebay.runtime.drafts.frozen import FrozenDraft
from forebay.runtime.drafts.head import DraftHead
from forebay.runtime.drafts.model import DraftModel
from forebay.runtime.graphs.backends import GraphBackend, graphs_for
from forebay.runtime.graphs.runner import default_sizes
from forebay.runtime.host.tier_stores import TierStore
from forebay.runtime.model_runner import ModelRunner, no_masks
from forebay.runtime.steps.forward import Forward
from forebay.runtime.steps.pictures import Encodings
from forebay.runtime.steps.proposer import DeviceProposer


def build_runner(
    model: Network,
    *,
    ops: Ops,
    sizes: PoolSizes,
    types: CacheTypes,
    hisparse: HisparseOptions = NO_HISPARSE,
    max_num_tokens: int,
    vocab_size: int,
    device: torch.device | str,
    graphs: GraphBackend | None = None,
    graph_sizes: Sequence[int] = (),
    width: int = 1,
    drafter: Drafter | None = None,
    assistant: Assistant | None = None,
    draft_model: Network | None = None,
    regions: Regions | None = None,
    take_masks: Callable[[int], I32] = no_masks,
    encodings: Encodings | None = None,
    make_tiers: Callable[[Mover], Mapping[str, TierStore]] = lambda mover: {},
    exchange: Exchange = ALONE,
) -> ModelRunner:
    """Allocate the pools that `memory.division` sized, for what the model's layers keep, and a runner over them.

    `graphs` None: what fits the ops and the device; `graph_sizes` () : the default batch sizes; `regions` None: some of
    its own. `max_num_tokens` is the most tokens of one step, `width` the most that a decode computes; the drafts among
    them are the `drafter`'s, `assistant`'s or `draft_model`'s, else of the plans. `exchange` is that of the model's
    share, through which other ranks get the tokens that rank 0 chooses. Sets torch's threads of the process:
    one beside the native ops, whose own threads would otherwise compete with torch's for the cores.
    """
    torch.set_num_threads(ops.num_threads if ops.name == "torch" else 1)
    regions = regions or Regions(device)
    cache = _make_caches((*model.cache_specs(), *_behind(drafter, draft_model)), sizes, types, hisparse, regions)
    mrope = model.mrope or (draft_model is not None and draft_model.mrope)
    rows = _make_rows(sizes, width, regions, adapters=model.adapters is not None, mrope=mrope)
    graphs = graphs or graphs_for(ops, device, regions)
    graph_sizes = graph_sizes or default_sizes(sizes.max_running_requests, quickly=graphs.captures_quickly)
    limits: _Limits = {"vocab_size": vocab_size, "max_num_tokens": max_num_tokens}
    return ModelRunner(
        model,
        ops,
        cache=cache,
        rows=rows,
        **limits,
        graphs=graphs,
        graph_sizes=graph_sizes,
        proposer=_proposer(drafter, assistant, draft_model, limits, {"sizes": graph_sizes, "backend": graphs}),
        taps=None if drafter is None else drafter.taps,
        take_masks=take_masks,
        encodings=encodings,
        make_tiers=make_tiers,
        exchange=exchange,
    )


def _make_rows(sizes: PoolSizes, width: int, regions: Regions, *, adapters: bool, mrope: bool) -> RequestRows:
    return RequestRows(
        sizes.num_rows,
        ceil_div(sizes.context_length, sizes.page_size),
        num_drafts=width - 1,
        adapters=adapters,
        mrope=mrope,
        device=regions.device,
        take=partial(regions.take, Tag.KV_CACHE),
    )


def _make_caches(
    specs: Sequence[CacheSpec], sizes: PoolSizes, types: CacheTypes, hisparse: HisparseOptions, regions: Regions
) -> CachePool:
    """Allocate what layers with these specs keep."""
    return CachePool(
        specs,
        types,
        page_size=sizes.page_size,
        num_slots=sizes.num_slots,
        device=regions.device,
        take=partial(regions.take, Tag.KV_CACHE),
        hot=HotSizes(sizes.num_rows + 1, hisparse.device_buffer_size),
        take_tiers=partial(regions.take_tiers, Tag.KV_CACHE, folder=hisparse.host_path),
    )


def _behind(drafter: Drafter | None, draft_model: Network | None) -> Sequence[CacheSpec]:
    if draft_model is not None:
        return [spec.on_device for spec in draft_model.cache_specs()]
    return () if drafter is None else drafter.cache_specs


class _Limits(TypedDict):
    vocab_size: int
    max_num_tokens: int


class _Graphs(TypedDict):
    sizes: Sequence[int]
    backend: GraphBackend


def _proposer(
    drafter: Drafter | None, assistant: Assistant | None, model: Network | None, limits: _Limits, graphs: _Graphs
) -> Callable[[Forward], DeviceProposer] | None:
    if model is not None:
        return partial(DraftModel, model=model, **limits, **graphs)
    if drafter is not None:
        return partial(DraftHead, drafter=drafter, **limits, **graphs)
    return None if assistant is None else partial(FrozenDraft, assistant=assistant, **graphs)
