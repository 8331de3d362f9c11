"""What a model needs is what its layers ask for: known without weights, and the same when it is loaded."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

import pytest
import torch

from forebay import models
from forebay.backends import make_ops
from forebay.base.errors import ModelError
from forebay.families import TYPES
from forebay.families.checkpoint import open_checkpoint
from forebay.models import needs_of
from tests.deadlines import HANGS_S
from tests.models.tiny import CASE_OF, CASES, by_tier

SOME = ("llama", "deepseek_v4", "kimi_linear", "falcon_h1")  # each kind of layer
OTHERS = sorted(CASES.keys() - CASE_OF.values())


@pytest.mark.whole
@pytest.mark.parametrize(
    "case", [*by_tier(CASE_OF.values()), *(pytest.param(case, marks=pytest.mark.slow) for case in OTHERS)]
)
def test_a_model_asks_for_each_tensor_of_its_checkpoint_once_and_keeps_what_it_said(case, tiny):
    checkpoint = open_checkpoint(tiny(case).path)
    needs, done = needs_of(checkpoint.config), []
    names = [name for param in needs.params for name in param.names]
    assert len(names) == len(set(names))
    model = models.load(
        checkpoint, ops=make_ops("torch", 1), dtype=torch.float32, progress=lambda *bytes_: done.append(bytes_)
    )
    assert len(done) == len(needs.params)
    assert done[-1] == (model.weight_bytes, 4 * sum(param.num_elements for param in needs.params))
    assert model.cache_specs() == needs.cache_specs


def test_a_model_that_no_machine_holds_takes_no_memory(tiny):
    config = open_checkpoint(tiny("llama").path).config
    needs = needs_of(replace(config, vocab_size=1 << 28, hidden_size=1 << 20))
    assert sum(param.num_elements for param in needs.params) > 1 << 48


def test_a_tensor_that_torch_cannot_count_is_refused(tiny):
    config = open_checkpoint(tiny("llama").path).config
    with pytest.raises(ModelError, match=r"embed_tokens\.weight would have [\d,]+ entries"):
        needs_of(replace(config, vocab_size=1 << 33, hidden_size=1 << 24))


WITHOUT_COMPILER = """
import sys
from forebay.families.config.model_config import config_of
from forebay.families.small import small_config
from forebay.models import needs_of
for name in sys.argv[1:]:
    needs_of(config_of(small_config(name, hidden_size=64, num_layers=4, vocab_size=64)))
    assert "torch._dynamo" not in sys.modules, name
"""


@pytest.mark.slow
@pytest.mark.parametrize("types", [SOME, pytest.param(sorted(TYPES), marks=pytest.mark.slow)], ids=len)
def test_nothing_is_computed_with_shapes(types):
    """Which would take a second, for torch then imports its compiler."""
    subprocess.run([sys.executable, "-c", WITHOUT_COMPILER, *types], check=True, timeout=HANGS_S)
