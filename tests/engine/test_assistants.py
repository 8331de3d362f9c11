"""C16, C17 with an assistant beside the model: its drafts change no token, whatever the algorithm was called."""

from __future__ import annotations

import math
import random
from pathlib import Path
from typing import Any

import pytest

from forebay.base.errors import ConfigError, ModelError
from forebay.config.machine import Amount
from forebay.config.resolve import Survey, resolve
from forebay.engine.loop.build import build_engine
from forebay.families.checkpoint import open_checkpoint
from tests.engine.test_every_model_type import check_twice
from tests.engine.test_pictures import tokens_of
from tests.integration.test_pictures import Album
from tests.kernels import NATIVE
from tests.models.assistants import CENTROIDS, TEXT, make_assistant
from tests.models.tiny import shared_tiny
from tests.models.visual import TEXT as WORDS
from tests.models.visual import shared_visual

TARGET = "gemma4_text"


@pytest.fixture(scope="module", params=[{}, CENTROIDS], ids=["every token", "centroids"])
def path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("assistant")
    make_assistant(folder, **request.param)
    return folder


def flags(draft: Path, algorithm: str, target: str = TARGET, **options: Any) -> dict[str, Any]:
    return {
        "model": str(shared_tiny(target).path),
        "dtype": "float32",
        "chunked_prefill_size": 5,
        "page_size": 4,
        "context_length": 64,
        "kernels": NATIVE,
        "speculative_algorithm": algorithm,
        "speculative_draft_model_path": str(draft),
        **options,
    }


@pytest.mark.quick(2)
@pytest.mark.parametrize(
    ("algorithm", "options"),
    [
        ("FROZEN_KV_MTP", {"speculative_num_draft_tokens": 2}),
        ("NEXTN", {"overlap_depth": 1}),
        ("EAGLE", {"disable_cuda_graph": True}),
    ],
)
def test_c16_an_assistant_changes_no_token(algorithm: str, options: dict[str, Any], path: Path) -> None:
    core, _ = build_engine(resolve(flags(path, algorithm, **options)).engine)
    tiny = shared_tiny(TARGET)
    check_twice(core, tiny)
    assert core.scheduler.state(0.0).counters["draft_tokens"] > 0


def test_c16_an_assistant_changes_no_token_behind_pictures(tmp_path: Path) -> None:
    model, rng = shared_visual("gemma4"), random.Random(5)
    make_assistant(tmp_path, text_config={**TEXT, "sliding_window": 3})  # as the model's
    album, words = Album(model), [[rng.choice(WORDS) for _ in range(7)] for _ in range(3)]
    prompts = [album.prompt(words[0], (1, 2), words[1]), album.prompt(words[0], (2, 1)), album.prompt(words[2])]
    own = {**flags(tmp_path, "FROZEN_KV_MTP"), "model": str(model.path)}
    plain, _ = build_engine(resolve({name: own[name] for name in own if "speculative" not in name}).engine)
    right = tokens_of(plain, prompts)
    core, _ = build_engine(resolve(own).engine)
    for _ in range(2):
        assert tokens_of(core, prompts) == right
    assert core.scheduler.state(0.0).counters["draft_tokens"] > 0


def test_an_assistant_is_no_eagle3_head(path: Path) -> None:
    with pytest.raises(ConfigError, match=r"EAGLE3.*gemma4_assistant drafts over the KV that the model keeps"):
        build_engine(resolve(flags(path, "EAGLE3")).engine)


@pytest.mark.parametrize("algorithm", ["FROZEN_KV_MTP", "NEXTN"])
def test_what_is_no_assistant_is_named(algorithm: str) -> None:
    with pytest.raises(ConfigError, match="a model of type llama is no assistant"):
        build_engine(resolve(flags(shared_tiny("llama").path, algorithm)).engine)


def test_an_assistant_of_another_family_is_refused(path: Path) -> None:
    with pytest.raises(ModelError, match="drafts for gemma4_text"):
        build_engine(resolve(flags(path, "FROZEN_KV_MTP", target="llama")).engine)


def test_what_an_assistant_weighs_is_not_given_to_the_caches(path: Path) -> None:
    memory = Survey(memory=lambda: Amount(1 << 32, "given"))
    with_one, without = (
        resolve(flags(draft, "FROZEN_KV_MTP", mem_fraction_static=0.25), survey=memory).engine.memory.kv_cache_bytes
        for draft in (path, path / "nowhere")
    )
    weights = sum(math.prod(tensor.shape) for tensor in open_checkpoint(path).tensors.values())
    assert without - with_one == 4 * weights
