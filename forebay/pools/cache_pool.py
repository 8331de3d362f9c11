"""The bytes of all that layers keep: KV pages, window pages and recurrent states, from the layers' specs (C5, C6).

Index 0 of each is nobody's: writes that must go nowhere go to page 0 or slot 0, and no live row reads them.
"""

from __future__ import annotations

import math
import mmap
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from forebay.memory.slots import PAD
from forebay.pools.cache_spec import CacheSpec, FullAttention, LatentAttention, RecurrentState, SlidingWindow


class KvLayer(NamedTuple):
    """`k` and `v` `[(pages + 1) * page_size, num_kv_heads, head_dim]`, indexed by `page * page_size + offset`.

    Of latent attention `v` is a view of the first `rank` entries of `k`'s rows.
    """

    k: Tensor
    v: Tensor


class KvScales(NamedTuple):
    """Of 8-bit `k` and `v`: the scale of each slot's heads, `[slots, num_kv_heads]` float32; otherwise None. Values
    that lie within keys have the keys' scales."""

    k: Tensor | None = None
    v: Tensor | None = None


class StateLayer(NamedTuple):
    """Per slot, `[slots + 1, ...]`: the convolution's last inputs, and the scan's state. Empty where there is none."""

    conv: Tensor
    ssm: Tensor


class Places(NamedTuple):
    """Where a request's part of the caches lies: pages and window pages in the order of its tokens, and its state slot
    or none. int64."""

    pages: Tensor
    window_pages: Tensor
    slots: Tensor


@dataclass(frozen=True, slots=True)
class CpuCopy:
    """A request's part of every tensor, in the order of the pool's layers."""

    parts: tuple[Tensor, ...]

    @property
    def num_bytes(self) -> int:
        return sum(part.nbytes for part in self.parts)


class CachePool:
    """One entry per spec, in the specs' order; a layer knows its own number.

    `kv_dtype` None: as `dtype`; with torch.int8 KV layers have scales. `num_pages`, `num_window_pages` and `num_slots`
    are without the padding page and slot.
    """

    def __init__(
        self,
        specs: Sequence[CacheSpec],
        *,
        num_pages: int,
        page_size: int,
        num_window_pages: int = 0,
        num_slots: int = 0,
        dtype: torch.dtype,
        kv_dtype: torch.dtype | None = None,
        ssm_dtype: torch.dtype = torch.float32,
        device: torch.device | str,
    ) -> None:
        self.specs = tuple(specs)
        self.page_size = page_size
        self.num_pages, self.num_window_pages, self.num_slots = num_pages, num_window_pages, num_slots
        at = torch.device(device)
        kv_type = kv_dtype or dtype
        self._layers: list[KvLayer | StateLayer] = []
        for spec in self.specs:
            match spec:
                case FullAttention():
                    tokens = (num_pages + 1) * page_size
                    k = _zeros((tokens, spec.num_kv_heads, spec.head_dim), kv_type, at)
                    v = _zeros((tokens, spec.num_kv_heads, spec.v_head_dim or spec.head_dim), kv_type, at)
                    self._layers.append(KvLayer(k, v))
                case LatentAttention():
                    k = _zeros(((num_pages + 1) * page_size, 1, spec.rank + spec.rope_dim), kv_type, at)
                    self._layers.append(KvLayer(k, k[..., : spec.rank]))
                case SlidingWindow():
                    shape = ((num_window_pages + 1) * page_size, spec.num_kv_heads, spec.head_dim)
                    self._layers.append(KvLayer(_zeros(shape, kv_type, at), _zeros(shape, kv_type, at)))
                case RecurrentState():
                    conv = _zeros((num_slots + 1, *(spec.conv or (0,))), dtype, at)
                    ssm = _zeros((num_slots + 1, *(spec.ssm or (0,))), ssm_dtype, at)
                    self._layers.append(StateLayer(conv, ssm))
        self._scales = [_scales(layer) for layer in self._layers]

    def kv(self, layer: int) -> KvLayer:
        entry = self._layers[layer]
        assert isinstance(entry, KvLayer), f"layer {layer} keeps {self.specs[layer]}"
        return entry

    def scales(self, layer: int) -> KvScales:
        return self._scales[layer]

    def state(self, layer: int) -> StateLayer:
        entry = self._layers[layer]
        assert isinstance(entry, StateLayer), f"layer {layer} keeps {self.specs[layer]}"
        return entry

    def kv_tensors(self) -> Iterator[Tensor]:
        """Every tensor that is indexed by location, each once: values that lie within keys are not named again."""
        for layer, scales in zip(self._layers, self._scales, strict=True):
            if isinstance(layer, KvLayer):
                yield from _distinct(layer, scales)

    # -- states -------------------------------------------------------------------------------------------------------

    def state_tensors(self) -> Iterator[Tensor]:
        """Every tensor that is indexed by state slot."""
        for layer in self._layers:
            if isinstance(layer, StateLayer):
                yield from (tensor for tensor in layer if tensor.numel())

    def clear_states(self, slots: Tensor) -> None:
        """Slots [n] int64 hold zeros."""
        for tensor in self.state_tensors():
            tensor.index_fill_(0, slots, 0)

    def copy_states(self, src: Tensor, dst: Tensor) -> None:
        """Slots dst [n] int64 become what slots src [n] are; no slot is in both."""
        for tensor in self.state_tensors():
            tensor.index_copy_(0, dst, tensor.index_select(0, src))

    # -- copies on the host (C26) -------------------------------------------------------------------------------------

    def get_cpu_copy(self, places: Places) -> CpuCopy:
        """What the device's work so far leaves at these places, without waiting for it."""
        return CpuCopy(tuple(_to_host(tensor.index_select(0, at)) for tensor, at in self._parts(places)))

    def load_cpu_copy(self, copy: CpuCopy, places: Places) -> None:
        """Put a copy into other places, as many as it was taken from."""
        for source, (tensor, at) in zip(copy.parts, self._parts(places), strict=True):
            tensor.index_copy_(0, at, source.to(tensor.device, non_blocking=True))

    def _parts(self, places: Places) -> Iterator[tuple[Tensor, Tensor]]:
        """Each tensor, by page or by slot, and where in it a request's part lies."""
        for spec, layer, scales in zip(self.specs, self._layers, self._scales, strict=True):
            if isinstance(layer, StateLayer):
                yield from ((tensor, places.slots) for tensor in layer if tensor.numel())
                continue
            at = places.window_pages if isinstance(spec, SlidingWindow) else places.pages
            for tensor in _distinct(layer, scales):
                yield tensor.view(-1, self.page_size, *tensor.shape[1:]), at

    # -- padding ------------------------------------------------------------------------------------------------------

    def reset_padding(self) -> None:
        """Make page 0 and slot 0 what they were at first, after a run whose writes had to go nowhere."""
        page = slice(PAD * self.page_size, (PAD + 1) * self.page_size)
        for tensor in self.kv_tensors():
            if tensor.numel():
                tensor[page].zero_()
        for tensor in self.state_tensors():
            tensor[PAD].zero_()

    def bytes_of(self, kind: type[CacheSpec]) -> int:
        """What all layers of a kind of spec take, padding included."""
        parts = zip(self.specs, self._layers, self._scales, strict=True)
        return sum(_bytes(layer, scales) for spec, layer, scales in parts if isinstance(spec, kind))

    @property
    def num_bytes(self) -> int:
        return sum(map(_bytes, self._layers, self._scales))


def _scales(layer: KvLayer | StateLayer) -> KvScales:
    if isinstance(layer, StateLayer) or layer.k.dtype is not torch.int8:
        return KvScales()
    k = _zeros(tuple(layer.k.shape[:2]), torch.float32, layer.k.device)
    return KvScales(k, k if _shared(layer) else _zeros(tuple(layer.v.shape[:2]), torch.float32, layer.v.device))


def _distinct(layer: KvLayer, scales: KvScales) -> tuple[Tensor, ...]:
    """Keys, values and their scales, without those that lie within keys."""
    num = 1 if _shared(layer) else 2
    return (*layer[:num], *(scale for scale in scales[:num] if scale is not None))


def _bytes(layer: KvLayer | StateLayer, scales: KvScales) -> int:
    tensors: tuple[Tensor, ...] = _distinct(layer, scales) if isinstance(layer, KvLayer) else layer
    return sum(tensor.nbytes for tensor in tensors)


def _to_host(tensor: Tensor) -> Tensor:
    if tensor.is_cuda:
        return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor, non_blocking=True)
    return tensor


def _shared(layer: KvLayer | StateLayer) -> bool:
    first, second = layer
    return first.numel() > 0 and first.untyped_storage().data_ptr() == second.untyped_storage().data_ptr()


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros; on a CPU the system provides them page by page when they are first written.

    `torch.zeros` writes them all at once: 4 GiB then take ten seconds of start-up and are resident from the beginning.
    Huge pages, which numpy asks for, make a step wait for 2 MiB of zeros in each layer wherever it is the first to
    write: a 40-token prompt on scattered pages took 650 ms of CPU time instead of 38, and decoding gained nothing.
    """
    num_bytes = math.prod(shape) * dtype.itemsize
    if device.type != "cpu" or sys.platform != "linux" or num_bytes == 0:
        return torch.zeros(shape, dtype=dtype, device=device)
    untouched = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):  # a kernel that was built without huge pages does not know the word
        untouched.madvise(mmap.MADV_NOHUGEPAGE)
    return torch.frombuffer(untouched, dtype=dtype).view(shape)
