"""The node of each server: values in, values out."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final

import msgspec

from forebay.base.errors import Unavailable
from forebay.base.units import human_bytes
from forebay.cluster.messages import Needs, Spec
from forebay.route.announcement import Role

SLACK: Final = 1e-6  # Ray counts in ten-thousandths


@dataclass(slots=True)
class Node:
    """A node of the Ray cluster: its free resources, and how many servers of ours are there."""

    id: str
    address: str
    hostname: str
    num_cpus: float
    memory_bytes: float
    num_gpus: float = 0.0
    num_servers: int = 0
    total_cpus: float = field(default=0.0)

    def fits(self, needs: Needs) -> bool:
        """Return whether an actor with these needs fits into the free resources."""
        return (
            self.num_cpus + SLACK >= needs.num_cpus
            and self.memory_bytes + SLACK >= needs.memory_bytes
            and self.num_gpus + SLACK >= needs.num_gpus
        )

    def reserve(self, needs: Needs) -> None:
        """Subtract the needs of one server from the free resources."""
        self.num_cpus -= needs.num_cpus
        self.memory_bytes -= needs.memory_bytes
        self.num_gpus -= needs.num_gpus
        self.num_servers += 1


def place(units: Iterable[Sequence[Spec]], nodes: Sequence[Node]) -> list[list[Node]]:
    """Return the node of each server. Each unit is one server, or a pair that must be on one node.

    A unit is placed on the node with the fewest servers that has room for it, then on the one with the most free CPUs.
    Takes the servers' needs from `nodes`. Raises Unavailable with the required and the free resources of each node."""
    placed: list[list[Node]] = []
    for unit in units:
        needs = sum_of([spec.needs for spec in unit])
        fitting = [node for node in nodes if node.fits(needs)]
        if not fitting:
            name = " and ".join(spec.name for spec in unit)
            raise Unavailable(no_room(name, needs, nodes, sum(map(len, placed))), code="no_room")
        chosen = min(fitting, key=lambda node: (node.num_servers, -node.num_cpus, node.address))
        for spec in unit:
            chosen.reserve(spec.needs)
        placed.append([chosen] * len(unit))
    return placed


def units_of(specs: Sequence[Spec], *, in_pairs: bool) -> list[list[Spec]]:
    """Return the servers that are placed together. In pairs, the first prefill server goes with the first decode
    server, and so on; a server without a partner is placed alone."""
    if not in_pairs:
        return [[spec] for spec in specs]
    prefill = [spec for spec in specs if spec.role is Role.PREFILL]
    decode = [spec for spec in specs if spec.role is Role.DECODE]
    pairs = [list(pair) for pair in zip(prefill, decode, strict=False)]
    alone = prefill[len(pairs) :] + decode[len(pairs) :]
    return [[msgspec.structs.replace(spec, group=pair[0].name) for spec in pair] for pair in pairs] + [
        [spec] for spec in alone
    ]


def sum_of(needs: Sequence[Needs]) -> Needs:
    """Return the needs of several servers on one node."""
    return Needs(
        num_cpus=sum(each.num_cpus for each in needs),
        memory_bytes=sum(each.memory_bytes for each in needs),
        num_gpus=sum(each.num_gpus for each in needs),
    )


def no_room(name: str, needs: Needs, nodes: Sequence[Node], num_placed: int = 0) -> str:
    """Return one line with the required and the free resources, by node."""
    beside = f" beside the {num_placed} before it" if num_placed else ""
    free = "; ".join(
        f"{node.hostname} ({node.address}) {_amounts(node.num_cpus, node.memory_bytes, node.num_gpus)}"
        for node in nodes
    )
    wanted = _amounts(needs.num_cpus, needs.memory_bytes, needs.num_gpus)
    return f"no node has enough resources for {name}: it needs {wanted}; free{beside}: {free or 'there is no node'}"


def _amounts(num_cpus: float, memory_bytes: float, num_gpus: float) -> str:
    gpus = f", {num_gpus:g} GPU" if num_gpus else ""
    return f"{max(num_cpus, 0):g} CPU, {human_bytes(int(max(memory_bytes, 0)))}{gpus}"
