"""A gateway of the field, with its own eyes: smg 1.13, where it is installed (in an environment of its own)."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests import loopback
from tests.deadlines import HANGS_S, wait_until
from tests.integration.test_disaggregation import SOON, Servers, started

SMG = shutil.which(os.environ.get("SMG", "smg"))


@pytest.fixture(scope="module")
def servers(embedded_model: Path) -> Iterator[Servers]:
    with started("--pd=local", *SOON) as servers:
        yield servers


@pytest.mark.slow
@pytest.mark.skipif(SMG is None, reason="there is no smg: python -m venv V; V/bin/pip install smg==1.13; SMG=V/bin/smg")
def test_a_gateway_of_the_field_takes_a_pair_of_ours_for_its_own(servers: Servers, tmp_path: Path) -> None:
    at = {member["role"]: member["url"] for member in servers.state()["members"]}
    info = loopback.get(f"{at['prefill']}/server_info").json()
    port, metrics = free_port(), free_port()
    words = [
        "launch",
        "--host",
        "127.0.0.1",
        "--port",
        str(port),
        "--prometheus-port",
        str(metrics),
        "--pd-disaggregation",
    ]
    words += ["--prefill", at["prefill"], str(info["disaggregation_bootstrap_port"]), "--decode", at["decode"]]
    words += ["--worker-startup-check-interval", "1", "--policy", "round_robin"]
    with (tmp_path / "smg.log").open("w") as log:
        gateway = subprocess.Popen([str(SMG), *words], stdout=log, stderr=log, cwd=tmp_path)
    try:
        wait_until(lambda: answers(port, "/v1/models"))
        workers = loopback.get(f"http://127.0.0.1:{port}/workers").json()["workers"]
        assert {worker["labels"].get("max_running_requests") for worker in workers} == {"4"}
        body = {"model": info["served_model_name"], "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 6}
        found = [chat(url, {**body, "temperature": 0}) for url in (f"http://127.0.0.1:{port}", servers.url)]
        assert found[0] == found[1]
        assert "[DONE]" in chat_text(f"http://127.0.0.1:{port}", {**body, "stream": True})
    finally:
        gateway.terminate()
        gateway.wait(HANGS_S)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port: int = probe.getsockname()[1]
        return port


def answers(port: int, path: str) -> bool:
    try:
        return loopback.get(f"http://127.0.0.1:{port}{path}").is_success
    except httpx.TransportError:
        return False


def chat_text(url: str, body: dict[str, Any]) -> str:
    answer = loopback.post(f"{url}/v1/chat/completions", json=body)
    assert answer.is_success, answer.text
    return answer.text


def chat(url: str, body: dict[str, Any]) -> Any:
    answer = loopback.post(f"{url}/v1/chat/completions", json=body)
    assert answer.is_success, answer.text
    return answer.json()["choices"]
