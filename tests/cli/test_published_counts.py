"""The number of parameters of a published configuration is the one that its authors name, within 1 %."""

from __future__ import annotations

import pytest
import torch
from transformers.models.qwen4_exp.configuration_qwen4_exp import Qwen4ExpVisionConfig
from transformers.models.qwen4_exp.modeling_qwen4_exp import Qwen4ExpVisionModel

from forebay.families.config.model_config import config_of
from forebay.models import needs_of
from forebay.models.encoder import encoder_params
from tests.cli import public_decoders, public_dense, public_experts, public_norms, public_outer
from tests.cli.public_configs import DEEPSEEK_V4_PRO, LLAMA_3_8B, QWEN3_30B_A3B

PUBLISHED = {
    "meta-llama/Meta-Llama-3-8B": (LLAMA_3_8B, 8.03),
    "Qwen/Qwen3-30B-A3B": (QWEN3_30B_A3B, 30.53),
    **public_decoders.PUBLISHED,
    **public_dense.PUBLISHED,
    **public_experts.PUBLISHED,
    **public_norms.PUBLISHED,
    **public_outer.PUBLISHED,
}


QWEN_4 = public_outer.QWEN_3_8_FLASH_NEXT["text_config"]
# Of the layers that draft, as the tensors of the published files have them; of Qwen's without its indexer. Few layers
# are before them.
DRAFT_LAYERS = {
    "deepseek-ai/DeepSeek-V4-Pro": ({**DEEPSEEK_V4_PRO, "num_hidden_layers": 1}, 25.84),
    "Qwen/Qwen3.8-Flash-Next": ({**QWEN_4, "num_hidden_layers": 2, "layer_types": QWEN_4["layer_types"][:2]}, 2.605),
}


@pytest.mark.parametrize("name", DRAFT_LAYERS)
def test_layer_that_drafts_has_the_parameters_of_the_published_files(name: str) -> None:
    fields, billions = DRAFT_LAYERS[name]
    config = config_of(fields)
    layer = f"model.layers.{config.num_layers}."
    found = sum(p.num_elements for p in needs_of(config, draft_head=True).params if p.names[0].startswith(layer))
    assert found / 1e9 == pytest.approx(billions, rel=0.01)


def test_encoder_of_qwen_4_has_the_parameters_of_transformers() -> None:
    vision = {"out_hidden_size": QWEN_4["hidden_size"]}
    config = config_of({**public_outer.QWEN_3_8_FLASH_NEXT, "vision_config": vision})
    with torch.device("meta"):
        theirs = Qwen4ExpVisionModel(Qwen4ExpVisionConfig(**vision))
    assert sum(param.num_elements for param in encoder_params(config)) == theirs.num_parameters()


@pytest.mark.quick(2)
@pytest.mark.parametrize("name", PUBLISHED)
def test_published_configuration_has_the_published_number_of_parameters(name: str) -> None:
    fields, billions = PUBLISHED[name]
    needs = needs_of(config_of(fields))
    assert sum(param.num_elements for param in needs.params) / 1e9 == pytest.approx(billions, rel=0.01)
