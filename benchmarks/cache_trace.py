"""What share of the tokens that could be reused the prefix cache gives, on a multi-turn chat trace.

    python benchmarks/cache_trace.py                     # every configuration: a minute or so
    python benchmarks/cache_trace.py --shift             # each conversation behind a random number of tokens of its own
    python benchmarks/cache_trace.py --quick --turns     # few configurations, and the loss of each turn
    python -m benchmarks.cache_trace --part 10           # device memory for a tenth, with and without tiers
    python -m benchmarks.cache_trace --part 10 --engine --conversations 24 --num-turns 4  # with a model

The trace, token by token and seeded: 8 conversations of 10 turns over one system prompt (350 tokens), user turns of
20-120 and answers of 30-200 tokens, a chat template's header around each, several conversations at once. The real
scheduler plays it, over a runner that returns the trace's answers; they end with a stop token, as chats do.

Reusable are the tokens that a prompt begins with in common with anything computed before: an earlier prompt, or an
earlier prompt with its answer but for the last token, which nobody computes. Its own last token never is.
"""

from __future__ import annotations

import argparse
import math
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from tempfile import TemporaryDirectory

import numpy as np
import numpy.typing as npt
from rich.console import Console
from rich.table import Table

from forebay.base.units import ceil_div
from forebay.config.engine_config import KindConfig, Ledger, SchedulerConfig, StateStrategy
from forebay.config.kinds import TRACK_TOKENS
from forebay.engine.frames import AddRequest
from forebay.engine.loop.core import EngineCore
from forebay.memory.kinds.resident.residents import RESIDENT
from forebay.memory.kinds.state.hybrid_rows import tracking_slots
from forebay.memory.kinds.window.demand import window_pages_in_flight, window_pages_per_request
from forebay.requests.end_tokens import EndTokens
from forebay.requests.sampling_params import SamplingParams
from forebay.requests.step_plan import Admission, Launched, StepPlan, StepResult
from forebay.requests.updates import CacheReport
from forebay.scheduler.scheduler import Scheduler

Tokens = npt.NDArray[np.int32]

VOCAB = 32_000
BEGIN, END, NEWLINE, SYSTEM, USER, ASSISTANT = range(1, 7)  # the chat template's own tokens
SYSTEM_LEN, USER_LEN, ANSWER_LEN, SHIFT = 350, (20, 120), (30, 200), (0, 300)
PAUSE_STEPS = 200  # at most: what a user takes to write, in decode steps
WINDOW = 128
NUM_RUNNING = 8
CONTEXT = 4096
CHUNK = 2048
TARGET = 0.95
BLOCKS = (64, 256, 528, 1024)


# -- the trace --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Turn:
    conversation: int
    number: int
    prompt: Tokens
    answer: Tokens  # the last token is END
    message_ends: tuple[int, ...]  # lengths of the prompt
    pause_steps: int  # before it comes, after the answer to the turn before

    @property
    def computed(self) -> Tokens:
        """The tokens whose KV exists when the answer is complete."""
        return np.concatenate([self.prompt, self.answer[:-1]])


def make_trace(num_conversations: int, num_turns: int, shift: bool, seed: int) -> list[list[Turn]]:
    rng = np.random.default_rng(seed)
    system = _message(SYSTEM, _words(rng, SYSTEM_LEN))
    starts = [_words(rng, int(rng.integers(*SHIFT))) if shift else _words(rng, 0) for _ in range(num_conversations)]
    return [_conversation(rng, i, np.concatenate([start, system]), num_turns) for i, start in enumerate(starts)]


def _conversation(rng: np.random.Generator, number: int, tokens: Tokens, num_turns: int) -> list[Turn]:
    turns, ends = [], [len(tokens)]
    for turn in range(num_turns):
        tokens = np.concatenate([tokens, _message(USER, _words(rng, int(rng.integers(*USER_LEN))))])
        ends.append(len(tokens))
        prompt = np.concatenate([tokens, _tokens(BEGIN, ASSISTANT, NEWLINE)])
        answer = np.concatenate([_words(rng, int(rng.integers(*ANSWER_LEN))), _tokens(END)])
        turns.append(Turn(number, turn, prompt, answer, tuple(ends), int(rng.integers(PAUSE_STEPS))))
        tokens = np.concatenate([prompt, answer, _tokens(NEWLINE)])
        ends.append(len(tokens))
    return turns


def _message(role: int, words: Tokens) -> Tokens:
    return np.concatenate([_tokens(BEGIN, role, NEWLINE), words, _tokens(END, NEWLINE)])


def _words(rng: np.random.Generator, n: int) -> Tokens:
    return rng.integers(100, VOCAB, n, dtype=np.int32)


def _tokens(*ids: int) -> Tokens:
    return np.array(ids, dtype=np.int32)


# -- what could be reused ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Event:
    """A turn comes, or its answer is complete."""

    turn: Turn
    complete: bool


class History:
    """What has been computed so far: the prompts that came, and the answers that are complete."""

    def __init__(self) -> None:
        self._computed: dict[tuple[int, int], tuple[int, Tokens]] = {}  # the length of the prompt, and all tokens

    def add(self, event: Event) -> None:
        turn = event.turn
        tokens = turn.computed if event.complete else turn.prompt
        self._computed[turn.conversation, turn.number] = len(turn.prompt), tokens

    def shared(self, turn: Turn) -> Iterator[tuple[int, int, int]]:
        """Of each earlier request: how many tokens of its own the turn begins with, its prompt's length, and how many
        tokens of it were computed."""
        for num_prompt, tokens in self._computed.values():
            yield num_common(turn.prompt[:-1], tokens), num_prompt, len(tokens)

    def reusable(self, turn: Turn) -> int:
        return max((common for common, _, _ in self.shared(turn)), default=0)


def num_common(a: Tokens, b: Tokens) -> int:
    n = min(len(a), len(b))
    differ = a[:n] != b[:n]
    return int(differ.argmax()) if differ.any() else n


Policy = Callable[[int, int], Sequence[int]]
"""Lengths at which the states of a request are kept, by the length of its prompt and that of all that was computed."""


def policies() -> Iterator[tuple[str, Policy]]:
    for block in BLOCKS:
        yield f"at the last multiple of {block}", lambda p, n, b=block: (p // b * b, n // b * b)
        yield f"at all multiples of {block}", lambda p, n, b=block: range(b, n + 1, b)
    yield "at the prompt's end", lambda p, n: (p,)
    yield "at the request's end", lambda p, n: (n,)


def share_of(policy: Policy, events: Sequence[Event]) -> float:
    """The share of the reusable tokens that the states kept by `policy` would give, if there were room for all of them
    and a prompt's were there as soon as it has come."""
    history, reused, reusable = History(), 0, 0
    for event in events:
        if not event.complete:
            reusable += history.reusable(event.turn)
            reused += max(
                (at for common, p, n in history.shared(event.turn) for at in policy(p, n) if at <= common), default=0
            )
        history.add(event)
    return reused / reusable


# -- playing it through the scheduler ---------------------------------------------------------------------------------


class TraceRunner:
    """Samples the answers of the trace, and END beyond them."""

    def __init__(self) -> None:
        self.answers: dict[int, Turn] = {}  # by request
        self._tenants: dict[int, Admission] = {}
        self._lengths: dict[int, int] = {}  # tokens with KV, by row: a plan has those of prompts alone

    def launch(self, plan: StepPlan) -> Launched:
        self._tenants |= {admission.row: admission for admission in plan.admissions}
        rows = plan.rows.tolist()
        begins = [*plan.starts.tolist(), *(self._lengths[row] for row in rows[plan.num_extends :])]
        self._lengths |= {row: begin + n for row, begin, n in zip(rows, begins, plan.q_lens.tolist(), strict=True)}
        sampled = plan.rows[plan.sample_mask].tolist()
        return Sampled([self._sample(self._tenants[row], self._lengths[row]) for row in sampled])

    def _sample(self, tenant: Admission, seq_len: int) -> int:
        answer = self.answers[tenant.request_id].answer
        at = seq_len - tenant.num_prompt
        return int(answer[at]) if at < len(answer) else END


@dataclass(frozen=True, slots=True)
class Sampled:
    token_ids: list[int]

    def result(self) -> StepResult:
        return StepResult(token_ids=self.token_ids)


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    kind: str  # plain | tiers | hybrid | window | hybrid+window
    page_size: int
    depth: int
    strategy: StateStrategy
    scarce: bool
    part: int = (
        0  # the device has memory for one in so many tokens of the trace, and states alike; 0: for more than all
    )
    host: bool = False  # a host tier has memory for twice the trace

    @property
    def states(self) -> bool:
        return self.kind.startswith("hybrid")

    def config(self, trace: Sequence[Sequence[Turn]]) -> SchedulerConfig:
        """Room for all KV and, unless scarce, for 4 states and 4 windows of each conversation besides what runs. Scarce
        are half a state and half a window of each running request besides, and a resident copy of a page in 16."""
        ps, depth, num_conversations = self.page_size, self.depth, len(trace)
        num_pages = num_conversations * ceil_div(CONTEXT, ps)
        spare = NUM_RUNNING // 2 if self.scarce else 4 * num_conversations
        slots = NUM_RUNNING * (1 + tracking_slots(self.strategy is StateStrategy.EXTRA_BUFFER, depth)) + spare
        interval = ceil_div(TRACK_TOKENS, ps) * ps
        window = window_pages_per_request(WINDOW, ps, depth, interval if self.states else 0)
        windows = (NUM_RUNNING + spare) * window + window_pages_in_flight(CHUNK, ps, depth)
        num_slots = {"state": slots} if self.states else {}
        if "window" in self.kind:
            num_slots["window"] = min(num_pages, windows)
        if self.kind == "tiers":
            num_slots[RESIDENT] = num_pages // 16 if self.scarce else num_pages
        state = KindConfig(
            num_slots=num_slots,
            num_read={"window": WINDOW} if "window" in self.kind else {},
            strategy=self.strategy,
            track_interval=interval,
        )
        tiers: dict[str, dict[str, int]] = {}
        if self.part:
            all_pages = sum(ceil_div(len(turns[-1].computed), ps) for turns in trace)
            num_pages = all_pages // self.part
            states = {"state": NUM_RUNNING * 3 + len(trace) // self.part} if self.states else {}
            state = replace(state, num_slots=states, slot_bytes={"kv": ps}, recompute_bytes_per_token=1 << 10)
            many = {"state": 20 * len(trace)} if self.states else {}
            tiers = {"host": {"kv": 2 * all_pages, **many}} if self.host else {}
        return SchedulerConfig(
            tiers=tiers,
            page_size=ps,
            num_pages=num_pages,
            max_running_requests=NUM_RUNNING,
            context_length=CONTEXT,
            chunked_prefill_size=CHUNK,
            overlap_depth=depth,
            ledger=Ledger.RAISE,
            kinds=state,
        )


@dataclass(slots=True)
class Played:
    """What came of it. `losses` are the reusable tokens that were not reused, by turn."""

    events: list[Event] = field(default_factory=list)
    reports: dict[tuple[int, int], CacheReport] = field(default_factory=dict)
    losses: dict[tuple[int, int], int] = field(default_factory=dict)
    reused: int = 0
    reusable: int = 0
    counters: dict[str, float] = field(default_factory=dict)

    @property
    def share(self) -> float:
        return self.reused / self.reusable


class Player:
    """Sends each conversation's turns, the next one a while after the answer; time is counted in steps."""

    def __init__(self, trace: Sequence[Sequence[Turn]], setup: Setup) -> None:
        self._runner = TraceRunner()
        scheduler = Scheduler(setup.config(trace))
        ends = EndTokens([END], vocab_size=VOCAB)
        self._core = EngineCore(scheduler, self._runner, vocab_size=VOCAB, end_tokens=ends, clock=lambda: 0.0)
        self._coming = {turns[0].pause_steps: [] for turns in trace}  # type: dict[int, list[Turn]]
        self._next = {(turn.conversation, turn.number - 1): turn for turns in trace for turn in turns}
        for turns in trace:
            self._coming[turns[0].pause_steps].append(turns[0])
        self._history, self._played = History(), Played()

    def play(self) -> Played:
        played, step = self._played, 0
        while self._coming or not self._core.idle:
            for turn in self._coming.pop(step, []):
                self._send(turn)
            for update in self._core.step():
                assert update.failure is None, f"request {update.request_id}: {update.failure}"
                turn = self._runner.answers[update.request_id]
                if update.cache:
                    self._note(turn, update.cache)
                if update.finish:
                    self._ended(turn, step)
            step += 1
        played.counters = self._core.scheduler.state(0.0).counters
        return played

    def _send(self, turn: Turn) -> None:
        event = Event(turn, complete=False)
        key = turn.conversation, turn.number
        self._played.losses[key] = self._history.reusable(turn)
        self._played.reusable += self._played.losses[key]
        self._history.add(event)
        self._played.events.append(event)
        request_id = len(self._runner.answers) + 1
        self._runner.answers[request_id] = turn
        refused = self._core.add(
            AddRequest(
                request_id=request_id,
                prompt_token_ids=turn.prompt.tolist(),
                params=SamplingParams(max_tokens=512),
                resume_points=list(turn.message_ends),
            )
        )
        assert not refused, refused

    def _note(self, turn: Turn, report: CacheReport) -> None:
        key = turn.conversation, turn.number
        self._played.reports[key] = report
        reused = min(report.cached_tokens, self._played.losses[key])  # with overlap one more token has been computed
        self._played.reused += reused
        self._played.losses[key] -= reused

    def _ended(self, turn: Turn, step: int) -> None:
        event = Event(turn, complete=True)
        self._history.add(event)
        self._played.events.append(event)
        following = self._next.get((turn.conversation, turn.number))
        if following:
            self._coming.setdefault(step + 1 + following.pause_steps, []).append(following)


# -- the tables -------------------------------------------------------------------------------------------------------


def setups(quick: bool) -> Iterator[Setup]:
    for kind, page_size, depth in product(("plain", "tiers", "window", "hybrid", "hybrid+window"), (1, 16), (0, 1)):
        if quick and (depth == 0 or kind == "hybrid+window"):
            continue
        # without the extra buffer states are kept wherever a request ends, so pages are of one token
        without = kind.startswith("hybrid") and page_size == 1
        for strategy in [StateStrategy.EXTRA_BUFFER, *([StateStrategy.NO_BUFFER] if without else [])]:
            for scarce in (False, True) if kind != "plain" else (False,):
                yield Setup(kind=kind, page_size=page_size, depth=depth, strategy=strategy, scarce=scarce)


def row_of(setup: Setup, played: Played) -> list[str]:
    misses = Counter(str(report.miss_reason) for key, report in played.reports.items() if played.losses[key] > 0)
    names = ("states_taken", "states_evicted", "states_skipped") if setup.states else ()
    return [
        setup.kind,
        str(setup.page_size),
        str(setup.depth),
        str(setup.strategy) if setup.states else "-",
        "-" if setup.kind == "plain" else "scarce" if setup.scarce else "enough",
        f"{played.share:.1%}{'' if played.share >= TARGET or setup.scarce else ' missed'}",
        " / ".join(str(int(played.counters[name])) for name in names) or "-",
        ", ".join(f"{n} {reason}" for reason, n in misses.most_common()),
    ]


def print_losses(console: Console, setup: Setup, played: Played, num_turns: int) -> None:
    table = Table("conversation", *map(str, range(1, num_turns + 1)), title=f"tokens lost: {setup}")
    for conversation in sorted({key[0] for key in played.losses}):
        table.add_row(str(conversation), *(str(played.losses[conversation, turn]) for turn in range(num_turns)))
    console.print(table)


def print_parts(console: Console, trace: Sequence[Sequence[Turn]], part: int) -> None:
    """Play the trace with device memory for one in `part` of its tokens, without and with a host tier."""
    table = Table("model", "page", "host tier", "reused", "prompt tokens computed", "loaded")
    for kind, page_size, host in product(("plain", "hybrid"), (16,), (False, True)):
        strategy = StateStrategy.EXTRA_BUFFER
        setup = Setup(kind=kind, page_size=page_size, depth=1, strategy=strategy, scarce=False, part=part, host=host)
        played = Player(trace, setup).play()
        computed, loaded = (int(played.counters[name]) for name in ("computed_prompt_tokens", "tier_loaded_tokens"))
        words = "yes" if host else "no"
        table.add_row(kind, str(page_size), words, f"{played.share:.1%}", f"{computed:,}", f"{loaded:,}")
    table.title = f"{len(trace)} conversations, {played.reusable:,} reusable tokens, device memory for 1 in {part}"
    console.print(table)


def replay(model: str | None, trace: Sequence[Sequence[Turn]], part: int, budget_s: float) -> None:
    """Compute each prompt of the trace with a real engine, a turn of all conversations at a time, without a tier behind
    the device, with one in host memory and with one in files. Print a row of a table for each: prompt tokens per second
    and the share that was cached. A run that exceeds its budget ends early, and its row has what it computed."""
    from forebay import LLM
    from forebay.requests.sampling_params import SamplingParams as Params

    num_tokens = sum(len(turns[-1].computed) for turns in trace)
    context = max(len(turns[-1].computed) for turns in trace) + 16
    params = Params(max_tokens=1, temperature=0.0, ignore_eos=True)
    print("| tier | prompt tokens | seconds | tokens per second | cached |\n|---|---|---|---|---|", flush=True)
    for tier in ("no tier", "a host tier", "files"):
        with (
            TemporaryDirectory(prefix="forebay-cache-") as folder,
            LLM(
                model,
                context_length=context,
                max_running_requests=2,
                max_total_tokens=max(num_tokens // part, context),
                host_cache_bytes=(2 << 30) if tier == "a host tier" else 0,
                **({"prefix_cache_dir": folder} if tier == "files" else {}),
            ) as llm,
        ):
            llm.generate([{"prompt_token_ids": [1, 2, 3]}], params)
            begin, num_prompt, num_cached = time.perf_counter(), 0, 0
            for number, turns in product(range(len(trace[0])), trace):
                (output,) = llm.generate([{"prompt_token_ids": turns[number].prompt.tolist()}], params)
                num_prompt += len(turns[number].prompt)
                num_cached += output.cache.cached_tokens
                seconds = time.perf_counter() - begin
                if seconds > budget_s:
                    break
        rate, cached = f"{num_prompt / seconds:,.0f}", f"{num_cached / num_prompt:.1%}"
        print(f"| {tier} | {num_prompt:,} | {seconds:.1f} | {rate} | {cached} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shift", action="store_true", help="each conversation behind 0-300 tokens of its own")
    parser.add_argument("--turns", action="store_true", help="print the loss of each turn")
    parser.add_argument("--quick", action="store_true", help="overlap only, and no hybrids with windows")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--part", type=int, help="device memory for one in so many tokens of the trace")
    parser.add_argument("--conversations", type=int, default=64, help="with --part")
    parser.add_argument("--num-turns", type=int, default=10, help="of a conversation, with --part")
    parser.add_argument(
        "--budget", type=float, default=math.inf, help="with --engine: seconds for each of the three runs"
    )
    parser.add_argument("--engine", action="store_true", help="with --part: a real engine")
    parser.add_argument("--model", help="with --engine; the embedded model by default")
    args = parser.parse_args()
    console = Console(width=150)
    if args.part:
        trace = make_trace(args.conversations, args.num_turns, args.shift, args.seed)
        if args.engine:
            replay(args.model, trace, args.part, args.budget)
        else:
            print_parts(console, trace, args.part)
        return
    trace = make_trace(8, 10, args.shift, args.seed)
    table = Table(
        "model", "page", "depth", "strategy", "memory", "reused", "states taken / evicted / skipped", "misses"
    )
    for setup in setups(args.quick):
        played = Player(trace, setup).play()
        table.add_row(*row_of(setup, played))
        if args.turns and played.share < 1:
            print_losses(console, setup, played, len(trace[0]))
    table.title = f"reused of {played.reusable:,} reusable tokens{', shifted' if args.shift else ''}"
    console.print(table)
    others = Table("state kept", "reused", title="the same trace by other rules, nothing evicted")
    for name, policy in policies():
        others.add_row(name, f"{share_of(policy, played.events):.1%}")
    console.print(others)


if __name__ == "__main__":
    main()
