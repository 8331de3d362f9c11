"""Settings of HiSparse: flags, their values, and the combinations that are refused."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Final

from forebay.base.errors import ConfigError
from forebay.config.engine_config import NO_HISPARSE, DisaggregationMode, HisparseOptions
from forebay.config.flag import BOOL, PATH, TEXT, Flag, Settled, in_group

if TYPE_CHECKING:
    from forebay.families.config.model_config import ModelConfig  # brings numpy, which --help does not wait for

GROUP: Final = "KV of sparse attention in two tiers"
MAX_COLUMNS: Final = 1 << 20  # tokens of a hot buffer
MAX_RATIO: Final = 100  # the division of memory takes ratios to three places
BUFFER_READS: Final = 2  # queries whose selections a hot buffer holds by default

FLAGS: Final = in_group(
    GROUP,
    Flag(
        "enable_hisparse",
        BOOL,
        "keep the KV of layers with sparse attention in host memory, and of each decoding request the tokens that it "
        "reads in a hot buffer; the output is the same",
        default=False,
    ),
    Flag(
        "hisparse_config",
        TEXT,
        'its sizes as JSON: \'{"top_k": 2048, "device_buffer_size": 4096, "host_to_device_ratio": 2}\'. top_k must be '
        "the model's; a hot buffer has device_buffer_size tokens; one in host_to_device_ratio pages has a copy on the "
        "device",
    ),
    Flag(
        "hisparse_host_path",
        PATH,
        "folder for a file that holds the KV instead of memory; the file has no name, and ends with the engine",
    ),
)
OPTIONAL: Final = {
    "hisparse_config": "hot buffers of twice the tokens that a query reads, a copy of every other page",
    "hisparse_host_path": "none: the host tier is memory",
}


def problems(settled: Settled, asked: Callable[[str], str], model: ModelConfig) -> Iterator[str]:
    """Yield one line for each setting that cannot work with this model."""
    if not settled["enable_hisparse"]:
        for name in OPTIONAL.keys() & settled.keys():
            yield f"{asked(name)}: without --enable-hisparse it has no effect: give that, too"
        return
    if not model.sparse_top_k:
        yield f"{asked('enable_hisparse')}: {model.model_type} has no layer with sparse attention: leave it out"
        return
    if settled["device"] == "cuda":
        yield from _gpu_problems(settled, asked)
    if "hisparse_host_path" in settled and settled["disaggregation_mode"] != DisaggregationMode.NULL:
        why = "with prefill and decode apart, peers map KV as shared memory, which a file is not"
        yield f"{asked('hisparse_host_path')}: {why}: leave it out"
    if settled.number("speculative_num_draft_tokens") > settled.number("page_size"):
        yield (
            f"{asked('enable_hisparse')} and {asked('page_size')}: the newest tokens have a page in a hot buffer, and "
            f"a step verifies {settled.number('speculative_num_draft_tokens')}: give a larger page"
        )
    try:
        options = options_of(settled, model)
    except ConfigError as error:
        yield f"{asked('hisparse_config')}: {error.message}"
        return
    top_k, columns = model.sparse_top_k, options.device_buffer_size
    if options.top_k != top_k:
        yield f"{asked('hisparse_config')}: top_k is {options.top_k}, a query of this model reads {top_k}: give that"
    if columns < top_k:
        least = f"a query reads {top_k} tokens: give device_buffer_size at least that"
        yield f"{asked('hisparse_config')}: a hot buffer of {columns} tokens is too small, {least}"


def _gpu_problems(settled: Settled, asked: Callable[[str], str]) -> Iterator[str]:
    """Yield one line for each setting that a host tier mapped beside a GPU's memory cannot have."""
    if "hisparse_host_path" in settled:
        why = "on a GPU the host tier is pinned memory, which a file is not"
        yield f"{asked('hisparse_host_path')}: {why}: leave it out"
    if settled["enable_memory_saver"]:
        why = "torch-memory-saver releases no memory that the driver has mapped for two tiers"
        yield f"{asked('enable_memory_saver')} and {asked('enable_hisparse')}: {why}: leave one out"


def options_of(settled: Settled, model: ModelConfig) -> HisparseOptions:
    """Return the sizes that the settings and the model give. Raises ConfigError for a text that is no such JSON."""
    if not settled["enable_hisparse"]:
        return NO_HISPARSE
    given = _read(str(settled["hisparse_config"])) if "hisparse_config" in settled else {}
    top_k = given.pop("top_k", model.sparse_top_k)
    columns = given.pop("device_buffer_size", BUFFER_READS * model.sparse_top_k)
    ratio = given.pop("host_to_device_ratio", NO_HISPARSE.host_to_device_ratio)
    for name, value in (("top_k", top_k), ("device_buffer_size", columns)):
        if type(value) is not int or not 1 <= value <= MAX_COLUMNS:
            raise ConfigError(f"{name} is {json.dumps(value)}, not a whole number of tokens from 1 to {MAX_COLUMNS}")
    if type(ratio) not in (int, float) or not 1 <= ratio <= MAX_RATIO:
        raise ConfigError(f"host_to_device_ratio is {json.dumps(ratio)}, not a number from 1 to {MAX_RATIO}")
    return HisparseOptions(
        device_buffer_size=columns,
        top_k=top_k,
        host_to_device_ratio=float(ratio),
        host_path=str(settled.get("hisparse_host_path", "")),
    )


def field_values(settled: Settled, model: ModelConfig) -> dict[str, Any]:
    """Return the values of the configuration's fields about HiSparse."""
    options = options_of(settled, model)
    return {"hisparse": options, "sparse_kv_on_host": options.enabled}


def _read(text: str) -> dict[str, Any]:
    """Read the JSON object of --hisparse-config. Raises ConfigError for a key that is unknown or there twice."""
    try:
        pairs = json.loads(text, object_pairs_hook=lambda pairs: pairs)
    except (ValueError, RecursionError):
        raise ConfigError("it is not JSON: write '{\"device_buffer_size\": 4096}'") from None
    if not text.lstrip().startswith("{"):
        raise ConfigError("it is not a JSON object: write '{\"device_buffer_size\": 4096}'")
    known = ("top_k", "device_buffer_size", "host_to_device_ratio")
    names = [name for name, _ in pairs]
    for name in names:
        if name not in known:
            raise ConfigError(f"{name!r} is not one of {', '.join(known)}")
        if names.count(name) > 1:
            raise ConfigError(f"{name!r} is there {names.count(name)} times: give it once")
    return dict(pairs)
