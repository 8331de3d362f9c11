"""Tokenizers of text encoders in GGUF files read texts as those that they were converted from."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
import tokenizers
from tokenizers import models, normalizers, pre_tokenizers, processors

from forebay.base.errors import ModelError
from forebay.formats.strings import Strings
from forebay.text.gguf_tokenizer import from_gguf
from forebay.text.tokenizer import Tokenizer
from tests.together import together

SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
WORDS = ["a", "fore", "##bay", "feeds", "turbine", "##s", "etudiante", "étudiante", "A", "!", "漢", "##", "x"]
NAMELESS = Strings.of(["[PAD]", "[NONE]", "[CLS]", "[SEP]", "[MASK]", *WORDS])
TEXTS = ("a forebay feeds turbines!", "A Étudiante", "漢漢 x", "", "  a\tx\n", "[CLS] a ##s", "zzz a\u0301")
PIECES = ["<s>", "<pad>", "</s>", "<unk>", "▁", "▁a", "▁fore", "bay", "s", "▁x", "!", "x"]
SCORES = [0.0, 0.0, 0.0, 0.0, -3.0, -2.0, -4.0, -4.0, -3.5, -3.0, -5.0, -6.0]


def wordpiece_metadata(**changes: Any) -> dict[str, Any]:
    """The metadata of a BERT, as the converter writes a WordPiece vocabulary."""
    plain = [word[2:] if word.startswith("##") else f"▁{word}" for word in WORDS]
    return {
        "general.architecture": "bert",
        "tokenizer.ggml.model": "bert",
        "tokenizer.ggml.tokens": Strings.of([*SPECIAL, *plain]),
        "tokenizer.ggml.token_type": np.array([3] * len(SPECIAL) + [1] * len(WORDS), np.int32),
        "tokenizer.ggml.unknown_token_id": 1,
        "tokenizer.ggml.seperator_token_id": 3,
        **changes,
    }


def wordpiece_oracle(*, lowercase: bool, strip_accents: bool | None) -> tokenizers.Tokenizer:
    vocab = {piece: token for token, piece in enumerate([*SPECIAL, *WORDS])}
    made = tokenizers.Tokenizer(models.WordPiece(vocab=vocab, unk_token="[UNK]", max_input_chars_per_word=100))
    made.normalizer = normalizers.BertNormalizer(lowercase=lowercase, strip_accents=strip_accents)
    made.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    made.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    made.add_special_tokens(SPECIAL)
    return made


@together("lowercase, accents", [(True, None), (True, False), (False, None), (False, True)])
def test_wordpiece_of_a_gguf_file_reads_texts_as_the_original(lowercase: bool, accents: bool | None) -> None:
    flags = {"tokenizer.ggml.normalizer.lowercase": lowercase, "tokenizer.ggml.normalizer.strip_accents": accents}
    given = {name: value for name, value in flags.items() if value is not None}
    ours = Tokenizer(from_gguf(wordpiece_metadata(**given)))
    oracle = wordpiece_oracle(lowercase=lowercase, strip_accents=accents)
    for text in TEXTS:
        assert ours.encode(text, parse_special=True) == oracle.encode(text).ids, text
    pair = oracle.encode("a forebay", "feeds x")
    assert ours.encode_pair("a forebay", "feeds x") == (pair.ids, pair.type_ids)
    assert ours.encode("[CLS] a") != ours.encode("[CLS] a", parse_special=True)


def test_wordpiece_of_a_gguf_file_is_lower_case_by_default_and_decodes() -> None:
    ours = Tokenizer(from_gguf(wordpiece_metadata()))
    assert ours.encode("Turbines A") == ours.encode("turbines a")
    assert ours.decode(ours.encode("a forebay feeds")) == " a forebay feeds"


def unigram_metadata(**changes: Any) -> dict[str, Any]:
    """The metadata of an XLM-RoBERTa, as the converter writes a vocabulary of unigrams."""
    return {
        "general.architecture": "bert",
        "tokenizer.ggml.model": "t5",
        "tokenizer.ggml.tokens": Strings.of(PIECES),
        "tokenizer.ggml.scores": np.array(SCORES, np.float32),
        "tokenizer.ggml.token_type": np.array([3, 3, 3, 2, *[1] * 8], np.int32),
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.eos_token_id": 2,
        **changes,
    }


def test_unigrams_of_a_gguf_file_read_texts_as_the_original() -> None:
    made = tokenizers.Tokenizer(models.Unigram(list(zip(PIECES, SCORES, strict=True)), unk_id=3))
    made.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Metaspace()])
    made.post_processor = processors.RobertaProcessing(("</s>", 2), ("<s>", 0))
    made.add_special_tokens(["<s>", "<pad>", "</s>"])
    ours = Tokenizer(from_gguf(unigram_metadata()))
    for text in ("a forebays", "x  xx!", "", "q a", "a </s> x"):
        assert ours.encode(text, parse_special=True) == made.encode(text).ids, text
    pair = made.encode("a", "forebay x")
    assert ours.encode_pair("a", "forebay x") == (pair.ids, pair.type_ids)


@pytest.mark.parametrize(
    ("metadata", "told"),
    [
        (wordpiece_metadata(**{"tokenizer.ggml.tokens": Strings.of(["▁a"] * 18)}), "first token of a text is 'None'"),
        (
            wordpiece_metadata(**{"tokenizer.ggml.unknown_token_id": None, "tokenizer.ggml.tokens": NAMELESS}),
            "no token '[UNK]'",
        ),
        (wordpiece_metadata(**{"tokenizer.ggml.cls_token_id": 18}), "the first token of a text is 18"),
        (wordpiece_metadata(**{"tokenizer.ggml.cls_token_id": "[CLS]"}), "the first token of a text is '[CLS]'"),
        (wordpiece_metadata(**{"tokenizer.ggml.token_type": np.array([1], np.int32)}), "token_type"),
        (wordpiece_metadata(**{"tokenizer.ggml.normalizer.lowercase": 1}), "lowercase is 1, not true or false"),
        (wordpiece_metadata(**{"general.architecture": "llama"}), "which only text encoders have here"),
        (unigram_metadata(**{"tokenizer.ggml.scores": np.array([0.0], np.float32)}), "scores"),
        (unigram_metadata(**{"tokenizer.ggml.precompiled_charsmap": "x"}), "precompiled_charsmap is 'x'"),
        (
            unigram_metadata(**{"tokenizer.ggml.precompiled_charsmap": np.full(9, 255, np.uint8)}),
            "precompiled_charsmap cannot be read",
        ),
    ],
    ids=lambda given: given if isinstance(given, str) else "",
)
def test_hostile_tokenizer_of_a_text_encoder_is_refused(metadata: dict[str, Any], told: str) -> None:
    with pytest.raises(ModelError, match=re.escape(told)):
        from_gguf(metadata)
