from __future__ import annotations

from forebay.families.config.model_config import ModelConfig
from forebay.models.text_encoder import TextEncoderSpec, bert_spec, head_spec


def describe(config: ModelConfig) -> TextEncoderSpec:
    """Describe an XLM-RoBERTa; its head reads the first token, through a layer of its own."""
    return bert_spec(config, lambda own: head_spec(own, dense="classifier.dense", output="classifier.out_proj"))
