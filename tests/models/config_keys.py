"""What becomes of a model when one key of its config.json changes: here, and in transformers, which is the oracle."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING

from forebay import models
from forebay.families.checkpoint import open_checkpoint
from forebay.families.config.model_config import ModelConfig
from forebay.ops import Ops
from tests.models.drive import Driver
from tests.models.tiny import CASE_OF, make_oracle, random_ids, stable_topk

NUM_TOKENS = 24

_YARN = {"rope_type": "yarn", "factor": 4.0, "rope_theta": 5e3, "original_max_position_embeddings": 16}
_DEEPSEEK_YARN = {**_YARN, "mscale": 1.0, "mscale_all_dim": 0.8}
_LINEAR = {"rope_type": "linear", "factor": 4.0, "rope_theta": 5e3}
_PARTIAL = {"rope_type": "default", "rope_theta": 700.0, "partial_rotary_factor": 0.5}

# Values for keys that a file of any type may have; `None` is a null. The first of each are tried in every run.
OPTIONS: dict[str, list[Any]] = {
    "is_causal": [False, True],
    "rescale_prenorm_residual": [True],
    "rope_parameters": [_DEEPSEEK_YARN, _YARN, _LINEAR, _PARTIAL, {"rope_theta": 700.0}, {"rope_type": "yarn"}],
    "rope_scaling": [_LINEAR, _YARN, {"type": "linear", "factor": 4.0}],
    "rope_theta": [777.0],
    "partial_rotary_factor": [0.5],
    "sliding_window": [0, 4],
    "use_sliding_window": [True],
    "attn_logit_softcapping": [5.0],
    "final_logit_softcapping": [5.0],
    "rms_norm_eps": [0.5],
    "norm_eps": [0.5],
    "layer_norm_epsilon": [0.5],
    "model_max_length": [300, 1000],
    "per_layer_config": [{"1": {"num_key_value_heads": 1}}],
    "head_dim": [24, 8],
    "num_key_value_heads": [1, 4],
    "tie_word_embeddings": [True, False],
    "time_step_limit": [[0.5, 0.6]],
    "time_step_min": [0.5],
    "time_step_floor": [0.5],
    "hidden_act": ["gelu"],
    "attention_multiplier": [0.5],
    "embedding_multiplier": [3.0],
    "residual_multiplier": [0.5],
    "logits_scaling": [3.0],
    "clip_qkv": [0.1],
    "use_qk_norm": [True],
    "attention_bias": [True],
    "mlp_bias": [True],
    "use_bidirectional_attention": [True],
    "residual_in_fp32": [False, True],
    "max_position_embeddings": [128],
}

# Ropes that take several keys to describe.
_SHORT_YARN = {"rope_type": "yarn", "factor": 4.0}
ROPES: list[dict[str, Any]] = [
    {"rope_parameters": _SHORT_YARN},
    {"rope_parameters": _SHORT_YARN, "model_max_length": 64},
    {"rope_parameters": _SHORT_YARN, "max_position_embeddings": 64},
    {"rope_parameters": _SHORT_YARN, "original_max_position_embeddings": 16},
    {"rope_parameters": None, "rope_scaling": {**_YARN, "mscale": 0.8, "mscale_all_dim": 0.8}},
    {"rope_parameters": {**_SHORT_YARN, "original_max_position_embeddings": 16, "attention_factor": 1.3}},
    {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}, "model_max_length": 64, "rope_theta": 777.0},
    {"rope_parameters": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}},
]

# What every model of transformers has and none computes with; the exhaustive run tries them too.
COMMON = frozenset(
    {
        "model_type",
        "architectures",
        "transformers_version",
        "dtype",
        "id2label",
        "label2id",
        "problem_type",
        "return_dict",
    }
    | {"output_hidden_states", "output_attentions", "chunk_size_feed_forward", "is_encoder_decoder", "use_cache"}
    | {"_name_or_path", "pad_token_id", "bos_token_id", "eos_token_id", "initializer_range", "attention_dropout"}
)


class ChangedKeys:
    """A tiny model of a type, saved once; its config.json is rewritten for each change."""

    def __init__(self, model_type: str, folder: Path, ops: Ops) -> None:
        make_oracle(CASE_OF[model_type]).save_pretrained(folder)
        self.fields: dict[str, Any] = json.loads((folder / "config.json").read_text())
        self._folder, self._ops = folder, ops
        self._weights = load_file(folder / "model.safetensors")
        self._ids = random_ids(NUM_TOKENS, seed=7)
        self._known: list[tuple[ModelConfig, Tensor]] = []

    def changes(self) -> Iterator[tuple[str, list[Any]]]:
        """Every key that a configuration of this type has in transformers, or is worth a try, and values for it."""
        theirs = _their_config(self.fields).to_dict()
        for name in sorted({**self.fields, **theirs, **OPTIONS}.keys() - {"model_type"}):
            now = self.fields.get(name, theirs.get(name))
            own = [value for value in _others(now) if value is not None] if name not in OPTIONS else []
            tried = [*OPTIONS.get(name, []), *own, None, *_others(now)]
            distinct = {json.dumps(value): value for value in tried if name not in self.fields or value != now}
            yield name, list(distinct.values())

    def ours(self, fields: Mapping[str, Any]) -> Tensor:
        """[tokens, V]; ModelError for what is refused. No more tokens than there are positions."""
        (self._folder / "config.json").write_text(json.dumps(fields))
        checkpoint = open_checkpoint(self._folder)
        for config, logits in self._known:
            if config == checkpoint.config:
                return logits
        model = models.load(checkpoint, ops=self._ops, dtype=torch.float32)
        assert isinstance(model, models.Model)
        (logits,) = Driver(model).step([(1, self._ids[: checkpoint.config.max_position_embeddings])])
        self._known.append((checkpoint.config, logits))
        return logits

    def theirs(self, fields: Mapping[str, Any]) -> Tensor | None:
        """None where transformers refuses it as well, fails, or has weights left that it does not use or miss."""
        try:
            config = _their_config(fields)
            family: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
            model, report = family.from_pretrained(
                None,
                config=config,
                state_dict=dict(self._weights),
                attn_implementation="eager",
                dtype=torch.float32,
                output_loading_info=True,
            )
            if any(report.values()):
                return None
            with torch.no_grad(), stable_topk():
                logits: Tensor = model.eval()(torch.tensor([self._ids]), use_cache=False, return_dict=True).logits[0]
        except Exception:  # of every kind: it is asked for the impossible
            return None
        return logits


def _their_config(fields: Mapping[str, Any]) -> Any:
    return CONFIG_MAPPING[fields["model_type"]].from_dict(_with_infinities(copy.deepcopy(dict(fields))))


def _with_infinities(value: Any) -> Any:
    if isinstance(value, dict):
        if value.keys() == {"__float__"}:
            return float(value["__float__"])
        return {key: _with_infinities(item) for key, item in value.items()}
    return [_with_infinities(item) for item in value] if isinstance(value, list) else value


def _others(value: Any) -> list[Any]:
    """Values of the same type and of none, the most telling first."""
    if isinstance(value, bool):
        return [not value, None]
    if isinstance(value, int):
        return [value + 1, 2 * value, value // 2, 0, None]
    if isinstance(value, float):
        return [value * 1.5 + 0.1, None]
    if isinstance(value, str):
        return ["gelu", None]
    if isinstance(value, list):
        return [value[::-1], value[1:], [_others(item)[0] for item in value], [], None]
    if isinstance(value, dict):
        inner = [{**value, key: other} for key, item in value.items() for other in _others(item)]
        return [*inner, {}, None]
    return [True, 1, 0.5, False, 3, None]
