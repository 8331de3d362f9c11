"""Rotary position embedding: the table of cosines and sines, for the scalings in use.

RoFormer, arXiv 2104.09864, section 3.4.2. Frequencies are float32 and computed in transformers' order, so that the
angles are equal to the bit: a late position multiplies any difference by tens of thousands.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor

from forebay.base.errors import ModelError
from forebay.families.base.rope import RopeSections, long_rope
from forebay.ops.weight_memory import WeightMemory

Scaling = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class RopeSpec:
    """`dim` of a head's dimensions, the first ones, are rotated. `sections` None: all by a token's one position."""

    dim: int
    theta: float
    scaling: Scaling | None = None
    sections: RopeSections | None = None


@dataclass(frozen=True, slots=True)
class QueryScaleSpec:
    """A query at position p is multiplied by 1 + beta * log(1 + floor(p / length)), so that scores keep their contrast
    over more tokens than `length`."""

    beta: float
    length: int


class RopeTables:
    """One table per different spec, whatever the number of layers that use it. They lie with the weights, in `memory`:
    those of 131,072 positions take 64 MiB."""

    def __init__(self, num_positions: int, device: torch.device | str, memory: WeightMemory | None) -> None:
        self._num_positions = num_positions
        self._device, self._memory = device, memory
        self._made: list[tuple[RopeSpec | QueryScaleSpec, Tensor]] = []
        self._axes: dict[tuple[RopeSections, int], Tensor] = {}

    def table(self, spec: RopeSpec | QueryScaleSpec) -> Tensor:
        """[num_positions, dim] float32, see `cos_sin_table`; of a scale of queries [num_positions] float32."""
        for known, table in self._made:
            if known == spec:
                return table
        made = _table(spec, self._num_positions).to(self._device)
        placed = made if self._memory is None else self._memory.placed(made)
        self._made.append((spec, placed))
        return placed

    def axes(self, spec: RopeSpec) -> Tensor | None:
        """[dim / 2] int32, which of a token's three positions each frequency has the angle of; None if a token has
        one."""
        if spec.sections is None:
            return None
        key = spec.sections, spec.dim // 2
        if key not in self._axes:
            self._axes[key] = torch.tensor(spec.sections.axes(spec.dim // 2), dtype=torch.int32).to(self._device)
        return self._axes[key]

    @property
    def has_axes(self) -> bool:
        """Return whether any layer rotates by three positions."""
        return bool(self._axes)


def _table(spec: RopeSpec | QueryScaleSpec, num_positions: int) -> Tensor:
    if isinstance(spec, QueryScaleSpec):
        return 1 + spec.beta * torch.log1p((torch.arange(num_positions) // spec.length).float())
    return cos_sin_table(head_dim=spec.dim, theta=spec.theta, scaling=spec.scaling, num_positions=num_positions)


def cos_sin_table(*, head_dim: int, theta: float, scaling: Scaling | None, num_positions: int) -> Tensor:
    """[num_positions, head_dim] float32: of each position the cosines of all frequencies, then the sines."""
    known = _for_positions(scaling, num_positions)
    frequencies, amplitude = inverse_frequencies(head_dim=head_dim, theta=theta, scaling=known)
    angles = torch.arange(num_positions, dtype=torch.float32).unsqueeze(1) * frequencies
    table = torch.empty(num_positions, head_dim)
    torch.cos(angles, out=table[:, : head_dim // 2])
    torch.sin(angles, out=table[:, head_dim // 2 :])
    return table if amplitude == 1.0 else table.mul_(amplitude)


def _for_positions(scaling: Scaling | None, num_positions: int) -> Scaling | None:
    """Choose one of the two lists of a LongRoPE, arXiv 2402.13753, by the length of the table."""
    if scaling is None or scaling["rope_type"] != "longrope":
        return scaling
    kind = "long" if long_rope(scaling, num_positions) else "short"
    return {"rope_type": "longrope", "factors": scaling[f"{kind}_factor"], "amplitude": scaling[f"{kind}_mscale"]}


def inverse_frequencies(*, head_dim: int, theta: float, scaling: Scaling | None) -> tuple[Tensor, float]:
    """Radians per position, [head_dim / 2] float32, and what cosines and sines are multiplied by."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim
    plain = 1.0 / theta**exponents
    if scaling is None:
        return plain, 1.0
    return _SCALINGS[scaling["rope_type"]](plain, scaling, theta)


def _linear(plain: Tensor, scaling: Scaling, theta: float) -> tuple[Tensor, float]:
    return plain / scaling["factor"], 1.0


def _dynamic(plain: Tensor, scaling: Scaling, theta: float) -> tuple[Tensor, float]:
    """Up to max_position_embeddings dynamic scaling changes nothing; beyond, a token's angle would depend on how long
    its batch has become, so that no more positions are offered than the configuration has."""
    return plain, 1.0


def _frequency_factors(plain: Tensor, scaling: Scaling, theta: float) -> tuple[Tensor, float]:
    factors = torch.tensor(scaling["factors"], dtype=torch.float32)
    if factors.shape != plain.shape:
        raise ModelError(f"the rope has {len(factors)} factors for {len(plain)} frequencies")
    return plain / factors, 1.0


def _longrope(plain: Tensor, scaling: Scaling, theta: float) -> tuple[Tensor, float]:
    frequencies, _ = _frequency_factors(plain, scaling, theta)
    return frequencies, scaling["amplitude"]


def _proportional(plain: Tensor, scaling: Scaling, theta: float) -> tuple[Tensor, float]:
    """A share of the frequencies, the highest, is kept; the other dimensions are not rotated, by angles of 0."""
    kept = int(scaling["partial_rotary_factor"] * len(plain))
    frequencies = torch.zeros_like(plain)
    frequencies[:kept] = plain[:kept]
    return frequencies / scaling.get("factor", 1.0), 1.0


def _llama3(plain: Tensor, scaling: Scaling, theta: float) -> tuple[Tensor, float]:
    """Low frequencies are divided by the factor, high ones kept, those between interpolated (Llama 3.1's release)."""
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    context = scaling["original_max_position_embeddings"]
    wavelength = 2 * math.pi / plain
    smooth = (context / wavelength - low) / (high - low)
    between = (1 - smooth) * plain / scaling["factor"] + smooth * plain
    scaled = torch.where(wavelength > context / low, plain / scaling["factor"], between)
    return torch.where(wavelength < context / high, plain, scaled), 1.0


def _yarn(plain: Tensor, scaling: Scaling, theta: float) -> tuple[Tensor, float]:
    """YaRN, arXiv 2309.00071, section 3.2 (which frequencies are interpolated) and 3.4 (the amplitude)."""
    half = len(plain)
    dim = 2 * half
    low, high = _yarn_range(scaling, theta, dim)
    ramp = ((torch.arange(half, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    powers = theta ** (torch.arange(0, dim, 2).float() / dim)
    kept = 1 - ramp
    frequencies = 1.0 / (scaling["factor"] * powers) * (1 - kept) + 1.0 / powers * kept
    return frequencies, _yarn_amplitude(scaling)


def _yarn_range(scaling: Scaling, theta: float, dim: int) -> tuple[float, float]:
    """The dimensions between which frequencies go from kept to interpolated."""

    def dimension(rotations: float) -> float:
        turns = scaling["original_max_position_embeddings"] / (rotations * 2 * math.pi)
        return dim * math.log(turns) / (2 * math.log(theta))

    low, high = dimension(scaling.get("beta_fast", 32)), dimension(scaling.get("beta_slow", 1))
    if scaling.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    return low, high + 0.001 if low == high else high


def _yarn_amplitude(scaling: Scaling) -> float:
    def grown(mscale: float) -> float:
        return 1.0 if scaling["factor"] <= 1 else 0.1 * mscale * math.log(scaling["factor"]) + 1.0

    if "attention_factor" in scaling:
        return float(scaling["attention_factor"])
    if "mscale" in scaling and "mscale_all_dim" in scaling:
        return grown(scaling["mscale"]) / grown(scaling["mscale_all_dim"])
    return grown(1.0)


_SCALINGS: Final[Mapping[str, Callable[[Tensor, Scaling, float], tuple[Tensor, float]]]] = {
    "linear": _linear,
    "dynamic": _dynamic,
    "frequency_factors": _frequency_factors,
    "longrope": _longrope,
    "proportional": _proportional,
    "llama3": _llama3,
    "yarn": _yarn,
}
