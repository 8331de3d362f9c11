"""C21, C28: the halves of a request on two real engines say what one says, to the bit, with whatever layers keep."""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from forebay.config.engine_config import (
    DisaggregationMode,
    DisaggregationOptions,
    SpeculationOptions,
    SpeculativeAlgorithm,
)
from forebay.engine.frames import AddRequest
from forebay.pools.cache_pool import CachePool
from forebay.requests.pictures import Picture
from forebay.requests.sampling_params import SamplingParams
from forebay.requests.transfers import (
    Arrived,
    Broken,
    Closed,
    Event,
    Offer,
    Offered,
    Order,
    Rendezvous,
    Send,
    Sent,
    Span,
    Tail,
    Withdraw,
)
from forebay.requests.updates import Update
from forebay.scheduler.decode_role import DecodeRole
from forebay.scheduler.handoff import LOST
from forebay.scheduler.prefill_role import PrefillRole
from forebay.speculation.ngram import Ngram
from tests.integration.rig import Engine, Result, Rig
from tests.integration.test_hybrid_tokens import Known, greedy
from tests.integration.test_widths import known_of
from tests.kernels import NATIVE
from tests.models.eagles import load_head, make_right
from tests.models.heads import make_headed
from tests.models.tiny import VOCAB, shared_tiny

# Attention; Mamba-2, Mamba-1 and delta nets beside it; states alone; convolutions and windows; sinks; latent KV;
# windows, entries and rings.
MODELS = (
    "llama",
    "falcon_h1",
    "jamba",
    "qwen3_5_text",
    "kimi_linear",
    "mamba2",
    "lfm3",
    "gpt_oss",
    "glm_moe_dsa",
    "deepseek_v4",
)
TIGHT = {"num_tokens": 112, "schedule_conservativeness": 0.0}
EXTRA = {"decode_extra_slots": 2, "num_reserved_decode_tokens": 4}
# Shapes of prefill and of decode.
SHAPES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "pages": ({"page_size": 16, "chunked_prefill_size": 20}, {"page_size": 4, "overlap_depth": 1}),
    "tokens": ({"page_size": 1, "overlap_depth": 1, "radix_cache": True}, {"page_size": 1}),
    "cached": ({"page_size": 4, "radix_cache": True}, {"page_size": 4, "radix_cache": True, "overlap_depth": 1}),
    "tight": ({"page_size": 4}, {"page_size": 4, "retraction_host_bytes": 1 << 30, "max_running_requests": 3, **TIGHT}),
}


@dataclass
class Carrier:
    """Of one engine: copies at once, between caches of the same process."""

    cache: CachePool
    peer: Carrier | None = None
    events: list[Event] = field(default_factory=list)
    offers: dict[Any, Offer] = field(default_factory=dict)
    num_lost: int = 0  # transfers, the next ones, that break with their last bytes
    num_unfenced: int = 0
    num_rejected: int = 0

    def fileno(self) -> int:
        raise NotImplementedError

    def poll(self) -> Sequence[Event]:
        events, self.events = self.events, []
        return events

    def submit(self, order: Order) -> None:
        assert self.peer is not None
        ticket = order.ticket
        match order:
            case Offer():
                self.peer.offers[ticket] = order
                given = order.num_tokens, order.digest, order.start, order.weight_version, order.adapter, order.pictures
                self.peer.events.append(Offered(ticket, *given))
            case Send(tail=Tail()) if self.num_lost:
                self.num_lost -= 1
                for end in (self, self.peer):
                    end.events += [Broken(ticket, LOST), Closed(ticket)]
            case Send():
                offer = self.offers[ticket]
                for kind, span in order.spans.items():
                    self._copy(kind, span, offer.spans[kind], offer.num_tokens)
                if order.tail:
                    self.events += [Sent(ticket), Closed(ticket)]
                    self.peer.events += [Arrived(ticket, order.tail), Closed(ticket)]
            case Withdraw():
                self.peer.events += [Broken(ticket, order.failure), Closed(ticket)]
                self.events.append(Closed(ticket))

    def _copy(self, kind: str, source: Span, target: Span, num_tokens: int) -> None:
        ours, theirs = self.cache.tables[kind], self.peer.cache.tables[kind]
        if kind in ("state", "ring"):
            for src, dst in zip(ours.tensors, theirs.tensors, strict=True):
                dst[target.ids.copy()] = src[source.ids.copy()]
            return
        sizes = self.cache.page_size, self.peer.cache.page_size
        stop = min(num_tokens, source.start + len(source.ids) * sizes[0], target.start + len(target.ids) * sizes[1])
        positions = torch.arange(max(source.start, target.start), stop)
        at, to = (
            torch.from_numpy(span.ids.copy())[(positions - span.start) // size] * size + positions % size
            for span, size in zip((source, target), sizes, strict=True)
        )
        for src, dst in zip(ours.tensors, theirs.tensors, strict=True):
            # As real transports do: a page's bytes are divided evenly, also where an entry is of several tokens.
            their, our = (_by_token(tensor, size) for tensor, size in zip((dst, src), reversed(sizes), strict=True))
            their[to] = our[at]


def _by_token(tensor: torch.Tensor, page_size: int) -> torch.Tensor:
    flat = tensor.view(len(tensor), -1).view(torch.uint8)
    return flat.view(len(tensor) * page_size, -1)


class Two:
    """A prefill and a decode engine over one model, or of each of its own."""

    def __init__(
        self, rig: Rig, prefill: dict[str, Any], decode: dict[str, Any], decodes_on: Rig | None = None
    ) -> None:
        modes = {mode: DisaggregationOptions(mode=mode) for mode in DisaggregationMode}
        sends = modes[DisaggregationMode.PREFILL]
        takes = DisaggregationOptions(mode=DisaggregationMode.DECODE, **EXTRA)
        self.prefill = rig.engine(role=PrefillRole(sends), options=sends, transfers=Carrier, **prefill)
        self.decode = (decodes_on or rig).engine(
            role=DecodeRole(takes, "decode"), options=takes, transfers=Carrier, **decode
        )
        one, other = (engine.core.exchange.transfers for engine in (self.prefill, self.decode))
        one.peer, other.peer = other, one
        self.num_requests = 0

    def guess(self, width: int) -> None:
        """Decode's steps are as wide as they may be."""
        plan = self.decode.core.scheduler.plan
        self.decode.core.scheduler.plan = lambda now, *_: plan(now, width)

    def run(
        self,
        prompts: list[list[int]],
        params: list[SamplingParams],
        adapters: Sequence[str] = (),
        *,
        pictures: Sequence[Sequence[Picture]] = (),
        of_decode: Sequence[Sequence[Picture]] = (),
        abort: Callable[[Result], bool] = lambda result: False,
        failing: Collection[str] = (),
    ) -> list[Result]:
        """Return the outcome of each prompt on decode, with the pictures `of_decode` there, if given. `abort` says
        after each step whether a client there leaves; halves fail with the codes of `failing`, and with no others."""
        halves: dict[Engine, dict[int, Result]] = {self.prefill: {}, self.decode: {}}
        failed = set[str]()

        def take(results: dict[int, Result], updates: Sequence[Update]) -> None:
            for update in updates:
                if update.failure is not None:
                    assert update.failure.code in failing, update.failure
                    failed.add(update.failure.code)
                results[update.request_id].take(update)

        names, shown = adapters or [""] * len(prompts), pictures or [()] * len(prompts)
        seen = {self.prefill: shown, self.decode: of_decode or shown}
        for i, (prompt, wanted, name) in enumerate(zip(prompts, params, names, strict=True)):
            self.num_requests += 1
            for engine, results in halves.items():
                results[self.num_requests] = Result()
                add = AddRequest(
                    request_id=self.num_requests,
                    prompt_token_ids=prompt,
                    params=wanted,
                    rendezvous=Rendezvous("prefill", 1, self.num_requests),
                    adapter=name,
                    pictures=tuple(seen[engine][i]),
                )
                take(results, engine.core.add(add))
        while not all(engine.core.idle for engine in halves):
            for engine, results in halves.items():
                take(results, engine.core.step())
            for request_id, result in halves[self.decode].items():
                if result.finish is None and abort(result):
                    take(halves[self.decode], self.decode.core.abort(request_id))
        for engine in halves:
            engine.core.step()  # hears of what has closed
            engine.core.scheduler.audit()
            assert not engine.core.scheduler.pools.deferred.entries
        assert failed == set(failing)
        first = [result.token_ids for result in halves[self.prefill].values()]
        results = list(halves[self.decode].values())
        assert first == [result.token_ids[:1] for result in results]
        return results


@pytest.fixture(scope="module", params=MODELS)
def known(request: pytest.FixtureRequest) -> Known:
    return known_of(request.param, shortest=12)


@pytest.mark.quick(4)
@pytest.mark.parametrize("shape", SHAPES)
def test_c21_c28_two_engines_say_what_one_says(known: Known, shape: str) -> None:
    """Twice: the second time with prefixes in either cache, where there is one."""
    two = Two(known.rig, *SHAPES[shape])
    for _ in range(2):
        results = two.run(known.prompts, known.params)
        assert [(result.token_ids, result.logprobs) for result in results] == known.alone
    if shape in ("tokens", "cached"):
        assert any(result.cached_tokens for result in results)
    if shape == "tight":
        assert two.decode.count("retractions") > 0


# Who guesses: on the host; a head that is hardly ever right; a model that always is, as it is the model itself.
GUESSERS: dict[str, Callable[[Path], dict[str, Any]]] = {
    "NGRAM": lambda folder: {"path": shared_tiny("llama").path},
    "NEXTN": lambda folder: {"path": make_headed("qwen3_next", folder).path, "draft_head": True},
    "EAGLE3": lambda folder: dict(zip(("path", "draft"), eagle(folder), strict=True)),
    "STANDALONE": lambda folder: {"path": shared_tiny("llama").path, "draft_model": shared_tiny("llama").path},
}


def eagle(folder: Path) -> tuple[Path, Any]:
    target, draft = make_right(folder, third=True, wrong=0.03)
    return target, partial(load_head, draft, third=True)


@pytest.mark.parametrize("guesser", GUESSERS)
def test_c21_c28_what_guesses_go_on_from_comes_with_the_prompt(guesser: str, tmp_path: Path) -> None:
    """Twice: the second time with prefixes in both caches."""
    made = {"dtype": torch.float32, "kernels": NATIVE, "num_threads": 1, "context_length": 256}
    rig = Rig(**GUESSERS[guesser](tmp_path), **made)
    if not rig.ops.name.startswith("native"):
        pytest.skip("only the native kernels compute a row alike in every batch")
    rng = random.Random(2)
    prompts = [[rng.randrange(3, VOCAB) for _ in range(1 + 13 * i)] for i in range(5)]
    known = Known.of(rig, prompts, [greedy(13 + 4 * i) for i in range(5)])
    ngram = Ngram(SpeculationOptions(algorithm=SpeculativeAlgorithm.NGRAM, num_draft_tokens=4))
    host = {"proposer": ngram} if guesser == "NGRAM" else {}
    widths = (1 if host else 2), 4
    two = Two(
        rig,
        {"width": widths[0], "page_size": 16, "chunked_prefill_size": 20, "radix_cache": True},
        {"width": widths[1], "page_size": 4, "radix_cache": True, "overlap_depth": 0 if host else 1, **host},
    )
    two.guess(widths[1])
    for _ in range(2):
        results = two.run(known.prompts, known.params)
        assert [(result.token_ids, result.logprobs) for result in results] == known.alone
    guessed, accepted = (two.decode.count(name) for name in ("draft_tokens", "accepted_tokens"))
    assert guessed > 0
    assert guesser != "STANDALONE" or accepted == guessed
