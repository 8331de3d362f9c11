from __future__ import annotations

import functools
from collections.abc import Callable

import pytest
import torch

from forebay.backends import make_ops
from forebay.models.decoder import Model
from forebay.models.drafter import Drafter
from forebay.ops import Ops
from forebay.pools.regions import Regions
from forebay.runtime.drafts.head import DraftHead
from forebay.runtime.graphs.backends import Eager, graphs_for
from tests.kernels import NATIVE
from tests.models.tiny import VOCAB
from tests.runtime.fake_hybrid import HybridPlanner, hybrid_runner


@pytest.fixture(scope="session", params=[NATIVE, "torch"])
def ops(request: pytest.FixtureRequest) -> Ops:
    return made(request.param)


@pytest.fixture(scope="session")
def native_ops() -> Ops:
    """What promises equal bits whatever the batch, and reads nothing back from the device."""
    return made(NATIVE)


Drafted = tuple[Model, Drafter]


@pytest.fixture(params=[("torch", False), (NATIVE, False), (NATIVE, True)], ids=["torch", "native", "graphs"])
def drafting(request: pytest.FixtureRequest) -> Callable[[Callable[[Ops], Drafted], int], HybridPlanner]:
    """Plans for a model, beside what `load` says drafts for it, on all ops and captured."""
    backend, captured = request.param
    ops = made(backend)

    def planner(load: Callable[[Ops], Drafted], width: int) -> HybridPlanner:
        model, drafter = load(ops)
        graphs = graphs_for(ops, "cpu", Regions()) if captured else Eager()
        runner = hybrid_runner(model, vocab_size=VOCAB, ops=ops, graphs=graphs, width=width, drafter=drafter)
        return HybridPlanner(runner)

    return planner


def kept_by_head(plans: HybridPlanner, row: int) -> torch.Tensor:
    """The head's hidden state, of the last token but one of those known, beside the last."""
    proposer = plans.runner.proposer
    assert isinstance(proposer, DraftHead), proposer
    hidden: torch.Tensor = proposer.head.kept["hidden"][row]
    return hidden


@functools.cache
def made(backend: str) -> Ops:
    ops = make_ops(backend, 1 if backend == "torch" else 2)  # a runner of torch's ops sets as many for torch
    if backend != "torch" and ops.name == "torch":
        pytest.skip("no native ops on this machine")
    return ops
