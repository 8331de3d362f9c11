"""A GGUF file's tokenizer, saved as a folder's files, gives the same ids, here and in other hands."""

from __future__ import annotations

from pathlib import Path

import pytest
import tokenizers

from forebay.base.errors import ModelError
from forebay.formats.strings import Strings
from forebay.text.tokenizer import Tokenizer
from forebay.text.tokenizer_saving import save_tokenizer
from tests.text.tiny_tokenizer import tiny_metadata

TEXTS = ["hello world", "  two  spaces\n\nand 1234 digits", "naïve 日本語 🙂", "hi<|im_end|>\n<|im_start|>user", ""]


@pytest.fixture(params=[False, True], ids=["plain", "begin-token"])
def saved(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Tokenizer, Path]:
    metadata = {**tiny_metadata(600), "tokenizer.ggml.add_bos_token": request.param}
    save_tokenizer(metadata, tmp_path)
    return Tokenizer.from_gguf(metadata), tmp_path


@pytest.mark.parametrize("text", TEXTS)
def test_texts_have_the_ids_they_had(text: str, saved: tuple[Tokenizer, Path]) -> None:
    original, folder = saved
    again = Tokenizer.from_path(folder)
    for parse_special in (False, True):
        ids = original.encode(text, parse_special=parse_special)
        assert again.encode(text, parse_special=parse_special) == ids
        assert again.decode(ids) == original.decode(ids)
    theirs = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    assert theirs.encode(text).ids == ids
    assert theirs.decode(ids) == original.decode(ids)


@pytest.mark.quick(1)
def test_conversations_have_the_ids_they_had(saved: tuple[Tokenizer, Path]) -> None:
    original, folder = saved
    messages = [{"role": "user", "content": "What is <|im_end|>?"}, {"role": "assistant", "content": "A marker."}]
    again = Tokenizer.from_path(folder)
    assert again.encode_chat(messages) == original.encode_chat(messages)
    assert (again.eos_token_id, again.bos_token_id) == (original.eos_token_id, original.bos_token_id)


def test_a_tokenizer_of_another_kind_is_refused(tmp_path: Path) -> None:
    words = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁"]
    metadata = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": Strings.of(words),
        "tokenizer.ggml.scores": [0.0] * len(words),
    }
    with pytest.raises(ModelError, match="byte-level"):
        save_tokenizer(metadata, tmp_path)
