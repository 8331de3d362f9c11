"""Settings of tensor parallelism: flags, and the combinations that are refused."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Final

from forebay.config.engine_config import DisaggregationMode, Exact, RankOptions
from forebay.config.flag import COUNT, TEXT, Flag, Settled, in_group

if TYPE_CHECKING:
    from forebay.families.config.model_config import ModelConfig  # brings numpy, which --help does not wait for

GROUP: Final = "tensor parallelism"
MAX_RANKS: Final = 64

FLAGS: Final = in_group(
    GROUP,
    Flag(
        "tp_size",
        COUNT,
        "ranks, each a process with its part of the weights and the caches; all compute each step together",
        default=1,
        aliases=("-tp", "--tp", "--tensor-parallel-size"),
        low=1,
        high=MAX_RANKS,
    ),
    Flag(
        "tp_exact",
        TEXT,
        "on: weights are split by outputs alone, and results are those of one rank to the bit",
        default=Exact.ON.value,
        choices=tuple(Exact),
    ),
)


def field_values(settled: Settled) -> dict[str, Any]:
    """Return the values of the configuration's fields about ranks."""
    return {"ranks": RankOptions(size=settled.number("tp_size"))}


def problems(settled: Settled, asked: Callable[[str], str], model: ModelConfig) -> Iterator[str]:
    """Yield one line for each setting that is not built for several ranks."""
    if settled["tp_exact"] == Exact.OFF:
        yield f"{asked('tp_exact')}: a split by inputs is not built: use on"
    if settled.number("tp_size") == 1:
        return
    for name, why in _not_built(settled, model):
        yield f"{asked('tp_size')} and {asked(name)}: {why}: use --tp-size 1"


def _not_built(settled: Settled, model: ModelConfig) -> Iterator[tuple[str, str]]:
    """Yield the settings that several ranks cannot have, with the reason."""
    if settled["device"] != "cpu":
        yield "device", "an exchange between GPUs is not built"
    if settled["kernels"] == "torch":
        yield "kernels", "the products of torch depend on the shapes of weights, so that a split changes bits"
    if settled["disaggregation_mode"] != DisaggregationMode.NULL:
        yield "disaggregation_mode", "ranks are not built for separate prefill and decode"
    if settled["speculative_algorithm"] not in ("off", "NGRAM"):
        yield "speculative_algorithm", "draft heads and draft models are not built for ranks"
    if settled["enable_lora"]:
        yield "enable_lora", "adapters are not built for ranks"
    if settled["enable_hisparse"]:
        yield "enable_hisparse", "KV in two tiers is not built for ranks"
    if "prefix_cache_dir" in settled:
        yield "prefix_cache_dir", "files of the prefix cache are not built for ranks"
    if model.vision is not None:
        yield "model_path", "an encoder of images is not built for ranks"
