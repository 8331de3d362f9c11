"""A gateway of the field, with its own eyes: smg 1.13, where it is installed (in an environment of its own)."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests import loopback
from tests.deadlines import HANGS_S, wait_until
from tests.integration.test_disaggregation import SMALL
from tests.integration.tree import serving

SMG = shutil.which(os.environ.get("SMG", "smg"))


@pytest.mark.slow
@pytest.mark.skipif(SMG is None, reason="there is no smg: python -m venv V; V/bin/pip install smg==1.13; SMG=V/bin/smg")
def test_a_gateway_of_the_field_takes_a_pair_of_ours_for_its_own(embedded_model: Path, tmp_path: Path) -> None:
    """It says in the body where halves meet, has no cluster key, and may name the prefill server that is configured."""
    (tmp_path / "cluster.key").write_text("cluster-canary-0123456789")
    bootstrap, port, metrics = free_port(), free_port(), free_port()
    flags = [*SMALL, f"--cluster-key-file={tmp_path / 'cluster.key'}"]
    flags += [f"--disaggregation-prefill-servers=127.0.0.1:{bootstrap}"]
    listens = f"--disaggregation-bootstrap-port={bootstrap}"
    with (
        serving(tmp_path / "alone", *SMALL) as alone,
        serving(tmp_path / "prefill", *flags, "--disaggregation-mode=prefill", listens) as prefill,
        serving(tmp_path / "decode", *flags, "--disaggregation-mode=decode") as decode,
    ):
        words = ["launch", "--host", "127.0.0.1", "--port", str(port), "--prometheus-port", str(metrics)]
        words += ["--pd-disaggregation", "--prefill", prefill.url, str(bootstrap), "--decode", decode.url]
        words += ["--worker-startup-check-interval", "1", "--policy", "round_robin"]
        with (tmp_path / "smg.log").open("w") as log:
            gateway = subprocess.Popen([str(SMG), *words], stdout=log, stderr=log, cwd=tmp_path)
        try:
            assert_serves_as(f"http://127.0.0.1:{port}", alone.url)
        finally:
            gateway.terminate()
            gateway.wait(HANGS_S)


def assert_serves_as(url: str, alone: str) -> None:
    wait_until(lambda: answers(f"{url}/v1/models"))
    workers = loopback.get(f"{url}/workers").json()["workers"]
    assert {worker["labels"].get("max_running_requests") for worker in workers} == {"4"}
    name = loopback.get(f"{alone}/server_info").json()["served_model_name"]
    body = {"model": name, "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 6, "temperature": 0}
    assert chat(url, body) == chat(alone, body)
    assert "[DONE]" in chat_text(url, {**body, "stream": True})


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port: int = probe.getsockname()[1]
        return port


def answers(url: str) -> bool:
    try:
        return loopback.get(url).is_success
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
