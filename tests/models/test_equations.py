"""A description printed as equations: every part of every type has one, and what differs is seen."""

from __future__ import annotations

from dataclasses import replace

import pytest

from forebay import models
from forebay.families import TYPES
from forebay.families.config.model_config import ModelConfig, config_of
from forebay.families.small import small_config
from forebay.layers.blocks import SublayerSpec
from forebay.models.equations import block_lines, equations
from tests.models.tiny import by_tier


def small(model_type: str, num_layers: int = 8, **fields: object) -> ModelConfig:
    shape = {"hidden_size": 128, "num_layers": num_layers, "vocab_size": 1000}
    return config_of({**small_config(model_type, **shape), **fields})


def lines(config: ModelConfig) -> list[str]:
    return "\n".join(equations(models.describe(config), models.needs_of(config).kept_by_block)).splitlines()


@pytest.mark.whole
@pytest.mark.parametrize("model_type", by_tier(TYPES))
def test_every_part_of_every_type_has_an_equation(model_type):
    shown = lines(small(model_type))
    assert any(line.startswith(("  x += ", "  x = ")) for line in shown)
    assert any("keeps" in line for line in shown)


def test_a_layer_is_shown_once_with_all_its_numbers():
    shown = lines(small("gemma3_text"))
    assert [line for line in shown if line.startswith("layer")] == ["layers 0-2, 4-6:", "layers 3, 7:"]
    assert sum("the last 128 tokens" in line for line in shown) == 2  # the equation, and what is kept
    assert "x = 11.31 embedding[token]  (1,000 x 128)" in shown


def test_parts_side_by_side_are_a_sum_and_multipliers_are_seen():
    shown = lines(small("falcon_h1", ssm_in_multiplier=1.25, lm_head_multiplier=0.5))
    assert "  x += attention(norm(x)) + mamba2(1.25 norm(x))" in shown
    assert shown[-1].startswith("logits = 0.5 head(norm(x))")


def test_a_layer_without_kv_says_whose_it_reads():
    shown = "\n".join(lines(small("gemma4_text", num_layers=3)))
    *_, last = shown.split("\n\n")[:-1]
    assert last.startswith("layer 2:")
    assert "k and v as layer 1 keeps them" in last
    assert "keeps KV" not in last
    assert "30 tanh(head(norm(x)) / 30)" in shown


def test_norms_stand_where_they_are():
    after, around = lines(small("olmo2")), lines(small("glm4"))
    assert "  x += norm(attention(x))" in after
    assert "  x += norm(attention(norm(x)))" in around


@pytest.mark.parametrize("fields", [{"head_dim": 64}, {"rope_theta": 5e5}, {"num_key_value_heads": 1}], ids=str)
def test_what_changes_the_model_changes_what_is_shown(fields):
    assert lines(small("llama", **fields)) != lines(small("llama"))


def test_a_part_without_an_equation_is_an_error():
    block = models.describe(small("llama")).blocks[0]
    with pytest.raises(NotImplementedError, match="object"):
        block_lines(replace(block, sublayers=(SublayerSpec(part=object()),)))


@pytest.mark.parametrize(
    ("model_type", "fields", "pairs"),
    [
        ("llama", {}, "in the two halves"),
        ("cohere", {}, "neighbours"),
        ("ernie4_5", {}, "neighbours"),
        ("deepseek_v3", {}, "neighbours"),
        ("deepseek_v3", {"rope_interleave": False}, "in the two halves"),
        ("deepseek_v4", {}, "neighbours"),
    ],
)
def test_rope_names_the_pairs_of_the_checkpoint(model_type: str, fields: dict[str, object], pairs: str) -> None:
    shown = [line for line in lines(small(model_type, **fields)) if line.startswith("    rope:")]
    assert shown
    assert all(f"dimensions of a head, rotary pairs are {pairs}, theta" in line for line in shown), shown


def test_rope_of_an_indexer_may_have_other_pairs_than_its_attention() -> None:
    shown = "\n".join(lines(small("deepseek_v32")))
    assert "dimensions of a head, rotary pairs are neighbours" in shown
    (index,) = {line.rpartition(", ")[2] for line in shown.splitlines() if "s = sum over heads" in line}
    assert index == "rotary pairs are in the two halves"
