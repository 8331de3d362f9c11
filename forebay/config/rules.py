"""Rules that decide each "auto" for this machine and model, with the reason. One function per setting."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NamedTuple

from forebay.backends import BACKENDS, default_backend, kernels_on
from forebay.backends.backend import Backend, Here
from forebay.base.cpu import BFLOAT16_FLAGS, Cpu
from forebay.base.units import human_bytes
from forebay.base.variants import VARIANTS
from forebay.config import (
    adapters,
    disaggregation,
    estimates,
    hisparse,
    kinds,
    media,
    pictures,
    ranks,
    sampling,
    speculation,
    text_encoders,
    tiers,
)
from forebay.config.engine_config import CacheIsolation
from forebay.config.flag import Decision, Settled
from forebay.config.gpu import GpuMemory, limits_for
from forebay.config.machine import Amount
from forebay.families.base.embedding import MEAN, embedding_of
from forebay.families.config.model_config import ModelConfig
from forebay.formats.quantization import Quantization
from forebay.formats.weight_shapes import ValueBytes, WeightShapes

GPU_FRACTION: Final = 0.88  # the rest is for activations, captured graphs and CUDA itself
MIN_KV_BYTES: Final = 16 << 20
# Several dozen slots of a small hybrid, a few of a large one; retractions are rare.
HOST_LIMIT_BYTES: Final = 1 << 30
# Beside 16 who decode, a step of the embedded model then takes about 12 ms on two cores, and prompts are read at nearly
# the speed of longer chunks.
MIXED_CHUNK_TOKENS: Final = 96
WEIGHTS_CACHE_BYTES: Final = 24 << 30
ITEM_BYTES: Final = {"int8": 1, "uint8": 1, "bfloat16": 2, "float32": 4}
# Codes of up to so many bits have lost several percent of perplexity, beside which 0.2 to 0.4 % are little. Codes of 8
# bits have lost next to nothing (docs/decisions/0026-integer-products-without-amx.md).
MOST_BITS_ROUNDED_TO_8: Final = 6
# Smaller models lose more by 8 bits than perplexity shows: the embedded one no longer answers what France's capital is.
LEAST_WEIGHTS_ROUNDED_TO_8: Final = 1_000_000_000


@dataclass(frozen=True, kw_only=True, slots=True)
class Facts:
    """Inputs of the rules: the checkpoint, the weights of its draft model, and the machine. `memory` is where
    the model computes; `gpu` is None unless that is a GPU."""

    model_path: Path
    title: str
    model: ModelConfig
    weights: WeightShapes
    draft: WeightShapes
    cores: Amount
    memory: Amount
    host_memory: Amount
    gpu: GpuMemory | None
    cpu: Cpu
    cache_disk: Amount  # the whole disk that holds files of packed weights
    kernel_folders: tuple[Path, ...]  # where compiled ones may be
    num_keys: int  # user and admin keys together
    mmproj: Path | None = None  # the encoder's file beside a GGUF model


Rule = Callable[[Facts, Settled], Decision]


def _dtype(facts: Facts, settled: Settled) -> Decision:
    if facts.gpu is not None:
        return Decision("bfloat16", "the GPU computes in it")
    named = next((variant for variant in VARIANTS if variant.name == settled.get("kernels")), None)
    native = facts.cpu.bfloat16 if named is None else sorted(named.needs & BFLOAT16_FLAGS)
    whose = "the CPU" if named is None else f"--kernels {named.name}"
    if native:
        return Decision("bfloat16", f"{whose} computes in it ({', '.join(native)})")
    return Decision("float32", f"{whose} has no bfloat16 instructions")


def _kernels(facts: Facts, settled: Settled) -> Decision:
    return Decision(*default_backend(Here(facts.cpu, facts.gpu is not None, facts.kernel_folders)))


def _quantization(facts: Facts, settled: Settled) -> Decision:
    if not (facts.weights.has_codes or facts.draft.has_codes):
        return Decision(Quantization.NONE.value, "the checkpoint has no codes that could be kept")
    kernels = str(settled["kernels"])
    if not BACKENDS[kernels].uses_codes:
        return Decision(Quantization.NONE.value, f"the {kernels} kernels are fastest without")
    return Decision(Quantization.FILE.value, "the checkpoint's own codes, without loss")


def _pooling(facts: Facts, settled: Settled) -> Decision:
    found = embedding_of(facts.model_path)
    if facts.model.is_text_encoder and not found.is_embedder:
        return Decision(MEAN, "the checkpoint does not say: as sentence-transformers pools a text encoder")
    return Decision(found.pooling, found.why)


def why_not_rounded(facts: Facts, settled: Settled) -> str:
    """Return why no layer rounds its inputs to `activation_bits`; empty if some layers do."""
    if settled["quantization"] == Quantization.NONE:
        return "no weights are held in codes"
    kernels = kernels_on(facts.cpu, str(settled["kernels"]))
    return "" if kernels.rounds_inputs else f"the {kernels.name} kernels multiply inputs as they are"


def _activation_bits(facts: Facts, settled: Settled) -> Decision:
    """Return one width for all layers: kernels round a layer's inputs once, and it is part of the identity of results.
    The bits of most weights decide it, those of the model before those of its draft model, which only some roles of a
    disaggregated pair load."""
    if why := why_not_rounded(facts, settled):
        return Decision(16, why)
    bits = facts.weights.code_bits(*_form(facts, settled)) or facts.draft.code_bits(*_form(facts, settled))
    both = "1.2 to 1.5 times the tokens/s{} from 4 requests on, perplexity 0.2 to 0.4 % higher"
    if facts.weights.num_parameters < LEAST_WEIGHTS_ROUNDED_TO_8:
        return Decision(16, f"fewer than 1 B weights, which lose most by rounding: 8 would have {both.format('')}")
    if bits <= MOST_BITS_ROUNDED_TO_8:
        return Decision(8, f"weights of {bits} bits: {both.format(' of 16')}")
    return Decision(16, f"weights of {bits} bits: 8 would have {both.format('')}")


def _kv_cache_dtype(facts: Facts, settled: Settled) -> Decision:
    """Decided before the dtype, which is therefore absent unless the user wrote it."""
    if "dtype" in settled or _dtype(facts, settled).value == "bfloat16":
        return Decision(settled.get("dtype", "bfloat16"), "as --dtype; int8 halves bfloat16's bytes and rounds")
    return Decision("bfloat16", "half of float32's bytes: only what is kept is rounded, sums are in float32")


def weight_bytes(facts: Facts, settled: Settled) -> int:
    """Return the bytes of the weights of the model and of its draft model, in all engines of this machine."""
    held = sum(weights.held_bytes(*_form(facts, settled)) for weights in (facts.weights, facts.draft))
    return held * disaggregation.num_engines(settled)


def _form(facts: Facts, settled: Settled) -> tuple[Quantization, ValueBytes]:
    kernels = kernels_on(facts.cpu, str(settled["kernels"]))
    return Quantization(str(settled["quantization"])), value_bytes(str(settled["dtype"]), kernels)


def value_bytes(dtype: str, kernels: Backend) -> ValueBytes:
    """Return the bytes of a value that is not held in codes."""
    own = ITEM_BYTES[dtype]
    return ValueBytes(own, min(own, ITEM_BYTES["bfloat16"]) if kernels.widens_bfloat16 else own)


class Room(NamedTuple):
    """Bytes for caches, negative if the memory is too small for the rest, and the sum that they result from."""

    num_bytes: int
    why: str


def room_for_caches(facts: Facts, settled: Settled) -> Room:
    """Return the rest of a CPU's memory for caches and host copies, if no size of the caches was written."""
    engines = disaggregation.num_engines(settled)
    step = estimates.StepShape(
        chunk_tokens=estimates.most_prompt_tokens(settled.number("chunked_prefill_size"), facts.model),
        num_rows=settled.number("max_running_requests"),
        width=settled.number("speculative_num_draft_tokens"),
        context_length=min(settled.number("context_length"), facts.model.max_position_embeddings),
    )
    parts = {
        "reserve": estimates.reserve_bytes(facts.memory.value),
        "weights": weight_bytes(facts, settled),
        "packed head": engines * estimates.tied_head_bytes(facts.model, facts.weights, *_form(facts, settled)),
        "processes": engines * estimates.process_bytes(facts.model),
        "adapters": engines * _adapter_bytes(facts, settled),
        "pictures": engines * _picture_bytes(facts, settled),
        "activations": engines * estimates.activation_bytes(facts.model, facts.weights, step),
    }
    less = ", ".join(f"{human_bytes(size)} {name}" for name, size in parts.items() if size)
    whole = f"{human_bytes(facts.memory.value)} {facts.memory.why}"
    return Room(facts.memory.value - sum(parts.values()), f"{whole}, less {less}")


def _adapter_bytes(facts: Facts, settled: Settled) -> int:
    if not settled.get("enable_lora"):
        return 0
    itemsize = 4 if settled.get("kv_cache_dtype") == "float32" else 2
    slots, rank = settled.number("max_loras"), settled.number("max_lora_rank")
    return estimates.adapter_bytes(facts.model, num_slots=slots, rank=rank, itemsize=itemsize)


def _picture_bytes(facts: Facts, settled: Settled) -> int:
    return 0 if facts.model.vision is None else settled.number("mm_cache_bytes")


def _by_fraction(facts: Facts, settled: Settled) -> Room:
    """SGLang's meaning of --mem-fraction-static: weights and caches together take this share."""
    fraction = settled.share("mem_fraction_static") if "mem_fraction_static" in settled else GPU_FRACTION
    num_gpus, weights = ranks.num_gpus(facts, settled), weight_bytes(facts, settled)
    memory = num_gpus * facts.memory.value
    weights += disaggregation.num_engines(settled) * _adapter_bytes(facts, settled)
    why = f"{facts.memory.why} on {num_gpus} GPUs" if num_gpus > 1 else facts.memory.why
    share = f"{fraction:.0%} of {human_bytes(memory)} {why}, less {human_bytes(weights)} weights"
    share += " and adapters" if settled.get("enable_lora") else ""
    return _at_least(Room(int(memory * fraction) - weights, share))


def _at_least(room: Room) -> Room:
    if room.num_bytes >= MIN_KV_BYTES:
        return room
    return Room(MIN_KV_BYTES, f"the least: {room.why}, leaves {human_bytes(max(room.num_bytes, 0))}")


def is_cache_size_asked(facts: Facts, settled: Settled) -> bool:
    """Return whether the caches have a size that was written, or that a GPU's memory allows, and not the default of a
    CPU. Call it before the rule of `kv_cache_bytes`."""
    return facts.gpu is not None or "kv_cache_bytes" in settled or "mem_fraction_static" in settled


def _retraction_host_bytes(facts: Facts, settled: Settled) -> Decision:
    """Decided before the caches, whose default leaves this."""
    if not is_cache_size_asked(facts, settled):
        share, why = room_for_caches(facts, settled).num_bytes // estimates.HOST_SHARE, "a sixteenth of what is left"
    else:
        left = facts.host_memory.value
        if facts.gpu is None:
            written = "kv_cache_bytes" in settled
            caches = settled.number("kv_cache_bytes") if written else _by_fraction(facts, settled).num_bytes
            left -= weight_bytes(facts, settled) + caches
        share, why = left // 4, "a quarter of what weights and caches leave"
    if share > HOST_LIMIT_BYTES:
        return Decision(HOST_LIMIT_BYTES, "retractions are rare, and a few requests fit")
    return Decision(max(0, share), why)


def _kv_cache_bytes(facts: Facts, settled: Settled) -> Decision:
    if is_cache_size_asked(facts, settled):
        return Decision(*_by_fraction(facts, settled))
    room = room_for_caches(facts, settled)
    copies = settled.number("retraction_host_bytes") + settled.number("host_cache_bytes")
    return Decision(*_at_least(Room(room.num_bytes - copies, f"{room.why}, {human_bytes(copies)} host copies")))


def _disable_radix_cache(facts: Facts, settled: Settled) -> Decision:
    if facts.model.is_text_encoder:
        return Decision(True, "each token of a text depends on all others: nothing can be computed once for several")
    return disaggregation.disable_radix_cache(settled)


def _max_running_requests(facts: Facts, settled: Settled) -> Decision:
    if facts.gpu is not None:
        most = limits_for(facts.gpu.total).max_running_requests
        return Decision(most, f"for a GPU of {human_bytes(facts.gpu.total)}")
    return Decision(64, "a CPU's throughput hardly grows beyond that")


def _chunked_prefill_size(facts: Facts, settled: Settled) -> Decision:
    if facts.gpu is not None:
        tokens = limits_for(facts.gpu.total).chunked_prefill_size
        return Decision(tokens, f"for a GPU of {human_bytes(facts.gpu.total)}")
    if facts.model.is_text_encoder:
        return text_encoders.step_tokens(settled)
    return Decision(512, "a step that long still lets others stream evenly")


def _speculative_algorithm(facts: Facts, settled: Settled) -> Decision:
    if facts.model.is_text_encoder:
        return Decision("off", "nothing is generated")
    return speculation.RULES["speculative_algorithm"](facts, settled)


def _mixed_chunk_size(facts: Facts, settled: Settled) -> Decision:
    chunk = settled.number("chunked_prefill_size")
    if settled["device"] != "cpu":
        return Decision(chunk, "a GPU hardly notices the difference")
    return Decision(min(chunk, MIXED_CHUNK_TOKENS), "those who decode wait for it between two tokens")


def _cuda_graph_max_bs(facts: Facts, settled: Settled) -> Decision:
    running = settled.number("max_running_requests")
    if facts.gpu is not None and running > limits_for(facts.gpu.total).max_running_requests:
        most = limits_for(facts.gpu.total).max_running_requests
        return Decision(most, f"a graph takes memory: for a GPU of {human_bytes(facts.gpu.total)}")
    return Decision(running, "every batch that can be is captured")


def _overlap_depth(facts: Facts, settled: Settled) -> Decision:
    if speculation.algorithm_of(settled).on_host:
        return Decision(0, "guesses continue the last token, which the host must know")
    if facts.gpu is not None:
        return Decision(1, "the host plans the next step while the GPU computes")
    return Decision(0, "host and model share the CPU's cores, nothing to overlap")


def _num_threads(facts: Facts, settled: Settled) -> Decision:
    size = settled.number("tp_size")
    if size == 1:
        return Decision(facts.cores.value, facts.cores.why)
    return Decision(max(1, facts.cores.value // size), f"of {facts.cores.value} cores, for each of {size} ranks")


def _max_queued_tokens(facts: Facts, settled: Settled) -> Decision:
    context = min(settled.number("context_length"), facts.model.max_position_embeddings)
    return Decision(settled.number("max_running_requests") * context, "a full context for each that may run")


def _cache_isolation(facts: Facts, settled: Settled) -> Decision:
    if facts.num_keys > 1:
        return Decision(CacheIsolation.KEY.value, f"{facts.num_keys} keys: what one has sent is no other's business")
    who = "all who hold the one key" if facts.num_keys else "without a key all who can connect"
    return Decision(CacheIsolation.NONE.value, f"{who} share cached prefixes")


def _weights_cache_bytes(facts: Facts, settled: Settled) -> Decision:
    if settled["device"] != "cpu":
        return Decision(0, "packed weights are cached for CPUs only")
    share = facts.cache_disk.value // 10
    if share >= WEIGHTS_CACHE_BYTES:
        return Decision(WEIGHTS_CACHE_BYTES, "five 8B models in 4 bits; less than a tenth of the disk")
    return Decision(share, f"a tenth of {human_bytes(facts.cache_disk.value)}, {facts.cache_disk.why}")


# In this order: a rule may look at what those above it decided.
RULES: Final[dict[str, Rule]] = {
    "model_path": lambda facts, settled: Decision(str(facts.model_path), "the embedded default model"),
    "served_model_name": lambda facts, settled: Decision(facts.title, "the checkpoint's own name"),
    "device": lambda facts, settled: Decision("cpu", "unless --device cuda asks for an NVIDIA GPU"),
    "kv_cache_dtype": _kv_cache_dtype,
    "dtype": _dtype,
    "num_threads": _num_threads,
    "kernels": _kernels,
    **ranks.RULES,
    "quantization": _quantization,
    "pooling": _pooling,
    "activation_bits": _activation_bits,
    "context_length": lambda facts, settled: Decision(facts.model.max_position_embeddings, "the model's own"),
    "disable_radix_cache": _disable_radix_cache,
    **kinds.RULES,
    "max_running_requests": _max_running_requests,
    **disaggregation.RULES,
    "chunked_prefill_size": _chunked_prefill_size,
    "mixed_chunk_size": _mixed_chunk_size,
    "cuda_graph_max_bs": _cuda_graph_max_bs,
    **speculation.RULES,
    "speculative_algorithm": _speculative_algorithm,
    "retraction_host_bytes": _retraction_host_bytes,
    **tiers.RULES,
    "kv_cache_bytes": _kv_cache_bytes,
    "overlap_depth": _overlap_depth,
    "max_queued_tokens": _max_queued_tokens,
    "cache_isolation": _cache_isolation,
    "weights_cache_bytes": _weights_cache_bytes,
    "max_body_bytes": lambda facts, settled: media.max_body_bytes(facts.model.vision is not None),
}

# Settings that may stay unset: being absent is their meaning.
OPTIONAL: Final = {
    "chat_template": "the checkpoint's own",
    "revision": "main, of models of the hub",
    "mem_fraction_static": f"the caches take what is left for them; {GPU_FRACTION:.0%} on a GPU",
    "max_total_tokens": "what the memory holds",
    "max_step_ms": "no limit by time: prompts keep their throughput, and --mixed-chunk-size alone limits them",
    **kinds.OPTIONAL,
    **tiers.OPTIONAL,
    **hisparse.OPTIONAL,
    **adapters.OPTIONAL,
    **pictures.OPTIONAL,
    **sampling.OPTIONAL,
    **speculation.OPTIONAL,
    **disaggregation.OPTIONAL,
    "api_key": "none: only this machine can connect",
    "api_key_file": "none: only this machine can connect",
    "admin_api_key": "none: the admin routes are absent",
    "admin_api_key_file": "none: the admin routes are absent",
    "weights_root": "none: weights are updated from no file",
}
