"""The servers and routers that `forebay cluster up` asks for."""

from __future__ import annotations

from pathlib import Path

import pytest

from forebay.base.errors import ConfigError
from forebay.cluster.messages import Needs, Spec
from forebay.cluster.options import UpOptions, next_name, read_options, roles_of, up_parser, with_model
from forebay.route.announcement import Role

KEY = "sk-canary-0123456789"


def options(*words: str) -> UpOptions:
    return read_options(up_parser().parse(words))


def server(found: UpOptions, role: Role) -> Spec:
    needs = Needs(num_cpus=2, memory_bytes=1 << 30)
    return found.server("x-1", role, host="", needs=needs, kv_cache_bytes=1 << 20, routers=["http://r:1"])


def test_up_server_words_have_settings_and_shares_but_not_the_routers() -> None:
    found = options("org/name", "--replicas=3", "--port=1", "--max-n=9", "--num-threads=7", "--policy=round_robin")
    spec = server(found, Role.BOTH)
    assert found.num_servers == 3
    assert {"--model-path=org/name", "--max-n=9", "--num-threads=2", f"--kv-cache-bytes={1 << 20}"} <= {*spec.words}
    assert not [word for word in spec.words if word.startswith(("--port", "--num-threads=7", "--policy"))]
    assert "--num-threads=7" in found.words_to_plan(Role.BOTH)
    router = found.router("router-1", host="127.0.0.1", node_address="10.0.0.1", standby="http://s:2")
    assert {"--port=1", "--policy=round_robin", "--standby=http://s:2", "--host=127.0.0.1"} <= {*router.words}
    assert not [word for word in router.words if "org/name" in word]
    named = options("org/name", "--allowed-hosts=models.example.org", "--host=0" + ".0.0.0")
    words = named.router("router-1", host="127.0.0.1", node_address="10.0.0.1", standby="").words
    assert "--allowed-hosts=models.example.org,10.0.0.1" in words


def test_up_pairs_have_roles_and_the_cluster_key_file(tmp_path: Path) -> None:
    key = tmp_path / "key"
    key.write_text("0" * 32)
    found = options("org/name", "--pd=2p1d", f"--cluster-key-file={key}", "--disaggregation-transfer-backend=shm")
    assert [*roles_of(found.counts)] == [Role.PREFILL, Role.DECODE, Role.PREFILL]
    assert found.needs_one_node
    words = server(found, Role.DECODE).words
    assert {"--disaggregation-mode=decode", f"--cluster-key-file={key}"} <= {*words}
    assert not options("org/name", "--pd=1p1d").needs_one_node


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--api-key", KEY], "--api-key-file FILE"),
        (["--admin-api-key", KEY], "--admin-api-key-file FILE"),
        (["--pd=2x"], "write 1p1d or 2p2d"),
        (["--pd=1p0d"], "write 1p1d or 2p2d"),
        (["--pd=1p1d", "--replicas=2"], "exclude each other"),
        (["--disaggregation-mode=prefill"], "leave it out"),
        (["--replicas=0"], "at least 1"),
        (["--replicas=2", "--kv-events=tcp://127.0.0.1:5557"], "2 servers cannot all listen at one address"),
        (["--pd=1p1d", "--kv-events=tcp://127.0.0.1:5557"], "2 servers cannot all listen at one address"),
    ],
)
def test_up_options_that_cannot_work_are_refused(words: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as refused:
        options("org/name", *words)
    assert KEY not in refused.value.message


def test_up_key_from_the_environment_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FOREBAY_API_KEY", KEY)
    with pytest.raises(ConfigError, match="Ray would store the key"):
        options("org/name")


def test_up_paths_that_exist_are_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "model").mkdir()
    monkeypatch.chdir(tmp_path)
    assert f"--model-path={tmp_path / 'model'}" in server(options("model"), Role.BOTH).words
    renewed = with_model(server(options("org/name"), Role.BOTH), "model")
    assert [word for word in renewed.words if "--model-path" in word] == [f"--model-path={tmp_path / 'model'}"]


def test_next_name_follows_the_highest_number_of_its_role() -> None:
    names = ["server-2", "server-10", "prefill-3", "router-7"]
    assert [next_name(role, names) for role in Role] == ["server-11", "prefill-4", "decode-1"]
