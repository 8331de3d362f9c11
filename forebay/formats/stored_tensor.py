"""A tensor of a checkpoint that has not been read yet, whatever the file it is in."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from forebay.base.errors import ModelError
from forebay.formats.quantized import F32, StoredCodes, joined_codes


class StoredTensor(Protocol):
    """`pieces` yields it in order as 2-D arrays of consecutive rows (a 1-D tensor is one row): float32, float16, or,
    where `bfloat16` says so, the bits of bfloat16 as uint16.
    """

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def bfloat16(self) -> bool: ...

    @property
    def storage(self) -> str:
        """The file's name for how the values are stored: `BF16`, `Q4_1`."""
        ...

    @property
    def num_bytes(self) -> int:
        """Bytes in the file."""
        ...

    @property
    def codes(self) -> StoredCodes | None:
        """Return the values as the file holds them; None if that is no `GroupQuantized`."""
        ...

    def pieces(self) -> Iterator[npt.NDArray[Any]]:
        """Read the tensor as consecutive blocks of rows, so that the whole is never in memory."""


def read_tensor(tensor: StoredTensor) -> F32:
    """A whole tensor as float32."""
    parts = [as_float32(piece, bfloat16=tensor.bfloat16) for piece in tensor.pieces()]
    whole = np.concatenate(parts) if parts else np.empty(0, np.float32)
    return whole.reshape(tensor.shape)


def as_float32(piece: npt.NDArray[Any], *, bfloat16: bool) -> F32:
    """Return a piece of a tensor; a copy only if it is of another type."""
    return (piece.astype(np.uint32) << 16).view(np.float32) if bfloat16 else piece.astype(np.float32, copy=False)


class ComputedTensor:
    """A tensor that the file holds in another form: made of `sources`, when it is read, by `compute`; `codes` where
    what it is made of are codes and need only be arranged."""

    bfloat16 = False

    def __init__(
        self,
        shape: tuple[int, ...],
        sources: Sequence[StoredTensor],
        compute: Callable[[], Iterator[F32]],
        codes: StoredCodes | None = None,
    ) -> None:
        self.shape = shape
        self.codes = codes
        self.storage = sources[0].storage
        self.num_bytes = sum(source.num_bytes for source in sources)
        self.pieces = compute


def one_below_the_other(first: StoredTensor, second: StoredTensor) -> StoredTensor:
    """ModelError where their widths differ."""
    if first.shape[1:] != second.shape[1:]:
        raise ModelError(f"weights of the shapes {first.shape} and {second.shape} cannot be one below the other")

    def pieces() -> Iterator[F32]:
        yield from first.pieces()
        yield from second.pieces()

    shape = (first.shape[0] + second.shape[0], *first.shape[1:])
    return ComputedTensor(shape, [first, second], pieces, joined_codes([first.codes, second.codes]))


def less_one(tensor: StoredTensor) -> StoredTensor:
    """Return the differences from 1 of norm weights that are stored as they are used."""
    return ComputedTensor(tensor.shape, [tensor], lambda: (piece - 1 for piece in tensor.pieces()))
