"""Facts about a GGUF architecture that are needed to read its files as one of our model types, and the names that many
of them share."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np

from forebay.base.errors import ModelError, brief
from forebay.formats.gguf import GgufFile
from forebay.formats.stored_tensor import StoredTensor

Tensors = dict[str, StoredTensor]

_SIGMOID: Final = 2  # llama.cpp's number of that gating function
_PERIOD: Final = 4  # llama.cpp's, of a file that names no pattern

_YARN_OPTIONS: Final = {
    "rope.scaling.yarn_attn_factor": "attention_factor",
    "rope.scaling.yarn_beta_fast": "beta_fast",
    "rope.scaling.yarn_beta_slow": "beta_slow",
}
YARN_KEYS: Final = tuple(_YARN_OPTIONS)


def within(part: str, names: Mapping[str, str]) -> dict[str, str]:
    """Return the names with `part.` before each of ours."""
    return {stored: f"{part}.{name}" for stored, name in names.items()}


def expert_names(part: str, names: Mapping[str, str]) -> dict[str, str]:
    """Return the names of the experts' stacked tensors: `{}` in ours stands for the expert's number."""
    return {f"{stored}_exps": f"{part}.experts.{{}}.{name}" for stored, name in names.items()}


TOP_NAMES: Final = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
FINAL_NORM: Final = {**TOP_NAMES, "output_norm": "model.final_layernorm"}
PROJECTIONS: Final = {"attn_q": "q_proj", "attn_k": "k_proj", "attn_v": "v_proj", "attn_output": "o_proj"}
ATTENTION: Final = within("self_attn", {**PROJECTIONS, "attn_q_norm": "q_norm", "attn_k_norm": "k_norm"})
GATED: Final = {"ffn_gate": "gate_proj", "ffn_up": "up_proj", "ffn_down": "down_proj"}
MLP: Final = within("mlp", GATED)
EXPERTS: Final = {"ffn_gate_inp": "mlp.gate", **expert_names("mlp", GATED)}
PRE_NORM: Final = {**ATTENTION, **MLP, "attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm"}


@dataclass(frozen=True, slots=True)
class Header:
    """The content of a file besides its weights: `own` is the metadata under its architecture's name, and `config`,
    which is completed, the same as the fields of a config.json."""

    file: GgufFile
    own: Mapping[str, Any]
    config: dict[str, Any]

    def wrong(self, what: str) -> ModelError:
        """Return the error for something wrong in the file, with its path."""
        return ModelError(f"{self.file.path}: {what}")

    def has(self, name: str) -> bool:
        """Return whether any block has a tensor of this name."""
        return any(stored.endswith(f".{name}") for stored in self.file.tensors)

    def kinds(self, signs: Mapping[str, str], otherwise: str) -> list[str]:
        """Return the kind of each layer: what the first weight of `signs` that it has stands for, or `otherwise`."""
        there = self.file.tensors
        return [
            next((kind for sign, kind in signs.items() if f"blk.{layer}.{sign}.weight" in there), otherwise)
            for layer in self.layers
        ]

    @property
    def layers(self) -> range:
        """The numbers of the model's layers. Raises ModelError for a count that the file cannot hold."""
        count = self.config.get("num_hidden_layers")
        if type(count) is not int or not 0 < count <= len(self.file.tensors):
            blocks = f"of blocks in a file of {len(self.file.tensors)} tensors"
            raise self.wrong(f"block_count is {brief(count)}, {blocks}")
        return range(count)

    def whole(self, key: str, *, least: int = 1) -> int:
        """Return the metadata's value of `key`, a whole number from `least` on. Raises ModelError for anything else."""
        value = self.own.get(key)
        if type(value) is not int or value < least:
            raise self.wrong(f"{key} is {brief(value)}, not a whole number above {least - 1}")
        return value

    def most(self, key: str) -> Any:
        """The most of a list, whose other entries are 0 for the layers without; or the one number for all."""
        value = self.own.get(key)
        entries = value.tolist() if isinstance(value, np.ndarray) else value
        if isinstance(entries, list) and all(type(entry) is int for entry in entries):
            return max(entries, default=0)
        return entries

    def of_each(self, key: str) -> list[Any]:
        """Return the metadata's value of `key` for each layer: its entries, or one value for all. Raises ModelError
        for a list of another length."""
        value, count = self.own.get(key), len(self.layers)
        entries = value.tolist() if isinstance(value, np.ndarray) else value
        if not isinstance(entries, list):
            return [entries] * count
        if len(entries) != count:
            raise self.wrong(f"{key} has {len(entries)} entries for {count} layers")
        return entries

    def kv_heads(self) -> Any:
        """Without attention their number is in no file, and of no use."""
        return self.most("attention.head_count_kv") or self.config.get("num_attention_heads")

    def check_sigmoid(self, *, default: int | None = _SIGMOID) -> None:
        """Raise ModelError if experts are chosen by another function; `default` counts if the file names none."""
        function = self.own.get("expert_gating_func", default)
        if function != _SIGMOID:
            raise self.wrong(f"the expert gating function {brief(function)} is not supported")

    def yarn_options(self) -> None:
        """Add YaRN's amplitude and its two betas to the rope's scaling if the metadata has them."""
        scaling = self.config["rope_scaling"]
        if scaling is not None and scaling["rope_type"] == "yarn":
            scaling |= {name: self.own[key] for key, name in _YARN_OPTIONS.items() if key in self.own}

    def windowed(self) -> list[str]:
        """Return the kind of attention of each layer of a file that names a window, by its
        `attention.sliding_window_pattern`: a flag for each, or N, as each N-th layer has no window; 4 by default."""
        pattern = self.own.get("attention.sliding_window_pattern", _PERIOD)
        if type(pattern) is int and pattern > 0:
            pattern = [(layer + 1) % pattern != 0 for layer in self.layers]
        flags = pattern.tolist() if isinstance(pattern, np.ndarray) else pattern
        if not isinstance(flags, list) or len(flags) != len(self.layers) or not set(flags) <= {False, True}:
            raise self.wrong(f"sliding_window_pattern is {brief(flags)}, neither a number nor a flag for each layer")
        return ["sliding_attention" if flag else "full_attention" for flag in flags]


def _as_it_is(header: Header) -> None:
    return


def _as_they_are(tensors: Tensors) -> Tensors:
    return tensors


def _in_order(tensors: Tensors, config: Any) -> Tensors:
    return tensors


@dataclass(frozen=True, kw_only=True, slots=True)
class Architecture:
    """`interleaved_rope`: the rows of q and k are stored so that rotary pairs are neighbours, not halves.

    `layers` is what names of blocks begin with. Unless `causal`, a file may say that tokens attend to later ones.
    `keys` are metadata that it has besides those of all, with config.json's names for them, and `checked` further ones.
    `configure` looks at these and completes the configuration. `restore` undoes what the converter did to the tensors,
    which it gets by transformers' names, stacked experts one by one; `reorder`, before that, what depends on the
    configuration, which is the family's own.
    """

    interleaved_rope: bool = False
    layers: str = "model.layers"
    causal: bool = True
    block_names: Mapping[str, str]
    top_names: Mapping[str, str] = field(default_factory=lambda: TOP_NAMES)
    keys: Mapping[str, str] = field(default_factory=dict)
    checked: tuple[str, ...] = ()
    configure: Callable[[Header], None] = _as_it_is
    reorder: Callable[[Tensors, Any], Tensors] = _in_order
    restore: Callable[[Tensors], Tensors] = _as_they_are
