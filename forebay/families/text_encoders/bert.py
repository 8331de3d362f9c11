"""BERT: learned positions and kinds of tokens, a norm behind each part."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

import numpy as np

from forebay.base.errors import brief
from forebay.families.base.architecture import Architecture, Header, Tensors
from forebay.families.base.fields import Fields
from forebay.families.config.model_config import Family
from forebay.families.parts.gguf.text_encoder import KEYS, LABELS, TOP_NAMES, configure, no_head
from forebay.families.parts.text_encoder import HARMLESS, TextEncoderConfig, encoder_fields, names_below, no_pooler
from forebay.formats.quantized import F32
from forebay.formats.stored_tensor import ComputedTensor, read_tensor

_TOKENIZER: Final = "tokenizer.ggml.model"
_PADDING: Final = "tokenizer.ggml.padding_token_id"
_POSITIONS: Final = "embeddings.position_embeddings.weight"
_ROBERTA: Final = {"gpt2": "roberta", "t5": "xlm-roberta"}
_MOST_OFFSET: Final = 1 << 10


def _parse(fields: Fields) -> TextEncoderConfig:
    return TextEncoderConfig(**encoder_fields(fields, positions=512, types=2))


def _configure(header: Header) -> None:
    """The format has one architecture for BERT and for RoBERTa, whose tokenizers differ. Tables of a RoBERTa's
    positions begin with that of the first token."""
    configure(header)
    config, tokenizer = header.config, header.file.metadata.get(_TOKENIZER)
    if tokenizer not in _ROBERTA:
        no_head(header)
        return
    padding = header.file.metadata.get(_PADDING, 1)
    if type(padding) is not int or not 0 <= padding < _MOST_OFFSET:
        raise header.wrong(f"{_PADDING} is {brief(padding)}, not the id of a token in front of the words")
    positions = header.whole("context_length") + padding + 1
    config.update(model_type=_ROBERTA[tokenizer], pad_token_id=padding, max_position_embeddings=positions)


def _with_first_rows(tensors: Tensors, config: Any) -> Tensors:
    """Return the tensors with the rows of positions that no token has."""
    table = tensors.get(_POSITIONS)
    offset = getattr(config, "position_offset", 0)
    if table is None or not offset or len(table.shape) != 2:
        return tensors
    rows, width = table.shape

    def pieces() -> Iterator[F32]:
        yield np.zeros((offset, width), np.float32)
        yield read_tensor(table)

    return {**tensors, _POSITIONS: ComputedTensor((offset + rows, width), [table], pieces)}


ARCHITECTURES: Final = {
    "bert": Architecture(
        layers="encoder.layer",
        causal=False,
        top_names=TOP_NAMES,
        block_names={
            "attn_q": "attention.self.query",
            "attn_k": "attention.self.key",
            "attn_v": "attention.self.value",
            "attn_output": "attention.output.dense",
            "attn_output_norm": "attention.output.LayerNorm",
            "ffn_up": "intermediate.dense",
            "ffn_down": "output.dense",
            "layer_output_norm": "output.LayerNorm",
        },
        keys=KEYS,
        checked=(LABELS,),
        configure=_configure,
        reorder=_with_first_rows,
    ),
}
FAMILY: Final = Family(parse=_parse, harmless=HARMLESS, names=names_below("bert", "cls."), unused=no_pooler)
