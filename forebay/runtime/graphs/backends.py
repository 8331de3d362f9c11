"""Replay of a step of fixed shape: by its Python, as a CUDA graph, or as a recording of native kernels."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import ClassVar, Final, Protocol, TypeVar

import torch
from torch import Tensor

from forebay.base.log import event, get_logger
from forebay.ops import Ops
from forebay.ops.native.ops import NativeOps
from forebay.pools.regions import Regions, Tag
from forebay.runtime.graphs.recorder import Arena, RecordedGraph, Recorder

Outputs = TypeVar("Outputs", bound=tuple[Tensor, ...])  # of named tuples

log = get_logger("graphs")


class GraphBackend(Protocol):
    name: ClassVar[str]
    captures_quickly: ClassVar[bool]  # a graph costs about as much as a few steps: it is made where it is first needed
    captures_prompts: ClassVar[bool]  # a replay saves a step that has prompts in it some time, too

    def capture(self, step: Callable[[], Outputs]) -> Callable[[], Outputs]:
        """Capture `step` with the memory that it uses; it may run once, more than once, or not at all. The result runs
        the step again, and its outputs may be overwritten by the next capture or replay of this backend."""
        ...


class Eager:
    """A backend without graphs: the same buffers and padding, and the step's own Python."""

    name: ClassVar = "eager"
    captures_quickly: ClassVar = True
    captures_prompts: ClassVar = False

    def capture(self, step: Callable[[], Outputs]) -> Callable[[], Outputs]:
        return step


class _Address:
    """A tensor's memory as CUDA's array interface has it, without keeping it from being used again."""

    def __init__(self, tensor: Tensor) -> None:
        self.__cuda_array_interface__ = tensor.__cuda_array_interface__


def _unowned(tensor: Tensor) -> Tensor:
    """View the memory of an output without owning it, as bytes first: the interface has no word for bfloat16."""
    held = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())
    whole = torch.as_tensor(_Address(held), device=tensor.device).view(tensor.dtype)
    return whole.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())


class CudaGraphs:
    """One memory pool and one capture stream for all graphs of a process: they never run at the same time."""

    name: ClassVar = "cuda"
    captures_quickly: ClassVar = False
    captures_prompts: ClassVar = True

    _WARM_UPS: Final = 2  # kernels are compiled and workspaces allocated before anything is captured

    def __init__(self, device: torch.device | str) -> None:
        self._device = torch.device(device)
        self._stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        self._memory = torch.cuda.graph_pool_handle()

    def capture(self, step: Callable[[], Outputs]) -> Callable[[], Outputs]:
        current = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            for _ in range(self._WARM_UPS):
                step()
        self._stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        # What other threads do meanwhile, such as waiting for an event, is none of this capture's business.
        with torch.cuda.graph(graph, pool=self._memory, stream=self._stream, capture_error_mode="thread_local"):
            outputs = step()
        current.wait_stream(self._stream)
        # Nobody holds the memory of the outputs but the graph: the next one captured lies in the same, logits included.
        unowned = type(outputs)(*map(_unowned, outputs))

        def replay() -> Outputs:
            graph.replay()
            return unowned

        return replay


class CpuGraphs:
    """A replay is one native call: the step's kernels, recorded with their addresses, run by the ops' own threads.

    What the step does in torch is repeated in torch, between two recordings: correct, but slower. A step that reads
    values on the host cannot be captured (`Uncapturable`). The activations of all graphs share one arena.
    """

    name: ClassVar = "cpu"
    captures_quickly: ClassVar = True
    captures_prompts: ClassVar = True

    def __init__(self, ops: NativeOps, regions: Regions) -> None:
        self._ops = ops
        self.arena = Arena(partial(regions.take, Tag.CUDA_GRAPH))

    def capture(self, step: Callable[[], Outputs]) -> RecordedGraph[Outputs]:
        started = time.perf_counter()
        recorder = Recorder(self._ops.kernels, self.arena)
        with recorder:
            outputs = step()
        graph = recorder.finish(outputs)
        seconds = time.perf_counter() - started
        log.debug(event("graph_captured", kernels=graph.num_kernels, torch_ops=graph.num_torch_ops, seconds=seconds))
        return graph


def graphs_for(ops: Ops, device: torch.device | str, regions: Regions) -> GraphBackend:
    """The backend that fits where steps run: CUDA graphs on a GPU, recordings of native kernels, else plain Python."""
    if torch.device(device).type == "cuda":
        return CudaGraphs(device)
    return CpuGraphs(ops, regions) if isinstance(ops, NativeOps) else Eager()
