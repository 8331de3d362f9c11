"""Settings of models that make vectors and scores of texts, and generate nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Final

from forebay.config.engine_config import DisaggregationMode, SpeculativeAlgorithm
from forebay.config.flag import Decision, Settled
from forebay.families.config.model_config import ModelConfig

# More tokens in a step than in one of a decoder: nobody streams beside it, and matrices of more rows cost less by row.
STEP_TOKENS: Final = 2048


def step_tokens(settled: Settled) -> Decision:
    """Return the most tokens of one step, which holds the longest text."""
    return Decision(max(STEP_TOKENS, settled.number("context_length")), "a text is computed whole, in one step")


def cut_to_step(settled: Settled, reasons: dict[str, str]) -> None:
    """Lower the context length to the tokens of a step, if these were written."""
    most = settled.number("chunked_prefill_size")
    if settled.number("context_length") > most:
        why = f"a text is computed whole, and a step has {most} tokens (--chunked-prefill-size)"
        settled["context_length"], reasons["context_length"] = Decision(most, why)


def field_values(model: ModelConfig) -> dict[str, Any]:
    """Return the fields of the engine's configuration that follow from the kind of model."""
    own = {"text_encoder": model.is_text_encoder, "head_outputs": model.head_outputs}
    return {**own, **({"radix_cache": False} if model.is_text_encoder else {})}


def problems(settled: Settled, asked: Callable[[str], str], model: ModelConfig) -> Iterator[str]:
    """Yield what a text encoder cannot do."""
    if not model.is_text_encoder:
        return
    what = f"a {model.model_type} makes vectors and scores of texts, and"
    if settled.get("enable_lora"):
        yield f"{asked('enable_lora')}: {what} has no adapters: leave it out"
    if settled["speculative_algorithm"] != SpeculativeAlgorithm.OFF:
        yield f"{asked('speculative_algorithm')}: {what} generates nothing: leave it out"
    if settled["disaggregation_mode"] != DisaggregationMode.NULL:
        yield f"{asked('disaggregation_mode')}: {what} has no KV to send: leave it out"
