"""The tokenizer of a checkpoint, whatever its files are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import tokenizers

from forebay.text.token_bytes import PieceReader

MAX_TOKENS: Final = 1 << 21
"""Ids of a tokenizer: eight times the largest vocabulary that is published."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenizerParts:
    """The tokenizer of a checkpoint. `control` are the ids that structure a conversation, `hidden` those of them that
    are no part of a text; `names` spells `bos_token`, `eos_token` and the like, `template` is the chat template."""

    backend: tokenizers.Tokenizer
    pieces: Sequence[str]  # by id; "" for an id without one
    reader: PieceReader
    added: dict[str, int]
    control: frozenset[int]
    hidden: frozenset[int]
    names: dict[str, str] = field(default_factory=dict)
    space_prefix: bool = False  # encoding puts a space before a text
    add_bos: bool = False  # put there by us; a tokenizer.json has both in its post-processor
    add_eos: bool = False
    template: str | None = None
    response_template: Any = None  # as it is in tokenizer_config.json
    named_templates: dict[str, str] = field(default_factory=dict)  # for some conversations, instead of `template`
