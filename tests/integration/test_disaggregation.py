"""Prefill, decode and their router as real processes: the tokens of one process, and what becomes of faults (C21, C22).

The servers are shared by all tests, and each leaves them at rest: nothing under way, nothing in quarantine.
"""

from __future__ import annotations

import json
import operator
import os
import random
import re
import signal
import socket
import subprocess
import tempfile
import threading
from argparse import Namespace
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pytest

from forebay.cli.main import main
from forebay.cli.make_model import make
from forebay.engine.client.llm import LLM
from forebay.requests.sampling_params import SamplingParams
from tests import loopback
from tests.deadlines import HANGS_S, wait_until
from tests.integration.tree import child, children, command, serving
from tests.proven import Proven

TYPES = {"dtype": "float32", "kv_cache_dtype": "bfloat16"}  # of servers and of the engines beside them
SMALL = (
    *(f"--{name.replace('_', '-')}={value}" for name, value in TYPES.items()),
    "--kv-cache-bytes=192MiB",
    "--max-running-requests=4",
    "--ledger=raise",
    "--log-level=warning",
)
# Faults are found sooner than in production, and not so soon that a busy machine is taken for one.
SOON = ("--disaggregation-heartbeat=1", "--disaggregation-lease=8", "--disaggregation-bootstrap-timeout=6")
ROLES = ("prefill", "decode")
LONG = "The river went on and on, past hills and towns and fields. " * 40


class Servers(NamedTuple):
    process: subprocess.Popen[bytes]
    url: str

    def post(self, path: str, body: dict[str, Any]) -> httpx.Response:
        return loopback.post(f"{self.url}{path}", json=body)

    def complete(self, **body: Any) -> httpx.Response:
        return self.post("/v1/completions", {"max_tokens": 8, "temperature": 0, **body})

    def state(self) -> dict[str, Any]:
        answer: dict[str, Any] = loopback.get(f"{self.url}/debug/state").json()
        return answer

    @property
    def is_ready(self) -> bool:
        return loopback.get(f"{self.url}/ready").is_success

    def at_rest(self) -> bool:
        """All members are up, and nobody holds anything but caches do."""
        state = self.state()
        told = {pool["name"].partition(" ")[0] for pool in state["pools"]}
        return told == {*ROLES} and not any((pool["running"], pool["quarantined"]) != (0, 0) for pool in state["pools"])

    @property
    def member_pids(self) -> list[int]:
        return [pid for pid in children(self.process.pid) if "--disaggregation-mode=" in command(pid)]

    def member(self, role: str) -> int:
        """The pid of its server process, the first of its role."""
        return child(self.process.pid, f"--disaggregation-mode={role}")

    def engine(self, role: str) -> int:
        return child(self.member(role), "forebay.engine.loop.process")


@contextmanager
def started(*words: str) -> Iterator[Servers]:
    with tempfile.TemporaryDirectory() as folder:
        with serving(Path(folder), *SMALL, *words) as tree:
            # Confined workers end by themselves, once their server has ended.
            below = [pid for pid in children(tree.server.pid) if "forebay.text." not in command(pid)]
            yield Servers(tree.server, tree.url)
            tree.server.terminate()
            assert tree.server.wait(HANGS_S) == 0, tree.output
        assert not [pid for pid in below if Path(f"/proc/{pid}").exists()]


def made(kind: str, folder: Path, **shape: Any) -> str:
    """Return the folder of a new random model of a type, with the tokenizer of the embedded one."""
    shape = {"hidden_size": 64, "num_layers": 4, "dtype": "bfloat16", "draft_head": False, **shape}
    return str(make(None, Namespace(like=kind, out=str(folder / kind), seed=0, set=[], **shape)))


@pytest.fixture(scope="module")
def model(embedded_model: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    return made("llama", tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def alone(model: str) -> Iterator[Servers]:
    with started(model) as servers:
        yield servers


@pytest.fixture(scope="module")
def pair(model: str) -> Iterator[Servers]:
    with started(model, "--pd=local", *SOON) as servers:
        yield servers


@pytest.fixture(autouse=True)
def _at_rest(pair: Servers) -> Iterator[None]:
    yield
    wait_until(pair.at_rest)


BODIES: dict[str, dict[str, Any]] = {
    "greedy": {"prompt": "The capital of France is"},
    "sampled": {"prompt": "Once upon a time", "temperature": 1.0, "top_p": 0.9, "seed": 7, "max_tokens": 24},
    "penalties": {"prompt": LONG, "repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": 0.5},
    "logprobs": {"prompt": "One, two, three,", "logprobs": 3, "echo": True},
    "stop": {"prompt": "1 2 3 4 5", "stop": ["9"], "max_tokens": 32},
    "restrictions": {
        "prompt": "The capital of France is",
        "max_tokens": 24,
        "stop": [".", ","],
        "temperature": 0.9,
        "seed": 5,
        "min_tokens": 9,
        "bad_words": ["Paris", "the", "France"],
        "stop_token_ids": [28, 30],
    },
    "one token": {"prompt": "The capital of France is", "max_tokens": 1},
    "ids": {"prompt": [[1, 2, 3], list(range(100, 170))], "n": 2, "temperature": 0.8, "seed": 3},
}


@pytest.mark.parametrize("body", BODIES.values(), ids=BODIES)
def test_c21_two_engines_say_what_one_says(alone: Servers, pair: Servers, body: dict[str, Any]) -> None:
    expected, found = alone.complete(**body), pair.complete(**body)
    assert (found.status_code, found.json().get("choices")) == (200, expected.json()["choices"]), found.text


def test_c21_a_streamed_chat_is_the_same_and_the_second_turn_is_cached_at_prefill(
    alone: Servers, pair: Servers
) -> None:
    turns = [{"role": "user", "content": LONG}]
    texts = []
    for servers in (alone, pair):
        body = {"messages": turns, "max_tokens": 12, "temperature": 0, "stream": True}
        lines = servers.post("/v1/chat/completions", body).text.splitlines()
        events = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
        texts.append("".join(event["choices"][0]["delta"].get("content", "") for event in events))
    assert texts[0] == texts[1] != ""
    more = [*turns, {"role": "assistant", "content": texts[0]}, {"role": "user", "content": "And then?"}]
    body = {"messages": more, "max_tokens": 4, "temperature": 0}
    first, second = (servers.post("/v1/chat/completions", body).json() for servers in (alone, pair))
    assert first["choices"] == second["choices"]
    assert second["usage"]["cache"]["cached_tokens"] >= 400


DIALECTS = {
    "messages": ({"messages": [{"role": "user", "content": LONG}], "max_tokens": 8}, "content"),
    "responses": ({"input": LONG, "max_output_tokens": 8}, "output"),
}


@pytest.mark.parametrize("dialect", DIALECTS)
def test_c21_other_dialects_say_what_one_engine_says(alone: Servers, pair: Servers, dialect: str) -> None:
    body, name = DIALECTS[dialect]
    texts = []
    for servers in (alone, pair):
        (model,) = loopback.get(f"{servers.url}/v1/models").json()["data"]
        answer = servers.post(f"/v1/{dialect}", {"model": model["id"], "temperature": 0, **body}).json()
        (item,) = answer[name]
        texts.append(item["text"] if dialect == "messages" else item["content"][0]["text"])
        assert answer["usage"]["output_tokens"] == 8
    assert texts[0] == texts[1] != ""


def leave(servers: Servers, *, after_bytes: int) -> None:
    """Send a request, read so much of its answer, and close the connection."""
    body = json.dumps({"prompt": LONG * 2, "max_tokens": 1500, "ignore_eos": True, "stream": True}).encode()
    head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    with socket.create_connection(("127.0.0.1", httpx.URL(servers.url).port), HANGS_S) as client:
        client.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        if after_bytes:
            assert client.recv(after_bytes)
        else:
            wait_until(lambda: any(member["in_flight"] for member in servers.state()["members"]))


@pytest.mark.parametrize("after_bytes", [0, 1])
def test_c22_of_a_client_that_leaves_nothing_is_left_on_either_side(pair: Servers, after_bytes: int) -> None:
    for _ in range(3):
        leave(pair, after_bytes=after_bytes)
    wait_until(pair.at_rest)
    assert pair.complete(**BODIES["greedy"]).is_success


# A server's engine, its HTTP process, and how it goes.
FAULTS = [
    pytest.param("prefill", "engine", signal.SIGKILL),
    pytest.param("decode", "member", signal.SIGKILL),
    pytest.param("prefill", "engine", signal.SIGSTOP, marks=pytest.mark.slow),
    pytest.param("decode", "engine", signal.SIGSTOP, marks=pytest.mark.slow),
    pytest.param("prefill", "member", signal.SIGKILL, marks=pytest.mark.slow),
    pytest.param("decode", "engine", signal.SIGKILL, marks=pytest.mark.slow),
]


@pytest.mark.quick(1)
@pytest.mark.parametrize(("role", "which", "number"), FAULTS)
def test_c22_requests_of_a_dead_peer_fail_typed_and_the_pair_serves_again(
    alone: Servers, pair: Servers, role: str, which: str, number: signal.Signals
) -> None:
    expected = alone.complete(**BODIES["greedy"]).json()["choices"]
    pid = getattr(pair, which)(role)
    request = {"prompt": LONG, "max_tokens": 400, "ignore_eos": True, "stream": True, "temperature": 0}
    ended = ""
    url = f"{pair.url}/v1/completions"
    with loopback.stream("POST", url, json=request) as answer:
        assert answer.is_success
        lines = answer.iter_lines()
        next(lines)
        os.kill(pid, number)
        if role == "decode":
            *_, ended = (line for line in lines if "error" in line)
    if role == "decode":
        assert json.loads(ended[6:])["error"]["code"] in ("engine_dead", "member_lost", "engine_stalled")
    if number is signal.SIGSTOP:
        refused = pair.complete(**BODIES["greedy"])
        assert refused.status_code in (503, 504), refused.text
        assert refused.json()["error"]["message"]
        os.kill(pid, signal.SIGCONT)
    wait_until(lambda: pair.is_ready and pair.complete(**BODIES["greedy"]).is_success)
    assert pair.complete(**BODIES["greedy"]).json()["choices"] == expected


def is_right_or_typed(answer: httpx.Response, expected: Any) -> bool:
    if answer.is_success:
        return bool(answer.json()["choices"] == expected)
    return answer.status_code in range(500, 505) and bool(answer.json()["error"]["code"])


# Whose engine stands still meanwhile, so that the request stays where it is: without places, or on its way to them.
STATES = {"pending": "decode", "transferring": "prefill"}


def url_of(servers: Servers, role: str) -> str:
    """Of the first server of a role."""
    return next(str(member["url"]) for member in members(servers) if member["role"] == role)


def transfers_of(servers: Servers, role: str, state: str) -> int:
    """Requests of the first server of a role that are in this state."""
    found = loopback.get(f"{url_of(servers, role)}/debug/state").json()
    return int(found["transfers"][state])


@pytest.mark.slow
@pytest.mark.parametrize("killed", ROLES)
@pytest.mark.parametrize("state", STATES)
def test_c22_server_killed_before_the_first_token_costs_no_token(
    alone: Servers, pair: Servers, state: str, killed: str
) -> None:
    """The router begins again, until it gives up with a reason."""
    body = BODIES["penalties"]
    expected = alone.complete(**body).json()["choices"]
    still, waits = STATES[state], "prefill" if state == "pending" else "decode"
    stopped, victim = pair.engine(still), pair.engine(killed)
    answers: list[httpx.Response] = []
    asking = threading.Thread(target=lambda: answers.append(pair.complete(**body)))
    os.kill(stopped, signal.SIGSTOP)
    try:
        asking.start()
        wait_until(lambda: transfers_of(pair, waits, state) > 0)
        os.kill(victim, signal.SIGKILL)
    finally:
        os.kill(stopped, signal.SIGCONT)
        asking.join()
    [answer] = answers
    assert is_right_or_typed(answer, expected), answer.text
    wait_until(lambda: pair.is_ready and pair.complete(**BODIES["greedy"]).is_success)


def test_two_servers_that_run_are_checked_and_nothing_stays_in_use(
    pair: Servers, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main(["pd", "check", *(url_of(pair, role) for role in ROLES)]) == 0
    told = capfd.readouterr().out
    assert "by shm, 3 times: " in told
    assert told.endswith("all arrived as it was sent\n")
    assert re.search(r"^  kv: 8 columns of 1 x 32 bfloat16$", told, re.MULTILINE), told
    prefill = url_of(pair, "prefill")
    assert main(["pd", "check", prefill, prefill]) == 2
    wanted = {"bootstrap_host": "127.0.0.1", "bootstrap_port": 1}
    assert loopback.post(f"{prefill}/check_transfers", json=wanted).status_code == 409


def test_c22_an_unknown_room_times_out_and_one_in_use_is_refused(pair: Servers) -> None:
    at = {role: url_of(pair, role) for role in ROLES}
    info = loopback.get(f"{at['prefill']}/server_info").json()
    where = {"bootstrap_host": "127.0.0.1", "bootstrap_port": info["disaggregation_bootstrap_port"]}
    body = {"prompt": "a", "max_tokens": 2, "bootstrap_room": 5, **where}
    refused = loopback.post(f"{at['decode']}/v1/completions", json=body)
    assert (refused.status_code, refused.json()["error"]["code"]) == (403, "cluster_key_required")
    with loopback.client(auth=Proven(cluster_key(pair.member("decode")))) as http, ThreadPoolExecutor() as threads:

        def ask(url: str, room: int) -> httpx.Response:
            return http.post(f"{url}/v1/completions", json={**body, "bootstrap_room": room})

        for answer in threads.map(ask, at.values(), (5, 6)):
            assert answer.status_code == 504
            assert answer.json()["error"]["code"] in ("bootstrap_timeout", "lease_timeout"), answer.text
        assert http.post(f"{at['prefill']}/v1/completions", json={**body, "bootstrap_room": None}).status_code == 400
        twice = http.post(
            f"{at['decode']}/v1/completions", json={**body, "prompt": ["a", "b"], "bootstrap_room": [7, 7]}
        )
        assert (twice.status_code, twice.json()["error"]["code"]) == (400, "room_in_use")


def cluster_key(pid: int) -> bytes:
    """That of a member, from the file without a name that it reads it from."""
    [fd] = re.findall("--cluster-key-file=/dev/fd/([0-9]+)", command(pid))
    return Path(f"/proc/{pid}/fd/{fd}").read_bytes()


@pytest.mark.slow
def test_c21_by_tcp_and_by_two_of_each_the_tokens_are_the_same(
    alone: Servers, model: str, capfd: pytest.CaptureFixture[str]
) -> None:
    by_tcp = ("--pd=local:2p2d", "--disaggregation-transfer-backend=tcp", "--disaggregation-decode-enable-radix-cache")
    with started(model, *by_tcp, *SOON) as servers:
        for body in BODIES.values():
            assert servers.complete(**body).json().get("choices") == alone.complete(**body).json()["choices"]
        assert main(["pd", "check", *(url_of(servers, role) for role in reversed(ROLES))]) == 0
        assert "by tcp" in capfd.readouterr().out


@pytest.mark.slow
def test_c22_servers_that_are_restarted_one_after_the_other_under_load_are_used_again(
    alone: Servers, model: str
) -> None:
    bodies = [BODIES[name] for name in ("greedy", "sampled", "penalties", "ids")]
    expected = [alone.complete(**body).json()["choices"] for body in bodies]
    done, wrong, found = threading.Event(), list[str](), Counter[int]()

    def client(servers: Servers, number: int) -> None:
        while not (done.is_set() or wrong):
            answer = servers.complete(**bodies[number % len(bodies)])
            found[answer.status_code] += 1
            if not is_right_or_typed(answer, expected[number % len(bodies)]):
                wrong.append(answer.text)
            number += 1

    with started(model, "--pd=local:2p2d", *SOON) as servers:
        clients = [threading.Thread(target=client, args=(servers, number)) for number in range(4)]
        for each in clients:
            each.start()
        try:
            for pid in servers.member_pids:
                os.kill(pid, signal.SIGTERM)
                wait_until(lambda pid=pid: not Path(f"/proc/{pid}").exists())
                wait_until(lambda: len(servers.member_pids) == 4 and all(member["up"] for member in members(servers)))
                counts = requests_of(servers)
                wait_until(lambda counts=counts: wrong or all(map(operator.lt, counts, requests_of(servers))))
        finally:
            done.set()
            for each in clients:
                each.join()
        wait_until(servers.at_rest)
    assert not wrong, wrong[:3]
    assert found[200] > 4 * len(bodies)


def members(servers: Servers) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = servers.state()["members"]
    return found


def requests_of(servers: Servers) -> list[int]:
    return [member["requests"] for member in members(servers)]


# What layers keep beside pages: convolutions and windows; windows; the states of Mamba-2 and of delta nets, once with a
# head that guesses.
KINDS = [
    ("lfm3", False),
    pytest.param("gemma3_text", False, marks=pytest.mark.slow),
    pytest.param("falcon_h1", False, marks=pytest.mark.slow),
    pytest.param("qwen3_next", False, marks=pytest.mark.slow),
    pytest.param("qwen3_next", True, marks=pytest.mark.slow),
]


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "guesses"), KINDS)
def test_c21_windows_and_states_arrive_in_another_process(kind: str, guesses: bool, tmp_path: Path) -> None:
    """Twice, so that what prefill had kept is sent, too. Log-probabilities tell more than a random model's tokens."""
    model = made(kind, tmp_path, draft_head=guesses)
    rng = random.Random(0)
    prompts = [[rng.randrange(1000, 9000) for _ in range(length)] for length in (1, 70, 300, 700)]
    alone = LLM(model, **TYPES, kv_cache_bytes="192MiB", max_running_requests=4, context_length=1024)
    outputs = alone.generate(prompts, SamplingParams(max_tokens=40, temperature=0.0, ignore_eos=True, logprobs=1))
    expected = [
        [token.logprob for each in output.logprobs or () for token in list(each.values())[:1]] for output in outputs
    ]
    guessing = ["--speculative-algorithm=NEXTN"] if guesses else []
    with started(model, "--pd=local", *SOON, *guessing) as servers:
        for is_second in (False, True):
            answer = servers.complete(prompt=prompts, max_tokens=40, ignore_eos=True, logprobs=1).json()
            choices = answer["choices"]
            assert [choice["logprobs"]["token_logprobs"] for choice in choices] == expected
            assert [choice["text"] for choice in choices] == [output.text for output in outputs]
            assert (answer["usage"]["cache"]["cached_tokens"] > 0) == is_second
