"""The number of parameters of a published configuration is the one that its authors name, within 1 %."""

from __future__ import annotations

import pytest

from forebay.families.config.model_config import config_of
from forebay.models import needs_of
from tests.cli import public_decoders, public_dense, public_experts, public_norms, public_outer
from tests.cli.public_configs import LLAMA_3_8B, QWEN3_30B_A3B

PUBLISHED = {
    "meta-llama/Meta-Llama-3-8B": (LLAMA_3_8B, 8.03),
    "Qwen/Qwen3-30B-A3B": (QWEN3_30B_A3B, 30.53),
    **public_decoders.PUBLISHED,
    **public_dense.PUBLISHED,
    **public_experts.PUBLISHED,
    **public_norms.PUBLISHED,
    **public_outer.PUBLISHED,
}


@pytest.mark.quick(2)
@pytest.mark.parametrize("name", PUBLISHED)
def test_published_configuration_has_the_published_number_of_parameters(name: str) -> None:
    fields, billions = PUBLISHED[name]
    needs = needs_of(config_of(fields))
    assert sum(param.num_elements for param in needs.params) / 1e9 == pytest.approx(billions, rel=0.01)
