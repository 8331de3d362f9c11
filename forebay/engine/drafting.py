"""A model beside the model that drafts for it: what it is, by its files, and what it becomes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Final

import torch

from forebay.base.errors import ConfigError
from forebay.base.log import event, get_logger
from forebay.config.engine_config import EngineConfig, SpeculationOptions, SpeculativeAlgorithm
from forebay.families import ASSISTANTS, HEADS
from forebay.families.checkpoint import open_checkpoint
from forebay.families.eagle_head.config import EagleConfig
from forebay.families.model_config import ModelConfig, config_from_folder
from forebay.models.assistant import Assistant, load_assistant
from forebay.models.decoder import Model
from forebay.models.drafter import Drafter, OwnHead
from forebay.models.eagle import eagle_cache_specs, load_eagle
from forebay.ops import Ops
from forebay.pools.cache_spec import CacheSpec

_OF_ASSISTANTS: Final = (
    SpeculativeAlgorithm.FROZEN_KV_MTP,
    SpeculativeAlgorithm.NEXTN,
    SpeculativeAlgorithm.EAGLE,
)

_OF_HEADS: Final = (SpeculativeAlgorithm.EAGLE, SpeculativeAlgorithm.EAGLE3)

log = get_logger("engine")


def by_draft_model(options: SpeculationOptions) -> SpeculationOptions:
    """With the algorithm that the draft model is made for: an assistant makes NEXTN and EAGLE frozen-KV MTP. Which of
    its kinds an EAGLE head is its tensors say when it is loaded.
    ConfigError for one of another kind, ModelError for what cannot be read."""
    path, algorithm = options.draft_model_path, options.algorithm
    if path is None:
        return options
    asked, model_type = f"--speculative-algorithm {algorithm} with {path}", _model_type(Path(path))
    if model_type in ASSISTANTS:
        if algorithm not in _OF_ASSISTANTS:
            raise ConfigError(
                f"{asked}: a {model_type} drafts over the KV that the model keeps: use "
                f"{SpeculativeAlgorithm.FROZEN_KV_MTP}"
            )
        return replace(options, algorithm=SpeculativeAlgorithm.FROZEN_KV_MTP)
    if (model_type in HEADS) is not (algorithm in _OF_HEADS):
        if model_type in HEADS:
            raise ConfigError(f"{asked}: it is an EAGLE head: use EAGLE or EAGLE3")
        raise ConfigError(
            f"{asked}: a model of type {model_type} is no EAGLE head, of which config.json names the architecture: "
            "LlamaForCausalLMEagle or LlamaForCausalLMEagle3"
        )
    if algorithm in (SpeculativeAlgorithm.FROZEN_KV_MTP, SpeculativeAlgorithm.NEXTN):
        raise ConfigError(f"{asked}: a model of type {model_type} is no assistant; there are {', '.join(ASSISTANTS)}")
    return options


def _model_type(path: Path) -> str:
    config = open_checkpoint(path).config if path.suffix == ".gguf" else config_from_folder(path)
    return config.model_type


def draft_cache_specs(options: SpeculationOptions) -> tuple[CacheSpec, ...]:
    """What a head in a checkpoint of its own keeps behind the layers of the model that it drafts for."""
    if options.algorithm not in _OF_HEADS or options.draft_model_path is None:
        return ()
    config = config_from_folder(Path(options.draft_model_path))
    return eagle_cache_specs(config) if isinstance(config, EagleConfig) else ()


def drafter_of(
    config: EngineConfig,
    target: ModelConfig,
    model: Model,
    ops: Ops,
    *,
    num_positions: int,
    progress: Callable[[int, int], None],
) -> Drafter | None:
    """Loaded, where it is not in the model; None where no head drafts, or memory leaves no width to draft for."""
    options = config.speculation
    if options.num_draft_tokens == 1:
        return None
    if options.by_own_head:
        return OwnHead(model, ops)
    if options.algorithm not in _OF_HEADS:
        return None
    assert options.draft_model_path is not None, "an algorithm of draft models without one"
    log.info(event("draft_head", path=options.draft_model_path, algorithm=options.algorithm))
    checkpoint = open_checkpoint(options.draft_model_path)
    if checkpoint.config.unknown_options:
        names = ", ".join(checkpoint.config.unknown_options)
        log.warning(event("unknown_draft_options", names=names, effect="ignored: fewer guesses may be right"))
    return load_eagle(
        checkpoint,
        target,
        model,
        third=options.algorithm is SpeculativeAlgorithm.EAGLE3,
        ops=ops,
        device=config.device,
        progress=progress,
        num_positions=num_positions,
        quantization=config.quantization,
    )


def assistant_of(
    config: EngineConfig,
    target: ModelConfig,
    ops: Ops,
    *,
    dtype: torch.dtype,
    num_positions: int,
    progress: Callable[[int, int], None],
) -> Assistant | None:
    """Loaded; None where nobody asked for one."""
    options = config.speculation
    if options.algorithm is not SpeculativeAlgorithm.FROZEN_KV_MTP:
        return None
    assert options.draft_model_path is not None, "an algorithm of draft models without one"
    log.info(event("assistant", path=options.draft_model_path, algorithm=options.algorithm))
    return load_assistant(
        open_checkpoint(options.draft_model_path),
        target,
        ops=ops,
        dtype=dtype,
        device=config.device,
        progress=progress,
        num_positions=num_positions,
        quantization=config.quantization,
    )
