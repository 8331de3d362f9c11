"""A cache on a GPU: chunks are gathered and scattered there, on a stream of their own, and cross in pinned memory."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from forebay.base.parts import I64
from forebay.pools.cache_pool import CachePool
from forebay.transfer.wire.memory import U8, HostMemory, checksum
from forebay.transfer.wire.pages import KindShape, Piece


class DeviceMemory:
    """Steps that wrote what is gathered have completed, and none that will read what is scattered has been launched:
    so the stream waits for no other, and each call for its own."""

    def __init__(self, cache: CachePool, shapes: Mapping[str, KindShape]) -> None:
        self._regions = {
            kind: [
                tensor.view(torch.uint8).view(-1, size)
                for tensor, size in zip(cache.tables[kind].tensors, shape.bytes_per_place, strict=True)
            ]
            for kind, shape in shapes.items()
        }
        self._device = next(region.device for regions in self._regions.values() for region in regions)
        self._stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]

    def num_bytes(self, piece: Piece) -> int:
        return len(piece.places) * sum(region.shape[1] for region in self._of(piece))

    def staging(self, num_bytes: int) -> U8:
        pinned: U8 = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True).numpy()
        return pinned

    def gather(self, piece: Piece, out: U8) -> U8:
        end = 0
        with torch.cuda.stream(self._stream):
            places = torch.as_tensor(piece.places, device=self._device)
            for region in self._of(piece):
                begin, end = end, end + len(places) * region.shape[1]
                torch.from_numpy(out[begin:end]).copy_(region.index_select(0, places).flatten(), non_blocking=True)
            self._stream.record_event().synchronize()
        return out[:end]

    def scatter(self, piece: Piece, data: U8) -> None:
        end = 0
        with torch.cuda.stream(self._stream):
            places = torch.as_tensor(piece.places, device=self._device)
            for region in self._of(piece):
                begin, end = end, end + len(places) * region.shape[1]
                rows = torch.from_numpy(data[begin:end]).view(len(places), -1)
                region.index_copy_(0, places, rows.to(self._device, non_blocking=True))
            self._stream.record_event().synchronize()

    def sum(self, piece: Piece, staging: U8) -> int:
        return checksum(self.gather(piece, staging).data)

    def parts(self, piece: Piece) -> list[memoryview]:
        return []

    def copy(self, piece: Piece, there: HostMemory, places: I64, staging: U8) -> int:
        data = self.gather(piece, staging)
        there.scatter(piece._replace(places=places), data)
        return checksum(data.data)

    def _of(self, piece: Piece) -> Iterable[Tensor]:
        return self._regions[piece.kind][piece.region : piece.region + piece.num_regions]
