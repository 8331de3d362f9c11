"""`forebay models list|pull|rm|inspect|show|make|quantize`."""

from __future__ import annotations

import contextlib
import json
import math
import shutil
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final

from rich.console import Console
from rich.table import Table

from forebay.backends import kernels_on
from forebay.base.cpu import this_cpu
from forebay.base.errors import ConfigError, ModelError
from forebay.base.units import human_bytes
from forebay.cli import quantize_model
from forebay.cli.arguments import Parser, note
from forebay.cli.make_model import add_options, make
from forebay.cli.progress import pull_default_model
from forebay.config.engine_config import CacheTypes
from forebay.config.machine import available_memory
from forebay.config.rules import ITEM_BYTES, value_bytes
from forebay.engine.lifecycle.bring import pull
from forebay.engine.lifecycle.model_shape import read_shape
from forebay.engine.lifecycle.served_files import check_served_files
from forebay.families import TEXT_ENCODERS, TYPES
from forebay.families.checkpoint import Checkpoint, open_with_encoder
from forebay.families.config.model_config import ModelConfig, config_of, family_title
from forebay.families.config.outer import OTHER_NAMES, OUTERS
from forebay.families.config.vision import TYPES as VISION_TYPES
from forebay.families.parts.latent import LatentConfig
from forebay.families.small import LIKES, small_config
from forebay.formats.adapters import AdapterFiles, open_adapter
from forebay.formats.gguf_parts import first_parts, model_file, part_paths
from forebay.formats.hub_names import (
    HubModel,
    find_adapter,
    find_in_cache,
    hub_folder,
    hub_model,
    is_adapter,
    repository_of,
    revisions,
)
from forebay.formats.quantization import Quantization
from forebay.formats.store import cached, find_model, find_named, models_folder, short_name, users_of
from forebay.memory.kinds.build import describe_request
from forebay.pools.cache_spec import cache_sizes

_ALSO: Final = {"ls": "list", "remove": "rm", "delete": "rm", "download": "pull", "info": "inspect", "create": "make"}
CONTEXTS = (1024, 8192, 32768, 131072)
PIPED_WIDTH = 500
_DTYPES: Final = ("bfloat16", "float32")  # those of `--dtype`
_SHOWN_SIZE, _SHOWN_LAYERS = 512, 8


def run(words: Sequence[str]) -> int:
    """Dispatch to the action named by the first word."""
    action = _ALSO.get(words[0], words[0]) if words else "list"
    if action in ("-h", "--help"):
        lines = [f"  {name:<8} {summary}" for name, (summary, _) in ACTIONS.items()]
        print("\n".join(["usage: forebay models ACTION [options]", "", *lines]))
        raise SystemExit(0)
    if action not in ACTIONS:
        raise ConfigError(f"there is no `forebay models {action}`: use {', '.join(ACTIONS)}")
    ACTIONS[action][1](words[1:])
    return 0


def _parser(action: str, usage: str = "", model: str = "") -> Parser:
    parser = Parser(f"models {action}", f"{ACTIONS[action][0]}.".capitalize(), usage)
    if model:
        parser.option("model", nargs="?", help=model)
    return parser


def _list(words: Sequence[str]) -> None:
    parser = _parser("list", "[--json] [--supported]")
    parser.option("--json", action="store_true", help="for programs")
    parser.option("--supported", action="store_true", help="the types of models that are served, instead")
    own = parser.parse(words).own
    as_json = own.json
    if own.supported:
        _list_types(as_json=as_json)
        return
    found = [_listed(*entry) for entry in _here()]
    if as_json:
        print(json.dumps(found, indent=2))
        return
    if not found:
        print(f"no models in {models_folder()} and {hub_folder()}: `forebay models pull` fetches the default one")
        return
    table = Table(box=None)
    for column in ("name", "kind", "size", "revision", "used by", "path"):
        table.add_column(column, overflow="fold")
    for model in found:
        pids = ", ".join(map(str, model["used_by"]))
        table.add_row(
            model["name"], model["kind"], human_bytes(model["num_bytes"]), model["revision"], pids, model["path"]
        )
    _print(table)


def supported_types() -> dict[str, str]:
    """Return what is served of each `model_type`, as files name it."""
    served = dict.fromkeys((*TYPES, *OUTERS), "text")
    served |= dict.fromkeys(VISION_TYPES, "text and images") | dict.fromkeys(
        TEXT_ENCODERS, "vectors and labels of texts"
    )
    served |= {named: served[ours] for named, ours in OTHER_NAMES.items()}
    return dict(sorted(served.items()))


def _list_types(*, as_json: bool) -> None:
    served = supported_types()
    if as_json:
        print(json.dumps(served, indent=2))
        return
    table = Table(box=None)
    for column in ("model_type", "served"):
        table.add_column(column)
    for row in served.items():
        table.add_row(*row)
    _print(table)


def _here() -> Iterator[tuple[str, str, Path]]:
    """Return the models and adapters that can be served, by the name that `serve` takes; of the hub's with the
    revision."""
    for path in cached():
        yield short_name(path), "", path
    for repo, revision, folder in revisions():
        model = HubModel(repo, revision)
        files = first_parts(path for path in folder.rglob("*.gguf") if path.exists())
        for file in files:
            yield str(HubModel(repo, file=file.relative_to(folder).as_posix())), revision, file
        with contextlib.suppress(ModelError):
            if not files and (is_adapter(_names(folder)) or find_in_cache(model) == folder):
                yield repo, revision, folder


def _names(folder: Path) -> list[str]:
    """Return the names of the files in a folder; links may lead nowhere."""
    return [entry.name for entry in folder.iterdir() if entry.exists()] if folder.is_dir() else []


def _listed(name: str, revision: str, path: Path) -> dict[str, Any]:
    size = sum(file.stat().st_size for file in _files(path))
    kind = "adapter" if is_adapter(_names(path)) else "model"
    return {
        "name": name,
        "kind": kind,
        "num_bytes": size,
        "revision": revision,
        "used_by": _users(path),
        "path": str(path),
    }


def _users(path: Path) -> list[int]:
    """The processes that hold a model, which they do by its first file."""
    first = model_file(path)
    return users_of(first if first.exists() else path)


def _files(path: Path) -> list[Path]:
    """The files of a model: all in a folder, or the parts that are there."""
    return [file for file in (path.rglob("*") if path.is_dir() else part_paths(path)) if file.is_file()]


def _pull(words: Sequence[str]) -> None:
    parser = _parser("pull", "[MODEL|ADAPTER] [--revision NAME] [options as for serve, to see that it fits]")
    parser.engine_flags(server=False, model_is_positional=True)
    parsed = parser.parse(words)
    if "model_path" not in parsed.values:
        print(pull_default_model())
        return
    name, revision = (str(parsed.values[key]) if key in parsed.values else None for key in ("model_path", "revision"))
    model = hub_model(str(name), revision)
    if find_named(name) is not None or model is None:
        raise ConfigError(f"{name} is no model of the hub: those are called org/name, or org/name:Q4_K_M")
    print(pull(model, parsed.resolve, note))


def _remove(words: Sequence[str]) -> None:
    own = _parser("rm", "MODEL", "a name that `forebay models list` shows").parse(words).own
    if own.model is None:
        raise ConfigError("say which: `forebay models rm MODEL`; `forebay models list` shows those that are here")
    path = _named(own.model)
    if pids := _users(path):
        raise ConfigError(f"{own.model} is used by process {', '.join(map(str, pids))}: end it first")
    freed = _listed("", "", path)["num_bytes"]
    if repository_of(path) is None:
        if path.is_dir():
            shutil.rmtree(path)
        for file in () if path.is_dir() else _files(path):
            file.unlink()
    else:
        from forebay.formats.hub import remove  # its library takes a third of a second to import

        freed = remove(path)
    print(f"removed {own.model}: {human_bytes(freed)}")


def _named(name: str) -> Path:
    """Return a listed model by its name. A folder or file elsewhere is its owner's to remove."""
    here = [(full, path) for known, revision, path in _here() for full in (known, f"{known}@{revision}")]
    matches = [path for known, path in here if known == name]
    matches = matches or [path for known, path in here if known.lower() == name.lower()]
    if len(matches) != 1:
        several = f"{len(matches)} are called {name}: add @ and a revision" if matches else f"no {name} is here"
        raise ModelError(f"{several}; `forebay models list` shows what is")
    return matches[0]


def _inspect(words: Sequence[str]) -> None:
    inspect(_parser("inspect", "[MODEL]", "a path or a listed name").parse(words).own.model)


def _show(words: Sequence[str]) -> None:
    show(_parser("show", "[MODEL|TYPE]", "a path, a listed name or a type").parse(words).own.model)


def _make(words: Sequence[str]) -> None:
    parser = _parser("make", "NAME --like TYPE [options]", "what to call it")
    add_options(parser)
    own = parser.parse(words).own
    print(make(own.model, own))


def _quantize(words: Sequence[str]) -> None:
    parser = _parser("quantize", "MODEL --to int4|int8 --out FOLDER", "a path, a listed name or org/name")
    quantize_model.add_options(parser)
    own = parser.parse(words).own
    print(quantize_model.quantize(own.model, own))


def inspect(name: str | None) -> None:
    """Print a checkpoint's shape, quantisation and memory needs, or what an adapter is. Reads no weights. Raises
    ModelError for a checkpoint that cannot be served."""
    if (folder := _adapter(name)) is not None:
        _print_items(str(folder), _adapter_items(open_adapter(folder)))
        return
    checkpoint = open_with_encoder(find_model(name))
    check_served_files(checkpoint.path)
    _print_items(str(checkpoint.path), [*_shape(checkpoint), *_memory(checkpoint)])


def _adapter(name: str | None) -> Path | None:
    """Return the folder of the adapter of this name; None if there is none."""
    with contextlib.suppress(ModelError):
        folder = None if name is None else find_adapter(name)
        return folder if folder is not None and is_adapter(_names(folder)) else None
    return None


def _adapter_items(files: AdapterFiles) -> list[tuple[str, str]]:
    ranks, modules = files.ranks, Counter(layer.rpartition(".")[2] for layer in files.ranks)
    most = max(ranks.values())
    return [
        ("kind", "an adapter (LoRA), for the model that it was trained on"),
        ("trained on", files.config.base or "not recorded"),
        ("rank", str(most) if min(ranks.values()) == most else f"{min(ranks.values())} to {most}"),
        ("layers", ", ".join(f"{count} x {module}" for module, count in sorted(modules.items()))),
        ("tensor data", human_bytes(files.num_bytes)),
        ("to serve it", f"forebay serve MODEL --enable-lora --max-lora-rank {most} --lora-modules NAME={files.folder}"),
    ]


def show(name: str | None) -> None:
    """Print a model's description as equations: a checkpoint's, or that of a small one of a type."""
    from forebay.models import describe, needs_of  # bring torch, which nothing but this needs here
    from forebay.models.encoder import encoder_spec
    from forebay.models.equations import equations
    from forebay.models.text_encoder import TextEncoderSpec

    if name in LIKES:
        config = config_of(small_config(name, hidden_size=_SHOWN_SIZE, num_layers=_SHOWN_LAYERS, vocab_size=1 << 15))
        print(f"{family_title(config.model_type)}\nA small {name} may be:\n")
    else:
        checkpoint = open_with_encoder(find_model(name))
        config = checkpoint.config
        print(f"{family_title(config.model_type)}\n{checkpoint.path}:\n")
    spec = describe(config)
    if isinstance(spec, TextEncoderSpec):
        print("\n".join(spec.equations()))
        return
    print("\n".join(equations(spec, needs_of(config).kept_by_block)))
    if config.vision is not None:
        print("\nimages:\n" + "\n".join(encoder_spec(config).equations()))


def _shape(checkpoint: Checkpoint) -> list[tuple[str, str]]:
    model = checkpoint.config
    parameters = sum(math.prod(tensor.shape) for tensor in checkpoint.every_tensor)
    return [
        ("architecture", model.model_type),
        ("parameters", f"{parameters / 1e6:,.1f} M in {len(checkpoint.every_tensor)} tensors"),
        ("layers", f"{model.num_layers} of width {model.hidden_size}, inner {model.intermediate_size}"),
        ("attention", f"{model.num_heads} query heads, {kv_heads(model)}"),
        *_encoder(checkpoint),
        ("vocabulary", f"{model.vocab_size:,} tokens"),
        ("context", f"{model.max_position_embeddings:,} tokens"),
        ("stored as", _quantisation(checkpoint)),
        ("tensor data", human_bytes(checkpoint.num_bytes)),
        *_tables(checkpoint),
    ]


def kv_heads(model: ModelConfig) -> str:
    """Return the KV heads of layers with attention, in words; of latent attention the latent that all heads share."""
    if not isinstance(model, LatentConfig):
        return f"{model.num_kv_heads} KV heads of {model.head_dim}"
    latent = model.latent
    rotated = f" and {latent.rope_dim} rotated entries" if latent.rope_dim else ""
    return f"a latent of {latent.rank}{rotated} for all"


def _tables(checkpoint: Checkpoint) -> list[tuple[str, str]]:
    size = checkpoint.num_table_bytes
    return [("tables", f"{human_bytes(size)}, read by row from the files, not in memory")] if size else []


def _encoder(checkpoint: Checkpoint) -> list[tuple[str, str]]:
    vision = checkpoint.config.vision
    if vision is None:
        return []
    parameters = sum(math.prod(tensor.shape) for tensor in checkpoint.encoder.values())
    layers = f"{vision.num_layers} layer{'s' * (vision.num_layers > 1)} of width {vision.hidden_size}"
    return [("images", f"{vision.tiles}; an encoder of {layers}, {parameters / 1e6:,.1f} M parameters")]


def _quantisation(checkpoint: Checkpoint) -> str:
    """`210 x Q4_1, 61 x F32`, from the headers."""
    kinds = Counter(tensor.storage for tensor in checkpoint.every_tensor)
    return ", ".join(f"{count} x {kind}" for kind, count in kinds.most_common())


def _memory(checkpoint: Checkpoint) -> list[tuple[str, str]]:
    from forebay.models import needs_of  # brings torch, which nothing but this needs here

    model, specs = checkpoint.config, needs_of(checkpoint.config).cache_specs
    contexts = sorted({c for c in CONTEXTS if c < model.max_position_embeddings} | {model.max_position_embeddings})
    rows = []
    shapes, kernels = read_shape(checkpoint.path, False, checkpoint.mmproj).weights, kernels_on(this_cpu(), "native")
    held = shapes.held_bytes(Quantization.FILE, value_bytes("bfloat16", kernels))
    parameters = shapes.num_parameters
    if held != parameters * ITEM_BYTES["bfloat16"]:
        rows.append(("memory, as stored", f"weights {human_bytes(held)}, which is how they are served"))
    for dtype in _DTYPES:
        sizes = cache_sizes(specs, CacheTypes(dtype=dtype, kv_cache_dtype=dtype))
        kv = ", ".join(f"{human_bytes(sizes.kv_bytes_per_token * context)} for {context:,}" for context in contexts)
        weights = shapes.held_bytes(Quantization.NONE, value_bytes(dtype, kernels))
        narrow = dtype == "float32" and weights < parameters * ITEM_BYTES["float32"]
        note = ", of which bfloat16 numbers stay in 2 bytes and are widened as they are read" if narrow else ""
        rows.append((f"memory, {dtype}", f"weights {human_bytes(weights)}{note}"))
        if sizes.kv_bytes_per_token:
            rows.append(("", f"KV {human_bytes(sizes.kv_bytes_per_token)} a token: {kv}"))
        rows += [("", words) for words in describe_request(sizes)]
    memory = available_memory()
    return [*rows, ("this machine", f"{human_bytes(memory.value)} {memory.why}")]


def _print_items(title: str, items: Iterable[tuple[str, str]]) -> None:
    table = Table(title=title, title_justify="left", box=None, show_header=False)
    table.add_column(style="dim")
    table.add_column(overflow="fold")
    for item, value in items:
        table.add_row(item, value)
    _print(table)


def _print(table: Table) -> None:
    """Print for a script if standard output is no terminal: paths are not broken, and lines not padded."""
    console = Console(highlight=False, width=None if sys.stdout.isatty() else PIPED_WIDTH)
    with console.capture() as printed:
        console.print(table)
    print("\n".join(line.rstrip() for line in printed.get().splitlines()))


ACTIONS: Final[dict[str, tuple[str, Callable[[Sequence[str]], None]]]] = {
    "list": ("the models and adapters that are here, with their sizes and who uses them", _list),
    "pull": ("fetch a model or an adapter of the hub, or the default model", _pull),
    "rm": ("remove a model that is listed", _remove),
    "inspect": ("what a model or an adapter is and needs", _inspect),
    "show": ("a model, or a small one of a type, as equations", _show),
    "quantize": ("write a model with its matrices in 4 or 8 bits", _quantize),
    "make": ("write a small random model with the default model's tokenizer", _make),
}
