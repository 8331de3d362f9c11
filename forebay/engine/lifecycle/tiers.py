"""The tiers of the prefix cache behind the device, as an engine is configured."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from forebay.base.errors import Conflict
from forebay.base.log import event, get_logger
from forebay.base.units import human_bytes
from forebay.config.engine_config import EngineConfig
from forebay.engine.lifecycle.environment import environment_of
from forebay.engine.lifecycle.sizing import tier_slots
from forebay.memory.budget import MemoryBudget
from forebay.memory.kv_allocator import KV
from forebay.memory.tier import DISK, HOST, Prefix
from forebay.ops import Ops
from forebay.pools.mover import Mover
from forebay.runtime.host.disk_store import DiskStore
from forebay.runtime.host.tier_stores import HostStore, TierStore
from forebay.scheduler.scheduler import Scheduler

NO_FOLDER: Final = "the prefix cache is in memory alone: start with --prefix-cache-dir DIR to keep it in files"

log = get_logger("engine")


class EngineTiers:
    """The stores of the tiers of one engine, made for its runner; `stores` is empty until then. `kernels`: see
    `make_transfers`."""

    def __init__(self, config: EngineConfig, budget: MemoryBudget, ops: Ops, kernels: str) -> None:
        self._config, self._ops, self._kernels = config, ops, kernels
        self._slots = tier_slots(config, budget)
        self.stores: dict[str, TierStore] = {}
        self._disk: DiskStore | None = None
        self._page_size, self._num_restored = budget.page_size, 0

    def make(self, mover: Mover) -> dict[str, TierStore]:
        """Make the stores, over the caches of a runner."""
        options = self._config.tiers
        if HOST in self._slots:
            self.stores[HOST] = HostStore(mover, self._slots[HOST], pinned=self._config.device != "cpu")
        if DISK in self._slots:
            folder, limit = Path(options.prefix_cache_dir), options.prefix_cache_disk_bytes
            self._disk = DiskStore(mover, folder, self._identity(mover), limit_bytes=limit)
            self.stores[DISK] = self._disk
        return self.stores

    def _identity(self, mover: Mover) -> dict[str, str]:
        """Return everything that the bits of a cached row depend on, beside tokens and namespace (C31)."""
        return {**environment_of(self._config, self._ops, self._kernels), "layout": mover.layout}

    def restore(self, scheduler: Scheduler) -> None:
        """Let the scheduler find what the files have."""
        if (disk := self._disk) is None:
            return
        tiers = scheduler.memory.tiers
        disk.retained = tiers.named(DISK).retained_slots
        num_tokens = tiers.restore(DISK, disk.records(), writable=lambda: disk.writes)
        self._num_restored = num_tokens
        log.info(event("prefix_cache_restored", path=self._config.tiers.prefix_cache_dir, tokens=num_tokens))

    def forget(self, prefix: Prefix, first: int) -> None:
        """Drop the last page of a prefix, number `first`, and what is behind it, so that no later start finds it."""
        if self._disk is not None:
            self._disk.forget(prefix, first)

    @property
    def report(self) -> list[tuple[str, str, str, str]]:
        """The tiers as rows of the start-up table."""
        page_size, rows = self._page_size, list[tuple[str, str, str, str]]()
        for name, slots in self._slots.items():
            tokens = f"{slots[KV] * page_size:,} tokens"
            if name == HOST:
                size = human_bytes(self._config.tiers.host_cache_bytes)
                rows.append(("memory", "prefix cache on the host", size, f"{tokens}, beside those of the device"))
            else:
                size, why = human_bytes(self._config.tiers.prefix_cache_disk_bytes), f"{tokens} at most"
                found = f"{self._num_restored:,} found in {self._config.tiers.prefix_cache_dir}"
                rows.append(("memory", "prefix cache in files", size, f"{why}, {found}"))
        return rows

    def save(self) -> None:
        """Wait until all that was stored in files is on the disk. Raises Conflict if there are none."""
        if self._disk is None:
            raise Conflict(NO_FOLDER, code="no_prefix_cache_dir")
        self._disk.flush()
        if not self._disk.writes:
            reason = self._disk.failure or "another server writes them"
            raise Conflict(f"the files of the prefix cache: {reason}: mend that, and restart", code="disk")

    def close(self) -> None:
        """Write what is queued."""
        if self._disk is not None:
            self._disk.close()
