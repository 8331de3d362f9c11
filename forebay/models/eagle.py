"""EAGLE, EAGLE-2 and EAGLE-3 heads: from a checkpoint of their own to the drafter of a model.

Embeddings are the model's, and so are logits if a head has none of its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Final

import torch
from torch import Tensor

from forebay.base.errors import ModelError
from forebay.families.checkpoint import Checkpoint
from forebay.families.config.model_config import ModelConfig
from forebay.families.eagle_head.config import EagleConfig
from forebay.formats.quantization import Quantization
from forebay.formats.stored_tensor import StoredTensor
from forebay.layers.build import Parts
from forebay.layers.context import ForwardContext
from forebay.layers.eagle import Eagle3Layers, Eagle3Spec, EagleLayers, EagleSpec
from forebay.layers.params import Weights
from forebay.layers.rotary import RopeTables
from forebay.models.decoder import Model, attention_spec, block_spec, layer_name, mlp_spec
from forebay.models.dry_build import asked_by
from forebay.models.loader import Loader, Progress, check_names
from forebay.ops import Ops
from forebay.pools.cache_spec import CacheSpec, FullAttention

_JOIN: Final = "fc.weight"
_BIAS: Final = "fc.bias"
_HEAD: Final = "lm_head.weight"
_OTHERS: Final = ("input_layernorm", "post_attention_layernorm")
_FIRST: Final = (None, "post_attention_layernorm")


class Eagle:
    """A `Drafter`."""

    taps: tuple[int, ...] = ()

    def __init__(self, layers: EagleLayers, model: Model, ops: Ops, cache_specs: tuple[CacheSpec, ...]) -> None:
        self._layers, self._model, self._ops, self.cache_specs = layers, model, ops, cache_specs
        self.dtype, self.hidden_size, self.seen_size = model.dtype, model.hidden_size, model.hidden_size
        self.num_layers = len(cache_specs)

    def follow(self, ctx: ForwardContext, next_ids: Tensor, seen: Tensor) -> Tensor:
        """As `Drafter.follow`; `seen` [T, H] are the model's hidden states."""
        return self._layers(ctx, self._model.embed(next_ids), seen)

    draft = follow

    def token_ids(self, hidden: Tensor) -> Tensor:
        """As `Drafter.token_ids`, by the model's own head of logits."""
        return self._ops.sampling.argmax_rows(self._model.logits(hidden))[0]


class Eagle3:
    """A `Drafter`."""

    def __init__(
        self,
        layers: Eagle3Layers,
        model: Model,
        ops: Ops,
        cache_specs: tuple[CacheSpec, ...],
        taps: tuple[int, ...],
    ) -> None:
        self._layers, self._model, self._ops = layers, model, ops
        self.cache_specs, self.taps = cache_specs, taps
        self.dtype, self.hidden_size, self.seen_size = model.dtype, model.hidden_size, len(taps) * model.hidden_size
        self.num_layers = len(cache_specs)

    def follow(self, ctx: ForwardContext, next_ids: Tensor, seen: Tensor) -> Tensor:
        """As `Drafter.follow`; `seen` holds the inputs of the tapped layers side by side, which one layer joins."""
        return self.draft(ctx, next_ids, self._layers.join(ctx, seen))

    def draft(self, ctx: ForwardContext, next_ids: Tensor, hidden: Tensor) -> Tensor:
        """As `Drafter.draft`, from hidden states before the last norm."""
        return self._layers(ctx, self._model.embed(next_ids), hidden)

    def token_ids(self, hidden: Tensor) -> Tensor:
        """As `Drafter.token_ids`, over the head's own vocabulary if it has one."""
        own = self._layers.token_ids(hidden)
        return (
            self._ops.sampling.argmax_rows(self._model.logits(self._layers.normed(hidden)))[0] if own is None else own
        )


def eagle_cache_specs(config: EagleConfig) -> tuple[CacheSpec, ...]:
    """Return the cache specs of a head of this configuration."""
    return (FullAttention(num_kv_heads=config.num_kv_heads, head_dim=config.head_dim),) * config.num_layers


def taps_of(config: EagleConfig, target: ModelConfig) -> tuple[int, ...]:
    """Return the layers whose inputs an EAGLE-3 head is fed with: those behind the ones that its configuration names,
    as SGLang has it, else the three that EAGLE-3 takes. Raises ModelError if the model has fewer layers."""
    layers = target.num_layers
    taps = tuple(layer + 1 for layer in config.tapped) or (2, layers // 2, layers - 3)
    if sorted({layer for layer in taps if 0 <= layer < layers}) != list(taps):
        raise ModelError(
            f"an EAGLE-3 head is fed with what layers {', '.join(map(str, taps))} are given, in this order, and the "
            f"model has {layers}: it is a head for another model, or its config.json lacks "
            "eagle_config.eagle_aux_hidden_state_layer_ids"
        )
    return taps


def load_eagle(
    checkpoint: Checkpoint,
    target: ModelConfig,
    model: Model,
    *,
    third: bool,
    ops: Ops,
    device: torch.device | str,
    progress: Progress,
    num_positions: int,
    quantization: Quantization = Quantization.NONE,
) -> Eagle | Eagle3:
    """For `model`, of configuration `target`; `third`: EAGLE-3. Otherwise as `models.load`; ModelError too where head
    and model do not belong together, and for a head of the other kind."""
    config = checkpoint.config
    assert isinstance(config, EagleConfig), config.model_type
    _check(checkpoint, config, target)
    _check_kind(checkpoint, third)
    taps = taps_of(config, target) if third else ()
    spec = _eagle3_spec(config, checkpoint.tensors, len(taps)) if third else _eagle_spec(config, checkpoint.tensors)
    if not third:  # a copy of the model's, as some files have it
        tensors = {name: tensor for name, tensor in checkpoint.tensors.items() if name != _HEAD}
        checkpoint = replace(checkpoint, tensors=tensors)

    def parts(ops: Ops, weights: Weights, num_positions: int = 1) -> Parts:
        ropes = RopeTables(num_positions, weights.device, ops.memory)
        return Parts(ops, weights, ropes, first=len(model.cache_specs()))

    params = asked_by(lambda ops, weights: spec.build(parts(ops, weights)))
    check_names(checkpoint, params)
    weights = Loader(
        checkpoint, params, ops=ops, dtype=model.dtype, device=device, progress=progress, quantization=quantization
    )
    own = parts(ops, weights, num_positions)
    layers = spec.build(own)
    specs = tuple(own.kept)
    assert specs == eagle_cache_specs(config), specs
    if isinstance(layers, Eagle3Layers):
        return Eagle3(layers, model, ops, specs, taps)
    return Eagle(layers, model, ops, specs)


def _check(checkpoint: Checkpoint, config: EagleConfig, target: ModelConfig) -> None:
    pairs = {
        "vocabulary": (config.vocab_size, target.vocab_size),
        "hidden size": (config.hidden_size, target.hidden_size),
    }
    for what, (ours, theirs) in pairs.items():
        if ours != theirs:
            raise ModelError(f"{checkpoint.path}: the head is for a {what} of {ours}, and the model's is {theirs}")


def _check_kind(checkpoint: Checkpoint, third: bool) -> None:
    """By the inputs of the layer that joins them: embedding and hidden state of EAGLE, taps of EAGLE-3."""
    join, size = checkpoint.tensors.get(_JOIN), checkpoint.config.hidden_size
    if join is None or len(join.shape) != 2:
        raise ModelError(f"{checkpoint.path}: an EAGLE head joins what it is fed with by {_JOIN}, which is not there")
    found = join.shape[1]
    if third and found == 2 * size:
        raise ModelError(f"{checkpoint.path}: {_JOIN} takes {found} inputs, 2 x {size}: an EAGLE head, not EAGLE3")
    if not third and found == 3 * size:
        raise ModelError(f"{checkpoint.path}: {_JOIN} takes {found} inputs, 3 x {size}: an EAGLE3 head, not EAGLE")


def _eagle_spec(config: EagleConfig, tensors: Mapping[str, StoredTensor]) -> EagleSpec:
    blocks = (
        block_spec(config, layer, attention_spec(config, layer), mlp_spec(config, layer), before=norms)
        for layer, norms in enumerate((_FIRST, *(_OTHERS,) * (config.num_layers - 1)))
    )
    return EagleSpec(hidden_size=config.hidden_size, blocks=tuple(blocks), join_bias=_BIAS in tensors)


def _eagle3_spec(config: EagleConfig, tensors: Mapping[str, StoredTensor], num_taps: int) -> Eagle3Spec:
    if config.num_layers != 1:
        raise ModelError(f"an EAGLE-3 head of {config.num_layers} layers: heads of one are served")
    reduced = config.draft_vocab_size < config.vocab_size
    return Eagle3Spec(
        name=layer_name(0),
        hidden_size=config.hidden_size,
        num_taps=num_taps,
        attention=replace(attention_spec(config, 0), input_size=2 * config.hidden_size),
        mlp=mlp_spec(config, 0),
        norm_eps=config.rms_norm_eps,
        norm_before_residual=config.norm_before_residual,
        join_bias=_BIAS in tensors,
        vocab_size=config.vocab_size,
        draft_vocab_size=config.draft_vocab_size if reduced or _HEAD in tensors else 0,
        listed=reduced or "d2t" in tensors,
    )
