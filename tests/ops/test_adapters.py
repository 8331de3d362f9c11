"""What adapters add to linear layers: every backend against the definition, and that against two plain products."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from forebay.ops.interface import Ops
from forebay.ops.native.ops import NativeOps
from forebay.ops.native.recording import Recording
from forebay.ops.reference.adapters import PANEL, AdapterTable, panels_of
from tests.ops.helpers import assert_close, assert_same_bits, normal

F32, BF16 = torch.float32, torch.bfloat16
DTYPES = pytest.mark.parametrize("dtypes", [(F32, F32), (F32, BF16), (BF16, BF16)], ids=["f32", "f32-of-bf16", "bf16"])
RANKS = [[0, 0], [16, 3], [1, 0], [0, 0], [5, 16], [8, 9]]  # of slots and joined layers
Dtypes = tuple[torch.dtype, torch.dtype]


def table_of(layers: Sequence[int], inputs: int, dtype: torch.dtype, ranks: list[list[int]] = RANKS) -> AdapterTable:
    """A table whose rows behind a slot's rank, and whose columns behind a panel's outputs, are NaN."""
    panels, rank = panels_of(layers), max(map(max, ranks))
    a, b = (
        normal((len(ranks), 2, rank, inputs), dtype, seed=1),
        normal((len(ranks), len(panels), rank, PANEL), dtype, seed=2),
    )
    for slot, of_layers in enumerate(ranks):
        for layer, used in enumerate(of_layers):
            a[slot, layer, used:] = float("nan")
        for panel, (_, count, layer) in enumerate(panels):
            b[slot, panel, of_layers[layer] :] = float("nan")
            b[slot, panel, :, count:] = float("nan")
    return AdapterTable(a, b, torch.tensor(ranks, dtype=torch.int32), torch.tensor(panels, dtype=torch.int32))


LAYERS = [0] * 70 + [1] * 33 + [0] * 4
SLOTS = torch.tensor([0, 1, 2, 1, 4, 0, 3, 5, 4], dtype=torch.int32)


def added(ops: Ops, table: AdapterTable, x: Tensor, slots: Tensor, outputs: int = len(LAYERS)) -> Tensor:
    """What an op makes of outputs that depend on their place alone."""
    out = normal((200, outputs), x.dtype, seed=3)[: len(x)].clone()
    ops.adapters.add(out, x, slots, table)
    return out


def test_panels_are_of_one_layer_and_cover_every_output() -> None:
    assert panels_of([2]) == [(0, 1, 2)]
    assert panels_of(LAYERS) == [(0, 32, 0), (32, 32, 0), (64, 6, 0), (70, 32, 1), (102, 1, 1), (103, 4, 0)]


@DTYPES
def test_definition_adds_two_products(dtypes: Dtypes) -> None:
    table, x = table_of(LAYERS, 30, dtypes[1]), normal((len(SLOTS), 30), dtypes[0], seed=4)
    before, out = (added(Ops(1), table, x, slots) for slots in (torch.zeros_like(SLOTS), SLOTS))
    expected = before.float()
    for token, slot in enumerate(SLOTS.tolist()):
        for number, (first, count, layer) in enumerate(panels_of(LAYERS)):
            rank = RANKS[slot][layer]
            inner = table.a[slot, layer, :rank].float() @ x[token].float()
            expected[token, first : first + count] += inner @ table.b[slot, number, :rank, :count].float()
    assert_close(out, expected.to(out.dtype))


@DTYPES
@pytest.mark.parametrize("inputs", [1, 30, 576])
@pytest.mark.parametrize("tokens", [0, 1, 2, 9, 150])
def test_adapters_equal_the_definition(
    native: NativeOps, reference: Ops, dtypes: Dtypes, inputs: int, tokens: int
) -> None:
    table, x = table_of(LAYERS, inputs, dtypes[1]), normal((tokens, inputs + 3), dtypes[0], seed=tokens)[:, 3:]
    slots = SLOTS.repeat(17)[:tokens]
    ours, theirs = added(native, table, x, slots), added(reference, table, x, slots)
    if inputs == 576 and dtypes[0] == F32:
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-3)  # sums of that many products, of large ones
    else:
        assert_close(ours, theirs)


@DTYPES
def test_tokens_without_an_adapter_keep_their_bits(each_ops: Ops, dtypes: Dtypes) -> None:
    """A zero keeps its sign too, and neither an input that is not finite nor what is left in slot 0 gets through."""
    table, x = table_of(LAYERS, 30, dtypes[1]), normal((len(SLOTS), 30), dtypes[0], seed=4)
    x[SLOTS == 0] = float("nan")
    table.a[0], table.b[0], table.ranks[0] = 1.0, 1.0, 1
    out = torch.full((len(SLOTS), len(LAYERS)), -0.0, dtype=dtypes[0])
    each_ops.adapters.add(out, x, SLOTS, table)
    assert out[SLOTS == 0].signbit().all()
    assert not out[SLOTS == 0].any()
    without = torch.tensor(LAYERS) == 1  # slot 2 has an adapter of the first layer alone
    assert out[2][without].signbit().all()
    assert out[2][~without].any()
    assert out.isfinite().all()


def test_recorded_call_follows_the_slots_of_the_step(native: NativeOps) -> None:
    table, x, slots = table_of(LAYERS, 30, F32), normal((len(SLOTS), 30), F32, seed=4), torch.zeros_like(SLOTS)
    out, recording = normal((len(SLOTS), len(LAYERS)), F32, seed=3), Recording(native.kernels)
    before = out.clone()
    with recording.record():
        native.adapters.add(out, x, slots, table)
    recording.replay()
    assert_same_bits(out, before)
    slots.copy_(SLOTS)
    recording.replay()
    native.adapters.add(before, x, SLOTS, table)
    assert_same_bits(out, before)


@DTYPES
def test_bits_of_a_token_do_not_depend_on_others_nor_on_threads(
    native: NativeOps, single_threaded: NativeOps, dtypes: Dtypes
) -> None:
    table, x = table_of(LAYERS, 577, dtypes[1]), normal((150, 577), dtypes[0], seed=5)
    slots = torch.randint(0, len(RANKS), (150,), generator=torch.Generator().manual_seed(0)).int()
    before = normal((200, len(LAYERS)), dtypes[0], seed=3)
    together = added(native, table, x, slots)
    assert_same_bits(added(single_threaded, table, x, slots), together)
    for first, count in ((0, 1), (17, 3), (40, 70)):
        part = before[first : first + count].clone()
        native.adapters.add(part, x[first : first + count], slots[first : first + count], table)
        assert_same_bits(part, together[first : first + count])
    alike = torch.full_like(slots, 4)
    whole = added(native, table, x, alike)
    assert_same_bits(whole[slots == 4], together[slots == 4])


@DTYPES
def test_bits_do_not_depend_on_the_largest_rank_and_the_slot(native: NativeOps, dtypes: Dtypes) -> None:
    table, x = table_of(LAYERS, 64, dtypes[1]), normal((3, 64), dtypes[0], seed=6)
    moved = table_of(LAYERS, 64, dtypes[1], [[0, 0], RANKS[5]])
    most = moved.a.shape[2]
    assert most < table.a.shape[2]
    moved.a[1], moved.b[1] = table.a[5, :, :most], table.b[5, :, :most]
    one, five = (torch.full((3,), slot, dtype=torch.int32) for slot in (1, 5))
    assert_same_bits(added(native, moved, x, one), added(native, table, x, five))
