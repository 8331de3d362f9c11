from __future__ import annotations

from forebay.families.parts.gated_delta import Qwen35Config
from forebay.layers.draft_head import DraftHeadSpec
from forebay.models.families.parts.gated_delta import DECODER, block, qwen_draft_head, with_draft_layer

__all__ = ["DECODER", "block", "draft_head"]


def draft_head(config: Qwen35Config) -> DraftHeadSpec:
    """Describe the layer behind the model's own that drafts tokens."""
    return qwen_draft_head(config, block(with_draft_layer(config), config.num_layers))
