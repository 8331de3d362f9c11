"""C16, C18, C19: a request that ends inside a verify window, at each of its positions and in each way.

All drafts are right, so a step accepts more tokens than the answer has. The KV and the states behind the end belong to
no prefix: a request that goes on from the answer gives the bits of a cold cache.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
import torch
from msgspec.structs import replace

from forebay.config.engine_config import StateStrategy
from forebay.requests.request import Request
from forebay.requests.sampling_params import Grammar, GrammarKind, SamplingParams
from forebay.requests.updates import FinishReason
from tests.integration.rig import Engine, Result, Rig
from tests.integration.test_grammars import EOS, grammars
from tests.kernels import NATIVE
from tests.models.tiny import VOCAB, shared_tiny

MODELS = ("llama", "gpt_oss", "deepseek_v4-short-blocks", "falcon_h1", "lfm3", "kimi_linear")
WIDTH = 5
# The first step of a decode is plain. Of two windows behind it each position ends an answer.
POSITIONS = range(1, 2 * WIDTH + 2)
GREEDY = SamplingParams(temperature=0.0, ignore_eos=True, logprobs=1)
SHAPES = (
    {"page_size": 1, "overlap_depth": 1, "strategy": StateStrategy.NO_BUFFER},
    {"page_size": 4, "overlap_depth": 1, "track_interval": 4},
    {"page_size": 4, "overlap_depth": 0, "track_interval": 8},
)


class RightDrafts:
    """Drafts what the answer to the one prompt says next."""

    def __init__(self) -> None:
        self.whole: list[int] = []

    def begin_step(self, num_requests: int) -> None:
        pass

    def propose(self, req: Request, most: int) -> Sequence[int]:
        return self.whole[len(req.tokens) :][:most]

    def ended(self, req: Request) -> None:
        pass


class Stops:
    """One engine with drafts, and one without a cache or drafts, which says what is right."""

    def __init__(self, rig: Rig, **shape: object) -> None:
        self._cold = rig.engine(grammars=grammars())
        self.drafts = RightDrafts()
        options = {"radix_cache": True, "width": WIDTH, "cached_states": 8, **shape}
        self.engine: Engine = rig.engine(proposer=self.drafts, grammars=grammars(), **options)  # type: ignore[arg-type]
        plan = self.engine.core.scheduler.plan
        self.engine.core.scheduler.plan = lambda now, *_: plan(now, WIDTH)  # type: ignore[method-assign]
        rng = random.Random(7)
        self.prompt = [rng.randrange(3, VOCAB) for _ in range(6)]

    def right(self, prompt: list[int], params: SamplingParams) -> Result:
        [result] = self._cold.run([prompt], params)
        return result

    def check(self, params: SamplingParams, right: Result, *, leaves_at: int = 0) -> None:
        """Ends as it should, at the token `leaves_at` if the client leaves; and what follows is as from a cold cache.

        The drafts go on behind the end.
        """
        behind = replace(GREEDY, max_tokens=2 * WIDTH)
        self.drafts.whole = self.prompt + right.token_ids
        self.drafts.whole += self.right(self.drafts.whole, behind).token_ids
        self.engine.flush_cache()
        [result] = self.engine.run(
            [self.prompt], params, abort=lambda _, seen: bool(leaves_at) and len(seen.token_ids) >= leaves_at
        )
        if leaves_at:
            assert result.token_ids == right.token_ids[: len(result.token_ids)]
        else:
            assert (result.token_ids, result.finish) == (right.token_ids, right.finish)
        answer = right.token_ids[: leaves_at or None]
        following = [*self.prompt, *answer, 11, 12]
        self.drafts.whole = []
        [after] = self.engine.run([following], replace(GREEDY, max_tokens=3))
        cold = self.right(following, replace(GREEDY, max_tokens=3))
        assert (after.token_ids, after.logprobs) == (cold.token_ids, cold.logprobs)
        assert after.cached_tokens <= len(self.prompt) + len(answer)


@pytest.fixture(scope="module", params=MODELS)
def rig(request: pytest.FixtureRequest) -> Rig:
    made = Rig(shared_tiny(request.param).path, dtype=torch.float32, kernels=NATIVE, num_threads=1, context_length=256)
    if not made.ops.name.startswith("native"):
        pytest.skip("only the native kernels compute a row alike in every batch")
    return made


@pytest.fixture(params=SHAPES, ids=["no-buffer", "overlap", "long-interval"])
def stops(rig: Rig, request: pytest.FixtureRequest) -> Stops:
    return Stops(rig, **request.param)


@pytest.mark.quick(1)
def test_length_that_ends_inside_a_window(stops: Stops) -> None:
    for position in POSITIONS:
        params = replace(GREEDY, max_tokens=position)
        stops.check(params, stops.right(stops.prompt, params))
    assert stops.engine.count("accepted_tokens") > len(POSITIONS)


@pytest.mark.quick(2)
def test_stop_token_inside_a_window(stops: Stops) -> None:
    varied = replace(GREEDY, repetition_penalty=2.0)  # a token that came before would stop there
    whole = stops.right(stops.prompt, replace(varied, max_tokens=POSITIONS[-1])).token_ids
    assert len(set(whole)) > 2 * WIDTH - 2
    for token in dict.fromkeys(whole):
        params = replace(varied, max_tokens=POSITIONS[-1] + 1, stop_token_ids=(token,))
        right = stops.right(stops.prompt, params)
        assert right.finish is FinishReason.STOP
        stops.check(params, right)


@pytest.mark.quick(1)
def test_grammar_that_ends_inside_a_window(stops: Stops) -> None:
    for position in POSITIONS[::2]:
        grammar = Grammar(GrammarKind.REGEX, f"[a-z]{{{position}}}")
        params = replace(GREEDY, ignore_eos=False, max_tokens=40, grammar=grammar, stop_token_ids=(EOS,))
        right = stops.right(stops.prompt, params)
        assert right.finish is FinishReason.STOP
        assert len(right.token_ids) == position + 1
        stops.check(params, right)


@pytest.mark.quick(1)
def test_client_that_leaves_inside_a_window(stops: Stops) -> None:
    """As a stop string does: it is met in the client's process, some tokens behind."""
    right = stops.right(stops.prompt, replace(GREEDY, max_tokens=40))
    for position in POSITIONS:
        stops.check(replace(GREEDY, max_tokens=40), right, leaves_at=position)
