"""Tiny random checkpoints of every model type, made and saved by transformers, which is the oracle for their logits."""

from __future__ import annotations

import copy
import functools
import math
import tempfile
from collections.abc import Container, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, GenerationMixin, Mistral4Config, Mistral4ForCausalLM
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.models.glm5_next.configuration_glm5_next import Glm5NextTextConfig
from transformers.models.glm5_next.modeling_glm5_next import Glm5NextPreTrainedModel, Glm5NextTextModel
from transformers.models.muse_glimmer.configuration_muse_glimmer import MuseGlimmerTextConfig
from transformers.models.muse_glimmer.modeling_muse_glimmer import MuseGlimmerPreTrainedModel, MuseGlimmerTextModel

from tests.models import (
    cases_compressed,
    cases_delta,
    cases_dense,
    cases_experts,
    cases_mamba,
    cases_norms,
    cases_window,
)

VOCAB = 96


class MuseGlimmerForCausalLM(MuseGlimmerPreTrainedModel, GenerationMixin):  # type: ignore[no-untyped-call]
    """The language model of Muse Glimmer with its head, which transformers has only inside of the whole model."""

    config_class = MuseGlimmerTextConfig
    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}

    def __init__(self, config: MuseGlimmerTextConfig) -> None:
        super().__init__(config)
        self.model = MuseGlimmerTextModel(config)
        self.lm_head = torch.nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()  # type: ignore[no-untyped-call]

    def forward(self, *arguments: Any, logits_to_keep: int = 0, **options: Any) -> CausalLMOutputWithPast:
        made, cap = self.model(*arguments, **options), self.config.final_logit_softcapping
        logits = self.lm_head(made.last_hidden_state[:, -logits_to_keep:]) * self.config.output_multiplier
        return CausalLMOutputWithPast(logits=cap * torch.tanh(logits / cap), cache=made.cache)


class Glm5NextForCausalLM(Glm5NextPreTrainedModel, GenerationMixin):  # type: ignore[no-untyped-call]
    """The language model of GLM-5.3-Flash with its head, which transformers has only inside of the whole model."""

    config_class = Glm5NextTextConfig
    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}

    def __init__(self, config: Glm5NextTextConfig) -> None:
        super().__init__(config)
        self.model = Glm5NextTextModel(config)
        self.lm_head = torch.nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()  # type: ignore[no-untyped-call]

    def forward(self, *arguments: Any, logits_to_keep: int = 0, **options: Any) -> CausalLMOutputWithPast:
        made = self.model(*arguments, **options)
        return CausalLMOutputWithPast(
            logits=self.lm_head(made.last_hidden_state[:, -logits_to_keep:]), cache=made.cache
        )


# transformers has these among the models that see images, where AutoModelForCausalLM does not look.
AutoModelForCausalLM.register(Glm5NextTextConfig, Glm5NextForCausalLM, exist_ok=True)
AutoModelForCausalLM.register(Mistral4Config, Mistral4ForCausalLM, exist_ok=True)
AutoModelForCausalLM.register(MuseGlimmerTextConfig, MuseGlimmerForCausalLM, exist_ok=True)

BASE = {
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 12,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}

MOE = {"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 24}


def _rope(rope_type: str, **parameters: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": rope_type, "rope_theta": 5_000.0, **parameters}}


def _longrope(trained: int, **parameters: Any) -> dict[str, Any]:
    factors = [1.0, 1.5, 2.5, 4.0, 6.0, 9.0][: 3 if parameters else 6]
    lists = {"short_factor": factors, "long_factor": [1.0 + factor for factor in factors]}
    rope = _rope("longrope", **lists, original_max_position_embeddings=trained, **parameters)
    return {**rope, "original_max_position_embeddings": trained}


# (model type, what differs from BASE): at least one of each type, and each option that a type can have.
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama-biases-tied": ("llama", {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}),
    "llama-one-kv-head": ("llama", {"num_key_value_heads": 1, "num_attention_heads": 6, "head_dim": 16}),
    "llama-rope-linear": ("llama", _rope("linear", factor=4.0)),
    "llama-rope-llama3": (
        "llama",
        _rope("llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=16),
    ),
    "llama-rope-yarn": ("llama", _rope("yarn", factor=4.0, original_max_position_embeddings=64)),
    "llama-rope-yarn-options": (
        "llama",
        _rope("yarn", factor=4.0, original_max_position_embeddings=64, beta_fast=8, beta_slow=2, truncate=False)
        | {"head_dim": 16},
    ),
    "llama-rope-dynamic": ("llama", _rope("dynamic", factor=2.0)),
    "mistral": ("mistral", {"sliding_window": None}),
    "mistral-window": ("mistral", {"sliding_window": 6}),
    "qwen2": ("qwen2", {"tie_word_embeddings": True}),
    "qwen2-window": ("qwen2", {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1}),
    "qwen3": ("qwen3", {"head_dim": 20}),
    "qwen3-biases-window": (
        "qwen3",
        {
            "attention_bias": True,
            "use_sliding_window": True,
            "sliding_window": 7,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
    ),
    "smollm3": ("smollm3", {"no_rope_layer_interval": 2}),
    "smollm3-window": (
        "smollm3",
        {"no_rope_layers": [0, 1, 0], "use_sliding_window": True, "sliding_window": 6, "tie_word_embeddings": False},
    ),
    "smollm3-gguf": ("smollm3", {"num_hidden_layers": 5}),  # GGUF files have no key for the interval: it is 4
    "olmo2": ("olmo2", {}),
    "olmo2-biases": ("olmo2", {"attention_bias": True, "num_key_value_heads": 4}),
    "qwen3_moe": ("qwen3_moe", MOE),
    "qwen3_moe-gguf": ("qwen3_moe", {**MOE, "norm_topk_prob": True}),  # nor for this: it is true
    "qwen3_moe-some-dense": (
        "qwen3_moe",
        {**MOE, "norm_topk_prob": True, "decoder_sparse_step": 2, "num_hidden_layers": 4, "mlp_only_layers": [3]},
    ),
    "glm4": ("glm4", {"head_dim": 16}),
    "glm4-no-biases-tied-whole-heads": (
        "glm4",
        {"attention_bias": False, "tie_word_embeddings": True} | _rope("linear", factor=4.0, partial_rotary_factor=1.0),
    ),
    "phi3": ("phi3", {}),
    "phi3-window-partial-tied": (
        "phi3",
        {"sliding_window": 6, "tie_word_embeddings": True} | _rope("default", partial_rotary_factor=0.5),
    ),
    "phi3-longrope-short": ("phi3", _longrope(256)),
    "phi3-longrope-partial": ("phi3", _longrope(4, partial_rotary_factor=0.5) | {"tie_word_embeddings": True}),
    "ernie4_5": ("ernie4_5", {}),
    "ernie4_5-biases-untied": (
        "ernie4_5",
        {"use_bias": True, "tie_word_embeddings": False, "head_dim": 16, "num_key_value_heads": 1}
        | _rope("linear", factor=4.0),
    ),
    **cases_compressed.CASES,
    **cases_delta.CASES,
    **cases_dense.CASES,
    **cases_experts.CASES,
    **cases_mamba.CASES,
    **cases_norms.CASES,
    **cases_window.CASES,
}

# The first case of each type.
CASE_OF = {model_type: case for case, (model_type, _) in reversed(CASES.items())}

# Types with a part that no other type has. Quick tests run every suite for these. Of all others they run the oracle's
# prefill for each case and its mixed batches for the first case; `make test-all` runs every suite for every case.
WHOLE = frozenset(
    {
        *("llama", "olmo2", "qwen3_moe", "gemma4_text", "gpt_oss", "lfm3", "deepseek_v3", "glm_moe_dsa", "deepseek_v4"),
        *("falcon_h1", "jamba", "mamba2", "nemotron_h", "zamba2", "qwen3_next", "kimi_linear", "bailing_hybrid"),
    }
)


def by_tier(names: Iterable[str], *, more: Container[str] = ()) -> list[Any]:
    """Return parameters for cases or types `names`: those of types outside `WHOLE` are slow, but for `more`."""

    def quick(name: str) -> bool:
        return name in more or (CASES[name][0] if name in CASES else name) in WHOLE

    return [name if quick(name) else pytest.param(name, marks=pytest.mark.slow) for name in names]


@dataclass(frozen=True)
class Tiny:
    path: Path
    oracle: Any  # the transformers model, float32, eager attention
    _known: dict[tuple[int, ...], Tensor] = field(default_factory=dict)

    def logits(self, ids: list[int]) -> Tensor:
        """[len(ids), V], of one full forward, which is done once."""
        key = tuple(ids)
        if key not in self._known:
            with torch.no_grad(), stable_topk():
                self._known[key] = self.oracle(torch.tensor([ids]), use_cache=False).logits[0]
        return self._known[key]

    def own_error(self, ids: list[int]) -> float:
        """Return by how much the oracle's logits differ from those of the same model in float64, at most."""
        exact = Tiny(self.path, copy.deepcopy(self.oracle).double()).logits(ids)
        return float((self.logits(ids) - exact).abs().max())

    def assert_agrees(self, logits: Tensor, ids: list[int], what: str = "", *, first: int = 0) -> None:
        """Check logits [n, V] of n of `ids`, from the place `first` on: within 1e-4 of the oracle's or, where float32
        is coarser for the model itself (Zamba 2: 1.6e-4), within twice its own error: each has one."""
        expected = self.logits(ids)[first : first + len(logits)]
        assert logits.shape == expected.shape
        error = float((logits - expected).abs().max())
        assert error <= 1e-4 or error <= 2 * self.own_error(ids), f"{what}: {error:.3g} from the oracle's logits"


@contextmanager
def stable_topk() -> Iterator[None]:
    """Inside, `Tensor.topk` chooses the earlier of equal values. Scores of indexers are often exactly 0, and
    torch may choose any of those, another at another length."""

    def topk(self: Tensor, k: int, dim: int = -1, **options: Any) -> Any:
        ordered = self.sort(dim=dim, descending=True, stable=True)
        return torch.return_types.topk((ordered.values.narrow(dim, 0, k), ordered.indices.narrow(dim, 0, k)))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Tensor, "topk", topk)
        yield


def page_size_of(case: str, least: int) -> int:
    """Return the smallest page size, `least` or more, that the model of a case can have."""
    fields = CASES[case][1]
    pool = fields.get("index_kpool") or fields.get("indexer_compress_ratio", 1)
    multiple = math.lcm(*fields.get("compress_rates", {}).values(), pool)
    return -(-least // multiple) * multiple


def make_oracle(case: str, *, seed: int = 0, **overrides: Any) -> Any:
    model_type, options = CASES[case]
    return make_random(model_type, {**BASE, **options, **overrides}, seed=seed)


def make_random(model_type: str, fields: Mapping[str, Any], *, seed: int) -> Any:
    """A model with every weight random: as initialized, biases are 0 and norms 1, which hides mistakes."""
    config = AutoConfig.for_model(model_type, **fields)
    generator = torch.Generator().manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()  # type: ignore[no-untyped-call]
    with torch.no_grad():
        for name, tensor in _weights(model):
            if not tensor.is_floating_point() and not name.endswith("tid2eid"):
                continue  # factors and sizes of hashes, which follow from the configuration
            if name.endswith("tid2eid"):  # the experts of token ids: rounded, other values would all be zeros
                tensor.copy_(torch.randint(0, config.n_routed_experts, tensor.shape, generator=generator))
                continue
            values = torch.randn(tensor.shape, generator=generator)
            # Norms are 1, or stored as differences from it and 0, and so are factors.
            around_mean = "norm" in name or "scal" in name
            tensor.copy_(tensor.mean() + 0.3 * values if around_mean else 0.15 * values)
    return model


def _weights(model: Any) -> Iterator[tuple[str, Tensor]]:
    """All that a checkpoint holds, buffers that are weights in all but name included; each once."""
    yield from model.named_parameters()
    saved = model.state_dict()
    yield from ((name, buffer) for name, buffer in model.named_buffers() if name in saved)


def make_tiny(case: str, folder: Path, *, seed: int = 0, **save: Any) -> Tiny:
    model = make_oracle(case, seed=seed)
    model.save_pretrained(folder, **save)
    return Tiny(folder, model)


@functools.cache
def shared_tiny(case: str) -> Tiny:
    """The checkpoint of a case, made once in a process. It is everybody's: write nothing into its folder."""
    return make_tiny(case, Path(_scratch()) / case)


@functools.cache
def _scratch() -> str:
    return tempfile.mkdtemp(prefix="forebay-tiny-")


def random_ids(count: int, seed: int) -> list[int]:
    return torch.randint(0, VOCAB, (count,), generator=torch.Generator().manual_seed(seed)).tolist()
