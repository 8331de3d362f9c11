"""Adapters: logits are those of PEFT and of merged weights, and no token's bits depend on another's adapter (C28)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from forebay import models
from forebay.backends import make_ops
from forebay.base.errors import ModelError
from forebay.families.checkpoint import open_checkpoint
from forebay.formats.adapters import Adapter
from forebay.formats.quantization import Quantization
from forebay.models import Model
from forebay.ops import Ops
from forebay.ops.weight_memory import WeightMemory
from tests.models.adapters import CASES, MAX_RANK, SLOTS, adapted
from tests.models.drive import NUM_ROWS, Driver
from tests.models.test_gguf import convert
from tests.models.tiny import CASE_OF, WHOLE, by_tier, random_ids

LENGTH = 24
IDS = random_ids(LENGTH, seed=5)
OTHERS = {row: random_ids(LENGTH, seed=row) for row in range(2, NUM_ROWS + 1)}
FIRST, SECOND = "mixed", "rank-1"  # the second's ranks are lower than most of the first's
# All cases of every type; in the quick tier one of each type with a part of its own, and all of one type.
LOGITS = [
    pytest.param(
        checkpoint, case, marks=() if checkpoint == "llama" or (case == FIRST and kind in WHOLE) else pytest.mark.slow
    )
    for kind, checkpoint in CASE_OF.items()
    for case in CASES
]
_QUICK_BITS = ("llama", "gemma4_text", "deepseek_v4", "qwen3_next", "falcon_h1", "mamba2")
BITS = [pytest.param(case, marks=() if kind in _QUICK_BITS else pytest.mark.slow) for kind, case in CASE_OF.items()]


def load(path: Path, ops: Ops, dtype: torch.dtype = torch.float32, **options) -> Model:
    return models.load(open_checkpoint(path), ops=ops, dtype=dtype, adapters=SLOTS, **options)


def adapter_of(checkpoint: str, case: str, max_rank: int = MAX_RANK) -> Adapter:
    made = adapted(checkpoint, case)
    config = open_checkpoint(made.tiny.path).config
    layers = models.needs_of(config, adapters=SLOTS).adaptable
    return models.adapter_of(made.folder, config, layers=layers, max_rank=max_rank)


def put(model: Model, slot: int, adapter: Adapter) -> None:
    for _ in model.adapters.write(slot, model.adapters.pack(adapter)):
        pass


def run(
    model: Model, slots: dict[int, int] | None, batch: Sequence[tuple[int, list[int]]], dtype: torch.dtype
) -> list[Tensor]:
    """The logits of one step, in which rows have adapters from slots, 0 if they are not named."""
    driver = Driver(model, dtype=dtype)
    driver.slots = None if slots is None else [slots.get(row, 0) for row in range(NUM_ROWS + 1)]
    return driver.step(batch)


def logits_of(model: Model, slot: int | None, ids: list[int] = IDS) -> Tensor:
    return run(model, None if slot is None else {1: slot}, [(1, ids)], model.dtype)[0]


@pytest.mark.quick(10)
@pytest.mark.parametrize(("checkpoint", "case"), LOGITS)
def test_adapters_on_all_layers_give_the_logits_of_peft_and_of_merged_weights(checkpoint, case, ops):
    made = adapted(checkpoint, case)
    model = load(made.tiny.path, ops)
    put(model, 2, adapter_of(checkpoint, case))
    logits = logits_of(model, 2)
    made.peft.assert_agrees(logits, IDS, "PEFT")
    made.merged.assert_agrees(logits, IDS, "merged")
    made.merged.assert_agrees(
        logits_of(models.load(open_checkpoint(made.merged.path), ops=ops, dtype=torch.float32), None), IDS
    )
    assert (logits - made.tiny.logits(IDS)).abs().max() > 0.05, "the adapter changes next to nothing"


@pytest.mark.quick(1)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("checkpoint", BITS)
def test_tokens_without_an_adapter_have_the_bits_of_a_model_without_adapters(checkpoint, dtype, tiny, native):
    path = tiny(checkpoint).path
    plain = models.load(open_checkpoint(path), ops=native, dtype=dtype)
    assert plain.adapters is None
    slots = SLOTS if dtype == torch.float32 else models.AdapterSlots(max_loras=3, dtype=dtype)
    model = models.load(open_checkpoint(path), ops=native, dtype=dtype, adapters=slots)
    put(model, 1, adapter_of(checkpoint, FIRST))
    put(model, 3, adapter_of(checkpoint, SECOND))
    batch = [(row, ids[: 5 + 3 * row]) for row, ids in OTHERS.items()]
    base, mixed = run(plain, None, batch, dtype), run(model, {3: 1, 4: 3}, batch, dtype)
    for (row, _), before, after in zip(batch, base, mixed, strict=True):
        assert torch.equal(before, after) == (row not in (3, 4)), f"row {row}"


@pytest.mark.quick(1)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("checkpoint", BITS)
def test_chunks_and_other_rows_and_adapters_do_not_change_a_bit(checkpoint, dtype, tiny, native):
    slots = SLOTS if dtype == torch.float32 else models.AdapterSlots(max_loras=3, dtype=dtype)
    model = models.load(open_checkpoint(tiny(checkpoint).path), ops=native, dtype=dtype, adapters=slots)
    put(model, 1, adapter_of(checkpoint, FIRST))
    put(model, 2, adapter_of(checkpoint, SECOND))
    (alone,) = run(model, {1: 1}, [(1, IDS)], dtype)
    assert alone.isfinite().all()
    for chunk, of_others in ((1, (0, 1, 2, 0, 1)), (7, (1, 1, 1, 1, 1))):
        driver = Driver(model, dtype=dtype)
        driver.slots, parts = [0, 1, *of_others], []
        for first in range(0, LENGTH, chunk):
            company = [(row, OTHERS[row][driver.lens[row] :][: row - 1]) for row in range(2, 2 + len(parts) % NUM_ROWS)]
            batch = [(row, ids) for row, ids in company if ids]
            batch.insert(len(batch) // 2, (1, IDS[first : first + chunk]))
            parts.append(driver.step(batch)[[row for row, _ in batch].index(1)])
        assert torch.equal(torch.cat(parts), alone), f"chunks of {chunk}"


def test_slot_that_is_written_again_has_nothing_left_of_the_adapter_before(tiny, ops):
    path = tiny("llama").path
    model, fresh = load(path, ops), load(path, ops)
    second = adapter_of("llama", SECOND)
    some = replace(second, pairs=dict(list(second.pairs.items())[::2]))
    put(model, 1, adapter_of("llama", FIRST))
    put(model, 1, some)
    put(fresh, 1, some)
    assert torch.equal(logits_of(model, 1), logits_of(fresh, 1))
    model.adapters.clear(1)
    assert torch.equal(logits_of(model, 1), logits_of(fresh, 0))


def test_adapter_is_written_one_layer_at_a_time(tiny):
    model, adapter = load(tiny("llama").path, Ops(1)), adapter_of("llama", FIRST)
    before = logits_of(model, 0)
    writing = model.adapters.write(1, model.adapters.pack(adapter))
    assert not model.adapters.holds(1)
    for _ in adapter.pairs:
        next(writing)
        assert model.adapters.holds(1)
    with pytest.raises(StopIteration):
        next(writing)
    assert torch.equal(logits_of(model, 0), before)


@pytest.mark.parametrize("case", ["llama", "qwen2"])
def test_adapter_fits_a_gguf_file_of_the_same_model(case, tiny, ops, tmp_path):
    """Whose rows of q and k are in another order."""
    path = convert(tiny(case), case, tmp_path / "model.gguf")
    model = load(path, ops)
    put(model, 1, adapter_of(case, FIRST))
    adapted(case, FIRST).peft.assert_agrees(logits_of(model, 1), IDS)


@pytest.mark.parametrize("quantization", [Quantization.INT8, Quantization.INT4])
def test_adapter_beside_weights_in_codes_adds_what_it_adds_to_their_values(quantization, tiny, native):
    """The reference opens the codes; kernels round inputs to 16 bits."""
    expected, found = (
        load(tiny("olmo2").path, ops, quantization=quantization) for ops in (make_ops("torch", 1), native)
    )
    for model in (expected, found):
        put(model, 1, adapter_of("olmo2", FIRST))
    torch.testing.assert_close(logits_of(found, 1), logits_of(expected, 1), rtol=0, atol=5e-3)


@pytest.mark.parametrize("checkpoint", by_tier(CASE_OF.values()))
def test_bytes_of_tables_are_known_before_loading(checkpoint, tiny):
    checkpoint = open_checkpoint(tiny(checkpoint).path)
    for slots in (SLOTS, models.AdapterSlots(max_loras=1, max_rank=3)):
        needs = models.needs_of(checkpoint.config, adapters=slots)
        model = models.load(checkpoint, ops=Ops(1), dtype=torch.float32, adapters=slots)
        assert needs.adapter_bytes == model.adapters.num_bytes
        assert needs.adaptable == model.adapters.layers
    assert models.needs_of(checkpoint.config).adapter_bytes == 0


def test_layers_that_are_used_otherwise_than_by_a_product_can_have_no_adapter(tiny):
    without = {
        "qwen3_moe": ("experts", "mlp.gate", "lm_head"),
        "deepseek_v32": ("kv_b_proj", "weights_proj", "experts", "mlp.gate"),
        "zamba2": ("shared_transformer",),
        "gpt_oss": ("experts", "router"),
    }
    for checkpoint, parts in without.items():
        layers = models.needs_of(open_checkpoint(tiny(checkpoint).path).config, adapters=SLOTS).adaptable
        assert layers
        assert not [name for name in layers for part in parts if f".{part}." in f".{name}."]


def test_rank_above_the_slots_is_rejected(tiny):
    with pytest.raises(ModelError, match="has rank 16: start with --max-lora-rank 16 or more"):
        adapter_of("llama", "rank-16", max_rank=8)


def test_weights_that_are_loaded_again_leave_tables_in_their_places_and_empty(tiny, native):
    chunks = []

    def take(num_bytes: int) -> Tensor:
        chunks.append(torch.zeros(num_bytes, dtype=torch.uint8))
        return chunks[-1]

    ops = make_ops(native.name.removeprefix("native-"), 1, memory=WeightMemory(take))
    model = load(tiny("llama").path, ops)
    put(model, 1, adapter_of("llama", FIRST))
    adapted_logits = logits_of(model, 1)
    with ops.memory.again():
        again = load(tiny("llama").path, ops)
    assert torch.equal(logits_of(again, 1), logits_of(model, 0))
    put(again, 1, adapter_of("llama", FIRST))
    assert torch.equal(logits_of(model, 1), adapted_logits)
