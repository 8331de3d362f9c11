from __future__ import annotations

from dataclasses import replace

from forebay.base.errors import ModelError
from forebay.families.config.model_config import ModelConfig
from forebay.families.gemma4_assistant.config import AssistantConfig
from forebay.families.parts.gemma4 import Gemma4Config
from forebay.layers.build import BlockSpec
from forebay.models.assistant import AssistantSpec
from forebay.models.decoder import decoder_spec
from forebay.models.families.parts.gemma4 import block, own_attention, reading


def assistant(config: AssistantConfig, target: ModelConfig) -> AssistantSpec:
    """Describe the assistant that drafts for `target`, over the KV that `target` keeps. Raises ModelError for a target
    of another type or of other sizes."""
    if not isinstance(target, Gemma4Config):
        raise ModelError(f"a gemma4_assistant drafts for gemma4_text, not for a model of type {target.model_type}")
    _check(config, target)
    around = decoder_spec(config, [_block(config, target, layer) for layer in range(config.num_layers)])
    return AssistantSpec(
        decoder=around,
        backbone_size=config.backbone_size,
        num_centroids=config.num_centroids,
        best_centroids=config.best_centroids,
    )


def _check(config: AssistantConfig, target: Gemma4Config) -> None:
    """Raise ModelError if the assistant does not fit its target model."""
    pairs = {
        "vocabulary": (config.vocab_size, target.vocab_size),
        "hidden size": (config.backbone_size, target.hidden_size),
    }
    for kind in set(config.layer_types):
        if kind not in target.layer_types:
            raise ModelError(f"the assistant reads the KV of {kind}, and no layer of the model keeps any")
        heads, sharing = config.heads[kind], target.heads[kind].num_kv_heads
        pairs[f"size of {kind}'s heads"] = heads.dim, target.heads[kind].dim
        if config.num_heads % sharing:
            raise ModelError(f"the assistant's {config.num_heads} heads cannot share {sharing} of KV of {kind}")
    if config.sliding_window and target.sliding_window:
        pairs["sliding window"] = config.sliding_window, target.sliding_window
        if target.sliding_window < 2:
            raise ModelError("the assistant reads tokens before a token, and the model's window is the token itself")
    for what, (ours, theirs) in pairs.items():
        if ours != theirs:
            raise ModelError(f"the assistant is for a {what} of {ours}, and the model's is {theirs}")


def _block(config: AssistantConfig, target: Gemma4Config, layer: int) -> BlockSpec:
    """Read the KV of the model's last layer of the same kind: all keys that a query behind the last token would see,
    except its own, which does not exist."""
    kind = config.layer_types[layer]
    last = max(number for number, of in enumerate(target.layer_types) if of == kind)
    own = own_attention(config, layer)
    seen = replace(own, sliding_window=max(0, own.sliding_window - 1))
    return block(config, layer, reading(seen, target.kv_owners[last]))
