"""A model beside the model that drafts for it: what it is, by its files, and what it becomes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final

import torch

from forebay.base.errors import ConfigError, ModelError, brief
from forebay.base.log import event, get_logger
from forebay.config.engine_config import EngineConfig, SpeculationOptions, SpeculativeAlgorithm
from forebay.families import ASSISTANTS, HEADS
from forebay.families.checkpoint import Checkpoint, open_checkpoint
from forebay.families.config.model_config import ModelConfig, config_from_folder
from forebay.families.eagle_head.config import EagleConfig
from forebay.formats.gguf_parts import model_file
from forebay.memory.kv_allocator import KV
from forebay.models import load, needs_of
from forebay.models.assistant import Assistant, load_assistant
from forebay.models.decoder import Model
from forebay.models.drafter import Drafter, OwnHead
from forebay.models.eagle import eagle_cache_specs, load_eagle
from forebay.models.network import Network
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
    """Return the options with the algorithm that the draft model is made for: an assistant turns NEXTN and EAGLE into
    frozen-KV MTP. An EAGLE head's tensors decide its kind when it is loaded. ConfigError for a draft model of another
    kind, ModelError for one that cannot be read."""
    path, algorithm = options.draft_model_path, options.algorithm
    if path is None:
        return options
    asked, model_type = f"--speculative-algorithm {algorithm} with {path}", _config_of(Path(path)).model_type
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


def _config_of(path: Path) -> ModelConfig:
    path = model_file(path)
    return open_checkpoint(path).config if path.suffix == ".gguf" else config_from_folder(path)


def draft_cache_specs(config: EngineConfig, target: ModelConfig) -> tuple[CacheSpec, ...]:
    """Return the cache of a draft head or model with a checkpoint of its own, behind the layers of the target model.
    Raises ConfigError for a model that cannot draft for it."""
    options = config.speculation
    if options.draft_model_path is None or options.algorithm not in (*_OF_HEADS, SpeculativeAlgorithm.STANDALONE):
        return ()
    draft = _config_of(Path(options.draft_model_path))
    if options.algorithm is SpeculativeAlgorithm.STANDALONE:
        return _specs_of_model(config, options.draft_model_path, draft, target)
    return eagle_cache_specs(draft) if isinstance(draft, EagleConfig) else ()


def _specs_of_model(config: EngineConfig, path: str, draft: ModelConfig, target: ModelConfig) -> tuple[CacheSpec, ...]:
    if draft.vocab_size != target.vocab_size:
        raise ConfigError(
            f"{path} has a vocabulary of {draft.vocab_size} tokens, and {config.model_path} one of "
            f"{target.vocab_size}: a draft model has the tokens of the model: take one of the same family"
        )
    asked, own = config.memory.context_length, draft.max_position_embeddings
    if asked > own:
        raise ConfigError(
            f"{path} has {own} positions, and the context is {asked} tokens: set --context-length {own}, or take "
            "another draft model"
        )
    specs = tuple(spec.on_device for spec in needs_of(draft).cache_specs)
    for spec in specs:
        if spec.kind != KV:
            raise ConfigError(
                f"{path}: a layer of this {draft.model_type} keeps {spec}: a draft model shares the model's pages, "
                "which have room for all tokens and where rejected ones are written over: take one of full attention"
            )
    _check_same_tokens(path, config.model_path)
    return specs


def _check_same_tokens(draft: str, target: str) -> None:
    """Wherever both have a spelling."""
    for token, (piece, other) in enumerate(zip(_spellings(draft), _spellings(target), strict=False)):
        if piece and other and piece != other:
            raise ConfigError(
                f"token {token} is {brief(piece)} in {draft} and {brief(other)} in {target}: a draft model has the "
                "tokens of the model: take one of the same family"
            )


def _spellings(path: str) -> Sequence[str]:
    """Return the spelling of each token; empty if there is no tokenizer, or an unknown one, which its users report."""
    from forebay.text import tokenizer_files  # brings the tokenizers, which the engine does without otherwise

    try:
        return tokenizer_files.from_path(Path(path)).pieces
    except ModelError:
        return []


def drafter_of(
    config: EngineConfig,
    target: ModelConfig,
    model: Network,
    ops: Ops,
    *,
    num_positions: int,
    progress: Callable[[int, int], None],
) -> Drafter | None:
    """Load the drafter if it is not in the model; None if no head drafts, or memory leaves no width to draft for."""
    options = config.speculation
    if options.num_draft_tokens == 1:
        return None
    assert isinstance(model, Model), "a head drafts for a decoder"
    if options.by_own_head:
        return OwnHead(model, ops)
    if options.algorithm not in _OF_HEADS:
        return None
    assert options.draft_model_path is not None, "an algorithm of draft models without one"
    log.info(event("draft_head", path=options.draft_model_path, algorithm=options.algorithm))
    return load_eagle(
        _opened(options.draft_model_path),
        target,
        model,
        third=options.algorithm is SpeculativeAlgorithm.EAGLE3,
        ops=ops,
        device=config.device,
        progress=progress,
        num_positions=num_positions,
        quantization=config.quantization,
    )


def draft_model_of(
    config: EngineConfig, model: Network, ops: Ops, *, num_positions: int, progress: Callable[[int, int], None]
) -> Network | None:
    """Loaded, its layers behind those of `model`; None where no model drafts, or memory leaves no width to draft
    for."""
    options = config.speculation
    if options.algorithm is not SpeculativeAlgorithm.STANDALONE or options.num_draft_tokens == 1:
        return None
    assert options.draft_model_path is not None, "an algorithm of draft models without one"
    log.info(event("draft_model", path=options.draft_model_path))
    return load(
        _opened(options.draft_model_path),
        ops=ops,
        dtype=model.dtype,
        device=config.device,
        progress=progress,
        context_length=num_positions,
        quantization=config.quantization,
        first_entry=len(model.cache_specs()),
    )


def _opened(path: str) -> Checkpoint:
    checkpoint = open_checkpoint(path)
    if checkpoint.config.unknown_options:
        names = ", ".join(checkpoint.config.unknown_options)
        log.warning(event("unknown_draft_options", names=names, effect="ignored: fewer guesses may be right"))
    return checkpoint


def assistant_of(
    config: EngineConfig,
    target: ModelConfig,
    ops: Ops,
    *,
    dtype: torch.dtype,
    num_positions: int,
    progress: Callable[[int, int], None],
) -> Assistant | None:
    """Load the assistant; None if none was requested, or memory leaves no width to draft for."""
    options = config.speculation
    if options.algorithm is not SpeculativeAlgorithm.FROZEN_KV_MTP or options.num_draft_tokens == 1:
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
