"""Heads of text encoders: layers behind a chosen hidden state, or behind the pooling of a text.

Shape letters: N chosen vectors, H hidden size.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Final

import torch
import torch.nn.functional as F
from torch import Tensor

from forebay.layers.build import Parts
from forebay.layers.norms import LayerNormSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadLayerSpec:
    """A linear layer under the checkpoint's `name`, perhaps with an `activation` ("" for none) and a norm behind it."""

    name: str
    inputs: int
    outputs: int
    bias: bool = True
    activation: str = ""
    norm: LayerNormSpec | None = None
    norm_eps: float = 0.0

    def equation(self, x: str) -> str:
        """Return what it computes of `x`."""
        product = f"W {x}{' + b' if self.bias else ''}"
        inner = f"{self.activation}({product})" if self.activation else f"({product})"
        return inner if self.norm is None else f"layernorm({inner})"

    def build(self, parts: Parts) -> HeadLayer:
        """Return the layer with its weights."""
        return HeadLayer(self, parts)


class HeadLayer:
    """Computed in float32: it runs on few vectors, and its results are scores."""

    def __init__(self, spec: HeadLayerSpec, parts: Parts) -> None:
        self.num_outputs, self._eps = spec.outputs, spec.norm_eps
        self._activate = _OF_HEADS[spec.activation]
        self._weight = parts.tensor(f"{spec.name}.weight", spec.outputs, spec.inputs, float32=True)
        self._bias = parts.tensor(f"{spec.name}.bias", spec.outputs, float32=True) if spec.bias else None
        norm = () if spec.norm is None else (spec.norm.weight, spec.norm.bias)
        self._norm = [None if param is None else parts.weights.tensor(param, float32=True) for param in norm]

    def __call__(self, x: Tensor) -> Tensor:
        """x [inputs] float32 -> [outputs] float32."""
        product = torch.mv(self._weight, x)
        x = self._activate(product if self._bias is None else product + self._bias)
        if self._norm:
            weight, bias = self._norm
            x = F.layer_norm(x, x.shape, weight, bias, self._eps)
        return x


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadSpec:
    """Layers behind a chosen hidden state, or behind the pooling of a text: `what` they give, such as labels."""

    layers: tuple[HeadLayerSpec, ...]
    what: str

    @property
    def equation(self) -> str:
        """Return what it computes of a chosen vector x."""
        inner = "x"
        for layer in self.layers:
            inner = layer.equation(inner)
        return f"{inner}  ({self.layers[-1].outputs:,} {self.what})"

    def build(self, parts: Parts) -> Head:
        """Return the head with its weights."""
        return Head(self, parts)


class Head:
    """The layers of a `HeadSpec`, one behind the other."""

    def __init__(self, spec: HeadSpec, parts: Parts) -> None:
        self._layers = [layer.build(parts) for layer in spec.layers]

    def __call__(self, chosen: Tensor) -> Tensor:
        """chosen [N, H] -> [N, outputs] float32. A row's bits do not depend on the other rows."""
        if not len(chosen):
            return chosen.new_empty(0, self._layers[-1].num_outputs, dtype=torch.float32)
        return torch.stack([self._of(row) for row in chosen.float()])

    def _of(self, x: Tensor) -> Tensor:
        for layer in self._layers:
            x = layer(x)
        return x


@dataclass(frozen=True, slots=True, kw_only=True)
class JointHeadSpec:
    """Layers side by side behind each token, whose outputs follow one another."""

    layers: tuple[HeadLayerSpec, ...]
    what: str

    @property
    def equation(self) -> str:
        """Return what it computes of a hidden state x."""
        return "; ".join(f"{layer.equation('x')}  ({layer.outputs:,} {self.what})" for layer in self.layers)

    def build(self, parts: Parts) -> JointHead:
        """Return the head with its weights."""
        return JointHead(self, parts)


class JointHead:
    """The layers of a `JointHeadSpec`, side by side."""

    def __init__(self, spec: JointHeadSpec, parts: Parts) -> None:
        self._layers = [layer.build(parts) for layer in spec.layers]

    def __call__(self, chosen: Tensor) -> Tensor:
        """chosen [N, H] -> [N, outputs of all layers] float32. A row's bits do not depend on the other rows."""
        if not len(chosen):
            return chosen.new_empty(0, sum(layer.num_outputs for layer in self._layers), dtype=torch.float32)
        return torch.stack([torch.cat([layer(row) for layer in self._layers]) for row in chosen.float()])


_OF_HEADS: Final[Mapping[str, Callable[[Tensor], Tensor]]] = {
    "": lambda x: x,
    "tanh": torch.tanh,
    "relu": torch.relu,
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "silu": F.silu,
}
