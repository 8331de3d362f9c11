"""The way from the command line, the environment and a file to a configuration without gaps."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Final

from forebay.backends import BACKENDS
from forebay.base.cpu import Cpu, this_cpu
from forebay.base.errors import ConfigError, ModelError
from forebay.base.exposure import check_exposure
from forebay.base.log import event, get_logger
from forebay.base.paths import cache_folder
from forebay.base.units import ceil_div, human_bytes
from forebay.base.variants import PREBUILT
from forebay.config import (
    adapters,
    disaggregation,
    hisparse,
    kinds,
    kv_events,
    machine,
    pictures,
    ranks,
    sampling,
    speculation,
    text_encoders,
    tiers,
)
from forebay.config.config import Config, ServerConfig, Setting
from forebay.config.engine_config import (
    ActivationDtype,
    CacheEventOptions,
    CacheIsolation,
    CacheTypes,
    DisaggregationMode,
    DisaggregationOptions,
    EngineConfig,
    Exact,
    KindOptions,
    MemoryOptions,
    RecorderOptions,
    SchedulePolicy,
    SchedulingOptions,
    SpeculationOptions,
    SpeculativeAlgorithm,
    TierOptions,
)
from forebay.config.fit import check_fit
from forebay.config.flag import AUTO, BYTES, SECRET, Auto, Decision, Settled, Value
from forebay.config.gpu import GpuMemory, gpu_memory
from forebay.config.keys import Keys, all_keys, cluster_key, key_fields, read_text
from forebay.config.media import BODY_BYTES_WITH_IMAGES
from forebay.config.mmproj import encoder_file
from forebay.config.rules import OPTIONAL, RULES, Facts, why_not_rounded
from forebay.config.server_args import BY_NAME, CONFIG_VARIABLE, FLAGS
from forebay.config.sources import Given, from_environment, from_file, from_flags, from_one_flag
from forebay.config.tracing import check_traces
from forebay.families.checkpoint import open_checkpoint
from forebay.families.config.model_config import ModelConfig
from forebay.formats.gguf_parts import model_file
from forebay.formats.hub_names import find_adapter
from forebay.formats.quantization import Quantization
from forebay.formats.store import find_model, model_title
from forebay.formats.weight_shapes import WeightShapes

_ENUMS: Final = {flag.name: type(flag.choices[0]) for flag in FLAGS if flag.choices}  # or plain text
_GROUPS: Final = {
    "types": CacheTypes,
    "memory": MemoryOptions,
    "scheduling": SchedulingOptions,
    "kinds": KindOptions,
    "tiers": TierOptions,
    "pictures": pictures.PictureOptions,
    "recorder": RecorderOptions,
    "events": CacheEventOptions,
    "speculation": SpeculationOptions,
    "disaggregation": DisaggregationOptions,
}
_REASONS: Final = {"flag": "the command line", "env": "the environment", "file": "the configuration file"}

log = get_logger("config")


def _read_shape(path: Path, draft_head: bool, mmproj: Path | None) -> tuple[ModelConfig, WeightShapes]:
    checkpoint = open_checkpoint(path, draft_head=draft_head, mmproj=mmproj)
    return checkpoint.config, checkpoint.weight_shapes()


@dataclass(frozen=True, kw_only=True, slots=True)
class Survey:
    """The facts by which `resolve` decides: the files of a model (by name and revision) and of an adapter (by name);
    the shape of the model and of its weights, including a draft head's if there is one, and those of the encoder in a
    file of its own; the CPU and memory of the
    machine and, if a GPU is requested, its memory. `forebay plan` asks about models without their weights, and about
    other machines."""

    find: Callable[[str | None, str | None], Path] = lambda name, revision: find_model(name, revision=revision)
    adapter: Callable[[str], Path] = find_adapter
    model: Callable[[Path, bool, Path | None], tuple[ModelConfig, WeightShapes]] = _read_shape
    memory: Callable[[], machine.Amount] = machine.available_memory
    gpu: Callable[[], GpuMemory | None] = gpu_memory
    cpu: Callable[[], Cpu] = this_cpu


HERE: Final = Survey()
NAMED: Final = ("model_path", "revision")


def _log_problem(text: str) -> None:
    log.warning(event("environment", problem=text))


def resolve(
    flags: Mapping[str, object] | None = None,
    env: Mapping[str, str] | None = None,
    file: Path | None = None,
    *,
    warn: Callable[[str], None] = _log_problem,
    survey: Survey = HERE,
) -> Config:
    """Decide every setting: flag over environment over file over rule.

    `flags` has values by flag name (text as on the command line, or Python values; None for "not given"; `model` is
    short for `model_path`). A library caller leaves `env` out and its environment is not read. Fetches nothing. `warn`
    gets the names of variables that are no settings.

    Raises ConfigError for a setting that is unknown, out of bounds or contradictory, ModelError for a checkpoint that
    is missing or not served.
    """
    given, warnings = _gather(flags or {}, env or {}, file)
    for warning in warnings:
        warn(warning)
    _refuse_contradictions(given)
    written = Settled({name: item.value for name, item in given.items() if not isinstance(item.value, Auto)})
    keys = all_keys(written)
    check_exposure(str(written["host"]), keys[0])
    check_traces(str(written["otlp_traces_endpoint"]))
    _refuse_pointless_isolation(given, keys)
    facts = _facts(given, survey, num_keys=sum(map(len, keys)))
    settled, reasons = _decide(given, facts, warn)
    for problem in _what_cannot_work(given, facts, settled):
        raise ConfigError(problem)
    check_fit(facts, settled, given)
    _cut_to_model(given, facts, settled, reasons)
    values = _field_values(settled) | _written_sizes(given, facts)
    values |= text_encoders.field_values(facts.model)
    values["mmproj"] = None if facts.mmproj is None else str(facts.mmproj)
    values |= hisparse.field_values(settled, facts.model) | adapters.field_values(settled, survey.adapter)
    values |= ranks.field_values(settled, facts)
    values |= speculation.field_values(settled, auto=given["speculative_algorithm"].value is AUTO)
    values |= disaggregation.field_values(settled, cluster_key(settled)) | key_fields(keys)
    values |= kv_events.field_values(settled, values["cluster_key"], num_keys=sum(map(len, keys)))
    return Config(
        engine=_build(EngineConfig, values, **{name: _build(kind, values) for name, kind in _GROUPS.items()}),
        server=_build(
            ServerConfig,
            values,
            chat_template=_read_template(settled.get("chat_template")),
            sampling=sampling.defaults(settled, facts.model.sampling),
        ),
        settings=tuple(_setting(flag.name, given, settled, reasons) for flag in FLAGS),
    )


def written_values(flags: Mapping[str, object], env: Mapping[str, str], file: Path | None = None) -> dict[str, Value]:
    """The settings that flags, environment or file have."""
    given, _ = _gather(flags, env, file)
    chosen = {name: item.value for name, item in given.items() if item.source in _REASONS}
    return {name: value for name, value in chosen.items() if not isinstance(value, Auto)}


def resolve_server(
    flags: Mapping[str, object], env: Mapping[str, str], file: Path | None, warn: Callable[[str], None]
) -> ServerConfig:
    """Resolve the settings of a server without a model of its own, whose members' models may accept images. Raises
    ConfigError as `resolve` does."""
    given, warnings = _gather(flags, env, file)
    for warning in warnings:
        warn(warning)
    written = Settled({name: item.value for name, item in given.items() if not isinstance(item.value, Auto)})
    keys = all_keys(written)
    check_exposure(str(written["host"]), keys[0])
    check_traces(str(written["otlp_traces_endpoint"]))
    values: dict[str, Any] = {"max_body_bytes": BODY_BYTES_WITH_IMAGES}
    values |= {BY_NAME[name].field: value for name, value in written.items()}
    values.pop("chat_template", None)
    several = len(keys[0]) + len(keys[1]) > 1  # the rule of servers
    isolation = CacheIsolation(str(written.get("cache_isolation", "key" if several else "none")))
    derived = {**key_fields(keys), "cluster_key": cluster_key(written), "cache_isolation": isolation}
    config: ServerConfig = _build(ServerConfig, values, **derived)
    return config


def _gather(
    flags: Mapping[str, object], env: Mapping[str, str], file: Path | None
) -> tuple[dict[str, Given], list[str]]:
    """Return the value of each setting before any rule, and warnings about the environment."""
    from_env, warnings = from_environment(env)
    path = file or (Path(env[CONFIG_VARIABLE]) if env.get(CONFIG_VARIABLE) else None)
    given = {flag.name: from_one_flag(flag) for flag in FLAGS}
    return given | (from_file(path) if path else {}) | from_env | from_flags(flags), warnings


def _refuse_contradictions(given: dict[str, Given]) -> None:
    """Refuse two settings that were written and cannot both hold. The error names both as they were written."""

    def written(name: str) -> bool:
        return given[name].source in ("flag", "env", "file") and given[name].value is not AUTO

    for first, second in _SAME_SETTING:
        # A stronger source may override the other spelling only where both come from different places.
        if written(first) and written(second) and given[first].source == given[second].source:
            raise _clash(given, first, second, "both set the same thing: give one")
    values = {name: item.value for name, item in given.items()}
    for first, second, why in _clashes(values, written):
        raise _clash(given, first, second, why)


_SAME_SETTING: Final = (
    ("mem_fraction_static", "kv_cache_bytes"),
    ("api_key", "api_key_file"),
    ("admin_api_key", "admin_api_key_file"),
)
_AT_MOST: Final = (  # the first may not be larger than the second
    ("context_length", "max_total_tokens", "one request could not fit: raise the second"),
    ("page_size", "max_total_tokens", "not a single page fits"),
    ("stall_timeout", "request_timeout", "the first could never be reached"),
)


def _clash(given: Mapping[str, Given], first: str, second: str, why: str) -> ConfigError:
    a, b = given[first], given[second]
    return ConfigError(f"{a.origin} ({shown(first, a.value)}) and {b.origin} ({shown(second, b.value)}): {why}")


def _clashes(values: Mapping[str, object], written: Callable[[str], bool]) -> Iterator[tuple[str, str, str]]:
    """Yield pairs of settings whose values cannot both hold, with the reason."""
    if values["disable_radix_cache"] is True:
        yield from _without_prefix_cache(values, written)
    yield from disaggregation.clashes(values, written)
    page_size = values["page_size"] if written("page_size") else None
    radix_cache = values["disable_radix_cache"] is not True
    if disaggregation.keeps_tree(values):
        yield from kinds.clashes(values["mamba_scheduler_strategy"], page_size, radix_cache=radix_cache)
    yield from speculation.clashes(values, written)
    for first, second, why in _AT_MOST:
        a, b = values[first], values[second]
        if written(first) and written(second) and isinstance(a, int | float) and isinstance(b, int | float) and a > b:
            yield first, second, why


def _without_prefix_cache(
    values: Mapping[str, object], written: Callable[[str], bool]
) -> Iterator[tuple[str, str, str]]:
    if written("schedule_policy") and values["schedule_policy"] == SchedulePolicy.LPM:
        yield "disable_radix_cache", "schedule_policy", "longest prefix match needs the prefix cache"
    if written("radix_eviction_policy"):
        yield "disable_radix_cache", "radix_eviction_policy", "without the cache nothing is evicted"
    if written("pinned_cache_fraction"):
        yield "disable_radix_cache", "pinned_cache_fraction", "without the cache nothing is kept"
    if written("cache_isolation"):
        yield "disable_radix_cache", "cache_isolation", "without the cache nothing is shared"


def _read_template(path: Value | None) -> str | None:
    return None if path is None else read_text(Path(str(path)), "--chat-template", 1 << 20)


def _facts(given: dict[str, Given], survey: Survey, *, num_keys: int) -> Facts:
    name, revision = (None if isinstance(given[key].value, Auto) else str(given[key].value) for key in NAMED)
    path = survey.find(name, revision)
    guesses = disaggregation.loads_drafter({name: item.value for name, item in given.items()})
    draft_path = given["speculative_draft_model_path"].value if guesses else None
    by_own_head = guesses and given["speculative_algorithm"].value == SpeculativeAlgorithm.NEXTN
    by_own_head &= not isinstance(draft_path, str | Path)
    mmproj, (model, weights) = _with_encoder(given["mmproj"], path, lambda file: survey.model(path, by_own_head, file))
    host_memory, gpu = survey.memory(), None
    if given["device"].value == "cuda":
        gpu = survey.gpu()
        if gpu is None:
            raise ConfigError(
                f"{given['device'].origin} (cuda): this machine's NVIDIA driver names no GPU: check nvidia-smi and "
                "CUDA_VISIBLE_DEVICES, or use cpu"
            )
    return Facts(
        model_path=path,
        title=model_title(name, path),
        model=model,
        weights=weights,
        draft=_draft_weights(draft_path),
        cores=machine.usable_cores(),
        memory=host_memory if gpu is None else machine.Amount(gpu.free, "free on the GPU"),
        host_memory=host_memory,
        gpu=gpu,
        cpu=survey.cpu(),
        cache_disk=machine.disk_of(cache_folder("weights")),
        kernel_folders=(PREBUILT, cache_folder("ops")),
        num_keys=num_keys,
        mmproj=mmproj,
    )


def _with_encoder(
    given: Given, path: Path, read: Callable[[Path | None], tuple[ModelConfig, WeightShapes]]
) -> tuple[Path | None, tuple[ModelConfig, WeightShapes]]:
    """Read the model with its encoder's file. A file that was found beside the model, and is not served with it, is
    left out with a warning. Raises ConfigError and ModelError."""
    mmproj = encoder_file(given.value, given.origin, path)
    try:
        return mmproj, read(mmproj)
    except ModelError as error:
        if mmproj is None or given.value is not AUTO:
            raise
        found = read(None)
        log.warning(event("encoder_not_used", path=mmproj, reason=error.message, effect="images are refused"))
        return None, found


def _draft_weights(path: Value | Auto | None) -> WeightShapes:
    """None if no draft model was named, and if there is none at the path, which the engine reports."""
    named = model_file(Path(path)) if isinstance(path, str | Path) else None
    there = named is not None and (named.is_dir() or (named.suffix == ".gguf" and named.exists()))
    return open_checkpoint(str(named)).weight_shapes() if there else WeightShapes({})


def _refuse_pointless_isolation(given: dict[str, Given], keys: Keys) -> None:
    asked = given["cache_isolation"]
    if asked.value == CacheIsolation.KEY and not any(keys):
        raise ConfigError(
            f"{asked.origin} (key): without an API key clients cannot be distinguished: give --api-key-file, or use "
            "none or user"
        )


def _decide(given: dict[str, Given], facts: Facts, warn: Callable[[str], None]) -> tuple[Settled, dict[str, str]]:
    """Every value that is not absent, and the reasons of those that a rule chose."""
    settled = Settled({name: item.value for name, item in given.items() if not isinstance(item.value, Auto)})
    reasons = disaggregation.overrule(settled)
    for name in reasons.keys() & {name for name, item in given.items() if not isinstance(item.value, Auto)}:
        warn(f"{given[name].origin} ({shown(name, given[name].value)}) becomes {settled[name]}: {reasons[name]}")
    for name, rule in RULES.items():
        if name in settled:
            continue
        decision = rule(facts, settled)
        settled[name], reasons[name] = decision
    if settled["sampling_defaults"] == "model":
        reasons["sampling_defaults"] = facts.model.sampling.source
    settled["model_path"] = str(facts.model_path)
    if facts.mmproj is not None and "mmproj" not in settled:
        settled["mmproj"], reasons["mmproj"] = str(facts.mmproj), "beside the model"
    machine.warn_of_threads(settled.number("num_threads"), facts.cores, warn)
    return settled, reasons


def _what_cannot_work(given: dict[str, Given], facts: Facts, settled: Settled) -> Iterator[str]:
    """On this machine, with this model: one line for each."""

    def asked(name: str) -> str:
        return f"{given[name].origin} ({shown(name, settled[name])})"

    yield from _of_device(settled, asked)
    if settled["activation_bits"] not in (8, 16):
        yield f"{asked('activation_bits')}: use 8 or 16"
    if settled["activation_bits"] == 8 and (why := why_not_rounded(facts, settled)):
        yield f"{asked('activation_bits')}: {why}: leave it out, or use other --kernels or --quantization"
    if given["quantization"].value == Quantization.FILE and not (facts.weights.has_codes or facts.draft.has_codes):
        yield (
            f"{asked('quantization')}: {facts.model_path} has no weights in codes that are kept (GGUF's but "
            "IQ2, MXFP4 and NVFP4, GPTQ, AWQ, compressed-tensors): use int8 or int4 to round them while loading, or "
            "none"
        )
    yield from _misaligned(asked, facts, settled)
    yield from _asleep(settled, asked)
    yield from speculation.problems(settled, asked)
    yield from hisparse.problems(settled, asked, facts.model)
    yield from tiers.problems(settled, asked)
    yield from adapters.problems(settled, asked, lambda name: given[name].source in _REASONS)
    yield from text_encoders.problems(settled, asked, facts.model)
    yield from disaggregation.problems(settled, asked)
    yield from ranks.problems(settled, asked, facts)


def _of_device(settled: Settled, asked: Callable[[str], str]) -> Iterator[str]:
    """Yield what the device's kernels do not compute."""
    device, dtype, kv_dtype = settled["device"], settled["dtype"], settled["kv_cache_dtype"]
    if (needed := BACKENDS[str(settled["kernels"])].device) != device:
        yield f"{asked('kernels')} and {asked('device')}: these kernels are for {needed}"
    if kv_dtype == "float32" != dtype:
        yield f"{asked('kv_cache_dtype')}: larger than {dtype}, the model's type: use that"
    if kv_dtype == "bfloat16" != dtype and device == "cuda":
        yield f"{asked('kv_cache_dtype')}: on a GPU KV in bfloat16 needs --dtype bfloat16: use {dtype}, int8 or fp8"
    if kv_dtype == "fp8" and device == "cpu":
        yield f"{asked('kv_cache_dtype')}: a CPU's kernels read 8-bit KV as int8, which takes the same memory: use int8"
    if settled["activation_dtype"] == ActivationDtype.FP8 and device == "cpu":
        yield f"{asked('activation_dtype')}: a CPU multiplies no FP8: leave it out, or use --activation-bits 8"
    if settled["exact"] == Exact.OFF and device == "cpu":
        yield f"{asked('exact')}: a CPU's kernels have equal bits at no cost: leave it out"


def _misaligned(asked: Callable[[str], str], facts: Facts, settled: Settled) -> Iterator[str]:
    """Yield a line for each number of tokens that is no multiple of another one."""
    # The prefix cache keeps whole pages, so a state inside one could never be found.
    interval, page = settled.number("mamba_track_interval"), settled.number("page_size")
    if interval % page:
        near = ceil_div(interval, page) * page
        yield f"{asked('mamba_track_interval')} is not a multiple of the page size, {page}: give {near}"
    if page % (multiple := facts.model.page_multiple):
        near = ceil_div(page, multiple) * multiple
        yield f"{asked('page_size')}: layers of {facts.title} keep entries of {multiple} tokens: give {near}"


def _asleep(settled: Settled, asked: Callable[[str], str]) -> Iterator[str]:
    """Yield what sleep cannot release or keep."""
    if settled["keep_prefix_cache"] and (settled["disable_radix_cache"] or not settled.number("retraction_host_bytes")):
        yield (
            f"{asked('keep_prefix_cache')}: there is no prefix cache, or no host memory for it: leave it out, or use "
            "the radix cache and --retraction-host-bytes"
        )
    saves = settled["enable_memory_saver"] and settled["weights_cpu_backup"]
    if settled["sleep_idle_seconds"] and settled["device"] == "cuda" and not saves:
        yield f"{asked('sleep_idle_seconds')}: on a GPU that needs --enable-memory-saver and --weights-cpu-backup"


def _cut_to_model(given: dict[str, Given], facts: Facts, settled: Settled, reasons: dict[str, str]) -> None:
    """Requests longer than the model or the KV may be are impossible, also if they were requested. `memory.division`
    finds out how much fits in memory."""
    asked = settled.number("context_length")
    own = facts.model.max_position_embeddings
    total = settled.number("max_total_tokens") if "max_total_tokens" in settled else asked
    if asked > own:
        settled["context_length"], reasons["context_length"] = Decision(own, f"{asked} asked, the model ends there")
    if facts.model.is_text_encoder:
        text_encoders.cut_to_step(settled, reasons)
    if settled.number("context_length") > total:
        settled["context_length"], reasons["context_length"] = Decision(total, "all that --max-total-tokens allows")
    if facts.model.vocab_size < 1:
        raise ModelError(f"{facts.model_path}: the vocabulary is empty")


def _written_sizes(given: dict[str, Given], facts: Facts) -> dict[str, bool]:
    """Return the fields that say whether a size was written, or is a GPU's."""
    written = {name for name, item in given.items() if not isinstance(item.value, Auto)}
    sized = facts.gpu is not None or not written.isdisjoint(("kv_cache_bytes", "mem_fraction_static"))
    return {"spare_cache": sized, "requests_first": "max_running_requests" in written}


def _field_values(settled: Settled) -> dict[str, Any]:
    values: dict[str, Any] = {BY_NAME[name].field: value for name, value in settled.items()}
    for name, kind in _ENUMS.items():
        values[name] = kind(values[name])
    values["wake_on_request"] |= values["sleep_idle_seconds"] > 0
    values["radix_cache"] = not settled["disable_radix_cache"]
    values["width"] = settled["speculative_num_draft_tokens"]
    values["chunked_scans"] = BACKENDS[str(settled["kernels"])].chunked_scans
    values["movable"] = disaggregation.role_of(settled) is not DisaggregationMode.NULL
    values["strategy"], values["track_interval"] = values["mamba_scheduler_strategy"], values["mamba_track_interval"]
    return values


def _build(kind: type[Any], values: dict[str, Any], **derived: Any) -> Any:
    names = {field.name for field in fields(kind)}
    return kind(**{name: value for name, value in values.items() if name in names and name not in derived}, **derived)


def _setting(name: str, given: dict[str, Given], settled: Settled, reasons: dict[str, str]) -> Setting:
    item = given[name]
    if name not in settled:
        return Setting(name=name, value="none", source="default", reason=OPTIONAL[name])
    reason = reasons.get(name, _REASONS.get(item.source, "the default"))
    source = "rule" if name in reasons else item.source
    return Setting(name=name, value=shown(name, settled[name]), source=source, reason=reason)


def shown(name: str, value: object) -> str:
    """The value for people and /server_info; never a key."""
    flag = BY_NAME[name]
    if flag.kind is SECRET:
        return "set"
    if flag.kind is BYTES and isinstance(value, int):
        return human_bytes(value)
    if isinstance(value, tuple):
        return ",".join(map(str, value)) or "none"
    return str(value).lower() if isinstance(value, bool) else str(value)
