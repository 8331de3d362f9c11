"""The machine's nodes: groups of CPUs with memory of their own, which they read faster than the others' (NUMA)."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Final

SYS: Final = Path("/sys")
_NODE: Final = re.compile(r"node(\d+)")


@dataclass(frozen=True, slots=True)
class Topology:
    """`nodes`: the usable CPUs of each node that has any."""

    nodes: tuple[tuple[int, ...], ...]

    def nodes_of_threads(self, num_threads: int) -> list[int]:
        """Return the node of each thread, ascending: as many of each as it has of the CPUs."""
        cpus = [node for node, members in enumerate(self.nodes) for _ in members]
        return [cpus[thread * len(cpus) // num_threads] for thread in range(num_threads)]

    def nodes_of_cpus(self) -> list[int]:
        """Return the node of each CPU by its number, -1 for one that is not usable."""
        found = [-1] * (1 + max(cpu for members in self.nodes for cpu in members))
        for node, members in enumerate(self.nodes):
            for cpu in members:
                found[cpu] = node
        return found


@cache
def this_topology() -> Topology:
    """The nodes of this machine, as far as this process may use their CPUs."""
    return read_topology(SYS, usable_cpus())


def usable_cpus() -> frozenset[int]:
    """Numbers of the CPUs that this process may use."""
    try:
        return frozenset(os.sched_getaffinity(0))
    except AttributeError:  # not Linux
        return frozenset(range(os.cpu_count() or 1))


def read_topology(sys: Path, usable: frozenset[int]) -> Topology:
    """Read the nodes from `sys`; one node if that does not name them all."""
    nodes = []
    for folder in sorted((sys / "devices/system/node").glob("node*"), key=_number):
        try:
            cpus = parse_cpus((folder / "cpulist").read_text()) & usable
        except (OSError, ValueError):
            continue
        if cpus:
            nodes.append(tuple(sorted(cpus)))
    if {cpu for node in nodes for cpu in node} != usable:
        return Topology((tuple(sorted(usable)),))
    return Topology(tuple(nodes))


def parse_cpus(text: str) -> frozenset[int]:
    """Return the numbers of a list as Linux writes it: `0-3,8`. Raises ValueError for other text."""
    cpus: set[int] = set()
    for part in text.strip().split(","):
        first, _, last = part.partition("-")
        if part:
            cpus.update(range(int(first), int(last or first) + 1))
    return frozenset(cpus)


def _number(folder: Path) -> int:
    match = _NODE.fullmatch(folder.name)
    return int(match[1]) if match else -1
