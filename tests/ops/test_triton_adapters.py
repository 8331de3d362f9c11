"""What adapters add on a GPU equals the definition: without a GPU in Triton's interpreter, with one on it."""

from __future__ import annotations

import pytest
import torch

from forebay.ops.interface import Ops
from tests.ops.helpers import assert_same_bits, normal
from tests.ops.test_adapters import DTYPES, LAYERS, SLOTS, Dtypes, added, table_of
from tests.ops.triton_device import ON_EACH_DEVICE, OnDevice, TritonOps, assert_close


@pytest.fixture(scope="module", params=ON_EACH_DEVICE)
def ops(request: pytest.FixtureRequest) -> OnDevice:
    device = str(request.param)
    return OnDevice(TritonOps(device, 1), device)


@DTYPES
@pytest.mark.parametrize("tokens", [0, 1, 9, 21])
def test_adapters_equal_the_definition(ops: Ops, dtypes: Dtypes, tokens: int) -> None:
    table, x = table_of(LAYERS, 70, dtypes[1]), normal((tokens, 73), dtypes[0], seed=tokens)[:, 3:]
    slots = SLOTS.repeat(3)[:tokens]
    assert_close(added(ops, table, x, slots), added(Ops(1), table, x, slots))


@DTYPES
def test_tokens_without_an_adapter_keep_their_bits(ops: Ops, dtypes: Dtypes) -> None:
    table, x = table_of(LAYERS, 70, dtypes[1]), normal((len(SLOTS), 70), dtypes[0], seed=4)
    x[SLOTS == 0] = float("nan")
    out = torch.full((len(SLOTS), len(LAYERS)), -0.0, dtype=dtypes[0])
    ops.adapters.add(out, x, SLOTS, table)
    assert out[SLOTS == 0].signbit().all()
    assert out.isfinite().all()


@pytest.mark.quick(1)
@DTYPES
def test_bits_of_a_token_do_not_depend_on_others(ops: Ops, dtypes: Dtypes) -> None:
    table, x = table_of(LAYERS, 70, dtypes[1]), normal((len(SLOTS), 70), dtypes[0], seed=4)
    together, before = added(ops, table, x, SLOTS), normal((200, len(LAYERS)), dtypes[0], seed=3)
    alone = before[3:5].clone()
    ops.adapters.add(alone, x[3:5], SLOTS[3:5], table)
    assert_same_bits(alone, together[3:5])
