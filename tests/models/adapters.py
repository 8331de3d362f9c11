"""Adapters of tiny checkpoints, made by PEFT, which is the oracle for their logits."""

from __future__ import annotations

import copy
import functools
import tempfile
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final
from unittest.mock import patch

import torch
from peft import LoraConfig, get_peft_model
from torch import nn

from forebay.families.checkpoint import open_checkpoint
from forebay.families.config.model_config import family
from forebay.models import AdapterSlots, needs_of
from tests.models.tiny import Tiny, shared_tiny

MAX_RANK: Final = 16
SLOTS: Final = AdapterSlots(max_loras=3, max_rank=MAX_RANK, dtype=torch.float32)


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """`ranks` and `alphas` are given to the adapted layers in turn: what differs from the first is in a pattern."""

    ranks: tuple[int, ...]
    alphas: tuple[float, ...]
    rslora: bool = False
    seed: int = 0


CASES: Final = {
    "rank-1": Case(ranks=(1,), alphas=(2,)),
    "rank-3-rslora": Case(ranks=(3,), alphas=(5,), rslora=True, seed=1),
    "rank-16": Case(ranks=(16,), alphas=(16,), seed=2),
    "mixed": Case(ranks=(3, 16, 1, 7), alphas=(4, 2.5, 4, 9, 1), rslora=True, seed=3),
}


@dataclass(frozen=True)
class Adapted:
    """A checkpoint, an adapter of it in `folder`, and the oracles: PEFT's model, and a checkpoint with the products of
    all adapters in its weights."""

    tiny: Tiny
    folder: Path
    peft: Tiny
    merged: Tiny


def linear_layers(tiny: Tiny) -> dict[str, str]:
    """Return transformers' name of each layer that can have an adapter, by ours."""
    config = open_checkpoint(tiny.path).config
    layers, names = needs_of(config, adapters=SLOTS).adaptable, family(config.model_type).names
    found = {
        names.layer(name, config.num_layers): name
        for name, module in tiny.oracle.named_modules()
        if isinstance(module, nn.Linear)
    }
    return {ours: found[ours] for ours in layers}


@functools.cache
def adapted(checkpoint: str, case: str) -> Adapted:
    """The adapter of a case on all layers that can have one. It is everybody's."""
    tiny, folder = shared_tiny(checkpoint), Path(tempfile.mkdtemp(prefix="forebay-adapter-"))
    made = CASES[case]
    modules = sorted(linear_layers(tiny).values())
    ranks, alphas = ({name: of[i % len(of)] for i, name in enumerate(modules)} for of in (made.ranks, made.alphas))
    config = LoraConfig(
        r=made.ranks[0],
        lora_alpha=made.alphas[0],  # type: ignore[arg-type]  # declared for whole numbers, and read as any
        use_rslora=made.rslora,
        target_modules=modules,
        rank_pattern=_others(ranks, made.ranks[0]),
        alpha_pattern=_others(alphas, made.alphas[0]),
    )
    with as_they_are():
        model: Any = get_peft_model(copy.deepcopy(tiny.oracle), config).eval()
        randomize(model, made.seed)
        model.save_pretrained(folder / "adapter")
        merged = copy.deepcopy(model).merge_and_unload()
        merged.save_pretrained(folder / "merged")
        for name, module in model.named_modules():
            if name.endswith("dt_proj"):  # of Mamba-1: transformers multiplies with its weight and does not call it
                module.merge()
    return Adapted(tiny, folder / "adapter", Tiny(tiny.path, model), Tiny(folder / "merged", merged))


@contextmanager
def as_they_are() -> Iterator[None]:
    """Inside, PEFT makes adapters for the layers that are named: not for experts, which it takes shared experts for,
    and for the last layers of Mamba mixers too, whose fused kernels on a GPU would leave them out."""
    with (
        warnings.catch_warnings(),
        patch("peft.utils.transformers_weight_conversion._convert_peft_config_moe"),
        patch("peft.tuners.lora.LoraModel._check_target_module_compatiblity"),
    ):
        warnings.simplefilter("ignore")
        yield


def _others(values: Mapping[str, Any], first: Any) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value != first}


def randomize(model: nn.Module, seed: int) -> None:
    """Give A and B entries of such sizes that each adapter changes the outputs of its layer by about a tenth."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, tensor in model.named_parameters():
            if "lora_" in name:
                tensor.copy_(0.1 * torch.randn(tensor.shape, generator=generator))
