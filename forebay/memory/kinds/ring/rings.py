"""State rings by request row (C24). Row r has slot r, so nothing is allocated, and slot 0 is the padding row's.

The prefix cache keeps none: where a page ends, no layer has anything in a ring that is still read. What a row's last
request left there is never read either: positions decide which places have something.
"""

from __future__ import annotations

from typing import ClassVar, Final

from forebay.config.engine_config import Ledger
from forebay.memory.holding import Allocation
from forebay.memory.kinds.kind import Kind, TransferredKind
from forebay.memory.slots import Ids, Slots, as_ids

RING: Final = "ring"


class Rings(Kind, TransferredKind):
    """A ring of each row, which goes to the host or to another engine with the rest of a request."""

    name: ClassVar[str] = RING
    of_pages: ClassVar[bool] = False
    of_rows: ClassVar[bool] = True

    def __init__(self, num_rows: int, *, ledger: Ledger = Ledger.RAISE) -> None:
        self.slots = Slots(RING, num_rows, ledger=ledger)

    def transfer_slots(self, allocation: Allocation, pages: Ids, start: int = 0) -> Ids:
        return as_ids([allocation.row])
