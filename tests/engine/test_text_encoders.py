"""A text encoder in the engine: vectors of transformers, whatever is beside a text; and what it refuses."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from forebay.base.errors import ConfigError, GenerationError
from forebay.engine.client.llm import LLM
from tests.kernels import NATIVE
from tests.models.text_encoders import make_encoder, write_tokenizer

SETTINGS: dict[str, Any] = {
    "kv_cache_bytes": "16MiB", "num_threads": 1, "dtype": "float32", "kernels": NATIVE, "log_level": "warning",
}  # fmt: skip
TEXTS = ["a forebay", "b" * 30, "", "turbine", "f o r e b a y", "the pool above a turbine is", "x y z"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("encoder") / "bert"
    make_encoder("bert", path)
    write_tokenizer(path)
    (path / "1_Pooling").mkdir()
    (path / "1_Pooling" / "config.json").write_text(json.dumps({"pooling_mode_mean_tokens": True}))
    return path


@pytest.fixture(scope="module")
def llm(folder: Path) -> Iterator[LLM]:
    with LLM(str(folder), max_running_requests=8, **SETTINGS) as made:
        yield made


def test_embed_text_encoder_gives_the_means_of_transformers(folder: Path, llm: LLM) -> None:
    oracle = make_encoder("bert", folder.parent / "again")
    for output in llm.embed(TEXTS):
        mean = torch.nn.functional.normalize(oracle.hidden(output.prompt_token_ids).mean(dim=0), dim=0)
        torch.testing.assert_close(torch.from_numpy(output.embedding), mean, rtol=0, atol=1e-4)
        assert output.cache.cached_tokens == 0


def test_c28_embed_text_encoder_steps_and_neighbours_change_no_bit(folder: Path, llm: LLM) -> None:
    together = [output.embedding for output in llm.embed(TEXTS)]
    alone = [llm.embed(text)[0].embedding for text in TEXTS]
    with LLM(str(folder), max_running_requests=3, chunked_prefill_size=40, **SETTINGS) as narrow:
        assert narrow.info.context_length == 40
        others = [output.embedding for output in narrow.embed([*TEXTS[::-1], *TEXTS])]
    for i in range(len(TEXTS)):
        for other in (alone[i], others[len(TEXTS) + i], others[len(TEXTS) - 1 - i]):
            np.testing.assert_array_equal(together[i], other)


def test_text_encoder_with_a_prefix_cache_asked_for_computes_all_tokens(folder: Path) -> None:
    with LLM(str(folder), disable_radix_cache=False, pooling="last", **SETTINGS) as made:
        first, second = (made.embed("a forebay")[0] for _ in range(2))
    assert second.cache.cached_tokens == 0
    np.testing.assert_array_equal(first.embedding, second.embedding)


def test_text_encoder_refuses_generation_and_long_texts_with_what_it_can_do(llm: LLM) -> None:
    with pytest.raises(GenerationError, match="text encoder, which generates nothing"):
        llm.generate("a forebay")
    with pytest.raises(GenerationError, match="102 tokens; the context holds 64"):
        llm.embed("a " * 100)


@pytest.mark.parametrize(
    ("setting", "named"),
    [
        ({"enable_lora": True}, "--enable-lora"),
        ({"speculative_algorithm": "NGRAM"}, "--speculative-algorithm"),
        ({"disaggregation_mode": "prefill"}, "--disaggregation-mode"),
    ],
)
def test_text_encoder_start_with_a_decoders_setting_is_refused(folder: Path, setting: Any, named: str) -> None:
    with pytest.raises(ConfigError, match=f"{named}.*makes vectors and scores of texts"):
        LLM(str(folder), **SETTINGS, **setting)
