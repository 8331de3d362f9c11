"""The embedded default model, where it has been downloaded: the same greedy tokens and logits as transformers.

transformers needs 6 s to read the file. What it computes is stored in `embedded.json`: the greedy tokens, and of the
logits of the prompt each 499th column. The long tier computes it again.
"""

from __future__ import annotations

import functools
import json
from pathlib import Path

import pytest
import torch

from forebay import models
from forebay.families.checkpoint import open_checkpoint
from tests.models.drive import Driver

PATH = Path.home() / ".cache/forebay/models/SmolLM2-135M-Instruct.Q4_1.gguf"
# "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n"
PROMPT = [1, 4093, 198, 1780, 314, 260, 3575, 282, 4649, 47, 2, 198, 1, 520, 9531, 198]
NEW_TOKENS = 12
COLUMNS = slice(None, None, 499)
STORED = Path(__file__).with_name("embedded.json")

pytestmark = pytest.mark.skipif(not PATH.is_file(), reason="the embedded model is not in the cache: make install")


def by_transformers() -> tuple[list[int], torch.Tensor]:
    """Return greedy tokens and the logits of the prompt by transformers, from its own reading of the same file."""
    import gguf
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    with pytest.MonkeyPatch.context() as patch:
        # transformers parses the file for each call and builds the table of names for each module: 11 s become 6.
        patch.setattr(gguf, "GGUFReader", functools.cache(gguf.GGUFReader))
        patch.setattr(gguf, "get_tensor_name_map", functools.cache(gguf.get_tensor_name_map))
        config = load_gguf_checkpoint(str(PATH))["config"]
        oracle = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config), dtype=torch.float32).eval()
        tensors = load_gguf_checkpoint(str(PATH), return_tensors=True, model_to_load=oracle)["tensors"]
    missing, unexpected = oracle.load_state_dict(tensors, strict=False)
    assert (missing, unexpected) == (["lm_head.weight"], [])  # tied to the embedding
    with torch.no_grad():
        tokens = oracle.generate(
            torch.tensor([PROMPT]), max_new_tokens=NEW_TOKENS, do_sample=False, eos_token_id=None, pad_token_id=0
        )
        return tokens[0, len(PROMPT) :].tolist(), oracle(torch.tensor([PROMPT])).logits[0]


def stored() -> tuple[list[int], torch.Tensor]:
    """Return the greedy tokens and the stored columns of the prompt's logits."""
    contents = json.loads(STORED.read_text())
    return contents["tokens"], torch.tensor(contents["logits"])


@pytest.mark.slow
def test_stored_continuation_is_that_of_transformers():
    tokens, logits = by_transformers()
    known, columns = stored()
    assert tokens == known
    torch.testing.assert_close(logits[:, COLUMNS], columns, rtol=0, atol=1e-4)


@pytest.mark.quick(1)
def test_greedy_continuation_equals_that_of_transformers(ops):
    driver = Driver(models.load(open_checkpoint(PATH), ops=ops, dtype=torch.float32), page_size=16)
    tokens, columns = stored()
    (logits,) = driver.step([(1, PROMPT)])
    torch.testing.assert_close(logits[:, COLUMNS], columns, rtol=0, atol=2e-3)
    got = [int(logits[-1].argmax())]
    while len(got) < NEW_TOKENS:
        (logits,) = driver.step([(1, got[-1:])])
        got.append(int(logits[-1].argmax()))
    assert got == tokens
