"""A model that is split among ranks, as threads of this process with kernels of their own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import TypeVar

import torch

from forebay import models
from forebay.backends import make_ops
from forebay.families.checkpoint import open_checkpoint
from forebay.formats.quantization import Quantization
from forebay.models import Model
from forebay.ops import Ops
from forebay.ops.exchange import ALONE, Exchange, share_of
from forebay.ops.native.ops import NativeOps
from tests.ops.exchanging import group_exchanges, on_each, shared_exchanges

Result = TypeVar("Result")


@cache
def ops_of_ranks(kernels: str, size: int) -> list[Ops]:
    """Ops for each rank: those of one are not used by two threads at once."""
    return [make_ops(kernels, 1) for _ in range(size)]


def exchanges_of(ops: Sequence[Ops]) -> Sequence[Exchange]:
    """Exchanges through shared memory for native ops, through gloo for torch's."""
    native = [each for each in ops if isinstance(each, NativeOps)]
    return shared_exchanges([each.kernels for each in native]) if native else group_exchanges(len(ops))


def model_of(path: Path, ops: Ops, exchange: Exchange = ALONE, quantization: Quantization = Quantization.NONE) -> Model:
    """The model in a folder or file, or the share of the rank that exchanges so."""
    model = models.load(
        open_checkpoint(path),
        ops=ops,
        share=share_of(exchange),
        dtype=torch.float32,
        quantization=quantization,
        context_length=64,
    )
    assert isinstance(model, Model)
    return model


def on_ranks(
    path: Path,
    run: Callable[[Model, Ops, Exchange], Result],
    *,
    kernels: str = "native",
    size: int = 2,
    quantization: Quantization = Quantization.NONE,
) -> list[Result]:
    """Run each rank's share of the model in a thread of its own; the results by rank."""
    ops = ops_of_ranks(kernels, size)

    def one(exchange: Exchange) -> Result:
        own = ops[exchange.rank]
        return run(model_of(path, own, exchange, quantization), own, exchange)

    return on_each(exchanges_of(ops), one)
