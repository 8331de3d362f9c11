"""Refusal of weights and caches that the memory does not hold, with what it would hold."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from forebay.base.errors import ConfigError, NotEnoughMemory
from forebay.base.units import human_bytes
from forebay.config.flag import Auto, Settled
from forebay.config.rules import MIN_KV_BYTES, Facts, room_for_caches, weight_bytes
from forebay.config.sources import Given
from forebay.formats.quantization import Quantization


def check_fit(facts: Facts, settled: Settled, given: Mapping[str, Given]) -> None:
    """Raise NotEnoughMemory for weights alone, ConfigError for sizes that were written.

    Caches take their memory as they fill: without this check the missing memory would end the engine hours later.
    """
    here = ("kv_cache_bytes", "retraction_host_bytes", "host_cache_bytes") if facts.gpu is None else ("kv_cache_bytes",)
    sizes = [name for name in here if not isinstance(given[name].value, Auto)]
    weights, memory = weight_bytes(facts, settled), facts.memory
    left = max(0, memory.value - weights)
    if weights >= memory.value:
        raise NotEnoughMemory(
            f"{human_bytes(memory.value)} of memory ({memory.why}) do not hold {human_bytes(weights)} of weights: "
            f"{', '.join(_smaller(facts, settled)) or _least(facts, settled)}"
        )
    if sizes and sum(map(settled.number, sizes)) + weights > memory.value:
        asked = ", ".join(f"{given[name].origin} ({human_bytes(settled.number(name))})" for name in sizes)
        raise ConfigError(
            f"{asked} and {human_bytes(weights)} of weights are more than the {human_bytes(memory.value)} "
            f"{memory.why}: give at most {human_bytes(left)}, or --mem-fraction-static instead"
        )


def _smaller(facts: Facts, settled: Settled) -> Iterator[str]:
    """Yield the quantizations whose weights leave memory for caches, the least lossy first."""
    for kind, quantized in _quantized(facts, settled):
        room = room_for_caches(facts, quantized).num_bytes if facts.gpu is None else _left(facts, quantized)
        if room >= MIN_KV_BYTES:
            yield f"--quantization {kind} needs {human_bytes(weight_bytes(facts, quantized))}"


def _quantized(facts: Facts, settled: Settled) -> Iterator[tuple[Quantization, Settled]]:
    for kind in Quantization:
        yield kind, Settled({**settled, "quantization": kind})


def _left(facts: Facts, settled: Settled) -> int:
    return facts.memory.value - weight_bytes(facts, settled)


def _least(facts: Facts, settled: Settled) -> str:
    least = min(weight_bytes(facts, quantized) for _, quantized in _quantized(facts, settled))
    return f"no --quantization leaves memory for caches, the smallest needs {human_bytes(least)}: take a smaller model"
