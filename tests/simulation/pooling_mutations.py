"""Bugs on purpose in what becomes of prompts behind which nothing is generated."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from forebay.requests.request import Request
from forebay.requests.updates import Failure, FinishReason, Update
from forebay.scheduler.output_processor import OutputProcessor
from forebay.scheduler.preemption import Preemption
from forebay.scheduler.queues import Flight

Patch = pytest.MonkeyPatch


def a_vector_is_told_to_another(patch: Patch) -> None:
    take = OutputProcessor.take_vectors

    def mutated(self: OutputProcessor, flight: Flight, vectors: Mapping[int, bytes]) -> None:
        places = list(vectors)
        take(self, flight, dict(zip(places, [vectors[place] for place in (*places[1:], places[0])], strict=True)))

    patch.setattr(OutputProcessor, "take_vectors", mutated)


def a_mean_goes_on_from_a_hit(patch: Patch) -> None:
    made = Request.__post_init__

    def mutated(self: Request, *args: Any) -> None:
        made(self, *args)
        self.pools_all = False

    patch.setattr(Request, "__post_init__", mutated)


def a_retracted_mean_goes_on_from_its_copy_on_the_host(patch: Patch) -> None:
    suspend = Preemption.suspend

    def mutated(self: Preemption, req: Request) -> None:
        pools_all, req.pools_all = req.pools_all, False
        suspend(self, req)
        req.pools_all = pools_all

    patch.setattr(Preemption, "suspend", mutated)


def a_vector_is_told_and_its_request_goes_on(patch: Patch) -> None:
    finish = OutputProcessor.finish

    def mutated(
        self: OutputProcessor,
        req: Request,
        reason: FinishReason,
        failure: Failure | None = None,
        update: Update | None = None,
    ) -> None:
        if update is None or not update.vector or req.num_retractions == 0:
            finish(self, req, reason, failure, update)

    patch.setattr(OutputProcessor, "finish", mutated)


POOLING_MUTATIONS = {
    mutation.__name__: mutation
    for mutation in (
        a_vector_is_told_to_another,
        a_mean_goes_on_from_a_hit,
        a_retracted_mean_goes_on_from_its_copy_on_the_host,
        a_vector_is_told_and_its_request_goes_on,
    )
}
