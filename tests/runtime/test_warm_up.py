"""The warm-up runs steps for which the runner has memory, however small the chunk and however few the rows."""

from __future__ import annotations

import functools
from pathlib import Path

import pytest
import torch

from forebay import models
from forebay.engine.loop.build import max_step_tokens
from forebay.families.checkpoint import open_checkpoint
from forebay.models.drafter import OwnHead
from forebay.pools.regions import Regions
from forebay.runtime.graphs.backends import Eager, graphs_for
from forebay.runtime.model_runner import warm_up_steps
from tests.kernels import NATIVE
from tests.models.heads import make_headed
from tests.models.tiny import VOCAB, shared_tiny
from tests.runtime.conftest import made
from tests.runtime.fake_hybrid import hybrid_runner

CHUNKS = range(1, 65)


@pytest.mark.parametrize("width", [1, 2, 5, 8])
@pytest.mark.parametrize("num_rows", [1, 2, 3, 64])
def test_warm_up_steps_any_chunk_and_rows_stay_within_step_tokens(num_rows: int, width: int) -> None:
    for chunk in CHUNKS:
        for row_tokens in (8, 16, 4096):
            most = max_step_tokens(chunk, num_rows=num_rows, width=width)
            steps = warm_up_steps(most, row_tokens, width)
            assert max(num_tokens for _, num_tokens in steps) <= min(most, row_tokens)
            assert {num_extends for num_extends, _ in steps} == {0, 1}
            assert ((0, 2) in steps) == (width > 1)


@pytest.fixture(scope="module")
def headed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_headed("deepseek_v3", tmp_path_factory.mktemp("headed")).path


@pytest.mark.parametrize("captured", [False, True], ids=["eager", "graphs"])
@pytest.mark.parametrize("drafts", ["head", "model"])
@pytest.mark.parametrize(("chunk", "num_rows"), [(1, 1), (16, 2), (29, 3)])
def test_warm_up_small_chunk_and_few_rows_runs_with_each_proposer(
    chunk: int, num_rows: int, drafts: str, captured: bool, headed: Path
) -> None:
    ops = made(NATIVE)
    load = functools.partial(models.load, ops=ops, dtype=torch.float32)
    if drafts == "head":
        model = load(open_checkpoint(headed, draft_head=True), draft_head=True)
        options = {"drafter": OwnHead(model, ops)}
    else:
        tiny = shared_tiny("llama").path
        model = load(open_checkpoint(tiny))
        options = {"draft_model": load(open_checkpoint(tiny), first_entry=len(model.cache_specs()))}
    graphs = graphs_for(ops, "cpu", Regions()) if captured else Eager()
    most = max_step_tokens(chunk, num_rows=num_rows, width=4)
    runner = hybrid_runner(model, width=4, ops=ops, vocab_size=VOCAB, graphs=graphs, max_num_tokens=most, **options)
    runner.warm_up()
