"""Draft heads of models with several residual streams, beside what transformers makes of their layer: it is fed with
the model's streams, and gives streams."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from tests.models.tiny import stable_topk


@dataclass(frozen=True)
class Inputs:
    """What a head's input is made of. `hidden_norm` is of each stream or, if it is as wide as all, of all together."""

    embedding_norm: nn.Module
    hidden_norm: nn.Module
    of_embedding: nn.Module
    of_hidden: nn.Module

    @torch.no_grad()
    def streams(self, embedded: Tensor, hidden: Tensor) -> Tensor:
        """embedded [T, H], hidden [T, N * H] -> [T, N, H]."""
        size = embedded.shape[1]
        width = len(self.hidden_norm.get_parameter("weight"))
        normed = self.hidden_norm(hidden.view(-1, width)).view(len(embedded), -1, size)
        joined: Tensor = self.of_embedding(self.embedding_norm(embedded)).unsqueeze(1) + self.of_hidden(normed)
        return joined


def random_inputs(norm: Callable[[int], nn.Module], size: int, width: int, generator: torch.Generator) -> Inputs:
    """Inputs with random weights; `norm` makes a norm of a size."""
    norms = norm(size), norm(width)
    linears = [nn.Linear(size, size, bias=False) for _ in range(2)]
    with torch.no_grad():
        for module in norms:
            weight = module.get_parameter("weight")
            weight.add_(0.3 * torch.randn(weight.shape, generator=generator))
        for linear in linears:
            linear.weight.copy_(0.15 * torch.randn(size, size, generator=generator))
    return Inputs(*norms, *linears)


def join_of(model: Any) -> nn.Module:
    """The part behind the last layer that joins the streams."""
    base = model.base_model
    joins: nn.Module = base.hc_head if hasattr(base, "hc_head") else base.hyper_connection_mixer
    return joins


@torch.no_grad()
def run(model: Any, streams: Tensor | None = None, **inputs: Tensor) -> tuple[Tensor, Tensor]:
    """Return the streams behind the last layer, [T, N * H], and the hidden states [T, H] of them. The first layer is
    given `streams` [T, N, H] in the place of the embeddings, if there are any."""
    seen: list[Tensor] = []

    def keep(module: nn.Module, args: tuple[Tensor, ...]) -> None:
        seen.append(args[0][0].flatten(1))

    def replace(module: nn.Module, args: tuple[Tensor, ...], kwargs: dict[str, Any]) -> Any:
        assert streams is not None, "a hook without streams"
        return (streams.reshape(args[0].shape), *args[1:]), kwargs

    hooks = [join_of(model).register_forward_pre_hook(keep)]
    if streams is not None:
        hooks.append(model.base_model.layers[0].register_forward_pre_hook(replace, with_kwargs=True))
    with stable_topk():
        hidden = model.base_model(**inputs, use_cache=False).last_hidden_state[0]
    for hook in hooks:
        hook.remove()
    return seen[0], hidden


@dataclass(frozen=True)
class StreamedHeaded:
    """As `Headed`, with streams in the place of hidden states."""

    path: Any
    oracle: Any
    layers: Any
    inputs: Inputs

    def hidden(self, ids: list[int]) -> Tensor:
        """[T, N * H] of the model, before they are joined."""
        return run(self.oracle, input_ids=torch.tensor([ids]))[0]

    @torch.no_grad()
    def drafted(self, next_ids: list[int], hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Streams [T, N * H] and logits [T, V] of the head."""
        embedded = self.oracle.get_input_embeddings()(torch.tensor(next_ids))
        streams = self.inputs.streams(embedded, hidden)
        drafted, joined = run(self.layers, streams, inputs_embeds=embedded[None])
        return drafted, self.oracle.lm_head(joined)
