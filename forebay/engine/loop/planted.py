"""Faults that change tokens, planted in an engine process to test what should find them (`forebay verify --self-test`).

A plant replaces one method for the whole process, before the engine is built. The engine's own code knows nothing of
it, and pays nothing for it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

import msgspec
import numpy as np
from torch import Tensor

from forebay.base import fault
from forebay.base.errors import ConfigError
from forebay.base.fault import Planted
from forebay.pools.mover import Places
from forebay.requests.pieces import Chunk, Piece
from forebay.requests.step_plan import Admission, StepPlan
from forebay.runtime.host.host_copies import HostCopies
from forebay.runtime.host.packing import Sections
from forebay.runtime.kinds.planted import KIND_PLANTS
from forebay.runtime.sampling.penalties import Penalties
from forebay.runtime.steps.decode import DecodeInputs
from forebay.runtime.steps.inputs import StepInputs
from forebay.transfer.session.data_thread import Receiver


def plant_armed() -> None:
    """Plant the faults that are armed in this process. Raises ConfigError for one that does not exist."""
    for name in fault.planted():
        if name not in PLANTS:
            raise ConfigError(f"fault {name!r}: there are {', '.join(PLANTS)}")
        setattr(*PLANTS[name]())


def _page_of_another() -> Planted:
    """The second request of a step that only decodes reads its first page from the first request."""
    stage = StepInputs.stage

    def faulty(self: StepInputs, plan: StepPlan, *others: Any) -> Sections:
        sections = stage(self, plan, *others)
        if not plan.num_extends and plan.num_seqs > 1:
            pages, (first, second) = self._rows.req_to_token, plan.rows[:2].tolist()
            pages[second, 0] = pages[first, 0]
        return sections

    return Planted(StepInputs, "stage", faulty)


def _unpadded_tail() -> Planted:
    """The padded rows of a decode name the requests that a larger batch left in them."""
    fill = DecodeInputs.fill

    def faulty(self: DecodeInputs, values: Mapping[str, Tensor], n: int, padded: int, **sizes: int) -> None:
        rows = self["req_pool_indices"]
        left = rows[n:padded].clone()
        fill(self, values, n, padded, **sizes)
        if n:
            rows[n:padded] = left

    return Planted(DecodeInputs, "fill", faulty)


def _penalties_of_previous() -> Planted:
    """A row keeps the penalties of the request that had it before."""
    admit = Penalties.admit

    def faulty(self: Penalties, admission: Admission) -> None:
        if admission.row not in self._states:
            admit(self, admission)

    return Planted(Penalties, "admit", faulty)


def _penalties_lost() -> Planted:
    """A request that comes back from a retraction has the penalties of its prompt alone."""
    admit = Penalties.admit

    def faulty(self: Penalties, admission: Admission) -> None:
        tokens = admission.token_ids[: admission.num_prompt]
        admit(self, msgspec.structs.replace(admission, token_ids=tokens))

    return Planted(Penalties, "admit", faulty)


def _stale_host_copy() -> Planted:
    """The last page and the state of a copy in host memory are what that memory held before."""
    save = HostCopies.save

    def faulty(self: HostCopies, request_id: int, places: Places) -> None:
        save(self, request_id, places)
        for rows in self._copies[request_id].values():
            rows[-1:].zero_()

    return Planted(HostCopies, "save", faulty)


def _chunk_altered() -> Planted:
    """A chunk from a prefill engine is altered behind the check of its checksum."""
    landed = Receiver._landed

    def faulty(self: Receiver, chunk: Chunk, piece: Piece) -> None:
        data = self._memory.gather(piece, self._memory.staging(chunk.num_bytes))
        self._memory.scatter(piece, np.zeros_like(data))
        landed(self, chunk, piece)

    return Planted(Receiver, "_landed", faulty)


def _adapter_of_neighbour() -> Planted:
    """A row has the adapter of the row before it."""
    admit = StepInputs._admit

    def faulty(self: StepInputs, sections: Sections) -> None:
        admit(self, sections)
        adapters = self._rows.adapter
        if adapters is not None:
            rows = sections["admit_rows"]
            adapters[rows[rows > 1]] = adapters[rows[rows > 1] - 1]

    return Planted(StepInputs, "_admit", faulty)


def _delta_of_previous() -> Planted:
    """The rotary delta of a row is added to the one that the row had before."""
    admit = StepInputs._admit

    def faulty(self: StepInputs, sections: Sections) -> None:
        deltas = self._rows.rope_delta
        before = None if deltas is None else deltas.clone()
        admit(self, sections)
        if deltas is not None and before is not None:
            rows = sections["admit_rows"]
            deltas[rows] += before[rows]

    return Planted(StepInputs, "_admit", faulty)


PLANTS: Final[Mapping[str, Callable[[], Planted]]] = {
    "page_of_another": _page_of_another,
    **KIND_PLANTS,
    "unpadded_tail": _unpadded_tail,
    "penalties_of_previous": _penalties_of_previous,
    "penalties_lost": _penalties_lost,
    "stale_host_copy": _stale_host_copy,
    "chunk_altered": _chunk_altered,
    "adapter_of_neighbour": _adapter_of_neighbour,
    "delta_of_previous": _delta_of_previous,
}
