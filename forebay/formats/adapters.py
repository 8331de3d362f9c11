"""LoRA adapters in PEFT's format: a folder with a configuration and, for each adapted layer, two thin matrices.

The output of a layer is W x + scale * B (A x). arXiv 2106.09685, section 4.1. Shape letters: r rank, N and K a layer's
outputs and inputs.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np

from forebay.base.errors import ModelError, brief
from forebay.formats.file_array import Array
from forebay.formats.files import is_there, read_json
from forebay.formats.quantized import F32
from forebay.formats.safetensors import ADAPTER_NAME, ADAPTER_WEIGHTS_NAME, SafetensorsFile
from forebay.formats.stored_tensor import as_float32

WEIGHTS_NAME: Final = ADAPTER_WEIGHTS_NAME
PICKLED_NAME: Final = "adapter_model.bin"
WHY_NOT_PICKLED: Final = (
    f"the adapter is pickled ({PICKLED_NAME}), which can run code and is never opened: save it again with "
    "safe_serialization=True"
)
_PREFIX: Final = "base_model.model."
_PARTS: Final = (".lora_A.weight", ".lora_B.weight")

Shape = tuple[int, int]
"""(N, K) of a linear layer."""

# Of PEFT 0.21. Fields that select or initialize what was trained, or say with what: the tensors are the result.
_WITHOUT_EFFECT: Final = frozenset(
    {"auto_mapping", "corda_config", "ensure_weight_tying", "eva_config", "exclude_modules", "inference_mode"}
    | {"layers_pattern", "layers_to_transform", "loftq_config", "lora_dropout", "lora_ga_config", "megatron_core"}
    | {"peft_version", "qalora_group_size", "revision", "runtime_config", "target_modules", "task_type"}
)
# Fields that change what a layer computes, or another part of the model, unless they are off.
_UNSUPPORTED: Final = frozenset(
    {"alora_invocation_tokens", "arrow_config", "fan_in_fan_out", "layer_replication", "lora_bias", "megatron_config"}
    | {"modules_to_save", "monteclora_config", "target_parameters", "trainable_token_indices", "use_bdlora"}
    | {"use_dora", "use_qalora", "velora_config"}
)
_READ: Final = frozenset(
    {"alpha_pattern", "base_model_name_or_path", "bias", "init_lora_weights", "lora_alpha", "peft_type", "r"}
    | {"rank_pattern", "use_rslora"}
)
_OFF: Final[tuple[Any, ...]] = (None, False, [], {}, "")
# Other ways to initialize an adapter change the base's weights as well.
_INITIAL: Final = (None, True, False, "gaussian", "eva", "orthogonal")
_PLAIN_KEY: Final = re.compile(r"[\w.-]+", re.ASCII)
_MOST_RANK: Final = 1 << 16


@dataclass(frozen=True, slots=True, eq=False)
class AdapterPair:
    """The A [r, K] and B [N, r] of one layer, with the numbers of the file: float32, float16, or the bits of
    bfloat16."""

    a: Array
    b: Array
    scale: float

    @property
    def rank(self) -> int:
        return len(self.a)

    def inputs(self) -> F32:
        """Return A [r, K]."""
        return _wide(self.a)

    def outputs(self) -> F32:
        """Return scale * B, [N, r], each product rounded to float32."""
        return _wide(self.b) * np.float32(self.scale)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Adapter:
    """An adapter that was read and checked. `pairs` are by our name of the layer, without `.weight`. `base` is the name
    of the model that it was trained on, as its configuration has it: nothing checks that. `digest` is equal for two
    adapters of the same tensors and factors."""

    path: Path
    base: str
    pairs: Mapping[str, AdapterPair]
    digest: str

    @property
    def rank(self) -> int:
        """The largest of all layers."""
        return max(pair.rank for pair in self.pairs.values())

    @property
    def num_bytes(self) -> int:
        return sum(pair.a.nbytes + pair.b.nbytes for pair in self.pairs.values())


@dataclass(frozen=True, slots=True)
class _Pattern:
    """A field of values by layer, with the place of each key in the file: the first that fits counts, as in PEFT. A key
    is the name of a layer or its end from a dot on (`names`), or the name alone (`whole`)."""

    names: Mapping[str, tuple[int, float]]
    whole: Mapping[str, tuple[int, float]]

    def value(self, layer: str) -> float | None:
        """Return the layer's value; None for a layer without."""
        ends = [layer, *(layer[match.end() :] for match in re.finditer(r"\.", layer))]
        found = [self.names[end] for end in ends if end in self.names]
        return min([*found, *([self.whole[layer]] if layer in self.whole else [])], default=(0, None))[1]


@dataclass(frozen=True, kw_only=True, slots=True)
class _Config:
    """The fields of a configuration that tensors are read by."""

    base: str
    rank: int
    alpha: float
    rslora: bool
    ranks: _Pattern
    alphas: _Pattern

    def rank_of(self, layer: str) -> int:
        return int(self.ranks.value(layer) or self.rank)

    def scale_of(self, layer: str) -> float:
        """Return alpha / r; alpha / sqrt(r) if rank-stabilized (arXiv 2312.03732)."""
        alpha, rank = self.alphas.value(layer), self.rank_of(layer)
        return (self.alpha if alpha is None else alpha) / (math.sqrt(rank) if self.rslora else rank)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class AdapterFiles:
    """The opened files of an adapter, whose configuration and header are checked. No entry of a tensor is read.
    `stored` are the names of A and B in the file, by layer of the model that was trained."""

    folder: Path
    config: _Config
    file: SafetensorsFile
    stored: Mapping[str, Mapping[str, str]]

    @property
    def ranks(self) -> dict[str, int]:
        """Return the rank of each layer."""
        return {layer: self.config.rank_of(layer) for layer in self.stored}

    @property
    def num_bytes(self) -> int:
        return sum(tensor.num_bytes for tensor in self.file.tensors.values())

    def layers_of(self, layers: Mapping[str, Shape], rename: Callable[[str], str], max_rank: int) -> dict[str, str]:
        """Return the layer of the model that was trained by our name, for a model with these adaptable `layers`; see
        `read_adapter`. Raises ModelError."""
        names: dict[str, str] = {}
        for layer, parts in self.stored.items():
            name = rename(layer)
            if name not in layers:
                raise ModelError(
                    f"{self.file.path}: {brief(layer)} is no layer of this model that can have an adapter: train "
                    "without it (target_modules), or merge the adapter into the model (PEFT's merge_and_unload) and "
                    "serve that"
                )
            if name in names:
                raise ModelError(
                    f"{self.file.path}: {brief(names[name])} and {brief(layer)} are the same layer of this model"
                )
            names[name] = layer
            _check_shapes(self.file, parts, layers[name], self.config.rank_of(layer), max_rank)
        return names


def open_adapter(folder: Path) -> AdapterFiles:
    """Open the adapter in `folder` and check everything that does not depend on its model. ModelError names the file
    and the field or tensor that cannot be served."""
    config = _read_config(folder / ADAPTER_NAME)
    weights = folder / WEIGHTS_NAME
    if not is_there(weights) and is_there(folder / PICKLED_NAME):
        raise ModelError(f"{folder}: {WHY_NOT_PICKLED}")
    file = SafetensorsFile(weights)
    return AdapterFiles(folder=folder, config=config, file=file, stored=_by_layer(file))


def read_adapter(folder: Path, *, layers: Mapping[str, Shape], rename: Callable[[str], str], max_rank: int) -> Adapter:
    """Read and check the adapter in `folder`, for a model with these adaptable `layers`, by our names. `rename` returns
    our name of a layer of the model that was trained, "" for a layer that has no use here.

    Everything but the tensors' entries is checked before one is read. ModelError names the file and the field, tensor
    or layer that cannot be served.
    """
    files = open_adapter(folder)
    names, config = files.layers_of(layers, rename, max_rank), files.config
    pairs = {
        name: _read_pair(files.file, files.stored[names[name]], config.scale_of(names[name])) for name in sorted(names)
    }
    return Adapter(path=folder, base=config.base, pairs=pairs, digest=_digest(pairs))


def _read_config(path: Path) -> _Config:
    fields = read_json(path)
    _check_fields(fields, str(path))
    return _Config(
        base="".join(filter(str.isprintable, str(fields.get("base_model_name_or_path") or "")[:200])),
        rank=_rank(fields.get("r", 8), f"{path}: r"),
        alpha=_number(fields.get("lora_alpha", 8), f"{path}: lora_alpha"),
        rslora=_flag(fields.get("use_rslora"), f"{path}: use_rslora"),
        ranks=_pattern(fields.get("rank_pattern"), f"{path}: rank_pattern", _rank),
        alphas=_pattern(fields.get("alpha_pattern"), f"{path}: alpha_pattern", _number),
    )


def _check_fields(fields: Mapping[str, Any], where: str) -> None:
    if fields.get("peft_type") != "LORA":
        raise ModelError(f"{where}: peft_type is {brief(fields.get('peft_type'))}: only LORA is supported")
    for name, value in fields.items():
        if name in _UNSUPPORTED and value not in _OFF:
            raise ModelError(f"{where}: {name} is {brief(value)}: it is not supported; merge the adapter into its base")
        if name not in _UNSUPPORTED | _WITHOUT_EFFECT | _READ and value is not None:
            raise ModelError(f"{where}: the field {brief(name)} is not known, and may change what the adapter means")
    if fields.get("bias") not in (None, "none"):
        raise ModelError(f"{where}: bias is {brief(fields['bias'])}: only adapters without biases are supported")
    initial = fields.get("init_lora_weights")
    if initial not in _INITIAL:
        raise ModelError(
            f"{where}: init_lora_weights is {brief(initial)}, which changes the base's weights too: save the adapter "
            "with path_initial_model_for_weight_conversion"
        )


def _rank(value: Any, where: str) -> int:
    if type(value) is not int or not 1 <= value <= _MOST_RANK:
        raise ModelError(f"{where} is {brief(value)}: a rank of 1 to {_MOST_RANK} is expected")
    return value


def _number(value: Any, where: str) -> float:
    if type(value) not in (int, float) or not abs(value) <= 1e30:  # a NaN is not either
        raise ModelError(f"{where} is {brief(value)}: a number is expected")
    return float(value)


def _flag(value: Any, where: str) -> bool:
    if value not in (None, True, False) or type(value) in (int, float):
        raise ModelError(f"{where} is {brief(value)}: true or false is expected")
    return bool(value)


def _pattern(values: Any, where: str, read: Callable[[Any, str], float]) -> _Pattern:
    """Read the values by layer. PEFT's keys are regular expressions; those of an unknown author can take years to
    match, and names are what PEFT writes."""
    if not isinstance(values, dict | None):
        raise ModelError(f"{where} is {brief(values)}: an object is expected")
    names: dict[str, tuple[int, float]] = {}
    whole: dict[str, tuple[int, float]] = {}
    for order, (key, value) in enumerate((values or {}).items()):
        name = key.removeprefix("^").removesuffix("$").replace(r"\.", ".")
        if not _PLAIN_KEY.fullmatch(name):
            raise ModelError(f"{where} has the key {brief(key)}: only names of layers, or their ends, are supported")
        into = whole if key.startswith("^") else names
        into.setdefault(name, (order, read(value, f"{where}, {brief(key)},")))
    return _Pattern(names, whole)


def _by_layer(file: SafetensorsFile) -> dict[str, dict[str, str]]:
    """Return the file's names of A and B by `_PARTS`, by the layer of the model that was trained."""
    layers: defaultdict[str, dict[str, str]] = defaultdict(dict)
    for name in file.tensors:
        part = next((part for part in _PARTS if name.endswith(part)), None)
        if part is None or not name.startswith(_PREFIX):
            raise ModelError(f"{file.path}: {brief(name)} is not the A or B of a layer, {_PREFIX}<layer>{_PARTS[0]}")
        layers[name.removeprefix(_PREFIX).removesuffix(part)][part] = name
    if not layers:
        raise ModelError(f"{file.path}: it has no tensors: is it the adapter that was trained?")
    for layer, parts in layers.items():
        if len(parts) != len(_PARTS):
            there, missing = ("A", "B") if _PARTS[0] in parts else ("B", "A")
            raise ModelError(f"{file.path}: {brief(layer)} has lora_{there} and no lora_{missing}")
    return layers


def _check_shapes(file: SafetensorsFile, parts: Mapping[str, str], shape: Shape, rank: int, max_rank: int) -> None:
    a, b = (file.tensors[parts[part]] for part in _PARTS)
    if rank > max_rank:
        raise ModelError(f"{file.path}: {brief(a.name)} has rank {rank}: start with --max-lora-rank {rank} or more")
    outputs, inputs = shape
    for tensor, expected in ((a, (rank, inputs)), (b, (outputs, rank))):
        if tensor.shape != expected:
            raise ModelError(
                f"{file.path}: {brief(tensor.name)} has the shape {[*tensor.shape]}; of this model and rank {rank} it "
                f"would be {[*expected]}"
            )


def _read_pair(file: SafetensorsFile, parts: Mapping[str, str], scale: float) -> AdapterPair:
    a, b = (file.values(parts[part]).read() for part in _PARTS)
    pair = AdapterPair(a, b, scale)
    with np.errstate(over="ignore"):
        for part, values in zip(_PARTS, (pair.inputs(), pair.outputs()), strict=True):
            if not np.isfinite(values).all():
                raise ModelError(f"{file.path}: {brief(parts[part])} has an entry that is infinite or no number")
    return pair


def _wide(values: Array) -> F32:
    return as_float32(values, bfloat16=values.dtype == np.uint16)


def _digest(pairs: Mapping[str, AdapterPair]) -> str:
    digest = hashlib.sha256()
    for name, pair in pairs.items():
        digest.update(f"{name} {pair.scale.hex()}\n".encode())
        for array in (pair.a, pair.b):
            digest.update(f"{array.dtype} {array.shape}\n".encode())
            digest.update(np.ascontiguousarray(array).data)
    return digest.hexdigest()
