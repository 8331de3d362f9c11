"""Random weights for an untrained model, sane in scale: its results stay finite and varied."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

import torch
from torch import Tensor

from forebay.families.config.model_config import ModelConfig, family
from forebay.formats.safetensors_writer import Entry, write_safetensors
from forebay.formats.turned_experts import BIAS, DOWN, GATE_UP
from forebay.models import needs_of
from forebay.models.encoder import encoder_params
from forebay.models.loader import Progress

_DTYPES: Final = {
    "bfloat16": ("BF16", torch.bfloat16),
    "float16": ("F16", torch.float16),
    "float32": ("F32", torch.float32),
}
_EXPERT: Final = re.compile(r"(.*)\.experts\.\d+\.(gate|up|down)_proj\.(weight|bias)")
_NORM_SPREAD: Final = 0.1
_BIAS_SPREAD: Final = 0.02
_BOUND: Final = 3.0  # of values whose deviation is about 1
# What Mamba is initialised with: time steps between these, decays between these (arXiv 2312.00752, section 3.6;
# arXiv 2405.21060, its code).
_TIME_STEPS: Final = (0.001, 0.1)
_DECAYS: Final = (1.0, 16.0)


def write_random_weights(
    config: ModelConfig, path: Path, *, dtype: str, seed: int, progress: Progress, draft_head: bool = False
) -> int:
    """Write a safetensors file with all that a model of this configuration needs, with or without its `draft_head`, and
    return how many weights it is.

    The same seed gives the same file. `dtype` is `bfloat16`, `float16` or `float32`.
    """
    storage, torch_dtype = _DTYPES[dtype]
    params, whole = _stored(config, draft_head), family(config.model_type).names.whole
    total = sum(math.prod(shape) for shape, _ in params.values())
    generator = torch.Generator().manual_seed(seed)

    def values() -> Iterator[bytes]:
        done = 0
        for name, (shape, offset) in params.items():
            if name.endswith(whole):
                tensor = torch.randint(0, max(1, config.num_experts), shape, generator=generator)
            else:
                tensor = random_tensor(name, shape, generator, offset=offset).to(torch_dtype)
            yield tensor.view(-1).view(torch.uint8).numpy().tobytes()
            done += tensor.nbytes
            progress(done, total * torch_dtype.itemsize)

    with path.open("xb") as file:
        entries = {
            name: Entry("I64" if name.endswith(whole) else storage, shape) for name, (shape, _) in params.items()
        }
        write_safetensors(file, entries, values())
    return total


def _stored(config: ModelConfig, draft_head: bool) -> dict[str, tuple[tuple[int, ...], float]]:
    """Each tensor's shape and the offset of its values, by the names under which other engines read them, too."""
    names, outer = family(config.model_type).names, config.outer
    params = {
        names.stored_in_draft_head(name, config.num_layers): (shape, param.offset)
        for param in needs_of(config, draft_head=draft_head).params
        for name, shape in param.parts()
    }
    if outer is not None:
        params = {outer.stored(name): kind for name, kind in params.items()}
    params |= {name: (shape, 0.0) for param in encoder_params(config) for name, shape in param.parts()}
    turned = names.turned_experts or (outer is not None and outer.turned_stacks)
    if names.stacks is None and not turned:
        return params
    return _stacked(params, config.num_experts, names.stacks or (f"experts.{GATE_UP}", f"experts.{DOWN}"), turned)


def _stacked(
    params: Mapping[str, tuple[tuple[int, ...], float]], num_experts: int, stacks: tuple[str, str], turned: bool
) -> dict[str, tuple[tuple[int, ...], float]]:
    """Return the tensors with those of all experts in one stack each: gates with ups, and downs. `turned` stacks are
    transposed."""
    gate_up, down = stacks
    stored: dict[str, tuple[tuple[int, ...], float]] = {}
    for name, (shape, offset) in params.items():
        match = _EXPERT.fullmatch(name)
        if match is None:
            stored[name] = shape, offset
        elif match[2] != "up":
            outputs, *inputs = shape
            outputs *= 2 if match[2] == "gate" else 1
            entry = (*inputs, outputs) if turned else (outputs, *inputs)
            stack = f"{match[1]}.{gate_up if match[2] == 'gate' else down}{BIAS if match[3] == 'bias' else ''}"
            stored[stack] = (num_experts, *entry), offset
    return stored


def _is_norm(kind: str, shape: tuple[int, ...]) -> bool:
    return len(shape) == 1 and ("norm" in kind or kind.startswith(("ln_", "patch_ln")))


def random_tensor(name: str, shape: tuple[int, ...], generator: torch.Generator, *, offset: float) -> Tensor:
    """Make random values for a checkpoint's tensor of this name; `offset` is added to it when it is loaded."""
    kind = name.removesuffix(".weight").rpartition(".")[2]
    if kind == "A_log":
        return _uniform(shape, generator, *_DECAYS).log()
    if kind == "dt_bias" or name.endswith("dt_proj.bias"):
        steps = _uniform(shape, generator, *map(math.log, _TIME_STEPS)).exp()
        return steps + torch.log(-torch.expm1(-steps))  # softplus of it is the time step
    values = torch.randn(shape, generator=generator)
    if kind == "D" or kind.endswith(("scalar", "scale")) or _is_norm(kind, shape):
        return 1.0 - offset + _NORM_SPREAD * values
    if kind.endswith(("_min", "_max")):
        return (_BOUND if kind.endswith("_max") else -_BOUND) * (1.0 + _NORM_SPREAD * values)
    inputs = math.prod(shape[1:]) if len(shape) > 3 else math.prod(shape[-1:])  # first: of a convolution over pixels
    return values * (_BIAS_SPREAD if len(shape) == 1 else inputs**-0.5)


def _uniform(shape: tuple[int, ...], generator: torch.Generator, low: float, high: float) -> Tensor:
    return low + (high - low) * torch.rand(shape, generator=generator)
