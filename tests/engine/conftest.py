from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from tests.models.tiny import Tiny, make_oracle

CONTROL = ["<|im_end|>", "<|im_start|>"]
TEMPLATE = "{% for m in messages %}<|im_start|>{{ m.content }}<|im_end|>{% endfor %}"


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    return make_chat_model(tmp_path_factory.mktemp("checkpoint"), context_length=512)


def make_chat_model(folder: Path, *, context_length: int, template: str = TEMPLATE, marks: Sequence[str] = ()) -> Tiny:
    """A random llama with a byte-level tokenizer and a chat template, as a folder. `marks` are tokens too."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {piece: i for i, piece in enumerate([*CONTROL, *letters, *marks])}
    oracle = make_oracle("llama", vocab_size=len(vocab), eos_token_id=0, max_position_embeddings=context_length)
    oracle.save_pretrained(folder)
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(CONTROL)
    tokenizer.add_tokens([*marks])
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"eos_token": CONTROL[0], "chat_template": template}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return Tiny(folder, oracle)


def is_greedy(tiny: Tiny, prompt: list[int], tokens: list[int]) -> bool:
    """Whether each of these is what transformers says behind those before it: as `greedy`, with one forward for all."""
    return tiny.logits([*prompt, *tokens[:-1]])[len(prompt) - 1 :].argmax(-1).tolist() == tokens


def greedy(tiny: Tiny, prompt: list[int], num_tokens: int) -> list[int]:
    """What transformers generates greedily, end of sequence or not."""
    tokens = list(prompt)
    with torch.no_grad():
        for _ in range(num_tokens):
            tokens.append(int(tiny.logits(tokens)[-1].argmax()))
    return tokens[len(prompt) :]
