"""Clients of several adapters while adapters come and go, in seconds and for two minutes."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.engine.conftest import make_chat_model
from tests.integration.adapter_soak import CLIENTS, PROMPTS, ROUTES, soak, soaked

SECONDS = 120.0


@pytest.mark.slow
def test_c34_answers_are_those_of_the_named_adapter_while_it_is_reloaded_and_unloaded(tmp_path: Path) -> None:
    model = make_chat_model(tmp_path / "model", context_length=256).path
    with soaked(model, tmp_path, ("red",), PROMPTS[:1]) as made:
        found = made.run(lambda: made.answered >= 3 * CLIENTS)
    assert found["right, of one load"] > CLIENTS, found
    assert found["load"] > 2, found


@pytest.mark.slow
def test_c34_two_minutes_of_clients_of_four_adapters_leave_nothing_behind(tmp_path: Path) -> None:
    model = make_chat_model(tmp_path / "model", context_length=256).path
    found = soak(model, tmp_path, SECONDS)
    assert all(found[f"right {route.path}"] for route in ROUTES), found
    assert min(found[what] for what in ("404", "adapter_lost", "invalid_adapter", "unload", "given up")) > 0, found
