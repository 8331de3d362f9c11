"""Models and adapters of the hub that are not on this machine: what they are is fetched first, then whether they fit is
decided, and then come the weights."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from forebay.base.errors import ModelError
from forebay.base.progress import byte_progress
from forebay.base.units import human_bytes
from forebay.config.config import Config
from forebay.config.resolve import Survey
from forebay.engine.lifecycle.model_shape import Shape, read_shape
from forebay.engine.lifecycle.served_files import check_served_files
from forebay.engine.lifecycle.sizing import memory_demand
from forebay.families.base.embedding import LEXICAL, MULTI, embedding_of
from forebay.families.config.model_config import ModelConfig
from forebay.formats.adapters import PICKLED_NAME, WEIGHTS_NAME, WHY_NOT_PICKLED, AdapterFiles, open_adapter
from forebay.formats.files import MAX_SMALL_BYTES
from forebay.formats.gguf_parts import part_names
from forebay.formats.hub_names import HubModel, absent_adapter, chosen_gguf
from forebay.formats.mmproj_files import mmproj_of
from forebay.formats.safetensors import ADAPTER_NAME, INDEX_NAME, SINGLE_NAME, weight_files, why_no_weights
from forebay.formats.weight_shapes import WeightShapes
from forebay.memory.division import divide_memory
from forebay.pools.cache_spec import cache_sizes

if TYPE_CHECKING:
    from forebay.formats.hub import Hub, Repository

CONFIG_NAME: Final = "config.json"
TOKENIZER_NAME: Final = "tokenizer.json"
OTHER_TOKENIZER: Final = "tokenizer.model"
# The largest vocabularies take a quarter of it.
HEADER_BYTES: Final = 64 << 20
LATER_HEADER_BYTES: Final = 4 << 20  # of a later part, which has no tokenizer: enough for 40,000 tensors
ADAPTER_HEADER_BYTES: Final = 16 << 20  # enough for as many tensors as are read of one file

Say = Callable[[str], None]


def bring(model: HubModel, resolved: Callable[[Survey], Config], say: Say) -> Path:
    """Fetch the model, if it can be served as `resolved` decides. Raises ConfigError and ModelError."""
    return _bring_model(*_look(model), resolved, say)


def pull(model: HubModel, resolved: Callable[[Survey], Config], say: Say) -> Path:
    """Fetch a model as `bring` does, or an adapter, which is checked as far as it can be without its model."""
    hub, repository = _look(model)
    if ADAPTER_NAME in repository.files and not repository.files.keys() & {SINGLE_NAME, INDEX_NAME}:
        return _bring_adapter(hub, repository, lambda files: None, say)
    return _bring_model(hub, repository, resolved, say)


def bring_adapters(modules: Iterable[str], resolved: Callable[[Survey], Config], say: Say) -> None:
    """Fetch the adapters of these `NAME=org/name` that are not here, if they fit the model that `resolved` decides to
    serve, which is here. Raises ConfigError and ModelError."""
    absent = [model for text in modules if (model := absent_adapter(text.partition("=")[2].strip()))]
    if not absent:
        return
    from forebay.models import check_adapter  # brings torch, which nothing but this needs here

    engine = resolved(Survey(adapter=Path)).engine
    config = read_shape(Path(engine.model_path), False).config
    for model in absent:
        bring_adapter(model, lambda files: check_adapter(files, config, max_rank=engine.adapters.max_lora_rank), say)


def bring_adapter(model: HubModel, check: Callable[[AdapterFiles], None], say: Say) -> Path:
    """Fetch the two files of an adapter, once `check` has seen its configuration and header. Raises ConfigError and
    ModelError."""
    return _bring_adapter(*_look(model), check, say)


def _bring_adapter(hub: Hub, repository: Repository, check: Callable[[AdapterFiles], None], say: Say) -> Path:
    model, files = repository.model, repository.files
    if ADAPTER_NAME not in files:
        raise ModelError(f"{model} is no adapter: it has no {ADAPTER_NAME}; adapters are saved by PEFT")
    if WEIGHTS_NAME not in files:
        why = WHY_NOT_PICKLED if PICKLED_NAME in files else f"the LoRA adapter has no {WEIGHTS_NAME}"
        raise ModelError(f"{model}: {why}")
    if (size := files[ADAPTER_NAME].num_bytes) > MAX_SMALL_BYTES:
        most = human_bytes(MAX_SMALL_BYTES)
        raise ModelError(f"{model}: {ADAPTER_NAME} has {human_bytes(size)}; at most {most} of it are read")
    with tempfile.TemporaryDirectory(prefix="forebay-") as scratch:
        folder = hub.fetch(repository, [ADAPTER_NAME], lambda done, total: None)
        (Path(scratch) / ADAPTER_NAME).symlink_to(folder / ADAPTER_NAME)
        hub.begin(repository, WEIGHTS_NAME, ADAPTER_HEADER_BYTES, Path(scratch) / WEIGHTS_NAME)
        try:
            check(open_adapter(Path(scratch)))
        except ModelError as error:
            raise ModelError(error.message.replace(scratch, str(model))) from error
    say(f"fetching the adapter {model} at {_at(repository)}: {human_bytes(files[WEIGHTS_NAME].num_bytes)}")
    with byte_progress(str(model)) as progress:
        hub.fetch(repository, [ADAPTER_NAME, WEIGHTS_NAME], progress)
    hub.settle(repository)
    return folder


def _bring_model(hub: Hub, repository: Repository, resolved: Callable[[Survey], Config], say: Say) -> Path:
    model = repository.model
    gguf = chosen_gguf(repository.files, model)
    with _described(hub, repository, gguf) as path:
        _check_fits(path, resolved)
        weights = part_names(gguf) if gguf is not None else _weight_names(repository, path)
        weights += _encoder_names(repository, gguf)
    missing = [name for name in weights if name not in repository.files]
    if missing:
        raise ModelError(f"{model} has no {missing[0]}, which its index names: it is not whole at {repository.commit}")
    size = sum(repository.files[name].num_bytes for name in weights)
    say(f"fetching {model} at {_at(repository)}: {len(weights)} files of weights, {human_bytes(size)}")
    with byte_progress(str(model)) as progress:
        folder = hub.fetch(repository, [*repository.descriptions, *weights], progress)
    hub.settle(repository)
    return folder / gguf if gguf is not None else folder


def _encoder_names(repository: Repository, gguf: str | None) -> list[str]:
    """Return the name of the vision encoder's file of a GGUF model, if the repository has one, or of several that are
    equally good: `--mmproj` chooses among them."""
    return [] if gguf is None else mmproj_of(repository.files, gguf)


def _at(repository: Repository) -> str:
    """Return the revision and its commit, for people."""
    revision, commit = repository.model.revision, repository.commit
    return commit[:12] if revision == commit else f"{revision} ({commit[:12]})"


def _weight_names(repository: Repository, path: Path) -> list[str]:
    """Return the names of the weight files. `path` holds the descriptions; the index is among them if there is one."""
    if TOKENIZER_NAME not in repository.files:
        other = f"only {OTHER_TOKENIZER}" if OTHER_TOKENIZER in repository.files else "no other tokenizer"
        raise ModelError(
            f"{repository.model} cannot be served: it has no {TOKENIZER_NAME} ({other}): take a repository that has "
            "one, or a GGUF file, or save it with transformers (AutoTokenizer.from_pretrained, save_pretrained)"
        )
    dense = [f"{layer.folder}/{SINGLE_NAME}" for layer in embedding_of(path).dense]
    of_tokens = [name for name in (f"{LEXICAL}.pt", f"{MULTI}.pt") if name in repository.files]
    return [*(weight_files(path) if INDEX_NAME in repository.files else [SINGLE_NAME]), *dense, *of_tokens]


def _check_fits(path: Path, resolved: Callable[[Survey], Config]) -> None:
    """Check that the model can be served and fits, without its draft model: that may not be here either."""
    shape: list[Shape] = []

    def survey(*which: Any) -> tuple[ModelConfig, WeightShapes]:
        shape.append(read_shape(*which))
        return shape[-1].config, shape[-1].weights

    config = resolved(Survey(find=lambda *_: path, model=survey, adapter=Path))
    check_served_files(path, config.server.chat_template)
    engine = config.engine
    sizes = cache_sizes(shape[-1].needs.cache_specs, engine.types)
    divide_memory(memory_demand(engine, sizes, shape[-1].config))


@contextmanager
def described(model: HubModel) -> Iterator[Path]:
    """A path that says what the model is, without its weights, for as long as it lasts."""
    hub, repository = _look(model)
    with _described(hub, repository, chosen_gguf(repository.files, model)) as path:
        yield path


def _look(model: HubModel) -> tuple[Hub, Repository]:
    from forebay.formats.hub import Hub  # its library takes a third of a second to import

    hub = Hub()
    return hub, hub.look(model)


@contextmanager
def _described(hub: Hub, repository: Repository, gguf: str | None) -> Iterator[Path]:
    if gguf is None:
        _check_files(repository)
        yield hub.fetch(repository, repository.descriptions, lambda done, total: None)
        return
    with tempfile.TemporaryDirectory(prefix="forebay-") as scratch:
        for name in (*part_names(gguf), *_encoder_names(repository, gguf)):
            num_bytes = HEADER_BYTES if name == gguf else LATER_HEADER_BYTES
            hub.begin(repository, name, num_bytes, Path(scratch) / Path(name).name)
        yield Path(scratch) / Path(gguf).name


def _check_files(repository: Repository) -> None:
    """Raise ModelError for a repository without weights or a configuration."""
    names, model = repository.files.keys(), repository.model
    if model.file or model.codes or not names & {SINGLE_NAME, INDEX_NAME}:
        asked = f"it has no {model.file or model.codes}: " if model.file or model.codes else ""
        raise ModelError(f"{model} cannot be served: {asked}{why_no_weights(names)}")
    if CONFIG_NAME not in names:
        raise ModelError(
            f"{model} cannot be served: it has no {CONFIG_NAME}, which names the architecture and the sizes"
        )
