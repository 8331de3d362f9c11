from __future__ import annotations

from forebay.families.config.model_config import ModelConfig
from forebay.models.text_encoder import TextEncoderSpec, bert_spec, head_spec


def describe(config: ModelConfig) -> TextEncoderSpec:
    """Describe a BERT; its head reads the first token, through the pooler."""
    return bert_spec(config, lambda own: head_spec(own, dense="pooler.dense"))
