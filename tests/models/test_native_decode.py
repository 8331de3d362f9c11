"""A decode step of every model type computes nothing in torch: so a graph of it is one recording of native kernels."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor

from forebay import models
from forebay.families.checkpoint import open_checkpoint
from tests.models.drive import Driver
from tests.models.tiny import CASES, by_tier
from tests.torch_modes import DispatchMode

_aten = torch.ops.aten
ALLOCATIONS = (_aten.empty.memory_format, _aten.new_empty.default, _aten.empty_like.default)


class TorchWork(DispatchMode):
    """Counts what torch itself computes or moves in its scope: all but allocations and views."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if func not in ALLOCATIONS and (func._schema.is_mutable or not _is_view(result, args)):
            self.counts[str(func)] += 1
        return result


def _is_view(result: Any, args: tuple[Any, ...]) -> bool:
    """By address: `reshape` and its like copy where they must."""
    outputs = [result] if isinstance(result, Tensor) else list(result or ())
    sources = {arg.untyped_storage().data_ptr() for arg in args if isinstance(arg, Tensor)}
    return all(output.untyped_storage().data_ptr() in sources for output in outputs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("case", by_tier(CASES))
def test_a_decode_step_computes_nothing_in_torch(case, dtype, tiny, native):
    model = models.load(open_checkpoint(tiny(case).path), ops=native, dtype=dtype)
    driver = Driver(model, dtype=dtype)
    driver.step([(1, [5, 6, 7]), (2, [8])])
    ctx, ids = driver.inputs([(1, [9]), (2, [10])])
    with TorchWork() as work:
        model.logits(model.forward(ctx, ids))
    assert not work.counts
