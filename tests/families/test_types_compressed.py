"""config.json of DeepSeek-V4: what is read, what is assumed, what is refused."""

from __future__ import annotations

from typing import Any

import pytest
from transformers import AutoConfig

from forebay.base.errors import ModelError
from forebay.families.deepseek_v4.config import HASHED, HEAVY, ROUTED, SPARSE, CompressedConfig
from forebay.families.model_config import config_of
from forebay.families.transformer import SLIDING
from tests.cli.public_configs import DEEPSEEK_V4_FLASH


def parsed(**fields: Any) -> CompressedConfig:
    config = config_of({**DEEPSEEK_V4_FLASH, **fields})
    assert isinstance(config, CompressedConfig)
    return config


def test_published_fields_and_those_that_transformers_writes_are_read_alike() -> None:
    written = AutoConfig.for_model(**DEEPSEEK_V4_FLASH).to_dict()
    saved, published = config_of(written), parsed()
    for name in ("rates", "layer_types", "mlp_layer_types", "rope_dim", "compress_rope", "index", "hyper", "experts"):
        assert getattr(saved, name) == getattr(published, name), name
    assert list(published.layer_types) == written["layer_types"]
    assert list(published.mlp_layer_types) == written["mlp_layer_types"] == [HASHED] * 3 + [ROUTED] * 40
    assert published.page_multiple == 128
    theta, scaling = published.compress_rope
    assert (theta, published.rope_theta, published.rope_scaling) == (160_000, 10_000, None)
    assert scaling is not None
    assert scaling["attention_factor"] == 1.0, "YaRN's own amplitude is not used"


def test_older_fields_are_read() -> None:
    found = parsed(num_hidden_layers=4, compress_ratios=[0, 4, 128, 4, 0], num_hash_layers=1, compress_rate_hca=64)
    assert found.layer_types == (SLIDING, SPARSE, HEAVY, SPARSE)
    assert found.mlp_layer_types == (HASHED, ROUTED, ROUTED, ROUTED)
    assert found.rates == {SPARSE: 4, HEAVY: 64}


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"compress_rates": {SPARSE: 1}}, SPARSE),
        ({"compress_rates": [4]}, "compress_rates"),
        ({"num_hidden_layers": 2, "compress_ratios": [4, 8]}, "compress_ratios"),
        ({"layer_types": ["full_attention"] * 43}, "layer_types"),
        ({"mlp_layer_types": [ROUTED]}, "mlp_layer_types"),
        ({"qk_rope_head_dim": 63}, "qk_rope_head_dim"),
        ({"partial_rotary_factor": 0.5}, "qk_rope_head_dim"),
        ({"partial_rotary_factor": "x"}, "partial_rotary_factor"),
        ({"rope_scaling": {"main": {}, "compress": {"rope_theta": 1.0}}, "qk_rope_head_dim": 512}, "rope_parameters"),
        ({"index_head_dim": 32}, "index_head_dim"),
        ({"o_groups": 7}, "o_groups"),
        ({"hc_mult": 17}, "hc_mult"),
        ({"hc_sinkhorn_iters": 0}, "hc_sinkhorn_iters"),
        ({"num_key_value_heads": 2}, "num_key_value_heads"),
        ({"n_shared_experts": 2}, "n_shared_experts"),
        ({"scoring_func": "softmax"}, "scoring_func"),
        ({"intermediate_size": 99}, "intermediate_size"),
        ({"num_experts_per_tok": 257}, "num_experts_per_tok"),
        ({"sliding_window": 0}, "sliding_window"),
    ],
)
def test_a_wrong_field_is_named(fields: dict[str, Any], named: str) -> None:
    with pytest.raises(ModelError, match=named):
        parsed(**fields)
