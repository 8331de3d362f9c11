"""Feed-forward part of a text encoder's layer.

Shape letters: T tokens of all texts of a step, H hidden size, I intermediate size.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Final

import torch
import torch.nn.functional as F
from torch import Tensor

from forebay.formats.quantized import ENCODER_BITS
from forebay.layers.build import Parts
from forebay.ops import Ops


@dataclass(frozen=True, slots=True, kw_only=True)
class EncoderMlpSpec:
    """`up` and `down` are the checkpoint's names. `gate`: the name of the gate's layer, "" for no gate. If it is that
    of `up`, one layer has the outputs of both, those of `up` in front unless `gate_first`."""

    up: str
    down: str
    hidden_size: int
    intermediate_size: int
    activation: str
    up_bias: bool = True
    down_bias: bool = True
    gate: str = ""
    gate_first: bool = False

    def build(self, parts: Parts) -> EncoderMlp:
        """Return the part with its weights."""
        return EncoderMlp(self, parts)


class EncoderMlp:
    """Two linear layers with an activation between them, perhaps gated (arXiv 2002.05202).

    The first is never rounded to codes: with it and the projections of attention in 8 bits, all-MiniLM-L6-v2 misses a
    cosine of 0.9999."""

    def __init__(self, spec: EncoderMlpSpec, parts: Parts) -> None:
        width, inner = spec.hidden_size, spec.intermediate_size
        joined = spec.gate == spec.up
        outputs = {spec.up: 2 * inner} if joined else {name: inner for name in (spec.gate, spec.up) if name}
        gate_first = (range(inner, 2 * inner), range(inner)) if joined and not spec.gate_first else ()
        self._up = parts.linear(outputs, width, bias=spec.up_bias, rows=gate_first, min_bits=ENCODER_BITS)
        self._down = parts.linear({spec.down: width}, inner, bias=spec.down_bias)
        self._activate = (_GATED if spec.gate else _PLAIN)[spec.activation](parts.ops)

    def __call__(self, x: Tensor) -> Tensor:
        """x [T, H], which stays as it is -> [T, H] float32."""
        return self._down.of_f32(self._activate(self._up.of(x)))


_Activation = Callable[[Tensor], Tensor]
_PLAIN: Final[Mapping[str, Callable[[Ops], _Activation]]] = {
    "gelu": lambda ops: partial(ops.elementwise.gelu, exact=True),
    "gelu_tanh": lambda ops: ops.elementwise.gelu,
    "relu": lambda ops: torch.relu,
    "silu": lambda ops: F.silu,
}
_GATED: Final[Mapping[str, Callable[[Ops], _Activation]]] = {
    "gelu": lambda ops: partial(ops.elementwise.gelu_and_mul, exact=True),
    "gelu_tanh": lambda ops: ops.elementwise.gelu_and_mul,
    "silu": lambda ops: ops.elementwise.silu_and_mul,
}
