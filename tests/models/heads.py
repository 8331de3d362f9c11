"""Tiny checkpoints with a draft head, and what transformers makes of it.

The head's layers, its last norm and their tensors are those of a small model of the same type that has no other layers:
with embeddings joined to hidden states as its input it is the head. For some types transformers has a `MtpModel` too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM
from transformers.cache_utils import MtpCache
from transformers.modeling_layers import MtpModel

from tests.models.streamed_heads import StreamedHeaded, random_inputs
from tests.models.tiny import BASE, make_oracle, stable_topk

_FULL: Final = "full_attention"
_QWEN: Final = {
    "enorm": "mtp.pre_fc_norm_embedding",
    "hnorm": "mtp.pre_fc_norm_hidden",
    "eh_proj": "mtp.fc",
    "model.norm": "mtp.norm",
    "model.layers.0": "mtp.layers.0",
}
_DEEPSEEK: Final = {
    "enorm": "model.layers.3.enorm",
    "hnorm": "model.layers.3.hnorm",
    "eh_proj": "model.layers.3.eh_proj",
    "model.norm": "model.layers.3.shared_head.norm",
    "model.layers.0": "model.layers.3",
}
_NEMOTRON_H: Final = {
    "enorm": "mtp.layers.0.enorm",
    "hnorm": "mtp.layers.0.hnorm",
    "eh_proj": "mtp.layers.0.eh_proj",
    "backbone.norm_f": "mtp.layers.1.final_layernorm",
    "backbone.layers.0": "mtp.layers.0",
    "backbone.layers.1": "mtp.layers.1",
}
_HY: Final = {**_DEEPSEEK, "model.norm": "model.layers.3.final_layernorm"}
_GLM5_NEXT: Final = {name: stored.replace("model.layers.3", "model.layers.4") for name, stored in _DEEPSEEK.items()}
_QWEN4: Final = {
    "enorm": "mtp.pre_fc_norm_embedding",
    "hnorm": "mtp.pre_fc_norm_hidden",
    "e_proj": "mtp.fc_embedding",
    "h_proj": "mtp.fc_hidden",
    "model.hyper_connection_mixer": "mtp.hyper_connection_mixer",
    "model.layers.0": "mtp.layers.0",
}
_V4: Final = {
    **{part: f"mtp.0.{part}" for part in ("enorm", "hnorm", "e_proj", "h_proj")},
    "model.norm": "mtp.0.norm",
    "model.hc_head.hc_base": "mtp.0.hc_head_base",
    "model.hc_head.hc_fn": "mtp.0.hc_head_fn",
    "model.hc_head.hc_scale": "mtp.0.hc_head_scale",
    "model.layers.0.attn.norm": "mtp.0.attn.kv_norm",
    "model.layers.0": "mtp.0",
}
_ONE_LAYER: Final = {"num_hidden_layers": 1, "layer_types": [_FULL]}
_MELLUM_LAYER: Final = {
    "num_hidden_layers": 1,
    "layer_types": ["sliding_attention"],
    "mlp_layer_types": ["sparse"],
}
_LATENT_LAYER: Final = {"num_hidden_layers": 1, "first_k_dense_replace": 0}
_SPARSE_LAYER: Final = {"num_hidden_layers": 1, "mlp_layer_types": ["sparse"]}

# By case: what the head's layers are, what files call its tensors, what the whole model's configuration says of it.
HEADS: Final[dict[str, tuple[dict[str, Any], dict[str, str], dict[str, Any]]]] = {
    "qwen3_5_text": (_ONE_LAYER, _QWEN, {}),
    "qwen3_5_text-one-key-head-biases-tied": (_ONE_LAYER, _QWEN, {}),
    "qwen3_5_moe_text": (_ONE_LAYER, _QWEN, {}),
    "qwen3_next": (_ONE_LAYER, _QWEN, {}),
    "qwen3_next-some-dense-biases": (
        {**_ONE_LAYER, "decoder_sparse_step": 1, "mlp_only_layers": []},
        _QWEN,
        {},
    ),
    "deepseek_v3": (_LATENT_LAYER, _DEEPSEEK, {}),
    "deepseek_v32": (_LATENT_LAYER, _DEEPSEEK, {}),
    "glm4_moe": (_LATENT_LAYER, _DEEPSEEK, {}),
    "glm4_moe_lite": (_SPARSE_LAYER, _DEEPSEEK, {}),
    "glm5_next_text": (
        # The indexer selects all of these few tokens.
        {**_SPARSE_LAYER, "layer_types": ["indexed_attention"], "indexer_types": ["full"], "index_topk": 512},
        _GLM5_NEXT,
        {},
    ),
    "hy_v3": (_SPARSE_LAYER, _HY, {}),
    "bailing_hybrid": (
        {**_LATENT_LAYER, "layer_types": [_FULL]},
        _DEEPSEEK,
        {"layer_types": ["linear_attention", "linear_attention", _FULL]},
    ),
    "mellum": (_MELLUM_LAYER, _QWEN, {"num_mtp_layers": 1}),
    # The indexer selects all of these few tokens.
    "qwen4_exp_text": ({**_ONE_LAYER, "indexer_budget": 512}, _QWEN4, {}),
    "deepseek_v4": ({"num_hidden_layers": 1, "layer_types": ["sliding_attention"], "num_hash_layers": 0}, _V4, {}),
    "nemotron_h": (
        {"layers_block_type": ["attention", "moe"]},
        _NEMOTRON_H,
        {"num_nextn_predict_layers": 1},
    ),
}


class OneStream(nn.Module):
    """In the place of hyper-connections: all residual streams are equal, and each is a plain one."""

    def forward(self, streams: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """streams [..., S, H] -> what a layer's output is weighted by, how streams are mixed, and what a layer gets."""
        count = streams.shape[-2]
        return torch.ones(streams.shape[:-1]), torch.eye(count), streams[..., 0, :]


@dataclass(frozen=True)
class Headed:
    path: Path
    oracle: Any  # the model
    layers: Any  # the head's, a model of its own
    join: nn.Module
    norms: tuple[nn.Module, nn.Module]  # of embeddings, of hidden states

    @torch.no_grad()
    def hidden(self, ids: list[int]) -> Tensor:
        """[T, H] of the model, after its last norm."""
        with stable_topk():
            states: Tensor = self.oracle.base_model(torch.tensor([ids]), use_cache=False).last_hidden_state[0]
            return states

    @torch.no_grad()
    def drafted(self, next_ids: list[int], hidden: Tensor) -> tuple[Tensor, Tensor]:
        """[T, H] and logits [T, V] of the head."""
        embedded = self.oracle.get_input_embeddings()(torch.tensor(next_ids))
        both = [norm(x) for norm, x in zip(self.norms, (embedded, hidden), strict=True)]
        joined = self.join(torch.cat(both, dim=-1))
        with stable_topk():
            drafted = self.layers.base_model(inputs_embeds=joined[None], use_cache=False).last_hidden_state[0]
        return drafted, self.oracle.lm_head(drafted)


def make_headed(case: str, folder: Path, *, seed: int = 0, **overrides: Any) -> Headed | StreamedHeaded:
    of_layers, names, of_model = HEADS[case]
    oracle = make_oracle(case, seed=seed, **of_model, **overrides)
    layers = make_oracle(case, seed=seed + 100, **of_layers, **overrides)
    if case == "glm5_next_text":
        (layer,) = layers.base_model.layers
        layer.attn_hc, layer.ffn_hc = OneStream(), OneStream()
    oracle.save_pretrained(folder)
    layers.save_pretrained(folder / "head")
    if "h_proj" in names:
        return _with_streams(folder, oracle, layers, names, torch.Generator().manual_seed(seed + 200))
    size, norm = BASE["hidden_size"], layers.base_model.norm_f if "nemotron" in case else layers.base_model.norm
    generator = torch.Generator().manual_seed(seed + 200)
    norms = tuple(type(norm)(size, norm_eps(norm)) for _ in range(2))
    join = nn.Linear(2 * size, size, bias=False)
    with torch.no_grad():
        for module in norms:
            module.weight.add_(0.3 * torch.randn(size, generator=generator))
        join.weight.copy_(0.15 * torch.randn(size, 2 * size, generator=generator))
    own = load_file(folder / "head" / "model.safetensors")
    own |= {"enorm.weight": norms[0].weight.data, "hnorm.weight": norms[1].weight.data}
    own["eh_proj.weight"] = join.weight.data
    _store(folder, own, names)
    return Headed(folder, oracle, layers, join, norms)


def _store(folder: Path, own: Mapping[str, Tensor], names: Mapping[str, str]) -> None:
    """Write the head's `own` tensors that have published names beside the model's."""
    stored = load_file(folder / "model.safetensors")
    for name, values in own.items():
        begin = next((begin for begin in names if f"{name}.".startswith(f"{begin}.")), None)
        if begin is not None:
            stored[names[begin] + name.removeprefix(begin)] = values
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})


def _with_streams(
    folder: Path, oracle: Any, layers: Any, names: Mapping[str, str], generator: torch.Generator
) -> StreamedHeaded:
    """Qwen 4 norms all streams of a token together, DeepSeek-V4 each by itself."""
    size = oracle.config.hidden_size
    norm = next(module for name, module in layers.named_modules() if name.endswith("norm"))
    joint = "model.hyper_connection_mixer" in names
    width = size * oracle.config.hc_count if joint else size
    inputs = random_inputs(lambda count: type(norm)(count, eps=norm_eps(norm)), size, width, generator)
    own = load_file(folder / "head" / "model.safetensors")
    parts = {"enorm": inputs.embedding_norm, "hnorm": inputs.hidden_norm}
    parts |= {"e_proj": inputs.of_embedding, "h_proj": inputs.of_hidden}
    own |= {f"{name}.weight": part.get_parameter("weight").data for name, part in parts.items()}
    _store(folder, own, names)
    return StreamedHeaded(folder, oracle, layers, inputs)


def norm_eps(norm: nn.Module) -> float:
    eps: float = getattr(norm, "variance_epsilon", 0.0) or getattr(norm, "eps", 0.0)
    return eps


@torch.no_grad()
def of_transformers(headed: Headed) -> Callable[[list[int], Tensor], Tensor]:
    """The head as transformers itself reads it from the files: hidden states [T, H] of whole sequences."""
    model: Any = AutoModelForCausalLM.from_pretrained(headed.path, attn_implementation="eager", dtype=torch.float32)
    model.eval()
    if model.config.model_type != "mellum":
        model._keys_to_ignore_on_load_unexpected = [
            r"model\.layers\.3\..*"
        ]  # its own: of the published number of layers
        of_head = {"mtp_layer_types": [_FULL], "mtp_mlp_layer_types": ["sparse"]}
        for name, value in of_head.items():
            setattr(model.config, name, value)
    head = MtpModel.from_pretrained(model)

    def drafted(next_ids: list[int], hidden: Tensor) -> Tensor:
        positions = torch.arange(1, len(next_ids) + 1)[None]
        cache = MtpCache(config=model.config.get_mtp_config())
        ids = torch.tensor([next_ids])
        with torch.no_grad():
            return head.forward_layer(0, hidden[None], positions, cache, input_ids=ids)[0]

    return drafted


_LAST_OF_A_PART: Final = (
    *("o_proj.weight", "out_proj.weight", "dense.weight", "down_proj.weight", "down_proj", "wo_b.weight", "w2.weight"),
)


def make_right(case: str, folder: Path, *, wrong: float = 0.0) -> Path:
    """A model whose next token depends on the last one alone, and a draft head that makes the same of it: it is always
    right. `wrong` is how much noise its join has."""
    _, names, _ = HEADS[case]
    make_headed(case, folder)
    path = folder / "model.safetensors"
    tensors = load_file(path)
    for name, values in tensors.items():
        if name.endswith(_LAST_OF_A_PART):
            values.zero_()
    if "h_proj" in names:
        _echo(tensors, names, wrong)
        save_file(tensors, path, metadata={"format": "pt"})
        return folder
    norm = next(name for name in names if name.endswith(("model.norm", "norm_f")))
    own = {part: f"{names[part]}.weight" for part in ("enorm", "hnorm", "eh_proj", norm)}
    size, last = BASE["hidden_size"], tensors[f"{norm}.weight"]
    noise = wrong * torch.randn(size, 2 * size, generator=torch.Generator().manual_seed(1))
    tensors[own["enorm"]].fill_(0.0 if names is _QWEN else 1.0)  # stored as a difference from 1
    tensors[own["eh_proj"]] = torch.eye(size, 2 * size) + noise
    tensors[own[norm]] = last.clone()
    save_file(tensors, path, metadata={"format": "pt"})
    return folder


def _echo(tensors: dict[str, Tensor], names: Mapping[str, str], wrong: float) -> None:
    """Let a head of streams give the embedding in all streams, with as much noise, and join them as the model does."""
    size = BASE["hidden_size"]
    noise = wrong * torch.randn(size, size, generator=torch.Generator().manual_seed(1))
    tensors[f"{names['enorm']}.weight"].fill_(0.0 if names is _QWEN4 else 1.0)  # stored as a difference from 1
    tensors[f"{names['e_proj']}.weight"] = torch.eye(size) + noise
    tensors[f"{names['h_proj']}.weight"].zero_()
    for ours, theirs in names.items():
        if ours.startswith("model.") and not ours.startswith("model.layers."):
            tensors |= {
                theirs + name.removeprefix(ours): values.clone()
                for name, values in list(tensors.items())
                if f"{name}.".startswith(f"{ours}.")
            }
