"""`forebay models list|pull|inspect|show|make`."""

from __future__ import annotations

import math
import sys
from collections import Counter
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from forebay.base.errors import ConfigError
from forebay.base.units import human_bytes
from forebay.cli.arguments import Parser
from forebay.cli.make_model import add_options, make
from forebay.cli.progress import pull_default_model
from forebay.config.engine_config import CacheTypes
from forebay.config.machine import available_memory
from forebay.config.rules import ITEM_BYTES
from forebay.families import TYPES
from forebay.families.checkpoint import Checkpoint, open_checkpoint
from forebay.families.model_config import config_of, family_title
from forebay.families.small import small_config
from forebay.formats.store import cached, find_model, models_folder, short_name
from forebay.pools.cache_spec import cache_sizes

CONTEXTS = (1024, 8192, 32768, 131072)
PIPED_WIDTH = 500
_SHOWN_SIZE, _SHOWN_LAYERS = 512, 8


def run(words: Sequence[str]) -> int:
    summary = (
        "list: the models in the cache. pull: fetch the default model. inspect: what a model is and needs.\n"
        "show: a model, or a small one of a type, as equations.\n"
        "make: write a small random model with the default model's tokenizer."
    )
    parser = Parser("models", summary, "list|pull|inspect [MODEL]|show [MODEL|TYPE]|make NAME --like TYPE [options]")
    parser.option("action", nargs="?", default="list", help="list, pull, inspect, show or make")
    parser.option(
        "model", nargs="?", help="inspect, show: a path or a listed name. show: or a type. make: the new name"
    )
    add_options(parser)
    own = parser.parse(words).own
    if own.model and own.action in ("list", "pull"):
        raise ConfigError(f"`forebay models {own.action}` takes no model: only the default model is pulled")
    if own.action == "list":
        _list()
    elif own.action == "pull":
        print(pull_default_model())
    elif own.action == "inspect":
        inspect(own.model)
    elif own.action == "show":
        show(own.model)
    elif own.action == "make":
        print(make(own.model, own))
    else:
        raise ConfigError(f"there is no `forebay models {own.action}`: use list, pull, inspect, show or make")
    return 0


def _list() -> None:
    found = cached()
    if not found:
        print(f"no models in {models_folder()}: `forebay models pull` fetches the default one")
        return
    table = Table(box=None)
    for column in ("name", "size", "path"):
        table.add_column(column, overflow="fold")
    for path in found:
        size = path.stat().st_size if path.is_file() else sum(f.stat().st_size for f in path.iterdir())
        table.add_row(short_name(path), human_bytes(size), str(path))
    _console().print(table)


def inspect(name: str | None) -> None:
    """Print a checkpoint's shape, quantisation and memory needs. Reads headers only."""
    checkpoint = open_checkpoint(find_model(name))
    table = Table(title=str(checkpoint.path), title_justify="left", box=None, show_header=False)
    table.add_column(style="dim")
    table.add_column(overflow="fold")
    for item, value in [*_shape(checkpoint), *_memory(checkpoint)]:
        table.add_row(item, value)
    _console().print(table)


def show(name: str | None) -> None:
    """Print a model's description as equations: a checkpoint's, or that of a small one of a type."""
    from forebay.models import describe, needs_of  # bring torch, which nothing but this needs here
    from forebay.models.equations import equations

    if name in TYPES:
        config = config_of(small_config(name, hidden_size=_SHOWN_SIZE, num_layers=_SHOWN_LAYERS, vocab_size=1 << 15))
        print(f"{family_title(name)}\nA small {name} may be:\n")
    else:
        checkpoint = open_checkpoint(find_model(name))
        config = checkpoint.config
        print(f"{family_title(config.model_type)}\n{checkpoint.path}:\n")
    print("\n".join(equations(describe(config), needs_of(config).kept_by_block)))


def _shape(checkpoint: Checkpoint) -> list[tuple[str, str]]:
    model = checkpoint.config
    parameters = sum(math.prod(tensor.shape) for tensor in checkpoint.tensors.values())
    heads = f"{model.num_heads} query heads, {model.num_kv_heads} KV heads of {model.head_dim}"
    return [
        ("architecture", model.model_type),
        ("parameters", f"{parameters / 1e6:,.1f} M in {len(checkpoint.tensors)} tensors"),
        ("layers", f"{model.num_layers} of width {model.hidden_size}, inner {model.intermediate_size}"),
        ("attention", heads),
        ("vocabulary", f"{model.vocab_size:,} tokens"),
        ("context", f"{model.max_position_embeddings:,} tokens"),
        ("stored as", _quantisation(checkpoint)),
        ("tensor data", human_bytes(checkpoint.num_bytes)),
    ]


def _quantisation(checkpoint: Checkpoint) -> str:
    """`210 x Q4_1, 61 x F32`, from the headers."""
    kinds = Counter(tensor.storage for tensor in checkpoint.tensors.values())
    return ", ".join(f"{count} x {kind}" for kind, count in kinds.most_common())


def _memory(checkpoint: Checkpoint) -> list[tuple[str, str]]:
    from forebay.models import needs_of  # brings torch, which nothing but this needs here

    model, specs = checkpoint.config, needs_of(checkpoint.config).cache_specs
    parameters = sum(math.prod(tensor.shape) for tensor in checkpoint.tensors.values())
    contexts = sorted({c for c in CONTEXTS if c < model.max_position_embeddings} | {model.max_position_embeddings})
    rows = []
    for dtype, item_bytes in ITEM_BYTES.items():
        sizes = cache_sizes(specs, CacheTypes(dtype=dtype, kv_cache_dtype=dtype))
        kv = ", ".join(f"{human_bytes(sizes.kv_bytes_per_token * context)} for {context:,}" for context in contexts)
        rows.append((f"memory, {dtype}", f"weights {human_bytes(parameters * item_bytes)}"))
        rows.append(("", f"KV {human_bytes(sizes.kv_bytes_per_token)} a token: {kv}"))
        rows += [("", words) for words in sizes.of_a_request()]
    memory = available_memory()
    return [*rows, ("this machine", f"{human_bytes(memory.value)} {memory.why}")]


def _console() -> Console:
    """Paths are not broken where nobody looks at a screen: a script reads them."""
    return Console(highlight=False, width=None if sys.stdout.isatty() else PIPED_WIDTH)
