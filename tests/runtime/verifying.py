"""Requests that are decoded one token at a time, and with drafts: what they say, and what is left of them."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from forebay.memory.slots import PAD
from forebay.pools.cache_spec import RecurrentState, SlidingWindow
from forebay.requests.sampling_params import SamplingParams
from forebay.requests.step_plan import StepPlan, StepResult
from tests.runtime.fake_hybrid import HybridPlanner
from tests.runtime.fake_model import PAGE_SIZE
from tests.runtime.plans import Decode

Drafter = Callable[[list[int], random.Random], list[int]]
"""Guesses of what follows, given what does."""

GREEDY = SamplingParams(temperature=0.0, logprobs=2)
DRAWN = SamplingParams(temperature=1.3, top_k=40, top_p=0.9, seed=77, logprobs=1)
PENALIZED = SamplingParams(
    temperature=0.0,
    repetition_penalty=1.3,
    presence_penalty=0.4,
    frequency_penalty=0.3,
    logit_bias={5: 1.0},
    logprobs=1,
)
EVERYTHING = SamplingParams(
    temperature=0.9, top_p=0.95, min_p=0.01, seed=5, repetition_penalty=1.2, frequency_penalty=0.4, logit_bias={7: 0.5}
)
WISHES = {"greedy": GREEDY, "drawn": DRAWN, "penalized": PENALIZED, "everything": EVERYTHING}


def drafters(vocab: int, most: int) -> dict[str, Drafter]:
    def mixed(future: list[int], rng: random.Random) -> list[int]:
        return [token if rng.random() < 0.7 else (token + 1) % vocab for token in future[: rng.randint(0, most)]]

    return {
        "right": lambda future, _: future[:most],
        "wrong": lambda future, _: [(token + 1) % vocab for token in future[:most]],
        "random": lambda _, rng: [rng.randrange(vocab) for _ in range(rng.randint(1, most))],
        "mixed": mixed,
    }


@dataclass
class Said:
    """By row: its tokens, their log-probabilities, and what the caches kept of it after each step."""

    tokens: dict[int, list[int]] = field(default_factory=dict)
    logprobs: dict[int, list[Any]] = field(default_factory=dict)
    states: dict[int, list[list[Tensor]]] = field(default_factory=dict)
    kv: dict[int, list[list[Tensor]]] = field(default_factory=dict)

    def add(self, plans: HybridPlanner, plan: StepPlan, result: StepResult) -> None:
        assert result.failed == ()
        counts = result.num_new or [1] * len(plan.rows)
        entries = result.logprobs or [None] * len(result.token_ids)
        first = 0
        for row, count in zip(plan.rows.tolist(), counts, strict=True):
            self.tokens.setdefault(row, []).extend(result.token_ids[first : first + count])
            self.logprobs.setdefault(row, []).extend(entries[first : first + count])
            self.states.setdefault(row, []).append(states_of(plans, row))
            self.kv.setdefault(row, []).append(kv_of(plans, row))
            first += count


def states_of(plans: HybridPlanner, row: int) -> list[Tensor]:
    cache = plans.runner.cache
    return [tensor[plans.slots[row]].clone() for tensor in cache.tables["state"].tensors]


def kv_of(plans: HybridPlanner, row: int) -> list[Tensor]:
    """What each layer that attends keeps of the row's tokens; a windowed one of those that may still be read."""
    cache, kept, length = plans.runner.cache, [], int(plans.lens[row])
    for i, spec in enumerate(cache.specs):
        if isinstance(spec, RecurrentState):
            continue
        window = spec.window if isinstance(spec, SlidingWindow) else length + 1
        positions = torch.arange(max(0, length - window + 1), length)
        pages = torch.from_numpy(plans.pages[row])[positions // PAGE_SIZE]
        if isinstance(spec, SlidingWindow):
            pages = torch.tensor(plans.full_to_window)[pages]
            assert (pages != PAD).all()
        at = pages * PAGE_SIZE + positions % PAGE_SIZE
        kept += [tensor[at].clone() for tensor in cache.kv(i) if tensor is not None]
    return kept


def begin(plans: HybridPlanner, prompts: dict[int, list[int]], params: dict[int, SamplingParams]) -> Said:
    for row, tokens in prompts.items():
        plans.begin(row, tokens, params[row])
    said = Said()
    plan = plans.plan(extends=[(row, len(tokens)) for row, tokens in prompts.items()])
    said.add(plans, plan, plans.settle(plan, plans.runner.launch(plan).result()))
    return said


def decode(plans: HybridPlanner, said: Said, decodes: Sequence[Decode]) -> None:
    plan = plans.plan(decodes=decodes)
    said.add(plans, plan, plans.settle(plan, plans.runner.launch(plan).result()))


def plainly(plans: HybridPlanner, prompts: dict[int, list[int]], params: dict[int, SamplingParams], steps: int) -> Said:
    said = begin(plans, prompts, params)
    for _ in range(steps):
        decode(plans, said, list(prompts))
    return said


def with_drafts(
    plans: HybridPlanner,
    prompts: dict[int, list[int]],
    params: dict[int, SamplingParams],
    plain: Said,
    draft: Drafter,
    seed: int,
    *,
    spoil: Callable[[HybridPlanner], None] = lambda _: None,
) -> Said:
    """The same with guesses, some of the rows in each step and some of those without, until one has said nearly all."""
    rng, said, limit = random.Random(seed), begin(plans, prompts, params), min(map(len, plain.tokens.values())) - 4
    while max(map(len, said.tokens.values())) < limit:
        decodes: list[Decode] = []
        for row in rng.sample(list(prompts), rng.randint(1, len(prompts))):
            future = plain.tokens[row][len(said.tokens[row]) :]
            drafts = draft(future, rng) if rng.random() < 0.8 else []
            decodes.append((row, drafts) if drafts else row)
        spoil(plans)
        decode(plans, said, decodes)
    return said


def assert_same(plans: HybridPlanner, said: Said, plain: Said, prompts: dict[int, list[int]]) -> None:
    """Tokens, log-probabilities, KV and states, to the bit."""
    for row, tokens in said.tokens.items():
        count = len(tokens)
        assert tokens == plain.tokens[row][:count]
        assert said.logprobs[row] == plain.logprobs[row][:count]
        for ours, theirs in ((said.states, plain.states), (said.kv, plain.kv)):
            for tensor, expected in zip(ours[row][-1], theirs[row][count - 1], strict=True):
                assert torch.equal(tensor, expected)
        assert plans.lens[row] == plans.runner.rows.kv_lens[row] == len(prompts[row]) + count - 1
        assert plans.runner.rows.last_tokens[row] == tokens[-1]
