"""Settings of tensor parallelism: flags, and the combinations that are refused."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Final, Protocol

from forebay.config.engine_config import DisaggregationMode, Exact, RankExchange, RankOptions
from forebay.config.flag import COUNT, TEXT, Decision, Flag, Settled, in_group

if TYPE_CHECKING:
    from forebay.config.gpu import GpuMemory
    from forebay.families.config.model_config import ModelConfig  # brings numpy, which --help does not wait for

GROUP: Final = "tensor parallelism"
MAX_RANKS: Final = 64
_INTERPRETED: Final = "triton-interpreter"

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
    Flag(
        "tp_exchange",
        TEXT,
        "how ranks exchange tensors: memory of the host (shm) or of a GPU (ipc), or a process group (gloo, nccl)",
        choices=tuple(RankExchange),
    ),
)


class _Facts(Protocol):
    @property
    def gpu(self) -> GpuMemory | None: ...

    @property
    def model(self) -> ModelConfig: ...


def field_values(settled: Settled, facts: _Facts) -> dict[str, Any]:
    """Return the values of the configuration's fields about ranks."""
    size, exchange = settled.number("tp_size"), RankExchange(str(settled["tp_exchange"]))
    own_gpus, stall_timeout_s = num_gpus(facts, settled) > 1, float(str(settled["stall_timeout"]))
    return {"ranks": RankOptions(size=size, exchange=exchange, own_gpus=own_gpus, stall_timeout_s=stall_timeout_s)}


def num_gpus(facts: _Facts, settled: Settled) -> int:
    """Return how many GPUs the ranks compute on: one for each, or one for all."""
    size = settled.number("tp_size")
    return size if facts.gpu is not None and facts.gpu.count >= size else 1


def _exchange(facts: _Facts, settled: Settled) -> Decision:
    size = settled.number("tp_size")
    if size == 1:
        return Decision(RankExchange.SHM, "one rank exchanges nothing")
    if facts.gpu is not None:
        if num_gpus(facts, settled) == size:
            return Decision(RankExchange.NCCL, "each rank has a GPU")
        return Decision(RankExchange.IPC, f"{size} ranks share the GPU")
    if settled["kernels"] == _INTERPRETED:
        return Decision(RankExchange.IPC, "as on a GPU that all ranks share")
    return Decision(RankExchange.SHM, "ranks on a CPU share memory")


RULES: Final = {"tp_exchange": _exchange}


def problems(settled: Settled, asked: Callable[[str], str], facts: _Facts) -> Iterator[str]:
    """Yield one line for each setting that is not built for several ranks."""
    if settled["tp_exact"] == Exact.OFF:
        yield f"{asked('tp_exact')}: a split by inputs is not built: use on"
    if settled.number("tp_size") == 1:
        return
    yield from _without_exchange(settled, asked, facts)
    for name, why in _not_built(settled, facts):
        yield f"{asked('tp_size')} and {asked(name)}: {why}: use --tp-size 1"


def _without_exchange(settled: Settled, asked: Callable[[str], str], facts: _Facts) -> Iterator[str]:
    """Yield why the ranks cannot exchange tensors."""
    size, exchange = settled.number("tp_size"), settled["tp_exchange"]
    suiting = (RankExchange.SHM, RankExchange.GLOO)
    if settled["device"] != "cpu":
        suiting = (RankExchange.NCCL, RankExchange.IPC)
    elif settled["kernels"] == _INTERPRETED:
        suiting = (RankExchange.IPC, RankExchange.GLOO)
    if exchange not in suiting:
        yield f"{asked('tp_exchange')}: {settled['kernels']} kernels exchange through {' or '.join(suiting)}: use one"
    elif facts.gpu is not None and 1 < (count := facts.gpu.count) < size:
        remedy = f"use --tp-size {count}, or one GPU for all ranks by CUDA_VISIBLE_DEVICES"
        yield f"{asked('tp_size')}: {size} ranks on {count} GPUs: {remedy}"
    elif facts.gpu is not None and exchange == RankExchange.NCCL and facts.gpu.count < size:
        yield f"{asked('tp_exchange')}: NCCL needs a GPU for each of {size} ranks, and there is one: use ipc"


def _not_built(settled: Settled, facts: _Facts) -> Iterator[tuple[str, str]]:
    """Yield the settings that several ranks cannot have, with the reason."""
    if settled["exact"] == Exact.OFF:
        yield "exact", "ranks have the bits of one"
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
    if facts.model.vision is not None:
        yield "model_path", "an encoder of images is not built for ranks"
