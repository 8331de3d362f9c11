"""Arrangements of tensors that llama.cpp's converter changes, back to those of transformers."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from forebay.base.pixels import CHANNELS
from forebay.families.parts.mmproj.projector import Header, Tensors
from forebay.formats.quantized import F32
from forebay.formats.stored_tensor import ComputedTensor, StoredTensor, read_tensor


def computed(sources: Sequence[StoredTensor], shape: tuple[int, ...], compute: Callable[[], F32]) -> StoredTensor:
    """Return the tensor of `shape` that `compute` makes of the sources when it is read."""

    def pieces() -> Iterator[F32]:
        yield np.ascontiguousarray(compute()).reshape(math.prod(shape[:-1]), shape[-1] if shape else 1)

    return ComputedTensor(shape, sources, pieces)


def pixel_patches(tensors: Tensors, name: str, header: Header) -> Tensors:
    """Return the tensors with the weights `name` of patches by pixel, [h, rows x columns x channels]: files have
    channels before rows and columns. Raises ModelError for a tensor of another number of dimensions."""
    stored = tensors.get(name)
    if stored is None:
        return tensors
    if len(stored.shape) != 4:
        raise header.wrong(f"the weights of patches have the shape {stored.shape} instead of one of 4 dimensions")
    shape = (stored.shape[0], math.prod(stored.shape[1:]))
    turned = computed([stored], shape, lambda: read_tensor(stored).transpose(0, 2, 3, 1))
    return {**tensors, name: turned}


def by_pixel(tensor: StoredTensor, edge: int, header: Header) -> StoredTensor:
    """Return weights or a vector whose last axis has the numbers of a square of `edge` pixels, pixel by pixel: the
    file has them channel by channel. Raises ModelError for another number of them."""
    size = CHANNELS * edge**2
    if tensor.shape[-1] != size:
        raise header.wrong(f"weights of the shape {tensor.shape} are not of {edge} x {edge} pixels, {size} numbers")
    channels = (-1, CHANNELS, edge, edge)
    return computed([tensor], tensor.shape, lambda: read_tensor(tensor).reshape(channels).transpose(0, 2, 3, 1))


def swapped(tensor: StoredTensor) -> StoredTensor:
    """Return a tensor of three dimensions with the first two in each other's place."""
    first, second, width = tensor.shape
    return computed([tensor], (second, first, width), lambda: read_tensor(tensor).swapaxes(0, 1))


def rows_of_one(tensor: StoredTensor) -> StoredTensor:
    """Return a vector or rows as [1, rows, width]: files may leave out dimensions of 1."""
    shape = (1, math.prod(tensor.shape[:-1]), tensor.shape[-1])
    return computed([tensor], shape, lambda: read_tensor(tensor))


def number(tensor: StoredTensor, header: Header) -> StoredTensor:
    """Return a tensor of one number as one without dimensions, which files cannot have. Raises ModelError for another
    number of them."""
    if math.prod(tensor.shape) != 1:
        raise header.wrong(f"a bound of a layer's inputs or outputs has the shape {tensor.shape} instead of one number")
    return computed([tensor], (), lambda: read_tensor(tensor))


def one_below_another(sources: Sequence[StoredTensor], header: Header) -> StoredTensor:
    """Return matrices or vectors as one, the rows of the first before those of the next. Raises ModelError for
    different widths."""
    widths = {source.shape[1:] for source in sources}
    if len(widths) > 1:
        raise header.wrong(f"q, k and v of a layer have the shapes {[source.shape for source in sources]}")
    shape = (sum(source.shape[0] for source in sources), *sources[0].shape[1:])
    return computed(sources, shape, lambda: np.concatenate([read_tensor(source) for source in sources]))


def in_time(sources: Sequence[StoredTensor], header: Header) -> StoredTensor:
    """Return the weights of patches of several pictures in time, [h, channels, pictures, rows, columns], of one tensor
    for each picture. Raises ModelError for different shapes, and for those of another number of dimensions."""
    shapes = {source.shape for source in sources}
    first = sources[0].shape
    if len(shapes) > 1 or len(first) != 4:
        raise header.wrong(f"the weights of patches have the shapes {sorted(shapes)} instead of one of 4 dimensions")
    shape = (*first[:2], len(sources), *first[2:])
    return computed(sources, shape, lambda: np.stack([read_tensor(source) for source in sources], axis=2))
