"""From a family's description to a model with weights.

checkpoint = open_checkpoint(path)
model = load(checkpoint, ops=ops, dtype=torch.bfloat16, device="cpu")
hidden = model.forward(ctx, input_ids)       # [T] -> [T, H]; KV and states go to ctx.cache, as cache_specs() says
logits = model.logits(hidden[last])          # [N, H] -> [N, V] float32
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import torch

from forebay.base.errors import ModelError, brief
from forebay.families import ASSISTANTS, HEADS
from forebay.families.checkpoint import Checkpoint
from forebay.families.config.model_config import ModelConfig, family
from forebay.families.config.outer import OUTER_NAMES
from forebay.formats.adapters import Adapter, AdapterFiles, Shape, read_adapter
from forebay.formats.quantization import Quantization
from forebay.layers.adapters import AdapterSlots
from forebay.models.decoder import DecoderOptions, DecoderSpec, Model, decoder_spec
from forebay.models.dry_build import Needs, dry_build
from forebay.models.loader import Loader, Progress, check_names
from forebay.models.network import Network, NetworkSpec, build_network
from forebay.models.text_encoder import TextEncoderSpec
from forebay.ops import Ops
from forebay.ops.exchange import WHOLE, Share

__all__ = [
    "AdapterSlots",
    "Model",
    "Needs",
    "adapter_of",
    "check_adapter",
    "check_draft_head",
    "describe",
    "load",
    "needs_of",
]


_NO_HEAD = "take another --speculative-algorithm than NEXTN"


def _no_progress(done: int, total: int) -> None:
    return


def describe(config: ModelConfig, *, draft_head: bool = False) -> NetworkSpec:
    """Describe the parts of the model, with or without its `draft_head`. Raises ModelError if its type has none, and
    for models that only draft for others."""
    if config.is_text_encoder:
        if draft_head:
            raise ModelError(f"a {config.model_type} generates nothing: {_NO_HEAD}")
        encoder: TextEncoderSpec = importlib.import_module(
            f"forebay.models.text_encoders.{config.model_type}"
        ).describe(config)
        return encoder
    if config.model_type in (*ASSISTANTS, *HEADS):
        raise ModelError(
            f"a {config.model_type} only drafts for another model: serve that one, and give this as its draft"
        )
    described = importlib.import_module(f"forebay.models.families.{config.model_type}")
    if hasattr(described, "describe"):
        spec: DecoderSpec = described.describe(config)
    else:
        blocks = [described.block(config, layer) for layer in range(config.num_layers)]
        options: DecoderOptions = getattr(described, "DECODER", DecoderOptions())
        spec = decoder_spec(config, blocks, **options)
    if not draft_head:
        return spec
    if not hasattr(described, "draft_head"):
        raise ModelError(f"models of type {config.model_type} have no draft head: {_NO_HEAD}")
    return replace(spec, draft_head=described.draft_head(config))


def needs_of(
    config: ModelConfig,
    *,
    draft_head: bool = False,
    adapters: AdapterSlots | None = None,
    share: Share = WHOLE,
) -> Needs:
    """Return the weights of the model, or of a rank's share, and the caches of its layers, with this room for adapters;
    see `describe`. Raises ConfigError if the model is not built for ranks, or they cannot divide it."""
    return dry_build(describe(config, draft_head=draft_head), adapters, share)


def check_draft_head(checkpoint: Checkpoint) -> None:
    """Raise ModelError if a checkpoint, opened with its draft head, has none."""
    if not checkpoint.num_draft_heads:
        raise ModelError(f"{checkpoint.path}: no draft head (MTP, NextN) is in these files: {_NO_HEAD}")


def adapter_of(folder: Path, config: ModelConfig, *, layers: Mapping[str, Shape], max_rank: int) -> Adapter:
    """Read and check the adapter in `folder` for a model of this configuration and these adaptable `layers`; see
    `read_adapter`."""
    return read_adapter(folder, layers=layers, rename=_renamed(config, layers, folder), max_rank=max_rank)


def check_adapter(files: AdapterFiles, config: ModelConfig, *, max_rank: int) -> None:
    """Check that the adapter is one of a model of this configuration, by names, shapes and ranks. Raises ModelError."""
    layers = needs_of(config, adapters=AdapterSlots(max_loras=1, max_rank=max_rank)).adaptable
    files.layers_of(layers, _renamed(config, layers, files.folder), max_rank)


def _renamed(config: ModelConfig, layers: Mapping[str, Shape], folder: Path) -> Callable[[str], str]:
    """Return the mapping from the names of trained layers to ours, for a model with these adaptable `layers`.

    As of weights, names begin in the middle if only the layers were trained, or only the language model. They begin
    with `OUTER_NAMES` if a model with images was trained, by PEFT of any version: of the whole, or of the part without
    its head. The same adapter fits the language model alone.
    """
    names = family(config.model_type).names

    def rename(layer: str) -> str:
        if config.outer is not None and config.outer.is_beside(layer):
            raise ModelError(
                f"{folder}: {brief(layer)} is beside the language model, whose layers alone can have an adapter: train "
                r"with target_modules of these, such as r'.*(language_model|text_model).*\.(q_proj|v_proj)', or merge "
                "the adapter into the model (PEFT's merge_and_unload) and serve that"
            )
        inner = OUTER_NAMES.sub("", layer)
        found = [names.layer(name, config.num_layers) for name in (layer, f"model.{layer}", inner, f"model.{inner}")]
        return next((ours for ours in found if ours in layers), found[-1])

    return rename


def load(
    checkpoint: Checkpoint,
    *,
    ops: Ops,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    progress: Progress = _no_progress,
    context_length: int | None = None,
    quantization: Quantization = Quantization.NONE,
    draft_head: bool = False,
    first_entry: int = 0,
    adapters: AdapterSlots | None = None,
    share: Share = WHOLE,
) -> Network:
    """Read the weights tensor by tensor, in `dtype` or in the codes of `quantization`, into the form that `ops` reads
    fastest.

    Positions below `context_length` (None: all that the configuration has) can be used. `progress(done, total)` is
    called with bytes of the result. With its `draft_head` the checkpoint was opened, too. `first_entry`, `adapters` and
    `share`: see `Model`. Raises ModelError, before anything is read, if a weight is missing, unused or of another shape
    than the configuration has, and if the context is longer than the model's. Raises ConfigError as `needs_of`.
    """
    spec = describe(checkpoint.config, draft_head=draft_head)
    if draft_head:
        check_draft_head(checkpoint)
    params = dry_build(spec, share=share).params
    check_names(checkpoint, params)
    num_positions = spec.max_positions if context_length is None else context_length
    if not 1 <= num_positions <= spec.max_positions:
        raise ModelError(
            f"{checkpoint.path}: a context of {num_positions} tokens; the model has {spec.max_positions} positions"
        )
    weights = Loader(
        checkpoint, params, ops=ops, dtype=dtype, device=device, progress=progress, quantization=quantization
    )
    return build_network(
        spec, ops, weights, num_positions=num_positions, first_entry=first_entry, adapters=adapters, share=share
    )
