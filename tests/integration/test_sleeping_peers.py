"""A prefill and a decode server that sleep, wake, take other weights or stand still (C21, C22, C25, C31)."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pytest
from safetensors.torch import load_file, save_file

from forebay.engine.client.llm import LLM
from forebay.requests.sampling_params import SamplingParams
from tests.deadlines import wait_until
from tests.integration.test_processes import PATIENT, ask, asyncly, model
from tests.integration.tree import Tree, serving
from tests.proven import Proven

__all__ = ["model"]  # a fixture
ROLES = ("prefill", "decode")
ROOMS = count(1000)


CLUSTER_KEY = "cluster-canary-0123456789"


def gateway(tree: Tree) -> httpx.AsyncClient:
    """A client that may say where the halves of a request meet."""
    client = asyncly(tree)
    client.auth = Proven(CLUSTER_KEY.encode())
    return client


class Two(NamedTuple):
    prefill: Tree
    decode: Tree
    port: int
    other: Path  # weights

    def body(self, room: int, num_tokens: int) -> dict[str, Any]:
        where = {"bootstrap_host": "127.0.0.1", "bootstrap_port": self.port, "bootstrap_room": room}
        return ask([5, 6, 7, 8, 9], num_tokens) | where

    async def ask(self, room: int, num_tokens: int = 12) -> tuple[httpx.Response, httpx.Response]:
        body = self.body(room, num_tokens)
        async with gateway(self.prefill) as prefill, gateway(self.decode) as decode:
            wanted = (client.post("/v1/completions", json=body) for client in (prefill, decode))
            first, second = await asyncio.gather(*wanted)
            return first, second


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory, model: Path) -> Iterator[Two]:
    folder = tmp_path_factory.mktemp("peers")
    shutil.copytree(model, folder / "other")
    for file in (folder / "other").glob("*.safetensors"):
        save_file({name: value * 0.75 for name, value in load_file(file).items()}, file)
    (folder / "cluster.key").write_text(CLUSTER_KEY)
    flags = (*PATIENT, f"--weights-root={folder}", "--disaggregation-heartbeat=1")
    flags += (f"--cluster-key-file={folder / 'cluster.key'}",)
    listens = "--disaggregation-bootstrap-port=0"
    prefill = serving(folder / "prefill", model, *flags, "--disaggregation-mode=prefill", listens)
    decode = serving(folder / "decode", model, *flags, "--disaggregation-mode=decode")
    with prefill as first, decode as second, first.client() as client:
        yield Two(first, second, client.get("/server_info").json()["disaggregation_bootstrap_port"], folder / "other")


def post(tree: Tree, path: str, **body: Any) -> dict[str, Any]:
    with tree.client() as client:
        response = client.post(path, json=body)
        assert response.status_code == 200, response.text
        answer: dict[str, Any] = response.json()
        return answer


def codes(responses: tuple[httpx.Response, httpx.Response]) -> list[str]:
    return [response.json()["error"]["code"] for response in responses]


async def test_c22_sleeping_prefill_server_refuses_at_once_and_serves_again_when_awake(
    two: Two,
) -> None:
    right = (await two.ask(1))[1].json()["choices"]
    assert post(two.prefill, "/release_memory_occupation")["phase"] == "asleep"
    with two.prefill.client() as client:
        assert client.get("/ready").json()["reason"] == "asleep"
    assert codes(await two.ask(2)) == ["peer_asleep", "peer_asleep"]
    assert post(two.prefill, "/resume_memory_occupation")["phase"] == "serving"
    again: list[Any] = []

    async def answered() -> bool:
        again[:] = await two.ask(3 + len(again))
        return bool(again[1].status_code == 200)

    while not await answered():  # decode hears that it is awake when it hears it
        assert codes((again[0], again[1])) == ["peer_asleep", "peer_asleep"]
    assert again[1].json()["choices"] == right


async def test_c22_the_other_half_of_what_a_sleeping_decode_server_refuses_ends_at_once(two: Two) -> None:
    assert post(two.decode, "/release_memory_occupation")["phase"] == "asleep"
    assert codes(await two.ask(50)) == ["peer_asleep", "peer_asleep"]
    assert post(two.decode, "/resume_memory_occupation")["phase"] == "serving"
    assert (await two.ask(51))[1].status_code == 200


async def test_c22_requests_of_a_decode_server_that_sleeps_go_on_with_the_same_tokens_or_end_typed(two: Two) -> None:
    right = (await two.ask(100, 200))[1].json()["choices"]
    tasks = [asyncio.create_task(two.ask(101 + i, 200)) for i in range(8)]
    await asyncio.to_thread(post, two.decode, "/release_memory_occupation", mode="retract")
    await asyncio.to_thread(post, two.decode, "/resume_memory_occupation")
    for _, answer in await asyncio.gather(*tasks):
        said = answer.json()
        assert said["choices"] == right if answer.status_code == 200 else said["error"]["code"] == "peer_asleep"
    await asyncio.to_thread(wait_until, lambda: two.prefill.is_clean() and two.decode.is_clean())


def no_transfers(tree: Tree) -> bool:
    return tree.is_clean() and not any(tree.state()["transfers"].values())


@pytest.mark.quick(2)
@pytest.mark.parametrize("held", ["briefly", pytest.param("for_long", marks=pytest.mark.slow)])
@pytest.mark.parametrize("role", ROLES)
@pytest.mark.parametrize("state", ["pending", "offered", "in_flight", "running"])
async def test_c22_hung_engine_fails_only_its_own_requests(two: Two, state: str, role: str, held: str) -> None:
    """Held for long: until the other side has given up, if it waits."""
    right = (await two.ask(next(ROOMS), 100))[1].json()["choices"]
    trees, body, halves = two._asdict(), two.body(next(ROOMS), 100), dict[str, asyncio.Task[httpx.Response]]()
    engines = {name: trees[name].engine_pid for name in ROLES}
    async with gateway(two.prefill) as prefill, gateway(two.decode) as decode:

        def send(name: str) -> None:
            client = prefill if name == "prefill" else decode
            halves[name] = asyncio.create_task(client.post("/v1/completions", json=body))

        async def until(tree: Tree, state: str) -> None:
            """Or until it has passed, on a machine that is slower than the other side's patience."""

            def reached() -> bool:
                return tree.state()["transfers"][state] == 1 or any(half.done() for half in halves.values())

            await asyncio.to_thread(wait_until, reached)

        other = two.body(next(ROOMS), 100)
        bystander = asyncio.create_task(decode.post("/v1/completions", json=other))
        await prefill.post("/v1/completions", json=other)  # from here on it is decode's alone
        try:
            send("prefill" if state == "pending" else "decode")
            await until(*((two.prefill, "pending") if state == "pending" else (two.decode, "transferring")))
            if state == "in_flight":
                os.kill(engines["decode"], signal.SIGSTOP)
                send("prefill")
                await until(two.prefill, "transferring")
            if state == "running":
                send("prefill")
                await halves["prefill"]
            os.kill(engines[role], signal.SIGSTOP)
            os.kill(engines["prefill" if role == "decode" else "decode"], signal.SIGCONT)
            for name in ROLES:
                if name not in halves:
                    send(name)
            if held == "for_long":
                await halves["prefill" if role == "decode" else "decode"]
        finally:
            for pid in engines.values():
                os.kill(pid, signal.SIGCONT)
        assert (await bystander).json()["choices"] == right
        answers = [await halves[name] for name in ROLES]
    for answer in answers:
        assert answer.is_success or (answer.status_code in (500, 503, 504) and answer.json()["error"]["code"])
    assert not answers[1].is_success or answers[1].json()["choices"] == right
    await asyncio.to_thread(wait_until, lambda: no_transfers(two.prefill) and no_transfers(two.decode))
    assert (await two.ask(next(ROOMS), 100))[1].json()["choices"] == right


async def test_c31_prefill_and_decode_of_different_weights_exchange_nothing_and_say_so(two: Two) -> None:
    old = (await two.ask(200))[1].json()["choices"]
    assert post(two.prefill, "/update_weights_from_disk", model_path="other")["weight_version"] == 1
    async with gateway(two.decode) as client:  # prefill is told by nobody that it waits in vain
        answer = await client.post("/v1/completions", json=two.body(201, 12))
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "layout_mismatch")
    assert answer.json()["error"]["message"].endswith("weight_version: prefill has 1, decode 0")
    assert post(two.decode, "/update_weights_from_disk", model_path="other")["weight_version"] == 1
    alone = LLM(two.other, **two.decode.computes, kv_cache_bytes="8MiB", max_running_requests=1)
    (output,) = alone.generate([[5, 6, 7, 8, 9]], SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True))
    prefill, decode = await two.ask(202)
    assert (prefill.status_code, decode.status_code) == (200, 200), decode.text
    assert decode.json()["choices"][0]["text"] == output.text != old[0]["text"]
    assert decode.json()["usage"]["weight_version"] == 1
