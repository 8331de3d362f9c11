"""`forebay cluster` on two machines with Ray: refusals, tokens over the network, and the failures of nodes."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster.machines import SMALL, Pair, codes, needs_namespaces, needs_ray, tokens, two_machines
from tests.cluster.test_with_ray import expected, make_home, model
from tests.deadlines import HANGS_S, wait_until
from tests.engine.conftest import make_chat_model
from tests.models.tiny import make_oracle

__all__ = ["expected", "model"]  # fixtures

pytestmark = [needs_ray, needs_namespaces, pytest.mark.slow]
PORT = 30000
URL = f"http://10.77.0.1:{PORT}"
STANDBY = f"http://10.77.0.2:{PORT}"


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[Pair]:
    with two_machines(make_home(tmp_path / "home"), tmp_path) as found:
        yield found


def test_two_machines_without_key_model_or_room_start_nothing(pair: Pair, model: Path) -> None:
    def refused(*words: str | Path, code: int = 2) -> str:
        return pair.run("up", *words, *SMALL, code=code)

    assert "give --cluster-key-file FILE" in refused(model)
    key = f"--cluster-key-file={pair.cluster_key_file}"
    assert "(10.77.0.2): --host 10.77.0.2 can be reached from other machines" in refused(model, key)
    assert "(10.77.0.2): there is no model at '/nowhere'" in refused("/nowhere", *pair.keys)
    line = refused(model, *pair.keys, "--replicas=5", code=1)
    assert "no node has enough resources for server-5: it needs 1 CPU" in line
    assert "(10.77.0.1) 0 CPU" in line
    assert pair.status() == {}
    pair.kill(*pair.on("b"))
    del pair.env["RAY_AUTH_MODE"]
    pair.env["RAY_AUTH_MODE"] = "disabled"
    pair.kill(*pair.on("a"))
    pair.start("a", 2)
    pair.start("b", 2)
    assert "everybody who reaches its ports runs code there" in refused(model, *pair.keys)


def test_pair_over_two_machines_has_the_tokens_of_one_server(
    pair: Pair, model: Path, expected: dict[int, list[int]]
) -> None:
    pair.run("up", model, *SMALL, *pair.keys, "--pd=1p1d", f"--port={PORT}")
    places = {actor["node_address"] for name, actor in pair.status().items() if not name.startswith("router")}
    assert places == {"10.77.0.1", "10.77.0.2"}
    assert tokens(pair.load(URL, 2).outcomes()) == expected
    seen = [
        Path(f"/proc/{pid}/{name}").read_text(errors="replace")
        for side in "ab" for pid in pair.on(side) for name in ("cmdline", "environ")
    ]  # fmt: skip
    logs = [path.read_text(errors="replace") for path in [*pair.home.rglob("*.log"), *pair.folder.rglob("*.log")]]
    logs += [path.read_text(errors="replace") for path in pair.folder.rglob("*.err")]
    assert [secret for secret in pair.secrets if secret in "".join([*seen, *logs])] == []
    pair.run("down")
    assert pair.on("a", "forebay.cluster.member") == pair.on("b", "forebay.cluster.member") == []


def test_hybrid_model_over_two_machines_has_the_tokens_of_one_server(pair: Pair, tmp_path: Path) -> None:
    (tmp_path / "chat").mkdir()
    chat, hybrid = make_chat_model(tmp_path / "chat", context_length=2048), tmp_path / "hybrid"
    vocab_size = json.loads((chat.path / "config.json").read_text())["vocab_size"]
    make_oracle("falcon_h1", vocab_size=vocab_size, eos_token_id=0).save_pretrained(hybrid)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(chat.path / name, hybrid)
    pair.run("up", hybrid, *SMALL, *pair.keys, "--pd=1p1d", f"--port={PORT}")
    outcomes = pair.load(URL, 2).outcomes()
    assert codes(outcomes) == set()
    both = tokens(outcomes)
    pair.run("down")
    pair.run("up", hybrid, *SMALL, *pair.keys, f"--port={PORT}")
    assert tokens(pair.load(URL, 2).outcomes()) == both
    pair.run("down")


def test_node_that_dies_loses_its_server_until_it_is_back(
    pair: Pair, model: Path, expected: dict[int, list[int]]
) -> None:
    """Nothing has room for its server elsewhere."""
    pair.run("up", model, *SMALL, *pair.keys, "--replicas=4", f"--port={PORT}")
    before = {name: found for name, found in pair.status().items() if found["node_address"] == "10.77.0.2"}
    assert len(before) == 2
    load = pair.load(URL, 20)
    time.sleep(2)
    pair.kill(*pair.on("b", "raylet/raylet"))
    wait_until(lambda: not pair.on("b", "forebay.cluster.member"))
    lost = [name for name, found in pair.status().items() if found["phase"] == "lost"]
    assert lost == sorted(before)
    pair.kill(*pair.on("b"))
    pair.start("b", 2)
    for name, found in before.items():
        assert pair.wait_ready(name, after=found["pid"])["node_address"] == "10.77.0.2"
    outcomes = load.outcomes()
    assert codes(outcomes) == set()
    assert tokens(outcomes) == expected


def test_silent_node_is_replaced_and_its_server_harms_nobody(
    pair: Pair, model: Path, expected: dict[int, list[int]]
) -> None:
    pair.run("up", model, *SMALL, *pair.keys, "--replicas=2", f"--port={PORT}")
    [name] = [name for name, found in pair.status().items() if found["node_address"] == "10.77.0.2"]
    cut_off = pair.status()[name]
    load = pair.load(URL, 60)
    time.sleep(2)
    pair.cut("b", "down")
    found = pair.wait_ready(name, after=cut_off["pid"])
    assert found["node_address"] == "10.77.0.1"
    assert found["instance"] != cut_off["instance"]
    pair.cut("b", "up")
    outcomes = load.outcomes()
    assert codes(outcomes) == set()
    assert tokens(outcomes) == expected
    wait_until(lambda: not pair.on("b", "forebay.cluster.member"))  # its raylet learns that it is dead


def test_head_that_is_gone_leaves_the_standby_router_and_the_other_node(
    pair: Pair, model: Path, expected: dict[int, list[int]]
) -> None:
    pair.run("up", model, *SMALL, *pair.keys, "--replicas=2", "--standby", f"--port={PORT}")
    pair.kill(*pair.on("a", "gcs_server"))
    before = [pair.on(side, "forebay.cluster.member serve") for side in "ab"]
    assert tokens(pair.load(URL, 2).outcomes()) == expected  # without the GCS all serve on
    assert "the GCS does not answer" in pair.run("status", code=1).replace("Ray's", "the")
    pair.kill(*pair.on("a"))
    words = ["ip", "netns", "exec", pair.names["b"], sys.executable, str(Path(__file__).with_name("load.py"))]
    done = subprocess.run(
        [*words, STANDBY, "3", "4", pair.key], capture_output=True, text=True, check=True, timeout=HANGS_S
    )
    outcomes = [json.loads(line) for line in done.stdout.splitlines()]
    assert tokens(outcomes) == expected
    assert codes(outcomes[-4:]) == set()
    assert pair.on("b", "forebay.cluster.member serve") == before[1]
    assert os.path.exists(f"/proc/{before[1][0]}")
