"""Facts about a projector type of llama.cpp's vision encoders that are needed to read its files as our encoders."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from forebay.base.errors import ModelError
from forebay.families.base.fields import Fields
from forebay.families.config.model_config import ModelConfig
from forebay.formats.gguf import GgufFile
from forebay.formats.stored_tensor import StoredTensor

Raw = dict[str, Any]
Tensors = dict[str, StoredTensor]

GELU: Final = "clip.use_gelu"
SILU: Final = "clip.use_silu"
QUICK_GELU: Final = "neither clip.use_gelu nor clip.use_silu"
_TOKENS: Final = "tokenizer.ggml.tokens"
_BRACKETS: Final = ("<", "[")


@dataclass(frozen=True, slots=True)
class Language:
    """The language model beside an encoder: its configuration, the metadata of its GGUF file, and its `tokens` in
    brackets with their ids."""

    config: ModelConfig
    metadata: Mapping[str, Any]
    tokens: Mapping[str, int]

    @staticmethod
    def of(config: ModelConfig, metadata: Mapping[str, Any]) -> Language:
        """Find the tokens in a vocabulary, which may have a quarter of a million."""
        texts = enumerate(metadata.get(_TOKENS, ()))
        return Language(config, metadata, {text: at for at, text in texts if text.startswith(_BRACKETS)})

    def own(self, key: str) -> Any:
        """Return the metadata's value of `key` under the name of the architecture, None without one."""
        return self.metadata.get(f"{self.metadata.get('general.architecture')}.{key}")


@dataclass(frozen=True, slots=True)
class Header:
    """The content of an encoder's file besides its weights: `own` are the metadata under `clip.vision.`."""

    file: GgufFile
    own: Fields
    language: Language

    def wrong(self, what: str) -> ModelError:
        """Return the error for something wrong in the file, with its path."""
        return ModelError(f"{self.file.path}: {what}")

    def has(self, name: str) -> bool:
        """Return whether the file has a tensor of this name."""
        return name in self.file.tensors

    def shape(self, name: str, num_dims: int) -> tuple[int, ...]:
        """Return the shape of a tensor. Raises ModelError if it is missing or has another number of dimensions."""
        stored = self.file.tensors.get(name)
        if stored is None:
            raise self.wrong(f"the tensor {name!r} is missing")
        if len(stored.shape) != num_dims:
            raise self.wrong(
                f"the tensor {name!r} has the shape {stored.shape} instead of one of {num_dims} dimensions"
            )
        return stored.shape

    def rows(self, name: str) -> int:
        """Return the number of rows of a matrix. Raises ModelError as `shape` does."""
        return self.shape(name, 2)[0]

    def token(self, *names: str) -> int:
        """Return the id of the first of these tokens that the vocabulary has. Raises ModelError if it has none."""
        found = next((self.language.tokens[name] for name in names if name in self.language.tokens), None)
        if found is None:
            raise self.wrong(f"the vocabulary of the language model has no token {names[0]!r}, which stands for images")
        return found

    def activation(self, *expected: str) -> str:
        """Return which of `GELU`, `SILU` and `QUICK_GELU` the file has. Raises ModelError unless it is `expected`."""
        chosen = [key for key in (GELU, SILU) if self.file.metadata.get(key) is True]
        found = " and ".join(chosen) or QUICK_GELU
        if found not in expected:
            raise self.wrong(f"its MLPs have {found}; those that are served have {' or '.join(expected)}")
        return found

    def fields(self, names: Mapping[str, str]) -> Raw:
        """Return the metadata that are there, under a config.json's names for them."""
        return {ours: value for stored, ours in names.items() if (value := self.own.get(stored)) is not None}

    def pixels(self) -> Raw:
        """Return the mean and the deviation of pixels as fields of an image processor."""
        return self.fields({"image_mean": "image_mean", "image_std": "image_std"})

    @property
    def swaps(self) -> bool:
        """Return whether the two outer matrices of MLPs have each other's names, as in files of early 2025."""
        down = self.file.tensors.get("v.blk.0.ffn_down.weight")
        width = self.own.get("embedding_length")
        return down is not None and len(down.shape) == 2 and down.shape[1] == width != down.shape[0]

    @property
    def inner_size(self) -> int:
        """Return the inner size of MLPs: of some types the metadata have another number."""
        return self.rows(f"v.blk.0.{'ffn_down' if self.swaps else 'ffn_up'}.weight")


@dataclass(frozen=True, slots=True)
class Described:
    """An encoder as files of a folder describe it: fields of `vision_config`, those around it, and those of its image
    processor."""

    vision: Raw
    around: Raw
    processor: Raw


def as_they_are(tensors: Tensors, header: Header) -> Tensors:
    """Return the tensors."""
    return tensors


@dataclass(frozen=True, kw_only=True, slots=True)
class Projector:
    """How files of a projector type are read.

    `types`: by the type of the language model, the type of the model around it and the encoder. `names` are
    transformers' names of modules by llama.cpp's; those of `blocks` stand behind `layers` and a number. `output` is the
    matrix that makes tokens, whose width is on `output_axis`. `features` are the mergers behind layers. `ignored`
    tensors have no use here. `rotated`: the rows of q and k are stored so that rotary pairs are neighbours, not halves.
    `restore` undoes what the converter did to the tensors, which it gets by transformers' names.
    """

    types: Mapping[str, str]
    describe: Callable[[Header], Described]
    names: Mapping[str, str]
    layers: str
    blocks: Mapping[str, str]
    output: str
    output_axis: int = 0
    features: str = ""
    ignored: tuple[str, ...] = ()
    rotated: bool = False
    restore: Callable[[Tensors, Header], Tensors] = as_they_are
