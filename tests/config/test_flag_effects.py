"""No flag is without effect: set off its default it changes the configuration, and what it changes is read below.

That a limit of the server is what its flag says is tested by asking, in `tests/server/test_limit_flags.py`.
"""

from __future__ import annotations

import ast
import re
import shutil
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from forebay.config import hisparse
from forebay.config.flag import BOOL, BYTES, PATH, Flag
from forebay.config.gpu import GpuMemory
from forebay.config.machine import Amount
from forebay.config.resolve import HERE, Survey, resolve
from forebay.config.server_args import FLAGS
from forebay.families.config.model_config import ModelConfig
from forebay.formats.store import find_model
from forebay.formats.weight_shapes import WeightShapes
from tests.models.tiny import shared_tiny
from tests.together import together

PACKAGE = Path(__file__).parent.parent.parent / "forebay"

# A value off its default where the flag's kind does not say one.
VALUES: dict[str, Any] = {
    "allowed_hosts": "forebay.test",
    "allowed_media_domains": "images.test",
    "api_key": "sk-canary-0123456789",
    "activation_bits": 8,
    "activation_dtype": "fp8",
    "admin_api_key": "sk-canary-0123456789",
    "cache_isolation": "user",
    "chaos": "drop=1%,delay=50ms",
    "context_length": 64,
    "cors_origins": "https://forebay.test",
    "device": "cuda",
    "disable_radix_cache": True,
    "disaggregation_mode": "prefill",
    "disaggregation_prefill_servers": "10.0.0.1:8998",
    "disaggregation_transfer_backend": "tcp",
    "dtype": "float32",
    "hisparse_config": '{"device_buffer_size": 99}',
    "exact": "off",
    "host": "127.0.0.2",
    "kernels": "torch",
    "kv_cache_dtype": "int8",
    "ledger": "raise",
    "log_level": "debug",
    "log_format": "json",
    "kv_events": "tcp://127.0.0.1:5557",
    "kv_events_replay": "tcp://127.0.0.1:5558",
    "otlp_traces_endpoint": "http://127.0.0.1:4318",
    "lora_modules": "name=/folder",
    "mamba_scheduler_strategy": "no_buffer",
    "mamba_ssm_dtype": "bfloat16",
    "mamba_track_interval": 4096,
    "mem_fraction_static": 0.11,
    "metrics_compat": "vllm",
    "min_p": 0.25,
    "overlap_depth": 1,
    "pd": "local",
    "pinned_cache_fraction": 0.5,
    "pooling": "mean",
    "quantization": "int8",
    "reasoning_parser": "none",
    "radix_eviction_policy": "lfu",
    "revision": "v2",
    "sampling_defaults": "openai",
    "schedule_policy": "lpm",
    "served_model_name": "another",
    "speculative_algorithm": "NGRAM",
    "top_p": 0.25,
    "tp_exchange": "gloo",
    "unknown_fields": "warn",
    "swa_full_tokens_ratio": 0.125,
    "tool_call_parser": "hermes",
}
# Settings that a flag is of no use without.
DECODE: dict[str, Any] = {
    "disaggregation_mode": "decode",
    "max_running_requests": 64,
    "insecure_no_cluster_key": True,
}
KEYED: dict[str, Any] = {"disaggregation_mode": "decode", "cluster_key_file": __file__}
# A key, or hashes have a random one, which would be a change without a flag; and token ids are off.
PUBLIC: dict[str, Any] = {"cluster_key_file": __file__, "kv_events": "tcp://0.0.0.0:5557"}
ADAPTED: dict[str, Any] = {"enable_lora": True}
WITH: dict[str, dict[str, Any]] = {
    "chaos": DECODE,
    "cluster_key_file": DECODE,
    "disaggregation_bootstrap_port": DECODE,
    "disaggregation_bootstrap_timeout": DECODE,
    "disaggregation_decode_enable_radix_cache": DECODE,
    "disaggregation_decode_extra_slots": DECODE,
    "disaggregation_heartbeat": DECODE,
    "disaggregation_lease": DECODE,
    "disaggregation_mode": DECODE,
    "disaggregation_prefill_servers": DECODE,
    "insecure_no_cluster_key": KEYED,
    "disaggregation_transfer_backend": DECODE,
    "enable_memory_saver": {"device": "cuda"},
    "activation_dtype": {"device": "cuda"},
    "exact": {"device": "cuda"},
    "weights_cpu_backup": {"device": "cuda", "enable_memory_saver": True},
    "kv_events": {"cluster_key_file": __file__},
    "kv_events_replay": PUBLIC,
    "kv_events_tokens": PUBLIC,
    "lora_modules": ADAPTED,
    "lora_root": ADAPTED,
    "max_lora_rank": ADAPTED,
    "max_loras": ADAPTED,
    "num_reserved_decode_tokens": DECODE,
    "revision": {"model_path": "org/name"},
    "speculative_draft_model_path": {"speculative_algorithm": "EAGLE", "speculative_draft_model_path": "another"},
    "speculative_num_draft_tokens": {"speculative_algorithm": "NGRAM"},
    "speculative_num_steps": {"speculative_algorithm": "NGRAM"},
    "speculative_ngram_max_trie_depth": {"speculative_algorithm": "NGRAM"},
    "speculative_ngram_capacity": {"speculative_algorithm": "NGRAM"},
}
# Other values are refused, which `test_speculation.py` and `test_ranks.py` ask for.
ONE_VALUE = {"speculative_eagle_topk", "tp_exact"}
GPU = GpuMemory(total=80 << 30, free=79 << 30)


def alone(path: Path, draft_head: bool, mmproj: Path | None) -> tuple[ModelConfig, WeightShapes]:
    """Read a model without its encoder: a flag's file need be none."""
    return HERE.model(path, draft_head, None)


SURVEY = Survey(model=cache(alone), memory=lambda: Amount(64 << 30, "on a machine of the test's"), gpu=lambda: GPU)


@pytest.fixture(autouse=True)
def _with_model(embedded_model: Path) -> None:
    """The rules look at a checkpoint."""


def off_default(flag: Flag, folder: Path) -> object:
    if flag.name in VALUES:
        return VALUES[flag.name]
    if flag.kind is PATH:
        path = folder / "forebay.txt"
        path.write_text("sk-canary-0123456789")
        return path
    if flag.kind is BOOL:
        return not flag.default
    low = max(flag.low or 0, 1)
    return low + 0.75 if flag.kind.type is float else 2 * low if flag.kind is BYTES else 3 * low


def leaves(part: Any, path: str = "") -> Iterator[tuple[str, object]]:
    """Every field of the configuration, those of its parts among them."""
    for field in fields(part):
        value, name = getattr(part, field.name), f"{path}.{field.name}"
        if is_dataclass(value):
            yield from leaves(value, name)
        else:
            yield name, value


def configuration(**flags: object) -> dict[str, object]:
    if "kernels" not in flags and "device" not in flags:
        flags["kernels"] = "avx512bf16"  # what they do not heed is refused on a machine whose kernels are others
    config = resolve(flags, survey=SURVEY)
    return {**dict(leaves(config.engine, "engine")), **dict(leaves(config.server, "server"))}


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The cache of a hub in which a model has two revisions."""
    folder = tmp_path_factory.mktemp("hub")
    for revision in ("main", "v2"):
        snapshot = folder / "models--org--name" / "snapshots" / revision
        snapshot.mkdir(parents=True)
        (snapshot / "a.gguf").symlink_to(find_model(None))
        (folder / "models--org--name" / "refs").mkdir(exist_ok=True)
        (folder / "models--org--name" / "refs" / revision).write_text(revision)
    return folder


@cache
def without_flag(**beside: Any) -> dict[str, object]:
    """Return the configuration that flags are compared with, resolved once for all that have the same beside them."""
    return configuration(**beside)


@together("flag", [flag for flag in FLAGS if flag.name not in ONE_VALUE])
def test_every_flag_changes_the_configuration(
    flag: Flag, hub: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(hub))
    if flag.name == "model_path":
        shutil.copy(find_model(None), tmp_path / "another.gguf")
        value: object = tmp_path / "another.gguf"
    else:
        value = off_default(flag, tmp_path)
    beside = WITH.get(flag.name, {})
    if flag.group == hisparse.GROUP:
        beside = {"model_path": shared_tiny("deepseek_v32").path, "enable_hisparse": flag.name != "enable_hisparse"}
    assert configuration(**{**beside, flag.name: value}) != without_flag(**beside), value


def read(source: str) -> set[str]:
    """The attributes that it reads."""
    nodes = ast.walk(ast.parse(source))
    return {node.attr for node in nodes if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load)}


def test_what_is_only_written_is_not_read() -> None:
    assert read("x.written = x.read\nf(passed=x)") == {"read"}


def test_every_field_of_the_configuration_is_read_where_it_acts() -> None:
    idle = {name.rpartition(".")[2] for name in configuration()}
    for path in PACKAGE.rglob("*.py"):
        text = "" if PACKAGE / "config" in path.parents else path.read_text()
        if idle.intersection(re.findall(r"\w+", text)):
            idle -= read(text)
    assert idle == set()
