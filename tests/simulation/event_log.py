"""What happened in a run, as a hash that two equal runs have in common (B-7), and in numbers."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, Final, Self

import numpy as np

from forebay.config.engine_config import SchedulerConfig
from forebay.requests.step_plan import StepPlan
from forebay.requests.updates import Update
from forebay.scheduler.memory.pools import Pools
from tests.kinds_of import num_states, windows_of

_NONE: Final = np.empty(0, dtype=np.int64)


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What a run did. `digest` is the hash of its event log (B-7), of several runs their exclusive or."""

    seeds: int = 1
    requests: int = 0
    refused: int = 0
    steps: int = 0
    tokens: int = 0
    drafted: int = 0
    accepted: int = 0
    found: int = 0  # drafts, by n-grams
    right: int = 0  # of these
    disturbed: int = 0
    hits: int = 0
    retractions: int = 0
    displaced: int = 0
    recomputed: int = 0
    offloaded: int = 0
    state_hits: int = 0
    window_hits: int = 0
    states_taken: int = 0
    evicted_states: int = 0
    prefixes_kept: int = 0  # requests of which all prefixes that they wanted kept are
    prefixes_not_kept: int = 0
    given_up: int = 0  # kept prefixes that were evicted before their time
    given_up_in_tiers: int = 0
    fetched: int = 0  # copies from other tiers of the cache
    lost: int = 0  # of these
    digest: str = "0" * 64

    def __add__(self, other: Self) -> Self:
        sums = {f.name: getattr(self, f.name) + getattr(other, f.name) for f in fields(self) if f.name != "digest"}
        return type(self)(**sums, digest=f"{int(self.digest, 16) ^ int(other.digest, 16):064x}")


def log_plan(log: Any, plan: StepPlan, pools: Pools, config: SchedulerConfig) -> None:
    """A plan, and where it lets the device compute as far as the host knows."""
    decodes, page_size = plan.rows[plan.num_extends :], config.page_size
    ends = np.concatenate([plan.ends, pools.table.kv_bound[decodes]])
    positions = [np.arange(end - count, end) for end, count in zip(ends.tolist(), plan.q_lens.tolist(), strict=True)]
    locations = pools.rows.locations(np.repeat(plan.rows, plan.q_lens), np.concatenate([_NONE, *positions]))
    columns = [plan.rows, ends, locations, plan.input_ids, plan.writes.write_pages]
    if config.speculation.num_draft_tokens > 1:
        columns += [plan.q_lens, plan.drafts]
    windows, states = windows_of(pools), plan.kinds.state
    if windows or num_states(config.kinds):
        pages, offsets = np.divmod(locations, page_size)
        columns.append(windows.map.full_to_window[pages].astype(np.int64) * page_size + offsets if windows else _NONE)
        columns += [states.state_slots, states.snap_lens, states.snap_slots, states.copy_src]
    for column in columns:
        log.update(column.tobytes())


def logged(update: Update) -> str:
    """An update as the log has it, so that its hash tells of what happened and not of how a report is laid out."""
    told = repr(update).replace(", speculation=None", "").replace(", vector=b''", "")
    if update.cache is None:
        return told
    at = update.cache.resumable
    by_kind = f"window_tokens={at.get('window')}, state_tokens={at.get('state')}"
    return told.replace(f"resumable={at}", by_kind)
