"""A model that is split among ranks has the logits of the whole, to the bit; else it is refused before it is read."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from forebay import models
from forebay.base.errors import ConfigError
from forebay.families.checkpoint import open_checkpoint
from forebay.formats.quantization import Quantization
from forebay.models import Model, describe, needs_of
from forebay.models.shares import check_for_ranks
from forebay.ops.exchange import Share
from tests.kernels import VARIANTS
from tests.models.drive import Driver
from tests.models.ranks import model_of, on_ranks, ops_of_ranks
from tests.models.test_embedded import PATH as EMBEDDED
from tests.models.tiny import BASE, CASES, make_random, random_ids, shared_tiny

pytestmark = pytest.mark.skipif(not VARIANTS, reason="no native kernels for this CPU")

IDS = random_ids(24, seed=5)


def refusal_of(case: str, size: int) -> str:
    """Why the model of a case cannot be split among so many ranks; "" if it can."""
    try:
        needs_of(open_checkpoint(shared_tiny(case).path).config, share=Share(size=size))
    except ConfigError as error:
        return error.message
    return ""


def logits_of(model: Model) -> torch.Tensor:
    """Of a prompt in chunks beside another row, and of a decode."""
    driver = Driver(model)
    parts = driver.step([(1, IDS[:7])])
    parts += driver.step([(2, IDS[3:9]), (1, IDS[7:10])])
    parts += driver.step([(1, IDS[10:11]), (2, IDS[9:10])])
    return torch.cat(parts)


def check(case: str, *, size: int = 2, quantization: Quantization = Quantization.NONE) -> None:
    check_file(shared_tiny(case).path, size=size, quantization=quantization)


def check_file(path: Path, *, size: int = 2, quantization: Quantization = Quantization.NONE) -> None:
    whole = logits_of(model_of(path, ops_of_ranks("native", 1)[0], quantization=quantization))
    of_ranks = on_ranks(path, lambda model, ops, exchange: logits_of(model), size=size, quantization=quantization)
    first, *others = of_ranks
    assert torch.equal(first, whole)
    assert not any(part.any() for part in others)


# One of each way to split: heads, copies of KV heads, a norm of all heads, experts, latents, groups and recurrences.
SHORT = (
    "llama-biases-tied",
    "llama-one-kv-head",
    "olmo2",
    "phi3",
    "gpt_oss",
    "qwen3_moe",
    "deepseek_v3",
    "deepseek_v32",
    "qwen3_5_text",
    "bailing_hybrid",
    "mamba",
    "mamba2",
    "falcon_h1",
    "lfm2",
    "gemma4_text",
)


@pytest.mark.whole
@pytest.mark.parametrize("case", SHORT)
def test_ranks_have_the_logits_of_the_whole_model_to_the_bit(case: str) -> None:
    check(case)


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("case", [case for case in CASES if not case.endswith("-gguf")])
def test_ranks_of_every_type_have_the_logits_of_the_whole_model_or_are_refused(case: str, size: int) -> None:
    refusal = refusal_of(case, size)
    if refusal:
        assert re.search(r"cannot (divide \d+|be split among ranks, since) \w+", refusal)
    else:
        check(case, size=size)


@pytest.mark.parametrize("case", ["llama", "olmo2", "qwen3"])
def test_ranks_with_weights_in_codes_have_the_logits_of_the_whole_model(case: str) -> None:
    check(case, quantization=Quantization.INT8)


def test_ranks_of_torch_ops_over_gloo_have_the_logits_of_the_whole_model_within_rounding() -> None:
    """But for rounding: torch chooses the order of a product's sums by the shape of the whole matrix."""
    path = shared_tiny("llama").path
    whole = logits_of(model_of(path, ops_of_ranks("torch", 1)[0]))
    first, _ = on_ranks(path, lambda model, ops, exchange: logits_of(model), kernels="torch")
    torch.testing.assert_close(first, whole, rtol=1e-5, atol=1e-5)


def test_ranks_more_than_kv_heads_have_copies_of_these() -> None:
    check("llama", size=4)


def test_ranks_more_than_groups_norm_whole_groups() -> None:
    check("mamba2", size=4)


def test_rank_reads_and_keeps_its_part_of_weights_and_caches() -> None:
    config = open_checkpoint(shared_tiny("llama").path).config
    whole, part = (needs_of(config, share=Share(size=size)) for size in (1, 2))
    entries = [sum(param.num_elements for param in needs.params if len(param.shape) == 2) for needs in (whole, part)]
    assert 2 * entries[1] == entries[0]
    assert [2 * spec.num_kv_heads for spec in part.cache_specs] == [spec.num_kv_heads for spec in whole.cache_specs]


def test_ranks_that_cannot_divide_the_heads_are_refused_with_the_nearest_number() -> None:
    config = open_checkpoint(shared_tiny("llama").path).config
    with pytest.raises(ConfigError, match="3 ranks cannot divide 4 query heads"):
        needs_of(config, share=Share(size=3))


def test_model_with_parts_that_are_not_built_for_ranks_is_refused_with_their_names() -> None:
    spec = describe(open_checkpoint(shared_tiny("zamba2").path).config)
    with pytest.raises(ConfigError, match="Stack is not built for that"):
        check_for_ranks(spec)


def test_model_is_refused_before_its_weights_are_read() -> None:
    def progress(done: int, total: int) -> None:
        raise AssertionError("a weight was read")

    checkpoint, (ops,) = open_checkpoint(shared_tiny("llama").path), ops_of_ranks("torch", 1)
    with pytest.raises(ConfigError, match="3 ranks"):
        models.load(checkpoint, ops=ops, dtype=torch.float32, progress=progress, share=Share(size=3))


@pytest.mark.slow
@pytest.mark.skipif(not EMBEDDED.is_file(), reason="the embedded model is not in the cache: make install")
@pytest.mark.parametrize("size", [2, 3])
def test_ranks_of_the_embedded_model_in_the_codes_of_its_file_have_the_logits_of_the_whole(size: int) -> None:
    """Of its 3 KV heads, one of two ranks has two."""
    check_file(EMBEDDED, size=size, quantization=Quantization.FILE)


def test_rank_may_have_one_kv_head_more_than_another(tmp_path: Path) -> None:
    heads = {"num_attention_heads": 6, "num_key_value_heads": 3, "head_dim": 8}
    make_random("llama", {**BASE, **heads}, seed=0).save_pretrained(tmp_path)
    check_file(tmp_path)
