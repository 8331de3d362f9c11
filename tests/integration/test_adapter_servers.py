"""Adapters on prefill and decode servers as real processes: the tokens of one server, or one typed error (C21, C22)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from forebay.engine.client.llm import LLM
from forebay.requests.sampling_params import SamplingParams
from tests import loopback
from tests.deadlines import wait_until
from tests.engine.adapters import make_adapter
from tests.integration.streams import ask
from tests.integration.test_adapters import LENGTH, load, tokens, unload
from tests.integration.test_processes import PATIENT, model
from tests.integration.tree import Tree, serving

__all__ = ["model"]  # a fixture
NAMES = ("one", "two", "three")
PROMPT = [5, 6, 7]  # of `tokens`


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory, model: Path) -> Path:
    folder = tmp_path_factory.mktemp("adapters")
    for seed, name in enumerate(NAMES):
        make_adapter(model, folder / name, seed=seed)
    return folder


@pytest.fixture(scope="module")
def right(model: Path, root: Path, pair: Tree) -> dict[str | None, str]:
    """The text of one engine, of the base (None) and of each adapter."""
    greedy = SamplingParams(max_tokens=LENGTH, temperature=0.0, ignore_eos=True)
    with LLM(str(model), **pair.computes, enable_lora=True, kv_cache_bytes="16MiB") as llm:
        for name in NAMES:
            llm.load_adapter(name, str(root / name))
        return {name: llm.generate([PROMPT], greedy, lora=name or "")[0].outputs[0].text for name in (None, *NAMES)}


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory, model: Path, root: Path) -> Iterator[Tree]:
    modules = ",".join(f"{name}={root / name}" for name in ("one", "two"))
    flags = ("--enable-lora", f"--lora-root={root}", f"--lora-modules={modules}")
    with serving(tmp_path_factory.mktemp("pair") / "tree", model, *PATIENT, *flags, "--pd=local") as started:
        yield started


def member(client: httpx.Client, role: str) -> httpx.Client:
    members: list[dict[str, Any]] = client.get("/debug/state").json()["members"]
    return loopback.client(base_url=next(each["url"] for each in members if each["role"] == role))


def complete(client: httpx.Client, name: str) -> httpx.Response:
    return client.post("/v1/completions", json={**ask(PROMPT, LENGTH, stream=False), "model": name})


def at_rest(*members: httpx.Client) -> bool:
    """Nobody uses an adapter, or holds anything but caches do."""
    for client in members:
        pools = client.get("/debug/state").json()["pools"]
        if any(pool["quarantined"] or (pool["running"] and pool["name"] != "adapter") for pool in pools):
            return False
        users = [line for line in client.get("/metrics").text.splitlines() if line.startswith("forebay:lora_requests{")]
        if not users or not all(line.endswith(" 0.0") for line in users):
            return False
    return True


@pytest.mark.slow
def test_two_servers_with_adapters_give_the_tokens_of_one(pair: Tree, right: dict[str | None, str]) -> None:
    with pair.client() as client, member(client, "prefill") as prefill, member(client, "decode") as decode:
        for name in (None, "one", "two"):
            assert tokens(client, name) == right[name]
        wait_until(lambda: at_rest(prefill, decode))


@pytest.mark.slow
def test_an_adapter_of_other_files_on_the_other_server_ends_its_requests_with_adapter_mismatch(
    pair: Tree, right: dict[str | None, str]
) -> None:
    with pair.client() as client, member(client, "prefill") as prefill, member(client, "decode") as decode:
        assert load(decode, "three").status_code == 200
        missing = complete(client, "three")
        assert (missing.status_code, missing.json()["error"]["code"]) == (404, "model_not_found")
        assert load(prefill, "three", "two").status_code == 200
        other = complete(client, "three")
        assert (other.status_code, other.json()["error"]["code"]) == (503, "adapter_mismatch")
        assert other.json()["error"]["message"].count("'three' (sha256 ") == 2
        wait_until(lambda: at_rest(prefill, decode))
        assert load(prefill, "three", load_inplace=True).status_code == 200
        assert tokens(client, "three") == right["three"]
        assert [unload(each, "three").status_code for each in (prefill, decode)] == [200, 200]
        wait_until(lambda: at_rest(prefill, decode))
