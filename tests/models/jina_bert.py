"""Jina BERT v2 in plain torch, which is the oracle for it: transformers has no such type.

It follows the paper (arXiv 2310.19923, section 3.1), and the names of the published checkpoints.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    BertConfig,
    PreTrainedModel,
)
from transformers.modeling_outputs import BaseModelOutput, SequenceClassifierOutput


class JinaBertConfig(BertConfig):
    model_type = "jina_bert_v2"


def nest(**parts: nn.Module) -> nn.Module:
    module = nn.Module()
    for name, part in parts.items():
        module.add_module(name, part)
    return module


def slope(head: int, count: int) -> float:
    """The slopes of ALiBi as its paper has them: a geometric sequence, which starts at the 8/n-th root of 1/2."""
    power = 2 ** math.floor(math.log2(count))
    if head < power:
        start = 2 ** (-8 / power)
        return start ** (head + 1)
    return slope(2 * (head - power), 2 * power)


def layer_of(config: Any) -> nn.Module:
    width, inner = config.hidden_size, config.intermediate_size
    norm = lambda: nn.LayerNorm(width, eps=config.layer_norm_eps)  # noqa: E731
    own = nest(query=nn.Linear(width, width), key=nn.Linear(width, width), value=nn.Linear(width, width))
    attention = nest(self=own, output=nest(dense=nn.Linear(width, width), LayerNorm=norm()))
    gated = nn.Linear(width, 2 * inner, bias=False)
    return nest(attention=attention, mlp=nest(gated_layers=gated, wo=nn.Linear(inner, width), layernorm=norm()))


class JinaBertModel(PreTrainedModel):
    config_class = JinaBertConfig
    base_model_prefix = "bert"

    def __init__(self, config: Any, **_: Any) -> None:
        super().__init__(config)
        width = config.hidden_size
        words, kinds = nn.Embedding(config.vocab_size, width), nn.Embedding(config.type_vocab_size, width)
        norm = nn.LayerNorm(width, eps=config.layer_norm_eps)
        self.embeddings = nest(word_embeddings=words, token_type_embeddings=kinds, LayerNorm=norm)
        layers = [layer_of(config) for _ in range(config.num_hidden_layers)]
        self.encoder = nest(layer=nn.ModuleList(layers))
        self.pooler = nest(dense=nn.Linear(width, width))
        self.post_init()

    def forward(self, input_ids: Tensor, token_type_ids: Tensor, **_: Any) -> BaseModelOutput:
        parts: Any = self.embeddings
        x = parts.LayerNorm(parts.word_embeddings(input_ids) + parts.token_type_embeddings(token_type_ids))
        encoder: Any = self.encoder
        for layer in encoder.layer:
            x = self._layer(layer, x)
        return BaseModelOutput(last_hidden_state=x)

    def _layer(self, layer: Any, x: Tensor) -> Tensor:
        attention, mlp, heads = layer.attention, layer.mlp, self.config.num_attention_heads
        own = attention.self
        q, k, v = (part(x).unflatten(2, (heads, -1)).transpose(1, 2) for part in (own.query, own.key, own.value))
        places = torch.arange(x.shape[1])
        apart = (places.unsqueeze(1) - places).abs()
        slopes = torch.tensor([slope(head, heads) for head in range(heads)])
        scores = q @ k.transpose(2, 3) / math.sqrt(q.shape[3]) - slopes.view(-1, 1, 1) * apart
        attended = (scores.softmax(3) @ v).transpose(1, 2).flatten(2)
        x = attention.output.LayerNorm(attention.output.dense(attended) + x)
        gate, up = mlp.gated_layers(x).chunk(2, dim=2)
        return mlp.layernorm(mlp.wo(F.gelu(gate) * up) + x)  # type: ignore[no-any-return]


class _Headed(PreTrainedModel):
    config_class = JinaBertConfig
    base_model_prefix = "bert"

    def __init__(self, config: Any, **_: Any) -> None:
        super().__init__(config)
        self.bert = JinaBertModel(config)
        self.classifier = nn.Linear(config.hidden_size, config.num_labels)
        self.post_init()


class JinaBertForSequenceClassification(_Headed):
    def forward(self, input_ids: Tensor, token_type_ids: Tensor, **_: Any) -> SequenceClassifierOutput:
        first = self.bert(input_ids, token_type_ids).last_hidden_state[:, 0]
        return SequenceClassifierOutput(logits=self.classifier(torch.tanh(self.bert.pooler.dense(first))))


class JinaBertForTokenClassification(_Headed):
    def forward(self, input_ids: Tensor, token_type_ids: Tensor, **_: Any) -> SequenceClassifierOutput:
        return SequenceClassifierOutput(logits=self.classifier(self.bert(input_ids, token_type_ids).last_hidden_state))


def register() -> None:
    """Let transformers' classes make and save these models."""
    AutoConfig.register("jina_bert_v2", JinaBertConfig)
    AutoModel.register(JinaBertConfig, JinaBertModel)
    AutoModelForSequenceClassification.register(JinaBertConfig, JinaBertForSequenceClassification)
    AutoModelForTokenClassification.register(JinaBertConfig, JinaBertForTokenClassification)
