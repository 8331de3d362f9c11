"""Rotary tables equal transformers' to the last bit of float32, far out too, where small differences grow."""

from __future__ import annotations

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding
from transformers.models.ministral3.modeling_ministral3 import get_llama_4_attn_scale

from forebay.layers.rotary import QueryScaleSpec, RopeSpec, RopeTables, cos_sin_table, inverse_frequencies
from forebay.ops.weight_memory import WeightMemory

SCALINGS = {
    "default": {},
    "linear": {"factor": 4.0},
    "dynamic": {"factor": 2.0},
    "llama3": {
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
    "proportional": {"partial_rotary_factor": 0.4, "factor": 2.0},
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 32768},
    "yarn-options": {
        "factor": 8.0,
        "original_max_position_embeddings": 16384,
        "beta_fast": 16,
        "beta_slow": 2,
        "truncate": False,
        "mscale": 0.707,
        "mscale_all_dim": 1.0,
    },
    "yarn-amplitude": {"factor": 4.0, "original_max_position_embeddings": 32768, "attention_factor": 1.25},
}


@pytest.mark.parametrize("theta", [10_000.0, 500_000.0])
@pytest.mark.parametrize("name", SCALINGS)
def test_tables_equal_those_of_transformers(name, theta):
    rope_type, head_dim, positions = name.split("-")[0], 64, 131_072
    parameters = {"rope_type": rope_type, "rope_theta": theta, **SCALINGS[name]}
    config = LlamaConfig(
        hidden_size=head_dim, num_attention_heads=1, max_position_embeddings=positions, rope_parameters=parameters
    )
    ids = torch.tensor([[0, 1, 2, 1000, 8191, 65_537, positions - 1]])
    cos, sin = LlamaRotaryEmbedding(config)(torch.zeros(1), ids)
    scaling = None if rope_type == "default" else {"rope_type": rope_type, **SCALINGS[name]}
    table = cos_sin_table(head_dim=head_dim, theta=theta, scaling=scaling, num_positions=positions)[ids[0]]
    expected = torch.cat([cos[0, :, : head_dim // 2], sin[0, :, : head_dim // 2]], dim=-1)
    torch.testing.assert_close(table, expected, rtol=0, atol=2e-7)


def test_a_table_lies_with_the_weights_and_is_made_again_in_its_place():
    taken = []

    def take(size):
        taken.append(torch.zeros(size, dtype=torch.uint8))
        return taken[-1]

    def table():
        return RopeTables(50, "cpu", memory).table(spec)

    memory, spec = WeightMemory(take), RopeSpec(8, 100.0)
    right = cos_sin_table(head_dim=8, theta=100.0, scaling=None, num_positions=50)
    lies = table()
    (chunk,) = taken
    assert lies.data_ptr() - chunk.data_ptr() in range(chunk.nbytes - lies.nbytes)
    assert torch.equal(lies, right)
    chunk.fill_(0xA7)
    with memory.again():
        assert table().data_ptr() == lies.data_ptr()
    assert torch.equal(lies, right)


def test_frequency_factors_divide_each_frequency():
    plain, _ = inverse_frequencies(head_dim=8, theta=100.0, scaling=None)
    scaling = {"rope_type": "frequency_factors", "factors": [1.0, 2.0, 4.0, 8.0]}
    divided, amplitude = inverse_frequencies(head_dim=8, theta=100.0, scaling=scaling)
    assert torch.equal(divided, plain / torch.tensor([1.0, 2.0, 4.0, 8.0]))
    assert amplitude == 1.0


@pytest.mark.parametrize(("num_positions", "kind"), [(31, "short"), (32, "short"), (33, "long"), (100, "long")])
def test_longrope_takes_the_angles_of_the_table_s_length(num_positions, kind):
    scaling = {
        "short_factor": [1.0, 2.0, 4.0],
        "long_factor": [2.0, 3.0, 8.0],
        "short_mscale": 1.1,
        "long_mscale": 1.3,
    }
    given = {"rope_type": "longrope", "original_max_position_embeddings": 32, **scaling}
    table = cos_sin_table(head_dim=6, theta=1e4, scaling=given, num_positions=num_positions)
    factors = {"rope_type": "frequency_factors", "factors": scaling[f"{kind}_factor"]}
    plain = cos_sin_table(head_dim=6, theta=1e4, scaling=factors, num_positions=num_positions)
    torch.testing.assert_close(table, plain * scaling[f"{kind}_mscale"], rtol=0, atol=0)


def test_query_scales_equal_those_of_transformers():
    positions, length = torch.arange(200), 16
    scales = RopeTables(200, "cpu", None).table(QueryScaleSpec(0.3, length))
    theirs = get_llama_4_attn_scale(positions.unsqueeze(0), 0.3, length).flatten()
    torch.testing.assert_close(scales, theirs, rtol=0, atol=1e-6)
    assert scales[:length].eq(1).all()
    assert scales[length] > 1
