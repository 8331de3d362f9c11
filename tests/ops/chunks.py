"""Tables of states whose scans are in chunks: a state, and what the tokens of the open chunk brought (decision 68)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from forebay.base.scan_rows import CHUNK, part_offsets
from forebay.config.engine_config import CacheTypes
from forebay.ops.interface import Ops
from forebay.pools.cache_spec import RecentInputs, RecurrentState
from tests.ops.recurrences import Case, Delta, Inputs, Mamba2, state_batch, state_table

# Of few heads, so that the interpreter has few programs, and of sizes that fill no tile.
SMALL: dict[str, Case] = {
    "mamba2": Mamba2(heads=2, groups=1, head_size=6, state_size=11, dt_limits=(0.01, 1.0)),
    "delta": Delta(key_heads=1, value_heads=2, key_size=9, value_size=7),
    "kda": Delta(key_heads=1, value_heads=1, key_size=5, value_size=19, per_channel=True),
}


def kept(case: Case) -> tuple[str, ...]:
    """The inputs that a slot keeps of each token of the open chunk, in the order of their parts."""
    if isinstance(case, Mamba2):
        return "x", "b", "dt"
    return ("log_decay", "beta", "k", "v") if isinstance(case, Delta) else ()


def slots_of(case: Case, num_slots: int, state_dtype: torch.dtype, dtype: torch.dtype, seed: int) -> Tensor:
    """As `state_table`, with inputs of a whole chunk behind each state of a scan in chunks; slot 0 is zeros."""
    states = state_table(case, num_slots, state_dtype, seed)
    if not kept(case):
        return states
    inputs = [case.inputs(CHUNK, dtype, seed=1000 * seed + slot) for slot in range(num_slots)]
    sizes = [inputs[0][name][0].numel() * inputs[0][name].element_size() for name in kept(case)]
    row_bytes = part_offsets(states[0].numel() * states.element_size(), sizes)[-1]
    table = torch.zeros(num_slots, row_bytes // states.element_size(), dtype=state_dtype)
    table[:, : states[0].numel()] = states.flatten(1)
    for slot in range(1, num_slots):
        for name, part in parts(case, table, inputs[0]):
            part[slot] = inputs[slot][name].flatten(1)
    return table


def parts(case: Case, table: Tensor, like: Inputs) -> Iterator[tuple[str, Tensor]]:
    """The parts of all slots, [slots, CHUNK, columns], by their inputs' names."""
    sizes = {name: like[name].shape[1:].numel() for name in kept(case)}
    state_bytes = torch.Size(case.state_shape()).numel() * table.element_size()
    offsets = part_offsets(state_bytes, [size * like[name].element_size() for name, size in sizes.items()])
    for (name, size), offset in zip(sizes.items(), offsets, strict=False):
        first = offset // like[name].element_size()
        yield name, table.view(like[name].dtype)[:, first : first + CHUNK * size].view(-1, CHUNK, size)


def clear_stale(case: Case, table: Tensor, lengths: Mapping[int, int], like: Inputs) -> Tensor:
    """The bytes of all slots, zeros behind the tokens of their open chunk. `lengths`: the tokens read, by slot."""
    table = table.clone()
    for _, part in parts(case, table, like):
        for slot, length in lengths.items():
            part[slot, length % CHUNK :] = 0
    return table.view(torch.uint8)


def states_of(case: Case, table: Tensor, lengths: Mapping[int, int], like: Inputs) -> Tensor:
    """The states of slots behind all their tokens, computed by the reference from the open chunk's inputs."""
    if not kept(case):
        return table
    whole = table[:, : torch.Size(case.state_shape()).numel()]
    states = whole.reshape(len(table), *case.state_shape()).clone()
    by_name = dict(parts(case, table, like))
    for slot, length in lengths.items():
        count = length % CHUNK
        inputs = {name: torch.zeros(count, *x.shape[1:], dtype=x.dtype) for name, x in like.items()}
        inputs |= {name: part[slot, :count].view(count, *like[name].shape[1:]) for name, part in by_name.items()}
        case.call(Ops(1), inputs, states, state_batch([count], [slot]))
    return states


def rows_of_slots(num_slots: int, state: tuple[int, ...], recent: RecentInputs) -> Tensor:
    """Zeros for states in float32 of a model in bfloat16, as a pool has them."""
    types = CacheTypes(dtype="bfloat16", chunked_scans=True)
    (column,) = RecurrentState(ssm=state, recent=recent).columns(types)
    return torch.zeros(num_slots, *column.shape)
