"""Who wins, what is refused, and that every value says where it comes from."""

from __future__ import annotations

from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import pytest

from forebay.base.cpu import BFLOAT16_FLAGS, Cpu
from forebay.base.errors import ConfigError, ModelError
from forebay.base.variants import VARIANTS, X86_VARIANTS, Variant
from forebay.config import disaggregation
from forebay.config.config import Config
from forebay.config.engine_config import Chaos, StateStrategy
from forebay.config.flag import AUTO, SECRET, Auto
from forebay.config.machine import Amount
from forebay.config.resolve import HERE, Survey, resolve, written_values
from forebay.config.rules import OPTIONAL, RULES
from forebay.config.server_args import FLAGS
from forebay.config.speculation import PREFIX
from forebay.config.tracing import check_traces
from forebay.families.base.sampling import NEUTRAL
from forebay.formats.quantization import Quantization
from forebay.formats.quantized import CodeFormat
from forebay.formats.store import find_model
from forebay.formats.weight_shapes import WeightKind, WeightShapes
from tests.models.tiny import make_tiny

KEY = "sk-canary-0123456789"
# Kernels that round the inputs of codes, on any machine: they are not asked whether they run here.
ROUNDING = {"kernels": "avx2"}


@pytest.fixture(autouse=True)
def _with_model(embedded_model: Path) -> None:
    """The rules look at a checkpoint."""


def test_kernels_that_a_wheel_brought_are_used_without_a_compiler(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("forebay.backends.native.find_compiler", lambda: None)
    monkeypatch.setattr("forebay.config.resolve.cache_folder", lambda name: tmp_path / "cache")
    monkeypatch.setattr("forebay.config.resolve.PREBUILT", tmp_path)
    survey = Survey(cpu=lambda: Cpu(flags=X86_VARIANTS[-1].needs))
    (tmp_path / f"{X86_VARIANTS[0].name}-0123-4567.so").touch()
    assert resolve({}, survey=survey).engine.kernels == "torch"
    (tmp_path / f"{X86_VARIANTS[-1].name}-0123-4567.so").touch()
    assert resolve({}, survey=survey).engine.kernels == "native"


def flat(part: Any) -> dict[str, Any]:
    """The fields of a configuration by name, those of its groups among them."""
    values: dict[str, Any] = {}
    for field in fields(part):
        value = getattr(part, field.name)
        values |= flat(value) if is_dataclass(value) else {field.name: value}
    return values


def setting(config: Config, name: str) -> tuple[str, str]:
    found = next(item for item in config.settings if item.name == name)
    return found.value, found.source


def test_activation_bits_default_of_a_small_model_is_16() -> None:
    """The embedded one, whose codes have 4 bits, answers simple questions wrong with 8."""
    config = resolve(ROUNDING)
    found = next(item for item in config.settings if item.name == "activation_bits")
    assert (config.engine.activation_bits, found.source) == (16, "rule")
    assert found.reason.startswith("fewer than 1 B weights")


@pytest.mark.parametrize(
    ("own", "quantization", "bits"),
    [("", "int8", 16), ("", "int4", 8), ("q8", "file", 16), ("q8", "int8", 16), ("q6", "file", 8), ("q6", "int8", 8)],
)
def test_activation_bits_default_follows_the_bits_of_most_held_codes(own: str, quantization: str, bits: int) -> None:
    codes = {"q6": CodeFormat(bits=6, minimums=False, group=16), "q8": CodeFormat(bits=8, minimums=False), "": None}[
        own
    ]
    rarer = CodeFormat(bits=4 if own == "q8" else 8, minimums=False)
    many = 1 << 17  # of a model of 2 B weights
    kinds = {WeightKind(codes, 64, 4): 4096, WeightKind(rarer, 64, 8): 2048, WeightKind(None, 64, 16): 9000}
    kinds = {kind: number * many for kind, number in kinds.items()}
    model = HERE.model(find_model(None), False, None)[0]
    survey = Survey(model=lambda *which: (model, WeightShapes(kinds)))
    flags = {"quantization": quantization, **ROUNDING}
    config = resolve(flags, survey=survey)
    assert config.engine.activation_bits == bits
    reason = next(item.reason for item in config.settings if item.name == "activation_bits")
    assert reason.startswith("weights of ")
    assert "1.2 to 1.5 times the tokens/s" in reason
    assert resolve({**flags, "activation_bits": 24 - bits}, survey=survey).engine.activation_bits == 24 - bits


def test_activation_bits_of_another_number_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"--activation-bits \(12\): use 8 or 16"):
        resolve({"activation_bits": 12})


@pytest.mark.parametrize(
    ("flags", "cpu", "why"),
    [
        ({"kernels": "amx"}, "avx2", "the amx kernels"),
        ({"kernels": "native"}, "amx", "the amx kernels"),
        ({"kernels": "native"}, "", "the torch kernels"),
        ({"kernels": "torch", "quantization": "file"}, "avx2", "the torch kernels"),
        ({"kernels": "torch"}, "avx2", "no weights are held in codes"),
        ({"kernels": "avx2", "quantization": "none"}, "avx2", "no weights are held in codes"),
    ],
)
def test_eight_bits_are_refused_where_nothing_is_rounded(flags: dict[str, str], cpu: str, why: str) -> None:
    needs = next((variant.needs for variant in VARIANTS if variant.name == cpu), frozenset[str]())
    survey = Survey(cpu=lambda: Cpu(flags=needs))
    with pytest.raises(ConfigError, match=rf"--activation-bits \(8\): {why}.*leave it out"):
        resolve({"activation_bits": 8, **flags}, survey=survey)
    reason = next(item.reason for item in resolve(flags, survey=survey).settings if item.name == "activation_bits")
    assert reason.startswith(why)


def test_flag_wins_over_environment_over_file_over_rule(tmp_path: Path) -> None:
    file = tmp_path / "forebay.toml"
    file.write_text('port = 1\nmax_n = 2\nlog_level = "error"\n')
    config = resolve({"port": "3"}, {"FOREBAY_PORT": "2", "FOREBAY_MAX_N": "4"}, file)
    assert (config.server.port, config.server.max_n, config.server.log_level) == (3, 4, "error")
    assert setting(config, "port") == ("3", "flag")
    assert setting(config, "max_n") == ("4", "env")
    assert setting(config, "log_level") == ("error", "file")
    assert setting(config, "num_threads")[1] == "rule"


def test_every_flag_has_one_setting_with_a_reason() -> None:
    config = resolve()
    assert [item.name for item in config.settings] == [flag.name for flag in FLAGS]
    assert all(item.reason for item in config.settings)


def test_nothing_below_is_auto() -> None:
    config = resolve()
    engine = flat(config.engine)
    assert not any(isinstance(value, Auto) for value in (*engine.values(), *flat(config.server).values()))
    absent = {name for name, value in engine.items() if value is None}
    # No limit of its own, no model, and what only the engine can measure.
    assert absent == {"max_total_tokens", "max_mamba_cache_size", "draft_model_path", "max_step_ms", "mmproj"}


def test_every_auto_has_a_rule_or_may_be_absent() -> None:
    autos = {flag.name for flag in FLAGS if flag.default is AUTO or "auto" in flag.choices}
    assert autos == set(RULES) | set(OPTIONAL)


def test_every_field_of_the_configuration_has_a_flag() -> None:
    derived = {"radix_cache", "strategy", "track_interval", "api_keys", "admin_api_keys", "adaptive", "cluster_key"}
    derived |= {
        "key_names",
        "tenants",
        "receipt_tenants",
        "spare_cache",
        "requests_first",
        "width",
        "movable",
        "known_answers",
        "chunked_scans",
    }
    derived |= {"top_k", "device_buffer_size", "host_to_device_ratio", "host_path", "sparse_kv_on_host"}  # HiSparse's
    derived |= {"chunked_scans"}  # the kernels'
    derived |= {"text_encoder", "head_outputs"}  # the model's
    derived |= {"size", "exchange", "own_gpus"}  # --tp-size, --tp-exchange
    derived |= {"cache_events", "event_key", "event_tokens"}  # those of --kv-events
    config = resolve()
    wanted = (
        (flat(config.engine).keys() | flat(config.server).keys())
        - derived
        - flat(Chaos()).keys()
        - flat(NEUTRAL).keys()
    )
    assert wanted <= {flag.field.removeprefix(PREFIX).removeprefix(disaggregation.PREFIX) for flag in FLAGS}


@pytest.mark.parametrize(
    ("flags", "field", "value"),
    [
        ({"context_length": "4k"}, "context_length", 4096),
        ({"context_length": "1M"}, "context_length", 8192),  # the model's own limit
        ({"kv_cache_bytes": "64MiB"}, "kv_cache_bytes", 64 << 20),
        ({"kv_cache_bytes": 1 << 26}, "kv_cache_bytes", 1 << 26),
        ({"disable_radix_cache": "true"}, "radix_cache", False),
        ({"request_timeout": "90.5", "stall_timeout": 5}, "request_timeout_s", 90.5),
        ({"served_model_name": None}, "served_model_name", "SmolLM2-135M-Instruct"),
        ({"max_running_requests": "auto"}, "max_running_requests", 64),
    ],
)
def test_values_as_people_write_them(flags: dict[str, Any], field: str, value: object) -> None:
    assert flat(resolve(flags).engine)[field] == value


def test_a_fraction_or_a_percentage_of_memory_is_the_same_thing() -> None:
    half = resolve({"mem_fraction_static": "50%", "max_total_tokens": "1k"}).engine.memory.kv_cache_bytes
    again = resolve({"mem_fraction_static": 0.5, "max_total_tokens": "1k"}).engine.memory.kv_cache_bytes
    assert half == pytest.approx(again, rel=0.2)  # what is free moves meanwhile


def test_a_context_longer_than_the_cache_may_be_is_cut_and_says_so() -> None:
    config = resolve({"max_total_tokens": "1k"})
    assert config.engine.memory.context_length == config.engine.memory.max_total_tokens == 1024
    assert setting(config, "context_length")[1] == "rule"


def test_states_are_tracked_in_slots_of_their_own_only_beside_a_prefix_cache() -> None:
    """C18."""
    assert resolve().engine.kinds.strategy is StateStrategy.EXTRA_BUFFER
    assert resolve({"disable_radix_cache": True}).engine.kinds.strategy is StateStrategy.NO_BUFFER


@pytest.mark.parametrize(
    ("flags", "page_size"),
    [
        ({"mamba_scheduler_strategy": "no_buffer"}, 1),
        ({"mamba_scheduler_strategy": "no_buffer", "page_size": "auto"}, 1),
        ({"mamba_scheduler_strategy": "no_buffer", "disable_radix_cache": True}, 16),
        ({"mamba_radix_cache_strategy": "extra_buffer"}, 16),
        ({"disable_radix_cache": True}, 16),
    ],
)
def test_without_buffer_a_page_size_that_nobody_wrote_is_one(flags: dict[str, Any], page_size: int) -> None:
    assert resolve(flags).engine.memory.page_size == page_size


@pytest.mark.parametrize(("page_size", "interval"), [(1, 32), (16, 32), (24, 48), (64, 64)])
def test_a_state_is_tracked_every_few_whole_pages(page_size: int, interval: int) -> None:
    assert resolve({"page_size": page_size}).engine.kinds.track_interval == interval


def test_a_track_interval_inside_a_page_is_refused_with_the_next_that_is_not() -> None:
    with pytest.raises(ConfigError, match=r"--mamba-track-interval \(50\) .* page size, 16: give 64"):
        resolve({"mamba_track_interval": 50})


@pytest.mark.parametrize(
    ("flags", "quantization", "reason"),
    [
        ({}, "file", "own codes"),
        ({"dtype": "float32"}, "file", "own codes"),
        ({"kernels": "torch"}, "none", "torch kernels"),
        ({"quantization": "none"}, "none", "command line"),
        ({"quantization": "int8", "kernels": "torch"}, "int8", "command line"),
    ],
)
def test_the_files_own_codes_are_kept_where_kernels_are_made_for_them(
    flags: dict[str, Any], quantization: str, reason: str
) -> None:
    config = resolve({"kernels": "native", **flags})
    assert config.engine.quantization == quantization
    found = next(item for item in config.settings if item.name == "quantization")
    assert (found.value, reason in found.reason) == (quantization, True)


@pytest.mark.parametrize(
    ("flags", "dtype", "kv_dtype"),
    [
        ({"kernels": "amx"}, "bfloat16", "bfloat16"),
        ({"kernels": "avx512bf16", "dtype": "float32"}, "float32", "float32"),
        ({"kernels": "avx512vnni"}, "float32", "bfloat16"),
        ({"kernels": "avx2"}, "float32", "bfloat16"),
        ({"kernels": "avx2", "dtype": "float32"}, "float32", "float32"),
        ({"kernels": "avx2", "dtype": "bfloat16"}, "bfloat16", "bfloat16"),
        ({"kernels": "avx2", "kv_cache_dtype": "float32"}, "float32", "float32"),
        ({"kernels": "avx2", "kv_cache_dtype": "int8"}, "float32", "int8"),
    ],
    ids=str,
)
def test_kv_takes_16_bits_or_8_unless_float32_is_asked_for_or_better(
    flags: dict[str, Any], dtype: str, kv_dtype: str
) -> None:
    types = resolve(flags).engine.types
    assert (types.dtype, types.kv_cache_dtype) == (dtype, kv_dtype)


@pytest.mark.parametrize("variant", VARIANTS, ids=lambda variant: variant.name)
def test_kv_cache_dtype_explicit_float32_is_float32_on_every_cpu(variant: Variant) -> None:
    survey = Survey(cpu=lambda: Cpu(flags=variant.needs))
    types = resolve({"dtype": "float32"}, survey=survey).engine.types
    assert (types.dtype, types.kv_cache_dtype) == ("float32", "float32")
    types = resolve({"dtype": "float32", "kv_cache_dtype": "bfloat16"}, survey=survey).engine.types
    assert (types.dtype, types.kv_cache_dtype) == ("float32", "bfloat16")
    types = resolve({"dtype": "auto"}, survey=survey).engine.types
    native = bool(variant.needs & BFLOAT16_FLAGS)
    assert (types.dtype, types.kv_cache_dtype) == ("bfloat16" if native else "float32", "bfloat16")


def test_kv_larger_than_what_is_computed_in_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"--kv-cache-dtype \(float32\): larger than bfloat16"):
        resolve({"dtype": "bfloat16", "kv_cache_dtype": "float32"})
    with pytest.raises(ConfigError, match="use fp8 on a GPU, or int8"):
        resolve({"kv_cache_dtype": "fp8_e5m2"})
    with pytest.raises(ConfigError, match=r"\(fp8\): a CPU's kernels read 8-bit KV as int8.*: use int8"):
        resolve({"kv_cache_dtype": "fp8_e4m3"})


def test_a_checkpoint_without_codes_has_none_to_keep(tmp_path: Path) -> None:
    make_tiny("llama", tmp_path)
    config = resolve({"model": str(tmp_path), "kernels": "native"})
    assert config.engine.quantization is Quantization.NONE
    with pytest.raises(ConfigError, match=r"--quantization \(file\): .* use int8 or int4"):
        resolve({"model": str(tmp_path), "quantization": "file"})
    drafting = {"speculative_algorithm": "STANDALONE", "speculative_draft_model_path": str(find_model(None))}
    config = resolve({"model": str(tmp_path), "kernels": "native", **drafting})
    assert config.engine.quantization is Quantization.FILE


def test_weights_count_as_what_they_are_held_in() -> None:
    facts = []
    for quantization in ("none", "int8", "int4", "file"):
        settings = {"quantization": quantization, "dtype": "bfloat16", "mem_fraction_static": "1%"}
        config = resolve(settings, survey=Survey(memory=lambda: Amount(64 << 30, "of a test")))
        facts.append(config.engine.memory.kv_cache_bytes)
    weights = [(64 << 30) // 100 - kv for kv in facts]
    assert weights == pytest.approx([269_030_016, 96_506_496, 96_506_496, 96_506_496], rel=1e-3)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ({"mem_fraction_static": "0.5", "kv_cache_bytes": "1GiB"}, ("--mem-fraction-static", "--kv-cache-bytes")),
        ({"api_key": KEY, "api_key_file": "keys"}, ("--api-key", "--api-key-file")),
        ({"disable_radix_cache": True, "schedule_policy": "lpm"}, ("--disable-radix-cache", "--schedule-policy")),
        ({"disable_radix_cache": True, "radix_eviction_policy": "lfu"}, ("--radix-eviction-policy",)),
        ({"disable_radix_cache": True, "pinned_cache_fraction": 0.5}, ("--pinned-cache-fraction",)),
        ({"disable_radix_cache": True, "mamba_scheduler_strategy": "extra_buffer"}, ("--mamba-scheduler-strategy",)),
        ({"mamba_scheduler_strategy": "no_buffer", "page_size": 16}, ("--mamba-scheduler-strategy", "--page-size")),
        ({"context_length": "4k", "max_total_tokens": "1k"}, ("--context-length", "--max-total-tokens")),
        ({"page_size": 64, "max_total_tokens": 32}, ("--page-size", "--max-total-tokens")),
        ({"stall_timeout": 60, "request_timeout": 10}, ("--stall-timeout", "--request-timeout")),
        ({"disable_radix_cache": True, "cache_isolation": "user"}, ("--disable-radix-cache", "--cache-isolation")),
        ({"cache_isolation": "key"}, ("--cache-isolation", "--api-key-file")),
    ],
)
def test_a_contradiction_names_both_sides_and_no_key(flags: dict[str, Any], words: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError) as caught:
        resolve(flags)
    assert all(word in caught.value.message for word in words)
    assert KEY not in caught.value.message


@pytest.mark.parametrize(
    ("keys", "isolation", "reason"),
    [
        ({}, "none", "without a key all who can connect share cached prefixes"),
        ({"api_key": KEY}, "none", "all who hold the one key share cached prefixes"),
        ({"api_key": KEY, "admin_api_key": KEY + "!"}, "key", "2 keys: what one has sent is no other's business"),
    ],
)
def test_several_keys_do_not_share_cached_prefixes_unless_told_to(
    keys: dict[str, str], isolation: str, reason: str
) -> None:
    config = resolve(keys)
    assert config.server.cache_isolation == isolation
    assert next(item.reason for item in config.settings if item.name == "cache_isolation") == reason
    assert resolve({**keys, "cache_isolation": "user"}).server.cache_isolation == "user"


def test_a_flag_may_replace_what_a_file_says_in_another_way(tmp_path: Path) -> None:
    file = tmp_path / "forebay.toml"
    file.write_text("mem_fraction_static = 0.5\n")
    assert resolve({"kv_cache_bytes": "64MiB"}, {}, file).engine.memory.kv_cache_bytes == 64 << 20


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ({"port": "70000"}, "too large"),
        ({"port": "many"}, "--port"),
        ({"page_size": 0}, "too small"),
        ({"page_size": True}, "--page-size"),
        ({"dtype": "int3"}, "bfloat16"),
        ({"schedule_policy": "lifo"}, "fcfs"),
        ({"request_timeout": "nan"}, "finite"),
        ({"disable_radix_cache": "perhaps"}, "true or false"),
        ({"served_model_name": ""}, "empty"),
        ({"contxt_length": 4}, "did you mean context_length?"),
        ({"chat_template": "/nowhere"}, "--chat-template"),
        ({"api_key": "short"}, "--api-key"),
    ],
)
def test_what_cannot_be_is_refused_by_name(flags: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words.replace("?", r"\?")):
        resolve(flags)


def test_a_model_that_is_not_there_is_named() -> None:
    with pytest.raises(ModelError, match="no-such-model"):
        resolve({"model": "no-such-model"})


@pytest.mark.parametrize("host", ["192.168.1.5", "::", "example.org"])
def test_an_open_host_without_a_key_is_refused_and_with_one_is_not(host: str) -> None:
    with pytest.raises(ConfigError, match="--api-key-file"):
        resolve({"host": host})
    assert resolve({"host": host, "api_key": KEY}).server.api_keys == (KEY,)


def test_keys_come_from_a_file_and_are_shown_nowhere(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = tmp_path / "keys"
    file.write_text(f"# ours\n{KEY}\n\n{KEY}-2\n")
    file.chmod(0o600)
    config = resolve({"api_key_file": file, "admin_api_key": f"{KEY}-admin"})
    assert config.server.api_keys == (KEY, f"{KEY}-2")
    assert config.server.admin_api_keys == (f"{KEY}-admin",)
    assert not any(KEY in item.value or KEY in item.reason for item in config.settings)
    assert KEY not in repr(config.engine)
    assert any(flag.kind is SECRET for flag in FLAGS)
    for mode in (0o640, 0o604, 0o602, 0o601):
        caplog.clear()
        file.chmod(mode)
        resolve({"api_key_file": file})
        found = [line for line in caplog.messages if line.startswith(f"key_file_open path={file}")]
        assert bool(found) is (mode != 0o640), f"{mode:o}: others can read it"
        assert KEY not in caplog.text


def test_an_empty_key_file_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("# nothing\n")
    with pytest.raises(ConfigError, match="no key"):
        resolve({"api_key_file": file})
    file.write_text("short\n")
    with pytest.raises(ConfigError, match=f"--api-key-file {file}: a key is at least 8"):
        resolve({"api_key_file": file})


def test_what_was_written_is_told_from_what_was_not(tmp_path: Path) -> None:
    file = tmp_path / "forebay.toml"
    file.write_text("port = 1\n")
    flags = {"max_n": "2", "dtype": "auto", "kv_cache_bytes": 1 << 30}
    assert written_values(flags, {"FOREBAY_HOST": "localhost"}, file) == {
        "port": 1,
        "max_n": 2,
        "host": "localhost",
        "kv_cache_bytes": 1 << 30,
    }


def test_a_kv_cache_that_memory_cannot_hold_is_refused_at_the_start() -> None:
    """It would fill for hours and then be killed."""
    with pytest.raises(ConfigError, match=r"--kv-cache-bytes \(100.0 TiB\) and .* weights .* give at most"):
        resolve({"kv_cache_bytes": "102400GiB"})
    with pytest.raises(ConfigError, match=r"--retraction-host-bytes \(100.0 TiB\) and .* weights .* give at most"):
        resolve({"retraction_host_bytes": "102400GiB"})


@pytest.mark.parametrize("other", [{"retraction_host_bytes": 0}, {"disable_radix_cache": True}])
def test_a_prefix_cache_that_is_not_there_or_has_no_room_cannot_be_kept(other: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"--keep-prefix-cache \(true\): there is no prefix cache, or no host memory"):
        resolve({"keep_prefix_cache": True, **other})


def test_retracted_requests_keep_little_by_default_and_nothing_when_told() -> None:
    """C26."""
    assert 0 < resolve().engine.kinds.retraction_host_bytes <= 1 << 30
    assert resolve({"retraction_host_bytes": 0}).engine.kinds.retraction_host_bytes == 0


def test_more_threads_than_cores_are_warned_about() -> None:
    lines: list[str] = []
    resolve({"num_threads": 500}, warn=lines.append)
    (line,) = [line for line in lines if "cores here" in line]
    assert line.startswith("--num-threads 500 is more than the ")
    lines.clear()
    resolve({"num_threads": 1}, warn=lines.append)
    assert not any("cores here" in line for line in lines)


@pytest.mark.parametrize(("endpoint", "why"), [("localhost:4318", "is no URL"), ("http://", "is no URL")])
def test_endpoint_of_traces_that_is_no_url_is_refused(endpoint: str, why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        check_traces(endpoint)


def test_traces_without_the_exporter_are_refused_with_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"pip install 'forebay\[otel\]'"):
        check_traces("http://127.0.0.1:4318")
