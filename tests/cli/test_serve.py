"""`forebay serve` as a process: it comes up, says so once, answers, fails in one line, and ends when told."""

from __future__ import annotations

import asyncio
import io
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from forebay.base.http_client import Origin, get_json, stream_json
from forebay.cli.main import main
from tests import loopback
from tests.deadlines import HANGS_S, wait_until
from tests.integration.tree import Tree, serving

FOREBAY = (sys.executable, "-m", "forebay.cli.main")
KEY = "sk-canary-0123456789abcdef"
EXACT = ("--activation-bits", "16")  # with 8 the model does not know the capital of France
SMALL = (
    "--dtype",
    "float32",
    "--kv-cache-dtype",
    "bfloat16",
    "--kv-cache-bytes",
    "64MiB",
    "--max-running-requests",
    "4",
    "--report",
)


@pytest.fixture(scope="module")
def server(
    embedded_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[subprocess.Popen[bytes], str, str]]:
    """A running server with a key, its URL, and what it printed up to the last of its settings."""
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("FOREBAY_API_KEY", KEY)
        tree = Tree(tmp_path_factory.mktemp("server"), *SMALL, *EXACT)
    last = re.compile(r".*?^  cache_isolation .*?\n", re.DOTALL | re.MULTILINE)
    try:
        tree.wait_ready()
        wait_until(lambda: last.match(tree.output) is not None, lambda: tree.output)
        printed = last.match(tree.output)
        assert printed is not None
        yield tree.server, tree.url, printed[0]
        tree.server.terminate()
        assert tree.server.wait(HANGS_S) == 0, tree.output
    finally:
        tree.end()


def test_the_answer_then_memory_then_settings_with_reasons(server: tuple[subprocess.Popen[bytes], str, str]) -> None:
    _, url, printed = server
    answer, memory, _, settings = printed.split("\n\n")
    assert f"\nready at {url} after" in f"\n{answer}"
    assert re.search(r"fits +1 request of [\d,]+ tokens at once, or 4 of \d+", answer)
    assert (memory.split()[0], settings.split()[0]) == ("memory", "settings")
    assert all(line == line.rstrip() for line in printed.splitlines())
    assert all(word in printed for word in ("64.0 MiB", "planned", "the command line", "resident after warm-up"))
    assert re.search(r"cache_isolation +none +all who hold the one key", printed)


def test_the_key_is_shown_nowhere(server: tuple[subprocess.Popen[bytes], str, str]) -> None:
    """J-7: not in what is printed, the arguments, the engine's environment, or /server_info."""
    process, url, printed = server
    info = asyncio.run(get_json(Origin(url, KEY), "/server_info"))
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    assert children
    hidden = [Path(f"/proc/{pid}/{name}").read_bytes() for pid in children for name in ("environ", "cmdline")]
    hidden += [Path(f"/proc/{process.pid}/cmdline").read_bytes(), str(info).encode(), printed.encode()]
    assert not any(KEY.encode() in text for text in hidden)
    assert {s["name"]: s["value"] for s in info["settings"]}["api_key"] == "set"


def test_a_chat_streams(server: tuple[subprocess.Popen[bytes], str, str]) -> None:
    async def chat() -> str:
        payload = {
            "model": "SmolLM2-135M-Instruct",
            "messages": [{"role": "user", "content": "What is the capital of France?"}],
            "stream": True,
            "temperature": 0,
            "max_completion_tokens": 16,
        }
        events = [event async for event in stream_json(Origin(server[1], KEY), "/v1/chat/completions", payload)]
        return "".join(choice["delta"].get("content") or "" for event in events for choice in event["choices"])

    assert "Paris" in asyncio.run(chat())


@pytest.mark.long
def test_the_terminal_chat_and_the_benchmark_work_against_it(
    server: tuple[subprocess.Popen[bytes], str, str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("FOREBAY_API_KEY", KEY)
    monkeypatch.setattr("sys.stdin", io.StringIO("What is the capital of France?\n/reset\n/exit\n"))
    assert main(["chat", "--url", server[1], "--temperature", "0", "--max-tokens", "12"]) == 0
    assert "Paris" in capsys.readouterr().out
    bench = ["bench", "serve", "--base-url", server[1], "--api-key", KEY, "--num-prompts", "3"]
    assert main([*bench, "--random-input-len", "8", "--random-output-len", "4", "--ignore-eos"]) == 0
    measured = capsys.readouterr().out
    assert re.search(r"Total input tokens:\s+24", measured)
    assert re.search(r"Total generated tokens:\s+12", measured)


def test_a_priority_that_nobody_looks_at_is_refused(server: tuple[subprocess.Popen[bytes], str, str]) -> None:
    body = {"prompt": "x", "max_tokens": 1, "priority": 5}
    headers = {"authorization": f"Bearer {KEY}"}
    answer = loopback.post(f"{server[1]}/v1/completions", json=body, headers=headers)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "priority")
    assert "--schedule-policy priority" in answer.json()["error"]["message"]


def test_a_second_server_on_its_port_fails_in_one_line(
    server: tuple[subprocess.Popen[bytes], str, str], tmp_path: Path
) -> None:
    """F-4: without leaving an engine behind."""
    port = int(server[1].rpartition(":")[2])
    failed = Tree(tmp_path, *SMALL, port=port)
    try:
        assert failed.server.wait(HANGS_S) == 2
    finally:
        failed.end()
    errors = [line for line in failed.output.splitlines() if line.startswith("forebay: error:")]
    assert len(errors) == 1
    assert f":{port} cannot be used" in errors[0]
    assert "--port" in errors[0]
    assert "Traceback" not in failed.output


@pytest.mark.slow  # under streams, every time: tests/integration/test_processes.py
def test_sigterm_ends_it_with_code_0(embedded_model: Path, tmp_path: Path) -> None:
    with serving(tmp_path, *SMALL) as tree:
        tree.server.send_signal(signal.SIGTERM)
        assert tree.server.wait(HANGS_S) == 0, tree.output


@pytest.mark.slow  # with a tiny model, every time: test_generate.py
@pytest.mark.parametrize("words", [["-", "--max-tokens", "4"], ["-n", "4"]], ids=["dash", "pipe"])
def test_generate_continues_a_prompt_from_standard_input(words: list[str], embedded_model: Path) -> None:
    command = [*FOREBAY, "generate", *words, "--temp", "0", "--dtype", "float32", "--kv-cache-bytes", "32MiB"]
    done = subprocess.run(command, input="The capital of France is\n", capture_output=True, text=True, timeout=HANGS_S)
    assert (done.returncode, done.stdout.split(".")[0].strip()) == (0, "Paris"), done.stderr
