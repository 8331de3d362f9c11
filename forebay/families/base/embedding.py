"""Settings in a checkpoint's files about how a text becomes a vector, and how a document is judged.

The layout is sentence-transformers': `modules.json` lists the parts behind the layers, each with a folder of its own.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeGuard

from forebay.base.errors import ModelError, brief
from forebay.formats.files import is_there, parse_json, read_bytes, read_json

if TYPE_CHECKING:
    from forebay.formats.gguf import GgufFile

LAST: Final = "last"
MEAN: Final = "mean"
CLS: Final = "cls"
POOLINGS: Final = (LAST, MEAN, CLS)
MODULES: Final = "modules.json"
PROMPTS: Final = "config_sentence_transformers.json"
MAX_PROMPTS: Final = 256
MAX_PROMPT_CHARS: Final = 4096
_POOLING: Final = "1_Pooling/config.json"
_MAX_BYTES: Final = 1 << 16
_MAX_VALUES: Final = 1 << 10
_BY_FLAG: Final = {
    "pooling_mode_lasttoken": LAST,
    "pooling_mode_mean_tokens": MEAN,
    "pooling_mode_cls_token": CLS,
}
_GGUF_NONE: Final = 0
_GGUF_RANK: Final = 4
_GGUF_HEAD: Final = "cls.output.weight"
GGUF_DENSE: Final = ("dense_2", "dense_3")
"""Layers behind the pooling of an EmbeddingGemma in GGUF, which have neither biases nor activations."""
_OF_GGUF: Final = {1: MEAN, 2: CLS, 3: LAST}
_BY_NAME: Final = {"lasttoken": LAST, "mean": MEAN, "cls": CLS}
_MAX_DENSE: Final = 8
_MAX_OUTPUTS: Final = 1 << 16
_ACTIVATIONS: Final = {"Identity": "", "Tanh": "tanh", "ReLU": "relu", "GELU": "gelu", "SiLU": "silu"}
_DENSE_DEFAULTS: Final = {"bias": True, "activation_function": "torch.nn.modules.activation.Tanh"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Dense:
    """A linear layer behind the pooling, in the `folder` of its own; `activation` is "" for none."""

    folder: str
    inputs: int
    outputs: int
    bias: bool
    activation: str

    @property
    def layer(self) -> str:
        """Return the name of the layer among the tensors of the checkpoint."""
        return f"{self.folder}.linear"


@dataclass(frozen=True, kw_only=True, slots=True)
class Embedding:
    """`is_embedder`: the files say how vectors are made of this model. With `normalize` they have length 1.
    `judges_by` are the tokens for a document that fits and for one that does not, where the files name them. `refused`
    says why what the files want is not done here. `dense` are layers behind the pooling, in order. `prompts` are texts
    in front of a text, by the name of a task; that of `default_prompt` counts where none is named."""

    pooling: str = LAST
    why: str = "the checkpoint does not say: what has seen the whole text"
    is_embedder: bool = False
    normalize: bool = True
    judges_by: tuple[int, ...] = ()
    refused: str = ""
    dense: tuple[Dense, ...] = ()
    prompts: tuple[tuple[str, str], ...] = ()
    default_prompt: str = ""


def embedding_of(path: Path) -> Embedding:
    """Read the settings of the checkpoint at `path`, a folder or a GGUF file. Raises ModelError for files that are not
    what their names say."""
    if not path.is_dir():
        return _of_gguf(path) if path.suffix == ".gguf" and path.exists() else Embedding()
    if is_there(path / MODULES):
        found = _with_modules(path)
    else:
        found = _pooling(path / _POOLING, _POOLING) if is_there(path / _POOLING) else Embedding()
    return _with_prompts(found, path / PROMPTS) if is_there(path / PROMPTS) else found


def _with_prompts(found: Embedding, path: Path) -> Embedding:
    config = read_json(path)
    prompts, default = config.get("prompts") or {}, config.get("default_prompt_name") or ""
    texts = [text for pair in prompts.items() for text in pair] if isinstance(prompts, dict) else [None]
    short = all(isinstance(text, str) and len(text) <= MAX_PROMPT_CHARS for text in texts)
    if not short or len(texts) > 2 * MAX_PROMPTS:
        raise ModelError(
            f"{path}: prompts is {brief(prompts)}; possible are at most {MAX_PROMPTS} texts of {MAX_PROMPT_CHARS} "
            "characters, by name"
        )
    if default and default not in prompts:
        raise ModelError(f"{path}: default_prompt_name is {brief(default)}, which is none of its prompts")
    return replace(found, prompts=tuple(prompts.items()), default_prompt=default)


def _of_gguf(path: Path) -> Embedding:
    from forebay.formats.gguf_parts import model_file

    first = model_file(path)
    state = first.stat() if first.exists() else None
    return _of_parts(first, *(() if state is None else (state.st_ino, state.st_mtime_ns, state.st_size)))


@lru_cache(maxsize=4)  # a start asks several times, and a vocabulary is long
def _of_parts(path: Path, *state: int) -> Embedding:
    """Read the settings of a GGUF model in the `state` in which its first file is."""
    from forebay.formats.gguf import GgufFile  # brings numpy, which --help does without

    file = GgufFile(path)
    key = f"{file.metadata.get('general.architecture')}.pooling_type"
    kind = file.metadata.get(key, _GGUF_NONE)
    if type(kind) is not int or kind not in (_GGUF_NONE, _GGUF_RANK, *_OF_GGUF):
        raise ModelError(f"{file.path}: {key} is {brief(kind)}; llama.cpp has 0 (none) to 4 (rank)")
    if kind == _GGUF_NONE:
        return Embedding(dense=_dense_of(file))
    if kind == _GGUF_RANK and _GGUF_HEAD in file.tensors:
        return Embedding()  # of a text encoder, whose configuration has the head
    if kind == _GGUF_RANK:
        return Embedding(is_embedder=True, refused=f"{key} is {kind}: scores by a classifier's head are not served")
    return Embedding(is_embedder=True, pooling=_OF_GGUF[kind], why=f"{key} says so", dense=_dense_of(file))


def _dense_of(file: GgufFile) -> tuple[Dense, ...]:
    """Return the layers behind the pooling of an EmbeddingGemma. Raises ModelError for weights that are no matrix."""
    tensors = {name: file.tensors[f"{name}.weight"] for name in GGUF_DENSE if f"{name}.weight" in file.tensors}
    found = []
    for name, tensor in tensors.items():
        if len(tensor.shape) != 2:
            raise ModelError(f"{file.path}: {name!r} has the shape {tensor.shape}, which is no matrix")
        outputs, inputs = tensor.shape
        found.append(Dense(folder=name, inputs=inputs, outputs=outputs, bias=False, activation=""))
    return tuple(found)


def _pooling(path: Path, name: str) -> Embedding:
    """Read the file of a pooling; `name` is what errors call it."""
    config = read_json(path)
    named = config.get("pooling_mode")
    if isinstance(named, str):
        wanted = [_BY_NAME.get(named, named)]
    else:
        wanted = [_BY_FLAG.get(key, key) for key, value in config.items() if key.startswith("pooling_mode_") and value]
    if len(wanted) != 1 or wanted[0] not in POOLINGS:
        how = " and ".join(wanted) or "nothing"
        return Embedding(is_embedder=True, refused=f"{name} wants {how[:200]}; served are {', '.join(POOLINGS)}")
    return Embedding(is_embedder=True, pooling=wanted[0], why=f"{name} says so")


def _with_modules(path: Path) -> Embedding:
    listed = parse_json(b'{"": %b}' % read_bytes(path / MODULES, _MAX_BYTES), MODULES, most_values=_MAX_VALUES)[""]
    if not isinstance(listed, list) or not all(isinstance(module, dict) for module in listed):
        raise ModelError(f"{path / MODULES}: a list of modules is expected")
    kinds = [str(module.get("type", "")).rpartition(".")[2] for module in listed]
    found = _pooling(path / _POOLING, _POOLING) if is_there(path / _POOLING) else Embedding()
    found = replace(found, normalize="Normalize" in kinds)
    for i, (kind, module) in enumerate(zip(kinds, listed, strict=True)):
        match kind:
            case "Dense" if "Pooling" in kinds[:i]:
                found = replace(found, dense=(*found.dense, _dense(path, module)))
            case "Transformer" | "Normalize":
                pass
            case "Pooling":
                found = _of_pooling_module(found, path, module)
            case "LogitScore":
                found = _judging(found, read_json(_folder_of(path, module) / "config.json"))
            case _:
                found = replace(found, refused=f"{MODULES} wants a {kind[:64]}, which is not served")
    return found


def _of_pooling_module(found: Embedding, path: Path, module: dict[str, Any]) -> Embedding:
    file = _folder_of(path, module) / "config.json"
    name = f"{file.parent.name}/config.json"
    if not is_there(file):
        return replace(found, is_embedder=True, refused=f"{MODULES} names a Pooling, and {name} is missing")
    named = _pooling(file, name)
    return replace(named, normalize=found.normalize, refused=named.refused or found.refused)


def _dense(path: Path, module: dict[str, Any]) -> Dense:
    """Read the settings of a dense layer. Raises ModelError for sizes and activations that cannot be served."""
    file = _folder_of(path, module) / "config.json"
    config = _DENSE_DEFAULTS | read_json(file)
    inputs, outputs, bias = (config.get(name) for name in ("in_features", "out_features", "bias"))
    if not _is_size(inputs) or not _is_size(outputs) or type(bias) is not bool:
        raise ModelError(
            f"{file}: in_features, out_features and bias are {brief([inputs, outputs, bias])}; possible are sizes up "
            f"to {_MAX_OUTPUTS:,}, and true or false"
        )
    named = str(config["activation_function"]).rpartition(".")[2]
    if named not in _ACTIVATIONS:
        raise ModelError(f"{file}: activation_function is {brief(named)}; possible are {', '.join(_ACTIVATIONS)}")
    return Dense(
        folder=file.parent.name,
        inputs=inputs,
        outputs=outputs,
        bias=bias,
        activation=_ACTIVATIONS[named],
    )


def _is_size(value: object) -> TypeGuard[int]:
    return type(value) is int and 0 < value <= _MAX_OUTPUTS


def dense_layers(path: Path) -> tuple[Dense, ...]:
    """Return the layers behind the pooling of the checkpoint at `path`, each of which takes the outputs of the one
    before. Raises ModelError for layers that do not."""
    found = embedding_of(path).dense
    if len(found) > _MAX_DENSE:
        raise ModelError(f"{path / MODULES}: {len(found)} dense layers; at most {_MAX_DENSE} are served")
    for first, second in pairwise(found):
        if first.outputs != second.inputs:
            raise ModelError(
                f"{path}: {second.folder} has {second.inputs} inputs, and {first.folder} before it "
                f"{first.outputs} outputs"
            )
    return found


def dense_files(path: Path) -> list[Path]:
    """Return the weight files of the dense layers of the checkpoint at `path`. Raises ModelError if one is missing."""
    from forebay.formats.safetensors import SINGLE_NAME  # brings numpy, which --help does without

    files = [path / layer.folder / SINGLE_NAME for layer in dense_layers(path)] if path.is_dir() else []
    for file in files:
        if not is_there(file):
            raise ModelError(
                f"{file} is missing: save the model with sentence-transformers 3 or later, or fetch it again"
            )
    return files


LEXICAL: Final = "sparse_linear"
MULTI: Final = "colbert_linear"


def token_files(path: Path) -> list[Path]:
    """Return the files of layers behind each token of the checkpoint at `path`: a weight for words that match, and a
    vector of each token, as BGE-M3 has them."""
    names = (f"{layer}.pt" for layer in (LEXICAL, MULTI))
    return [path / name for name in names if is_there(path / name)] if path.is_dir() else []


def token_layers(path: Path) -> tuple[Dense, ...]:
    """Return the layers behind each token of the checkpoint in the folder `path`, by the names of their files. Raises
    ModelError for files without such a layer."""
    from forebay.formats.torch_file import read_torch_file

    found = []
    for file in token_files(path):
        shapes = {name: tensor.shape for name, tensor in read_torch_file(file).items()}
        outputs, inputs = shapes.get("weight", ()) if len(shapes.get("weight", ())) == 2 else (0, 0)
        if shapes != {"weight": (outputs, inputs), "bias": (outputs,)} or not _is_size(outputs):
            raise ModelError(
                f"{file}: it has {brief(shapes)}; a layer has a weight and a bias of up to {_MAX_OUTPUTS:,}"
            )
        if file.stem == LEXICAL and outputs != 1:
            raise ModelError(f"{file}: it has {outputs} outputs; a token has one weight")
        found.append(Dense(folder=file.stem, inputs=inputs, outputs=outputs, bias=True, activation=""))
    return tuple(found)


def _folder_of(path: Path, module: dict[str, Any]) -> Path:
    name = module.get("path")
    if not isinstance(name, str) or not name or Path(name).name != name:
        raise ModelError(f"{path / MODULES}: {name!r} is no folder of the checkpoint")
    return path / name


def _judging(found: Embedding, config: dict[str, Any]) -> Embedding:
    yes, no = config.get("true_token_id"), config.get("false_token_id")
    if type(yes) is not int or type(no) is not int:
        return replace(
            found, refused=f"{MODULES} wants scores by {brief(yes)} and {brief(no)}, which are no two tokens"
        )
    return replace(found, judges_by=(yes, no))
