"""Greedy tokens through the whole engine equal transformers', for every model type and every option of one."""

from __future__ import annotations

import pytest

from forebay.config.resolve import resolve
from forebay.engine.loop.build import build_engine
from forebay.engine.loop.core import EngineCore
from tests.engine.conftest import is_greedy
from tests.engine.starts import NEW_TOKENS, PROMPTS, tokens_of
from tests.kernels import NATIVE
from tests.models.tiny import CASES, Tiny, by_tier, page_size_of, shared_tiny


def check_twice(core: EngineCore, tiny: Tiny) -> None:
    """Greedy tokens are the model's, and the second time the same."""
    found = tokens_of(core, [*PROMPTS, *PROMPTS])
    assert found[len(PROMPTS) :] == found[: len(PROMPTS)]
    for prompt, tokens in zip(PROMPTS, found, strict=False):
        assert len(tokens) == NEW_TOKENS
        assert is_greedy(tiny, prompt, tokens)


@pytest.mark.quick(2)
@pytest.mark.parametrize("case", by_tier(case for case in CASES if not case.endswith("-gguf")))
def test_greedy_tokens_through_the_engine_equal_those_of_transformers(case: str) -> None:
    tiny = shared_tiny(case)
    config = resolve(
        {
            "model": str(tiny.path),
            "dtype": "float32",
            "chunked_prefill_size": 5,
            "page_size": page_size_of(case, 4),
            "context_length": 64,
            "kv_cache_bytes": "4MiB",
            "max_running_requests": 8,
            "kernels": NATIVE,
        }
    )
    # The second time round, the prompts come from the prefix cache as far as it has them.
    core, _ = build_engine(config.engine)
    check_twice(core, tiny)
