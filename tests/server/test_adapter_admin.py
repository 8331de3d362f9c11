"""What a load and an unload of an adapter answer over HTTP, and log."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest

from forebay.engine.frames import LoadedAdapter
from forebay.server.admin.adapters import AdapterCard
from tests.server.conftest import MODEL, Running
from tests.server.fake_engine import FakeEngine

LOADED = LoadedAdapter(name="support", number=7, path="/support", rank=16, num_bytes=4096, num_users=3, digest="d")


class Told(NamedTuple):
    """Of an engine's `State` what the answer is made of."""

    adapters: list[LoadedAdapter]


class AdapterEngine(FakeEngine):
    async def unload_adapter(self, name: str, *, timeout_s: float = 300.0) -> Any:
        return Told([LOADED])


def test_adapter_answer_has_the_card_of_each_adapter_by_its_fields_and_is_logged(
    launch: Callable[..., Running], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    card = {field: getattr(LOADED, field) for field in ("name", "path", "rank", "num_bytes", "num_users")}
    assert card.keys() == set(AdapterCard.__struct_fields__)
    with launch(AdapterEngine).client() as client:
        answer = client.post("/v1/unload_lora_adapter", json={"lora_name": "old"}).json()
    assert answer == {"success": True, "loaded_adapters": {"support": "/support"}, "adapters": [card]}
    assert "unload_adapter" in caplog.text
    assert "name=old loaded=1" in caplog.text


@pytest.mark.parametrize("name", [MODEL.name, f"{MODEL.name}:one", "", "a\n"])
def test_adapter_whose_name_cannot_be_one_is_refused_before_its_folder_is_read(
    launch: Callable[..., Running], name: str
) -> None:
    server = launch(FakeEngine)
    with server.client() as client:
        refused = client.post("/v1/load_lora_adapter", json={"lora_name": name, "lora_path": "x"})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "lora_name")
