"""What a role makes of the other settings, what it refuses, and what is said about it."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from forebay.base.errors import ConfigError
from forebay.config.config import Config
from forebay.config.disaggregation import chaos_of, faults_of_messages, num_servers, peer_address
from forebay.config.engine_config import Chaos, StateStrategy
from forebay.config.resolve import resolve, resolve_server
from forebay.engine.client.llm import LLM
from forebay.engine.lifecycle.sizing import memory_demand, scheduler_config
from forebay.memory.division import divide_memory
from forebay.memory.kinds.declared import CacheSizes, KindSize
from tests.kinds_of import num_states

KEY = "sk-canary-0123456789"
PREFILL = {"disaggregation_mode": "prefill", "insecure_no_cluster_key": True}
DECODE = {"disaggregation_mode": "decode", "insecure_no_cluster_key": True}
HYBRID = CacheSizes(256, {"state": KindSize(4096)})
MODEL = SimpleNamespace(max_position_embeddings=64, vocab_size=1000, hidden_size=64, vision=None)


@pytest.fixture(autouse=True)
def _with_model(embedded_model: Path) -> None:
    """The rules look at a checkpoint."""


def reason(config: Config, name: str) -> str:
    return next(item.reason for item in config.settings if item.name == name)


def test_a_decode_server_keeps_no_tree_unless_that_is_asked_for() -> None:
    config = resolve({**DECODE}).engine
    assert not config.scheduling.radix_cache
    assert config.kinds.strategy is StateStrategy.NO_BUFFER
    assert config.memory.page_size == 16
    asked = {"disaggregation_decode_enable_radix_cache": True, "mamba_scheduler_strategy": "extra_buffer"}
    config = resolve({**DECODE, **asked}).engine
    assert config.scheduling.radix_cache
    assert config.kinds.strategy is StateStrategy.EXTRA_BUFFER


def test_an_extra_buffer_without_a_tree_becomes_no_buffer_with_one_warning() -> None:
    said: list[str] = []
    flags = {**DECODE, "mamba_scheduler_strategy": "extra_buffer"}
    config = resolve(flags, warn=said.append)
    assert config.engine.kinds.strategy is StateStrategy.NO_BUFFER
    [warning] = said
    assert warning.startswith("--mamba-scheduler-strategy (extra_buffer) becomes no_buffer: ")
    assert "a decode server keeps no tree" in warning
    assert "a decode server keeps no tree" in reason(config, "mamba_scheduler_strategy")


@pytest.mark.parametrize("asked", [{}, {"speculative_algorithm": "NGRAM", "speculative_num_draft_tokens": 4}])
def test_a_prefill_server_guesses_nothing_and_says_why(asked: dict[str, Any]) -> None:
    config = resolve({**PREFILL, **asked}, warn=lambda text: None)
    assert (config.engine.speculation.algorithm, config.engine.speculation.num_draft_tokens) == ("off", 1)
    assert reason(config, "speculative_algorithm") == "a prefill server generates one token of a request"


def test_a_prefill_server_loads_what_keeps_kv_of_prompts_for_those_who_guess() -> None:
    draft = {"speculative_algorithm": "STANDALONE", "speculative_draft_model_path": "draft"}
    engine = resolve({**PREFILL, **draft}, warn=lambda text: None).engine
    speculation = engine.speculation
    assert (speculation.algorithm, speculation.num_draft_tokens, speculation.draft_model_path) == (
        "STANDALONE", 2, "draft",
    )  # fmt: skip


@pytest.mark.parametrize(("running", "extra"), [(4, 8), (32, 64), (33, 0)])
def test_few_running_requests_have_twice_as_many_on_their_way(running: int, extra: int) -> None:
    config = resolve({**DECODE, "max_running_requests": running})
    assert config.engine.disaggregation.decode_extra_slots == extra
    assert resolve({"max_running_requests": running}).engine.disaggregation.decode_extra_slots == 0


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ({"mamba_scheduler_strategy": "extra_buffer_lazy"}, ("--mamba-scheduler-strategy", "--disaggregation-mode")),
        (
            {**PREFILL, "disaggregation_decode_extra_slots": 4},
            ("--disaggregation-mode", "--disaggregation-decode-extra-slots"),
        ),
        ({"disaggregation_bootstrap_port": 1}, ("--disaggregation-bootstrap-port", "--disaggregation-mode")),
        ({**DECODE, "disable_radix_cache": False}, ("-decode-enable-radix-cache",)),
        ({"disaggregation_mode": "decode", "pd": "local"}, ("--pd (local:1p1d)", "--disaggregation-mode (decode)")),
        (
            {"disaggregation_mode": "prefill", "host": "0.0.0.0", "api_key": KEY},
            ("--host", "--disaggregation-mode", "--cluster-key-file"),
        ),
        ({"disaggregation_mode": "prefill"}, ("--cluster-key-file", "--insecure-no-cluster-key")),
        ({"disaggregation_mode": "decode"}, ("--disaggregation-mode", "--cluster-key-file", "forebay route")),
        ({**DECODE, "host": "10.0.0.1", "api_key": KEY}, ("--host", "--disaggregation-mode", "--cluster-key-file")),
        ({"pd": "local", "insecure_no_cluster_key": True}, ("--pd", "--insecure-no-cluster-key")),
        ({"pd": "local", "kv_events": "tcp://127.0.0.1:5557"}, ("--kv-events", "one address", "port of its own")),
        ({"insecure_no_cluster_key": True}, ("--insecure-no-cluster-key", "--disaggregation-mode")),
        ({**DECODE, "disaggregation_prefill_servers": "a:0"}, ("--disaggregation-prefill-servers", "HOST:PORT")),
        ({"pd": "local", "chaos": "drop=1%", "host": "10.0.0.1", "api_key": KEY}, ("--chaos", "--host")),
        ({**DECODE, "chaos": "kill-prefill=3s"}, ("--chaos", "--pd")),
        ({"pd": "remote"}, ("--pd", "local:2p2d")),
        ({"chaos": "drop=1"}, ("--chaos", "drop=1%")),
        ({"chaos": "alter=101%"}, ("--chaos", "alter=101%", "100%")),
    ],
)  # fmt: skip
def test_what_cannot_be_with_a_role_is_refused_by_name(flags: dict[str, Any], words: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError) as caught:
        resolve(flags)
    assert all(word in caught.value.message for word in words), caught.value.message
    assert "\n" not in caught.value.message


def test_faults_and_servers_are_read() -> None:
    text = "drop=1%,double=2%,reorder=3%,alter=100%,delay=50ms"
    shares = {"drop": 0.01, "double": 0.02, "reorder": 0.03, "alter": 1.0}
    assert chaos_of(f"{text}, kill-prefill=2m") == Chaos(**shares, delay_s=0.05, kill_prefill_s=120.0)
    assert faults_of_messages(chaos_of(f"{text},kill-decode=2s")) == text
    assert resolve({"pd": "local"}).server.pd == "local:1p1d"
    assert num_servers("local:2p3d") == (2, 3)


def test_a_cluster_key_is_read_and_never_shown(tmp_path: Path) -> None:
    file = tmp_path / "key"
    file.write_text("canary-canary-canary\n")
    config = resolve({"disaggregation_mode": "decode", "cluster_key_file": file})
    assert config.engine.disaggregation.cluster_key == b"canary-canary-canary"
    assert "canary-canary" not in repr(config)
    file.write_text("short")
    with pytest.raises(ConfigError, match="5 bytes are no key"):
        resolve({"disaggregation_mode": "decode", "cluster_key_file": file})


def test_slots_of_a_decode_server_are_raised_before_memory_is_divided(caplog: pytest.LogCaptureFixture) -> None:
    """C4: what all that run and all that arrive need, told once and with the numbers; and there are rows for them,
    however little of the memory is for states."""
    flags = {
        **DECODE,
        "max_running_requests": 4,
        "max_mamba_cache_size": 3,
        "mamba_full_memory_ratio": 0.02,
        "kv_cache_bytes": 1 << 20,
    }
    config = resolve(flags).engine
    with caplog.at_level("WARNING", logger="forebay.memory"):
        budget = divide_memory(memory_demand(config, HYBRID, MODEL))
    [warning] = [record.getMessage() for record in caplog.records]
    assert all(word in warning for word in ("configured=3", "12 reqs x 1 slots/req = 12", "raised_to=12")), warning
    limits = scheduler_config(config, budget, 0)
    assert (limits.max_running_requests, limits.disaggregation.decode_extra_slots, num_states(limits.kinds)) == (
        4,
        8,
        12,
    )
    assert budget.num_rows == 12


def test_extra_slots_are_the_first_to_have_no_room() -> None:
    flags = {**DECODE, "max_running_requests": 4, "kv_cache_bytes": 1 << 16, "page_size": 16}
    budget = divide_memory(memory_demand(resolve(flags).engine, CacheSizes(kv_bytes_per_token=512), MODEL))
    assert budget.max_running_requests == 4
    assert 0 < budget.pre_alloc_size < 8
    assert any("lowered from 12" in line.reason for line in budget.lines)


@pytest.mark.parametrize("flags", [{**DECODE}, {"pd": "local"}])
def test_a_role_without_a_server_is_refused_by_name(flags: dict[str, str]) -> None:
    with pytest.raises(ConfigError, match=r"LLM and --(disaggregation-mode \(decode\)|pd \(local:1p1d\))"):
        LLM(dtype="float32", **flags)


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("10.0.0.1:9000", ("10.0.0.1", 9000)),
        ("Prefill-1.example", ("prefill-1.example", 8998)),
        ("[::1]:5", ("::1", 5)),
    ],
)
def test_peer_address_host_and_port_are_read(text: str, address: tuple[str, int]) -> None:
    assert peer_address(text) == address


@pytest.mark.parametrize("text", ["", ":5", "a:65536", "a:b", "a b", "http://a:5", "a:5/x", "::1"])
def test_peer_address_of_no_server_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="write HOST:PORT"):
        peer_address(text)


def test_a_server_knows_the_cluster_key_and_never_shows_it(tmp_path: Path) -> None:
    file = tmp_path / "key"
    file.write_text("canary-canary-canary\n")
    for config in (
        resolve({"disaggregation_mode": "decode", "cluster_key_file": file}).server,
        resolve_server({"cluster_key_file": file}, {}, None, pytest.fail),
    ):
        assert config.cluster_key == b"canary-canary-canary"
        assert "canary-canary" not in repr(config)
