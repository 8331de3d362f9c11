"""Runs fixed-shape steps for any number of rows: padded, captured once per size, and replayed (C13-C15).

A step brings its inputs and its computation (`DecodeStep`, `ExtendStep`); what pads, resets, captures and cuts is here,
once. The shapes that speculation needs run in `tests/runtime/graph_steps.py`.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from typing import Final, Generic, Protocol, Self, TypeVar

from torch import Tensor

from forebay.base.log import event, get_logger
from forebay.pools.table import Table
from forebay.runtime.graphs.backends import Eager, GraphBackend
from forebay.runtime.graphs.recorder import Uncapturable

Inputs = TypeVar("Inputs", bound="Padded")
Outputs = TypeVar("Outputs", bound=tuple[Tensor, ...])  # named tuples

_PATIENCE: Final = 8  # uses of a size after which its graph is captured even though there is work

log = get_logger("graphs")


class Padded(Protocol):
    """A `Table`, or several that are filled together."""

    @property
    def num_rows(self) -> int: ...

    def fill(self, values: Mapping[str, Tensor], n: int, padded: int) -> None: ...

    def head(self, n: int) -> Self: ...


class Settled(Protocol):
    """The work that follows a step, once more is known. It reads the step's inputs and outputs, and the memory that
    `forget` gives free."""

    def settle(self) -> tuple[()]: ...

    def forget(self) -> None: ...


class GraphRunner(Generic[Inputs, Outputs]):
    """`step` maps a table of B rows to a named tuple of tensors `[B, ..]`, and may read nothing else that changes.

    Live rows come first. A padded row holds each column's declared pad, so it names row 0, page 0 and slot 0, the
    scratch entries; the captured step itself begins by resetting the padding row of every column in `writes`, so that
    nothing drifts there however often it is replayed. `sizes` are the B that may be captured; a batch runs in the
    smallest that holds it, a larger one as it is. A size runs eagerly until its `patience`-th use, then is captured: by
    default at the first use if graphs are quickly made. The work `settled` behind a step is captured with it, on the
    memory that it leaves. `failed` is called if a capture fails for another reason than the step itself.
    """

    def __init__(
        self,
        step: Callable[[Inputs], Outputs],
        inputs: Inputs,
        *,
        writes: Sequence[tuple[Table, str]],
        sizes: Sequence[int],
        backend: GraphBackend,
        settled: Settled | None = None,
        patience: int = 0,
        failed: Callable[[], None] = lambda: None,
    ) -> None:
        self.sizes = sorted(set(sizes))
        if not self.sizes or self.sizes[0] < 1 or self.sizes[-1] > inputs.num_rows:
            raise ValueError(f"sizes {list(sizes)} of a graph over inputs of {inputs.num_rows} rows")
        self.backend = backend
        self._step, self._inputs, self._writes = step, inputs, tuple(writes)
        self.graphs: dict[int, Callable[[], Outputs]] = {}  # by size: what does the captured step again
        self._settled, self._failed = settled, failed
        self._settles: dict[int, Callable[[], tuple[()]]] = {}  # by size
        self._records = backend.name != Eager.name
        self.replayed = False  # whether the latest run was
        self.padded = False  # whether it had padded rows
        self._latest = 0  # size
        self._refused = False
        self._uses: dict[int, int] = {}
        self._patience = patience or (1 if backend.captures_quickly else _PATIENCE)

    def run(self, values: Mapping[str, Tensor], n: int) -> Outputs:
        """The step's outputs for n rows, the first n of each, valid until the next run. `values` are the columns that
        this step has a source for, `[n, ..]` each; a column without one is padded whole, never left as it was.
        """
        size = self.sizes[bisect_left(self.sizes, n)] if n <= self.sizes[-1] else n
        graph = self.graphs.get(size) or self._captured_by_use(size)
        self._inputs.fill(values, n, size)
        outputs = self._run(size) if graph is None else graph()
        self._latest, self.padded = size, n < size
        self.replayed = self._records and graph is not None
        return outputs if n == size else _cut(outputs, n)

    def settle(self) -> None:
        """Do the remaining work of the latest run; its outputs do not change. No other step of the same backend may
        have run since."""
        if self._settled is not None:
            self._settles.get(self._latest, self._settled.settle)()
            self._settled.forget()

    def captured(self, n: int) -> bool:
        """Whether a run of n rows makes no graph, which would be made where outputs of other graphs lie."""
        return self._refused or n > self.sizes[-1] or self.sizes[bisect_left(self.sizes, n)] in self.graphs

    def capture_next(self) -> bool:
        """Capture the largest size that has no graph yet; False when there is none left.

        Largest first: smaller graphs then fit in the memory that the largest one already took.
        """
        missing = [size for size in self.sizes if size not in self.graphs]
        if self._refused or not missing:
            return False
        self._capture(missing[-1])
        log.debug(event("capture", size=missing[-1], left=len(missing) - 1))
        return True

    def drop_graphs(self) -> None:
        """Free all graphs and their memory. They are captured again as at first. Call with no step in flight."""
        for kept in (self.graphs, self._settles, self._uses):
            kept.clear()

    def _captured_by_use(self, size: int) -> Callable[[], Outputs] | None:
        """Graphs are captured in idle moments, or at the `patience`-th use of a size that has none yet."""
        if size > self.sizes[-1]:
            return None
        self._uses[size] = self._uses.get(size, 0) + 1
        return None if self._refused or self._uses[size] < self._patience else self._capture(size)

    def _capture(self, size: int) -> Callable[[], Outputs] | None:
        """On padding alone: a capture may run the step, and a live row's state must not advance twice. None where it
        failed: a replay only saves time, so the step runs by its Python from then on, and no size is tried again.
        """
        self._inputs.fill({}, 0, size)
        try:
            graph = self.backend.capture(lambda: self._run(size))
            if self._settled is not None:
                graph()  # what is settled lies where the step leaves it
                self._settles[size] = self.backend.capture(self._settled.settle)
        except Exception as error:
            self._refused = True
            expected = isinstance(error, Uncapturable)
            effect = "steps run by their Python, slower"
            log.warning(event("capture_failed", size=size, reason=str(error), effect=effect), exc_info=not expected)
            if not expected:
                self._failed()
            return None
        finally:
            if self._settled is not None:
                self._settled.forget()
        self.graphs[size] = graph
        return graph

    def _run(self, size: int) -> Outputs:
        for table, column in self._writes:
            table.reset_padding(column)
        return self._step(self._inputs.head(size))


def _cut(outputs: Outputs, n: int) -> Outputs:
    return type(outputs)(*(tensor[:n] for tensor in outputs))


# (first, last, step), as the field captures them on a GPU, where a padded row costs next to nothing.
_COARSE: Final = ((1, 2, 1), (4, 12, 4), (16, 256, 8), (272, 511, 16), (512, 4096, 32))
# Where every row costs its share of the step, and a graph a few milliseconds and no memory of its own.
_FINE: Final = ((1, 8, 1), (10, 16, 2), (20, 32, 4), (40, 128, 8), (144, 256, 16), (288, 4096, 32))


def default_sizes(most: int, *, quickly: bool) -> list[int]:
    """The batch sizes to capture up to `most`, always `most` itself."""
    steps = _FINE if quickly else _COARSE
    sizes = {size for start, stop, step in steps for size in range(start, min(stop, most) + 1, step)}
    return sorted(sizes | {most})
