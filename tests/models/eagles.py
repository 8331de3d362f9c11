"""Tiny checkpoints of EAGLE heads, and what transformers' layers make of them."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRMSNorm, LlamaRotaryEmbedding

from forebay.families.checkpoint import open_checkpoint
from forebay.families.config.model_config import ModelConfig
from forebay.models import Model
from forebay.models.eagle import Eagle, Eagle3, load_eagle
from forebay.ops import Ops
from tests.models.tiny import BASE, VOCAB, make_oracle

LAYERS: Final = 6  # of the model
NAMED: Final = (0, 2, 4)  # the layers whose outputs a head says that it is fed with
DRAFTED: Final = 40  # tokens that an EAGLE-3 head knows
SIZE: Final = BASE["hidden_size"]
_LISTED: Final = tuple(range(5, VOCAB, 2))[:DRAFTED]


def make_target(folder: Path, *, seed: int = 0, **fields: Any) -> Any:
    oracle = make_oracle("llama", seed=seed, num_hidden_layers=LAYERS, **fields)
    oracle.save_pretrained(folder)
    return oracle


@dataclass
class Head:
    """Of `third` or earlier kind; a layer of transformers' and what is around it."""

    path: Path
    oracle: Any
    layers: nn.ModuleList
    join: nn.Linear
    third: bool
    norms: nn.ModuleList  # EAGLE-3's: of embeddings, of hidden states, the last
    head: nn.Linear
    targets: Tensor
    fields: dict[str, Any]  # of its configuration, besides a Llama's

    @torch.no_grad()
    def seen(self, ids: list[int]) -> Tensor:
        """[T, F] of the model."""
        out = self.oracle.base_model(torch.tensor([ids]), use_cache=False, output_hidden_states=True)
        if not self.third:
            last: Tensor = out.last_hidden_state[0]
            return last
        return torch.cat([out.hidden_states[layer + 1][0] for layer in NAMED], dim=-1)

    @torch.no_grad()
    def guesses(self, next_ids: list[int], seen: Tensor, own: Tensor | None = None) -> Tensor:
        """The head's hidden states [T, H]: of the first tokens what the model gave, `seen`, of others its `own`."""
        embedded = self.oracle.get_input_embeddings()(torch.tensor(next_ids))
        if self.third:
            hidden = self.join(seen)
            return self._third(embedded, hidden if own is None else torch.cat([hidden, own]))
        hidden = seen if own is None else torch.cat([seen, own])
        x = self.join(torch.cat([embedded, hidden], dim=-1))[None]
        for layer in self.layers:
            x = layer(x, **self._around(x))
        found: Tensor = x[0]
        return found

    def _third(self, embedded: Tensor, hidden: Tensor) -> Tensor:
        layer: Any = self.layers[0]
        of_embedding, of_hidden, _ = self.norms
        normed = of_hidden(hidden)
        joined = torch.cat([of_embedding(embedded), normed], dim=-1)[None]
        stream = normed if self.fields.get("norm_before_residual") else hidden
        x = stream[None] + layer.self_attn(hidden_states=joined, **self._around(joined))[0]
        found: Tensor = (x + layer.mlp(layer.post_attention_layernorm(x)))[0]
        return found

    def _around(self, x: Tensor) -> dict[str, Any]:
        count = x.shape[1]
        positions = torch.arange(count)[None]
        mask = torch.full((count, count), float("-inf")).triu(1)[None, None]
        rotary = LlamaRotaryEmbedding(self.oracle.config)(x, positions)
        return {"attention_mask": mask, "position_embeddings": rotary}

    @torch.no_grad()
    def token(self, hidden: Tensor) -> int:
        """The most likely behind hidden [H]."""
        if not self.third:
            return int(self.oracle.lm_head(hidden).argmax())
        return int(self.targets[self.head(self.norms[2](hidden)).argmax()])

    def drafts(self, known: list[int], count: int) -> list[int]:
        """Behind the known tokens, the last of which the model has not seen."""
        seen, next_ids, own = self.seen(known[:-1]), list(known[1:]), None
        for _ in range(count):
            states = self.guesses(next_ids, seen, own)
            own = states[-1:] if own is None else torch.cat([own, states[-1:]])
            next_ids.append(self.token(states[-1]))
        return next_ids[-count:]


def make_head(oracle: Any, folder: Path, *, third: bool, num_layers: int = 1, seed: int = 1, **fields: Any) -> Head:
    torch.manual_seed(seed)
    config, eps = oracle.config, oracle.config.rms_norm_eps
    config._attn_implementation = "eager"
    layers = nn.ModuleList(LlamaDecoderLayer(config, i) for i in range(num_layers))
    if third:
        for name in ("q_proj", "k_proj", "v_proj"):
            old = getattr(layers[0].self_attn, name)
            setattr(layers[0].self_attn, name, nn.Linear(2 * SIZE, old.out_features, bias=False))
    else:
        layers[0].input_layernorm = nn.Identity()
    join = nn.Linear((3 if third else 2) * SIZE, SIZE, bias=not third)
    norms = nn.ModuleList(LlamaRMSNorm(SIZE, eps) for _ in range(3))
    head = nn.Linear(SIZE, DRAFTED, bias=False)
    for module in (layers, join, norms, head):
        for values in module.parameters():
            values.data.add_(0.1 * torch.randn(values.shape))
    made = Head(folder, oracle, layers.eval(), join, third, norms, head, torch.tensor(_LISTED), fields)
    save(made)
    return made


def save(made: Head) -> None:
    """Under the names that published heads have."""
    begin = "midlayer" if made.third else "layers.{}"
    tensors = {
        f"{begin.format(i)}.{name}": values.data
        for i, layer in enumerate(made.layers)
        for name, values in layer.named_parameters()
    }
    tensors |= {f"fc.{name}": values.data for name, values in made.join.named_parameters()}
    tensors["embed_tokens.weight"] = torch.full((VOCAB, SIZE), float("nan"))  # the model's is used
    config = {name: value for name, value in made.oracle.config.to_dict().items() if value is not None}
    config |= {"num_hidden_layers": len(made.layers), "architectures": ["LlamaForCausalLMEagle"]}
    if made.third:
        of_embedding, of_hidden, last = (norm.get_parameter("weight").data for norm in made.norms)
        tensors |= {"midlayer.input_layernorm.weight": of_embedding, "midlayer.hidden_norm.weight": of_hidden}
        tensors |= {"norm.weight": last, "lm_head.weight": made.head.weight.data}
        known = torch.zeros(VOCAB, dtype=torch.bool)
        known[made.targets] = True
        tensors |= {"d2t": made.targets - torch.arange(DRAFTED), "t2d": known}
        config |= {"architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": DRAFTED}
        config["eagle_config"] = {"eagle_aux_hidden_state_layer_ids": list(NAMED), "use_aux_hidden_state": True}
    made.path.mkdir(exist_ok=True)
    (made.path / "config.json").write_text(json.dumps({**config, **made.fields}, default=str))
    contiguous = {name: values.clone().contiguous() for name, values in tensors.items()}
    save_file(contiguous, made.path / "model.safetensors", metadata={"format": "pt"})


_LAST_OF_A_PART: Final = ("o_proj.weight", "down_proj.weight")


@torch.no_grad()
def make_right(folder: Path, *, third: bool, wrong: float = 0.0) -> tuple[Path, Path]:
    """A model whose next token, one of those that an EAGLE-3 head knows, depends on the last one alone, and a head that
    makes the same of it. `wrong` is how much noise it has."""
    target, draft = folder / "target", folder / "draft"
    oracle = make_target(target, num_key_value_heads=BASE["num_attention_heads"])
    made = make_head(oracle, draft, third=third, norm_before_residual=third)
    for module in (oracle.model.layers, made.layers):
        for name, values in module.named_parameters():
            if name.endswith(_LAST_OF_A_PART):
                values.zero_()
    embedding, one = oracle.get_input_embeddings().weight, torch.eye(SIZE)
    embedding.div_(embedding.pow(2).mean(-1, keepdim=True).sqrt())
    oracle.model.norm.weight.fill_(1.0)
    known = torch.zeros(VOCAB, 1).index_fill_(0, made.targets, 1.0)
    oracle.lm_head.weight.mul_(known)
    made.head.weight.copy_(oracle.lm_head.weight[made.targets])
    if third:  # a token attends to itself, and nothing else adds to what comes out
        attention = made.layers[0].get_submodule("self_attn")
        for name, factor in (("q_proj", 5.0), ("k_proj", 5.0), ("v_proj", 1.0)):
            weight = attention.get_parameter(f"{name}.weight")
            weight.copy_(torch.cat([factor * one, torch.zeros(SIZE, SIZE)], dim=-1))
        attention.get_parameter("o_proj.weight").copy_(one)
        for norm, value in zip(made.norms, (1.0, 0.0, 1.0), strict=True):
            norm.get_parameter("weight").fill_(value)
        made.head.weight.add_(wrong * torch.randn(DRAFTED, SIZE))
    else:
        made.join.weight.copy_(torch.cat([one, torch.zeros(SIZE, SIZE)], dim=-1) + wrong * torch.randn(SIZE, 2 * SIZE))
        made.join.bias.zero_()
    oracle.save_pretrained(target)
    save(made)
    return target, draft


def load_head(path: Path, model: Model, target: ModelConfig, ops: Ops, *, third: bool) -> Eagle | Eagle3:
    return load_eagle(
        open_checkpoint(path), target, model, third=third, ops=ops, device="cpu", progress=_silent, num_positions=256
    )


def _silent(done: int, total: int) -> None:
    return
