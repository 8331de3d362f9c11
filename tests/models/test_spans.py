"""Attention in both directions within pictures: logits of the language models equal those of transformers (C28)."""

from __future__ import annotations

from dataclasses import replace
from types import ModuleType
from typing import Any, Final

import pytest
import torch
from torch import Tensor
from transformers.models.gemma3 import modeling_gemma3
from transformers.models.gemma4 import modeling_gemma4

from forebay import models
from forebay.families.checkpoint import open_checkpoint
from forebay.layers.context import PictureRows
from forebay.ops import Ops
from tests.models.drive import Driver
from tests.models.tiny import Tiny, make_oracle, random_ids

LENGTH: Final = 40
PICTURES: Final = ((0, 7), (12, 30), (31, 36))  # the window is smaller than the second, and larger than the others
FAMILIES: Final[dict[str, ModuleType]] = {"gemma3_text": modeling_gemma3, "gemma4_text": modeling_gemma4}


class Case:
    """A checkpoint, a prompt with rows of encodings in the places of `PICTURES`, and the logits of transformers."""

    def __init__(self, tiny: Tiny, module: ModuleType) -> None:
        self.tiny, self.ids, decoder = tiny, random_ids(LENGTH, seed=1), tiny.oracle.model
        config = tiny.oracle.config
        self.rows, self.ahead = torch.zeros(2, LENGTH, dtype=torch.int32)
        groups = torch.full((1, LENGTH), -1)
        for number, (first, end) in enumerate(PICTURES):
            self.rows[first:end] = torch.arange(first, end) + 1
            self.ahead[first:end] = torch.arange(end - first).flip(0)
            groups[0, first:end] = number
        self.table = torch.randn(LENGTH + 1, config.hidden_size, generator=torch.Generator().manual_seed(2))
        with torch.no_grad():
            tokens = torch.tensor([self.ids])
            embeds = decoder.embed_tokens(tokens)
            given = {"config": config, "attention_mask": None, "cache": None, "position_ids": None}
            embeds = torch.where((self.rows > 0).view(1, -1, 1), self.table[self.rows.long()], embeds)
            masks = module.create_masks_for_vision_model(**given, inputs_embeds=embeds, block_sequence_ids=groups)
            own = {}
            if getattr(config, "hidden_size_per_layer_input", 0):
                own["per_layer_inputs"] = decoder.get_per_layer_inputs(tokens, None)
            hidden = decoder(inputs_embeds=embeds, attention_mask=masks, use_cache=False, **own).last_hidden_state
            self.expected = self._logits(hidden)

    def _logits(self, hidden: Tensor) -> Tensor:
        logits: Tensor = self.tiny.oracle.lm_head(hidden)[0]
        cap = getattr(self.tiny.oracle.config, "final_logit_softcapping", None)
        return logits if cap is None else cap * torch.tanh(logits / cap)

    def run(self, ops: Ops, cuts: list[int]) -> Tensor:
        """Return the logits of a prompt that is computed in chunks."""
        model = models.load(open_checkpoint(self.tiny.path), ops=ops, dtype=torch.float32)
        driver, parts = Driver(model), []
        for first, end in zip([0, *cuts], [*cuts, LENGTH], strict=True):
            ctx, ids = driver.inputs([(1, self.ids[first:end])])
            ctx = replace(ctx, pictures=PictureRows(self.table, self.rows[first:end], self.ahead[first:end].clone()))
            parts.append(model.logits(model.forward(ctx, ids)))
        return torch.cat(parts)


@pytest.fixture(scope="module", params=FAMILIES)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    options: dict[str, Any] = {"use_bidirectional_attention": "vision"} if request.param == "gemma4_text" else {}
    folder, oracle = tmp_path_factory.mktemp(request.param), make_oracle(request.param, seed=0, **options)
    oracle.save_pretrained(folder)
    return Case(Tiny(folder, oracle), FAMILIES[request.param])


@pytest.mark.parametrize("cuts", [[], [7], [10, 30], [7, 12, 30, 31, 36]])
def test_logits_with_pictures_equal_those_of_transformers(case: Case, ops: Ops, cuts: list[int]) -> None:
    assert (case.run(ops, cuts) - case.expected).abs().max() < 1e-4
