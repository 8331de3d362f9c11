"""C28 on the user's own machine: `forebay verify` finds what differs, and counts nothing that did not come about."""

from __future__ import annotations

import asyncio
import json
import re
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, nullcontext
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest

from forebay.base.errors import ConfigError, Conflict, EngineError
from forebay.base.units import ceil_div
from forebay.cli.main import main
from forebay.cli.verify_engine import summary_of
from forebay.config.engine_config import EngineConfig
from forebay.config.flag import Value
from forebay.engine.client.async_engine import AsyncEngine
from forebay.requests.sampling_params import SamplingParams
from forebay.requests.step_plan import TokenLogprob
from forebay.requests.updates import FinishReason
from forebay.text.tokenizer import Tokenizer
from forebay.verify import asking, run
from forebay.verify.asking import NONE, Answer, Difference, Engines, Findings
from forebay.verify.blame import Blame, Differs
from forebay.verify.circumstances import FOLDER, Circumstance, Room, Settings
from forebay.verify.questions import Question, broken_rule, derived, make_questions, num_derived
from forebay.verify.run import Outcome, Verification
from forebay.verify.verdict import Verdict


@pytest.fixture(scope="module", autouse=True)
def tokenizers_read_once() -> Iterator[None]:
    """A checkpoint's tokenizer is read once for all verifications of it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Tokenizer, "from_path", staticmethod(cache(Tokenizer.from_path)))
        yield


@pytest.fixture(scope="module")
def tokenizer(embedded_model: Path) -> Tokenizer:
    return Tokenizer.from_path(str(embedded_model))


@pytest.fixture(scope="module")
def small_model(embedded_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model with the embedded one's tokenizer, which answers many times faster."""
    path = tmp_path_factory.mktemp("small") / "small"
    assert main(["models", "make", "--like", "llama", "--out", str(path), "--hidden-size", "64"]) == 0
    return path


QUESTION = Question([1, 2, 3, 4], SamplingParams(), "greedy", 3, "one")


def said(tokens: list[int], finish: FinishReason = FinishReason.LENGTH, logprob: float = -0.5) -> Answer:
    entries = [TokenLogprob(token, logprob, 1, [token, token + 1], [logprob, logprob - 0.25]) for token in tokens]
    return Answer(tokens, entries, finish)


def test_questions_are_of_many_lengths_and_some_begin_alike(tokenizer: Tokenizer) -> None:
    asked = make_questions(tokenizer, 16, 32, page_size=16, context_length=2048, seed=3, device="cpu")
    assert asked == make_questions(tokenizer, 16, 32, page_size=16, context_length=2048, seed=3, device="cpu")
    lengths = [len(question.prompt) for question in asked]
    assert {1, 15, 16, 17, 32} <= set(lengths)
    assert max(lengths) <= 320
    assert asked[1].prompt[:16] == asked[3].prompt[:16]
    assert len({tuple(question.prompt[:16]) for question in asked}) > 3
    assert all(32 < len(question.prompt) <= 48 for question in asked[:8]), "three pages, one of each way"
    assert len({question.way for question in asked}) > 5
    with pytest.raises(ConfigError, match=r"a context of 48 tokens leaves 16 for a prompt"):
        make_questions(tokenizer, 16, 32, page_size=16, context_length=48, seed=3, device="cpu")


def test_questions_have_two_long_answers_and_prompts_of_twice_each_boundary(tokenizer: Tokenizer) -> None:
    asked = make_questions(
        tokenizer, 18, 32, page_size=16, context_length=2048, seed=3, device="cpu", boundaries=(32, 50, 1024)
    )
    assert [question.params.max_tokens for question in asked] == [128, 32, 32, 32, 128, *[32] * 13]
    assert all(place < len(question.prompt) for question in asked for place in question.resume_points)
    assert {len(question.resume_points) for question in asked} == {1, 2}
    assert [len(question.prompt) for question in asked[16:]] == [64, 100], "and none beyond the longest"
    tight = make_questions(tokenizer, 16, 32, page_size=16, context_length=112, seed=3, device="cpu")
    assert max(len(question.prompt) + question.params.max_tokens for question in tight) == 112


def test_questions_made_of_an_answer_go_on_from_inside_it_and_end_at_each_place_of_a_window(
    tokenizer: Tokenizer,
) -> None:
    """C16, C19."""
    asked = make_questions(tokenizer, 16, 32, page_size=16, context_length=2048, seed=3, device="cpu")
    answer, drawn = [7, *range(100, 140), 7, 7], [*range(200, 232)]
    answers = [answer, [], [*range(300, 332)], [], [], drawn, [3, 4], [5]]
    made = derived(asked, answers, 16)
    ending, behind_ends = made[:4], made[9:13]
    going_on, whole_pages, spelled, late, at_last = made[4:9]
    assert num_derived(asked) == len(made) == 25
    for question, said_before, continued in zip(asked[:8], answers, made[13:21], strict=True):
        assert continued.prompt == [*question.prompt, *said_before, *asked[1].prompt[:2]]
        assert continued.params == msgspec.structs.replace(question.params, max_tokens=4)
    assert [len(one.prompt) for one in made[21:]] == [158, 191, 240, 273], "around the ends of pages"
    assert all(one.prompt[:-2] == asked[8].prompt[: len(one.prompt) - 2] for one in made[21:]), "of the longest prompt"
    behind = [*asked[0].prompt, *answer]
    assert whole_pages.prompt == behind[:80], "it ends where a cached page and a state end"
    assert going_on.prompt == [*asked[0].prompt, *answer[:21], *asked[1].prompt[:2]]
    assert going_on.params.max_tokens == 32
    last = 20  # of 32 tokens behind a prompt of 44, up to the end of a page
    assert [one.params.stop_token_ids for one in ending] == [[token] for token in drawn[last - 4 : last]]
    assert {tuple(question.prompt) for question in ending} == {tuple(asked[5].prompt)}
    before = [*asked[5].prompt, *drawn[: last - 1]]
    assert all(one.prompt == before for one in behind_ends), "in front of the end of a page"
    namespaces = [one.namespace for one in ending]
    assert [one.namespace for one in behind_ends] == namespaces, "where only the answer that ends there has been"
    assert len({*namespaces}) == 4
    assert not any(one.namespace for one in (*asked, going_on, whole_pages, spelled, late, at_last))
    assert (spelled.params.bad_words, spelled.params.penalizes) == ([(316, 317)], True)
    assert (late.params.stop_token_ids, late.params.min_tokens) == ([120], 25)
    assert (at_last.params.stop_token_ids, at_last.params.min_tokens) == ([drawn[19]], 19)
    assert len({one.way for one in (spelled, late, at_last)} - {question.way for question in asked}) == 3
    assert [question.number for question in made] == [*range(16, 41)]
    again = derived(asked, [[5], *[[]] * 4, [5, 5, 6], [], []], 16)[:4]
    assert [one.params.stop_token_ids for one in again] == [[5], [6], [5], [6]]
    assert derived(asked[:7], answers, 16) == []


def test_questions_made_of_an_answer_are_no_larger_than_the_others(tokenizer: Tokenizer) -> None:
    asked = make_questions(tokenizer, 8, 32, page_size=16, context_length=2048, seed=3, device="cpu")
    room = max(len(question.prompt) + question.params.max_tokens for question in asked)
    made = derived(asked, [[*range(100, 132)], *[[]] * 4, [*range(200, 232)], [], []], 16)
    assert all(4 <= one.params.max_tokens <= room - len(one.prompt) for one in (*made[4:6], *made[9:]))
    assert len(made[5].prompt) % 16 == 0


def test_question_is_submitted_in_its_namespace() -> None:
    """C19: what an answer leaves in the cache is found by no question of another namespace."""
    engine: Any = SimpleNamespace(submit=lambda **given: given)
    given: Any = asking._submitted(engine, QUESTION._replace(namespace="apart"), "", None)
    assert given["namespace"] == "apart"


@pytest.mark.parametrize("given", [{}, {"context_length": 120}])
def test_verification_context_is_as_long_as_its_largest_question(given: dict[str, int], small_model: Path) -> None:
    """C15: a step of several prompts has more tokens than a graph is captured for."""
    verification = Verification({"model_path": str(small_model), **given}, num=8, max_tokens=8, seed=0)
    largest = max(len(question.prompt) + question.params.max_tokens for question in verification.questions)
    assert {flags[run.CONTEXT] for flags in verification._roomy} == {largest}
    asked = sum(len(question.prompt) for question in verification.questions)
    assert asked > largest
    assert all(
        verification._resolved({**verification._roomy[0], **one.flags}).scheduling.max_queued_tokens > 9 * asked
        for one in verification.circumstances
        if not one.adapted and FOLDER not in one.flags
    ), "they wait where few requests run"
    assert run.CONTEXT not in verification.varied


async def test_two_ranks_have_steps_of_greedy_requests_alone(small_model: Path) -> None:
    """C28: only there the greedy token of the model is the one that the next step reads."""
    verification = Verification({"model_path": str(small_model)}, num=8, max_tokens=8, seed=0)
    (one,) = (one for one in verification.circumstances if one.name == "two ranks")
    rounds: list[set[str]] = []
    async with without_processes([verification.config], verification.questions) as engines:

        async def ask(number: int, *, under_way: asyncio.Event | None = None, **others: object) -> None:
            if under_way:
                under_way.set()
            else:
                rounds.append({engines.questions[number].way})

        engines.ask = ask  # type: ignore[method-assign, assignment]
        await one.play(engines)
    assert rounds == [{"greedy"}] * 2


async def test_waves_begin_in_the_slots_of_more_than_twice_as_many_short_answers() -> None:
    """C14: the slots that were freed last are taken first, so that a wave gets the rows of a few short answers, and
    pages of more of them. Each question is asked once, and the next wave comes while this one decodes."""
    questions = [QUESTION._replace(prompt=[1] * (9 - number)) for number in range(8)]
    events: list[int] = []
    all_asked = asyncio.Event()

    async def ask(number: int, *, give_up_after: int | None = None, under_way: asyncio.Event | None = None) -> None:
        if under_way is None:
            assert (number, give_up_after) == (7, 2), "the shortest prompt"
            events.append(-1)
            return
        events.append(number)
        under_way.set()
        if number == 7:
            all_asked.set()
        await all_asked.wait()

    engines: Any = SimpleNamespace(questions=questions, order=[*range(8)], ask=ask)
    await Engines.ask_in_waves(engines)
    assert events == [*[-1] * 7, 0, 1, 2, *[-1] * 8, 3, 4, 5, *[-1] * 7, 6, 7]


@pytest.mark.quick(1)
@pytest.mark.parametrize("num", [2, 3, 16, 21, 32])
async def test_orders_of_questions_begin_with_each_of_them(num: int, small_model: Path) -> None:
    verification = Verification({"model_path": str(small_model)}, num=2, max_tokens=8, seed=0)
    async with without_processes([verification.config], [QUESTION] * num) as engines:
        firsts = []
        for _ in range(num):
            firsts.append(engines.order[0])
            engines.rotate()
    assert sorted(firsts) == list(range(num))


async def test_verify_asks_questions_made_of_answers_alone_and_where_they_matter(
    small_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run, "started", without_processes)
    verification = Verification({"model_path": str(small_model)}, num=16, max_tokens=8, seed=0)
    await verification.ask_alone()
    assert (len(verification.questions), len(verification.baseline.derived)) == (16, 25)
    assert verification.baseline.derived[4].prompt[-3] == 5, "inside the answer 5, 6, 7"
    assert verification._roomy[0]["max_running_requests"] == 41
    asked = {}

    async def play(engines: Engines) -> None:
        asked[engines.config.scheduling.overlap_depth] = len(engines.questions)
        assert len(engines.alone) == len(engines.questions)

    for one in verification.circumstances[5:10]:
        await verification.first_difference(replace(one, name="", settings={}, play=play), 1)
        assert asked.popitem()[1] == (41 if one.asks_derived else 16), one.name


def test_questions_for_a_gpu_have_several_segments_of_its_attention_and_share_some(tokenizer: Tokenizer) -> None:
    asked = make_questions(tokenizer, 24, 32, page_size=16, context_length=8192, seed=3, device="cuda")
    lengths = sorted(len(question.prompt) for question in asked)
    assert lengths[-1] == 2560
    assert len([question for question in asked[:16] if len(question.prompt) > 2000]) == 3
    assert asked[14].prompt[:1600] == asked[15].prompt[:1600]
    within = make_questions(tokenizer, 16, 32, page_size=16, context_length=512, seed=3, device="cuda")
    assert max(len(question.prompt) for question in within) == 480
    assert [len(question.prompt) for question in within[14:]] == [479, 420]


@pytest.mark.parametrize(
    ("found", "place", "expected", "other", "gap"),
    [
        (said([5, 6, 8]), 2, 7, 8, 0.25),
        (said([5, 9, 7]), 1, 6, 9, None),  # alone it was not among the likeliest
        (said([5, 6]), 2, 7, None, None),
        (said([5, 6, 7, 8]), 3, None, 8, None),
        (said([4], FinishReason.ABORT), 0, 5, 4, None),
    ],
)
def test_the_first_token_that_differs_is_named(
    found: Answer, place: int, expected: int | None, other: int | None, gap: float | None
) -> None:
    findings = Findings()
    findings.compare(QUESTION, said([5, 6, 7]), found)
    assert findings.differences == [Difference(3, 4, "greedy", "one", place, expected, other, gap)]


def test_an_answer_that_was_given_up_is_the_beginning_of_the_whole() -> None:
    findings = Findings()
    for finish in FinishReason.ABORT, FinishReason.LENGTH:
        findings.compare(QUESTION, said([5, 6, 7]), said([5, 6], finish))
    assert (findings.num_answers, findings.num_tokens, len(findings.differences)) == (2, 4, 1)


def test_differing_log_probabilities_of_equal_tokens_are_reported() -> None:
    findings = Findings()
    findings.compare(QUESTION, said([5, 6]), said([5, 6], logprob=-0.75))
    assert not findings.differences
    outcome = Outcome("a", Verdict.SAME, "so far", findings)
    assert summary_of([outcome, Outcome("b", Verdict.LEFT_OUT, "")]) == (
        "1 of 2 circumstances change no token, 1 left out. Compared: 2 tokens of 1 answers; the log-probabilities of "
        "equal ones are up to 0.25 apart."
    )


async def test_what_changes_tokens_is_found_and_what_did_not_come_about_is_not_counted(small_model: Path) -> None:
    """KV in eight bits is another model, as a stale page or state would be."""
    verification = Verification({"model_path": str(small_model)}, num=3, max_tokens=16, seed=0)
    await verification.ask_alone()
    by_name = {one.name: one for one in verification.circumstances}
    alone, cached = by_name["one by one again, backwards"], by_name["from the prefix cache"]
    other = Circumstance("eight bits", {"KV": {"kv_cache_dtype": "int8"}}, alone.play, alone.shown, alone.touched)
    never = Circumstance("never cached", {}, alone.play, cached.shown, alone.touched)
    refused = Circumstance("ahead", {"ahead": {"overlap_depth": 7}}, alone.play, alone.shown, alone.touched)
    keeping, failing = (replace(never, play=partial(_refusing, code)) for code in ("not_releasable", "in_transition"))
    verdicts = [(await verification.outcome(one)).verdict for one in (other, never, refused, keeping, failing)]
    assert verdicts == [
        Verdict.DIFFERENT,
        Verdict.NOT_SHOWN,
        Verdict.LEFT_OUT,
        Verdict.LEFT_OUT,
        Verdict.FAILED,
    ]


@asynccontextmanager
async def without_processes(
    configs: Sequence[EngineConfig],
    questions: Sequence[Question],
    alone: Sequence[Answer] = (),
    adapters: Mapping[str, Path] = NONE,
) -> AsyncIterator[Engines]:
    """Engines whose answers a test gives."""
    engine: Any = SimpleNamespace(info=SimpleNamespace(slot_bytes={"kv": 1}, vocab_size=512))
    engines = Engines(configs[0], cast(AsyncEngine, engine), None, questions, alone, adapters)

    async def counters() -> Counter[str]:
        return Counter()

    async def ask(number: int, **others: object) -> None:
        tokens = [8, 9, 10] if broken_rule(questions[number], [5, 6, 7]) else [5, 6, 7]
        engines.answers[number] = said(tokens, logprob=-0.75 if questions[number].adapter else -0.5)

    async def save_cache() -> None:
        """There is no folder."""

    engines.counters, engines.ask = counters, ask  # type: ignore[method-assign, assignment]
    engines.save_cache = save_cache  # type: ignore[method-assign]
    yield engines


async def test_engine_without_a_token_for_the_limit_is_a_failure_that_says_so(
    small_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def play(engines: Engines) -> None:
        limit = engines._limit.when()
        assert limit is not None
        assert limit <= asyncio.get_running_loop().time(), "else this would wait for it"
        await asyncio.Event().wait()

    monkeypatch.setattr(run, "started", without_processes)
    verification = Verification({"model_path": str(small_model)}, num=2, max_tokens=8, seed=0, silence_s=0.0)
    verification.baseline.alone = [said([5, 6])] * 2
    alone = verification.circumstances[0]
    outcome = await verification.outcome(replace(alone, play=play))
    assert outcome.verdict is Verdict.FAILED
    assert outcome.what == "no request got a token for 0 s: the engine hangs"


@pytest.mark.parametrize("counted", ["failed_steps", "recoveries", "leaked_pages", "ledger_violations"])
async def test_verify_engine_that_recovered_from_a_failure_is_a_failure_although_no_answer_differs(
    counted: str, small_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """C30: an engine repeats the requests of a step that failed, so their answers are right."""

    async def play(engines: Engines) -> None:
        async def counters() -> Counter[str]:
            return Counter({counted: 2})

        engines.counters = counters  # type: ignore[method-assign]

    monkeypatch.setattr(run, "started", without_processes)
    verification = Verification({"model_path": str(small_model)}, num=2, max_tokens=8, seed=0)
    verification.baseline.alone = [said([5, 6])] * 2
    outcome = await verification.outcome(replace(verification.circumstances[0], play=play))
    assert outcome.verdict is Verdict.FAILED
    assert outcome.what == f"2 {run._FAILURES[counted]}; no answer differs"


class Drawn:
    """Answers that are drawn as given, by their seed."""

    def __init__(self, tokens: dict[int, list[int]], logprob: float) -> None:
        self._tokens, self._logprob = tokens, logprob

    async def answer(self, question: Question, *others: object) -> Answer:
        assert question.params.temperature == 100.0
        return said(self._tokens[question.params.seed], logprob=self._logprob)


@pytest.mark.parametrize(
    ("first", "second", "logprob", "error"),
    [
        ([5, 6, 7], [7, 6, 5], -8.0, ""),
        ([5, 6, 7], [5, 6, 7], -8.0, "seeds 1 and 2 draw the same tokens"),
        ([*range(5, 14)], [*range(0, 450, 50)], -8.0, "nearly one token is drawn at all places"),
        ([*range(5, 13)], [*range(0, 450, 50)], -8.0, ""),  # so few are close by chance
        ([5, 5, 5], [5, 5, 5], -0.1, ""),  # as the model expects
    ],
)
async def test_draws_must_depend_on_the_seed_and_on_the_position(
    first: list[int],
    second: list[int],
    logprob: float,
    error: str,
    small_model: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Engines, "_answer", Drawn({1: first, 2: second}, logprob).answer)
    config = Verification({"model_path": str(small_model)}, num=2, max_tokens=8, seed=0).config
    async with without_processes([config], [QUESTION]) as engines:
        with pytest.raises(EngineError, match=error) if error else nullcontext():
            await engines.check_draws()


async def test_adapters_that_change_no_log_probability_are_a_failure(
    small_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run, "started", without_processes)
    verification = Verification({"model_path": str(small_model)}, num=2, max_tokens=8, seed=0)
    await verification.ask_alone()
    adapted = next(one for one in verification.circumstances if one.adapted)
    await verification.ask_alone_for(adapted)
    assert len(verification.baseline.adapted_alone) == 4
    verification.baseline.adapted_alone = []
    verification.baseline.alone = [said([5, 6, 7], logprob=-0.75)] * 2
    outcome = await verification.outcome(adapted)
    assert (outcome.verdict, outcome.what) == (Verdict.FAILED, "adapters change no log-probability of any answer")


@pytest.mark.parametrize(("kernels", "verdict"), [("", Verdict.DIFFERENT), ("torch", Verdict.SAME)])
async def test_log_probabilities_that_differ_are_a_difference_of_exact_kernels(
    kernels: str, verdict: Verdict, small_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def play(engines: Engines) -> None:
        engines.findings.compare(QUESTION, said([5, 6]), said([5, 6], logprob=-0.75))
        engines.all += [(number, said([5, 6])) for number in range(2)]

    monkeypatch.setattr(run, "started", without_processes)
    given: dict[str, Value] = {"model_path": str(small_model), **({"kernels": kernels} if kernels else {})}
    verification = Verification(given, num=2, max_tokens=8, seed=0)
    verification.baseline.alone = [said([5, 6])] * 2
    alone = verification.circumstances[0]
    outcome = await verification.outcome(replace(alone, play=play))
    assert outcome.verdict is verdict
    assert ("log-probabilities of equal tokens are up to 0.25 apart" in outcome.what) == (not kernels)


async def test_each_token_of_any_request_extends_the_limit(small_model: Path) -> None:
    verification = Verification({"model_path": str(small_model)}, num=2, max_tokens=8, seed=0)
    async with without_processes([verification.config], [QUESTION]) as engines:
        async with engines.limited(1e3):
            first = engines._limit.when()
            await asyncio.sleep(0)
            engines._note_decoding(1, said([5]))
            assert first is not None
            assert (engines._limit.when() or 0.0) > first
        engines._note_decoding(1, said([5]))  # outside of the block


@pytest.mark.parametrize("json_wanted", [False, True], ids=["text", "json"])
def test_verify_differences_in_every_circumstance_are_reported_with_their_prompts(
    json_wanted: bool,
    small_model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Of each circumstance every answer differs, those of adapters included, which are asked of more questions."""
    num, report, played = 4, tmp_path / "report.md", []

    async def play(engines: Engines) -> None:
        for question, alone in zip(engines.questions, engines.alone, strict=True):
            engines.findings.compare(question, alone, said([5, 1 << 30]))
        played.append([(question.number, question.adapter) for question in engines.questions])

    made = Verification.__init__

    def init(self: Verification, *args: Any, **settings: Any) -> None:
        made(self, *args, **settings)
        self.circumstances = [
            replace(
                one, play=play, shown=lambda engines, count: "so far", touched=lambda engines, question, answer: True
            )
            for one in self.circumstances
        ]

    monkeypatch.setattr(Verification, "__init__", init)

    async def blamed(settings: Sequence[str], differs: Differs) -> Blame:
        return Blame(tuple(settings[-1:]), True, 3)

    monkeypatch.setattr(run, "started", without_processes)
    monkeypatch.setattr(run, "MOST_ROUNDS", 1)
    monkeypatch.setattr(run, "blame", blamed)
    words = [f"--requests={num}", "-n=8", f"--report={report}", *(["--json"] if json_wanted else [])]
    assert main(["verify", str(small_model), *words]) == 1
    printed, text = capsys.readouterr().out, report.read_text()
    assert len(played) > 18
    assert {len(asked) for asked in played} == {num, 2 * num}
    if json_wanted:
        outcomes = json.loads(printed)
        assert {one["verdict"] for one in outcomes} == {"different"}
        found = [[(one["number"], one["adapter"]) for one in each["findings"]["differences"]] for each in outcomes]
        assert found == played
    else:
        assert printed.count("different ") == len(played)
        kept = f"{small_model} {' '.join(words[:2])}"
        repeated = f"again: forebay verify {kept} '--only=prompts in chunks' --settings=chunks\n"
        assert f"differ (3 runs): chunks\n{repeated}" in printed
        assert f"- prompts in chunks: {repeated}" in text
        assert re.search(r"prompt 0 \(\d+ tokens, greedy, adapter one\), token 1: '", " ".join(printed.split()))
    for number, adapter in played[-1]:
        assert f"adapters: prompt {number} (" in text
        assert not adapter or f", adapter {adapter}), token 1: " in text


@pytest.mark.slow
def test_verify_shows_speculation_by_rejections_behind_accepted_drafts_of_each_way(
    small_model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["verify", str(small_model), "--requests=8", "-n=16", "--only=speculative decoding", "--json"]) == 0
    (outcome,) = json.loads(capsys.readouterr().out)
    assert outcome["verdict"] == "same"
    assert re.search(r"draft tokens were accepted, \d+ times only some of a draft", outcome["what"])


@pytest.mark.quick(1)
@pytest.mark.parametrize(("partly", "shown"), [(0, ""), (1, "573 of 574 draft tokens were accepted, 1 time")])
def test_verify_speculation_without_a_rejection_behind_an_accepted_token_is_not_shown(
    partly: int, shown: str, small_model: Path
) -> None:
    verification = Verification({"model_path": str(small_model)}, num=2, max_tokens=8, seed=0)
    (one,) = (one for one in verification.circumstances if one.name == "speculative decoding")
    count = Counter(accepted_tokens=573, draft_tokens=574, partly_accepted_drafts=partly)
    assert one.shown(cast(Engines, None), count)[: len(shown) or None] == shown
    answer = replace(said([5]), num_partly_accepted=partly)
    assert one.touched(cast(Engines, None), QUESTION, answer) is bool(partly)


def test_verify_proposer_on_the_device_has_a_circumstance_beside_planted_drafts(tmp_path: Path) -> None:
    path = str(tmp_path / "deepseek_v3")
    assert main(["models", "make", "--like", "deepseek_v3", "--out", path, "--hidden-size", "64"]) == 0
    given = {"model_path": path, "speculative_algorithm": "NEXTN"}
    by_name = {one.name: one for one in Verification(given, num=2, max_tokens=8, seed=0).circumstances}
    assert by_name["speculative decoding"].flags["speculative_algorithm"] == "NGRAM"
    assert by_name["drafts by NEXTN"].flags["speculative_algorithm"] == "NEXTN"
    assert by_name["all of it, speculative"].flags["speculative_algorithm"] == "NEXTN"


async def test_verify_adapters_are_loaded_anew_once_all_requests_beside_it_are_submitted(small_model: Path) -> None:
    """A request that is submitted during the change names an adapter that has the other's weights by then."""
    verification = Verification({"model_path": str(small_model)}, num=2, max_tokens=8, seed=0)
    (anew,) = (one for one in verification.circumstances if one.name == "adapters loaded anew")
    events: list[str] = []
    async with without_processes([verification.config], verification.questions) as engines:

        async def ask(number: int, *, under_way: asyncio.Event | None = None, **others: object) -> None:
            events.append("ask")
            await asyncio.sleep(0)
            engines.half_decode.set()
            if under_way:
                under_way.set()

        async def load_anew() -> None:
            events.append("load")

        engines.ask, engines.load_anew = ask, load_anew  # type: ignore[method-assign, assignment]
        await anew.play(engines)
    assert events == ["ask"] * 4 + ["load"] + ["ask"] * 4


async def test_verify_that_differs_runs_parts_of_its_settings_in_engines_of_their_own(
    small_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """C28: what differs in the third round is looked for in four, up to the first difference."""
    configs = []

    async def play(engines: Engines) -> None:
        configs.append(engines.config)
        is_wrong = engines.config.memory.page_size == 1 and configs.count(engines.config) > 2
        answer = said([5, 7 if is_wrong else 6])
        engines.findings.compare(QUESTION, said([5, 6]), answer)
        engines.all += [(number, answer) for number in range(2)]

    monkeypatch.setattr(run, "started", without_processes)
    verification = Verification({"model_path": str(small_model)}, num=2, max_tokens=8, seed=0)
    verification.baseline.alone = [said([5, 6])] * 2
    settings: Settings = {"page size": {"page_size": 1}, "steps ahead": {"overlap_depth": 1}}
    several = Circumstance("several", settings, play, lambda engines, count: "so far", lambda *one: len(configs) >= 3)
    outcome = await verification.outcome(several)
    assert (outcome.verdict, outcome.num_rounds) == (Verdict.DIFFERENT, 3)
    assert outcome.blame == Blame(("page size",), True, 2)
    kinds = [(config.memory.page_size, config.scheduling.overlap_depth) for config in configs]
    assert kinds == [(1, 1)] * 3 + [(1, 0)] * 3 + [(16, 0)] * 4


async def _refusing(code: str, engines: Engines) -> None:
    """As an engine on a GPU refuses to sleep, whose memory cannot be released without a library."""
    async with asyncio.TaskGroup():
        raise Conflict("kv_cache cannot be released", code=code)


def test_the_command_tells_programs_and_people(
    small_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    report = tmp_path / "report.md"
    words = ["--requests=4", "-n=8", "--only=chunks", f"--report={report}", "--json"]
    assert main(["verify", str(small_model), *words]) == 0
    (outcome,) = json.loads(capsys.readouterr().out)
    assert (outcome["verdict"], outcome["findings"]["num_answers"]) == ("same", 4)
    assert outcome["findings"]["differences"] == []
    assert "| same | prompts in chunks | prompts of up to" in report.read_text()


@pytest.mark.quick(2)
@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--overlap-depth=1"], "--overlap-depth is among what is varied here: leave it out"),
        (["--report=/nowhere/report.md"], "--report /nowhere/report.md cannot be written: No such file or directory"),
        (["--only=nothing"], "--only nothing: no circumstance has that in its name; there are: one by one"),
        (["--settings=chunks"], "--settings is for one circumstance: give its whole name with --only, one of: one by"),
        (
            ["--only=prompts in chunks", "--settings=chunks,roles"],
            "--settings roles: the settings of 'prompts in chunks' are graphs, chunks",
        ),
        (["--requests=1"], "--requests: '1' is no such number: write a whole number, at least 2"),
    ],
)
def test_words_that_make_no_sense_here_are_refused(
    embedded_model: Path, words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["verify", str(embedded_model), *words]) == 2
    assert message in capsys.readouterr().err


def test_who_guesses_is_the_users_to_say(embedded_model: Path) -> None:
    given = {"model_path": str(embedded_model), "speculative_num_draft_tokens": 3, "speculative_algorithm": "NGRAM"}
    verification = Verification(given, num=4, max_tokens=8, seed=0)
    by_name = {one.name: one.flags for one in verification.circumstances}
    assert by_name["speculative decoding"]["speculative_num_draft_tokens"] == 3
    assert "speculative_num_draft_tokens" not in by_name["retracted"]
    assert not verification.varied & given.keys()
    assert {"overlap_depth", "chunked_prefill_size", "max_total_tokens"} <= verification.varied


@pytest.mark.slow
async def test_verify_circumstance_that_missed_a_way_of_choosing_tokens_is_asked_again_and_then_not_shown(
    small_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run, "MOST_ROUNDS", 3)
    verification = Verification({"model_path": str(small_model)}, num=4, max_tokens=8, seed=0)
    await verification.ask_alone()
    orders = []

    async def play(engines: Engines) -> None:
        orders.append(list(engines.order))
        await engines.ask_one_by_one()

    def touched(engines: Engines, question: Question, answer: Answer) -> bool:
        return question.way != "greedy" and len(orders) > 1

    alone = verification.circumstances[0]
    outcome = await verification.outcome(Circumstance("alone", {}, play, alone.shown, touched))
    assert (outcome.verdict, outcome.what) == (Verdict.NOT_SHOWN, "each alone; but not for: greedy")
    assert len(orders) == 3
    assert len({tuple(order) for order in orders}) == 3, "each time in another order"


async def test_questions_beside_the_longest_do_not_fit_with_it_into_little_memory(tokenizer: Tokenizer) -> None:
    """C26: the first question of each way is then retracted behind its first token, also one with a long answer."""
    questions = make_questions(tokenizer, 18, 32, page_size=16, context_length=2048, seed=0, device="cpu")
    asked: list[int] = []

    async def ask(number: int) -> None:
        asked.append(number)

    await Engines.ask_beside_the_longest(cast(Engines, SimpleNamespace(questions=questions, ask=ask)))
    pressed = Room(questions, 16).pressed // 16
    pairs = [*zip(asked[::2], asked[1::2], strict=True)]
    assert {questions[second].way for _, second in pairs} == {question.way for question in questions}
    for first, second in pairs:
        answer = min(questions[number].params.max_tokens for number in (first, second))
        assert sum(ceil_div(len(questions[number].prompt) + answer, 16) for number in (first, second)) > pressed


@pytest.mark.slow
async def test_verify_retracted_comes_about_for_each_way_of_choosing_tokens(embedded_model: Path) -> None:
    """C26, C28: the requests that were retracted behind their first token include sampled, penalised and constrained
    ones, and their tokens are the same."""
    verification = Verification({"model_path": str(embedded_model)}, num=8, max_tokens=24, seed=0)
    await verification.ask_alone()
    (retracted,) = (one for one in verification.circumstances if one.name == "retracted")
    outcome = await verification.outcome(retracted)
    assert outcome.verdict is Verdict.SAME, outcome


def exit_of(words: list[str], in_chunks: Verdict, others: Verdict, model: Path, monkeypatch: pytest.MonkeyPatch) -> int:
    """Return the exit code if these are the outcomes of prompts in chunks and of all other circumstances."""

    async def ask_alone(self: Verification) -> None:
        pass

    async def outcome(self: Verification, circumstance: Circumstance) -> Outcome:
        return Outcome(circumstance.name, in_chunks if "chunks" in circumstance.name else others, "")

    monkeypatch.setattr(Verification, "ask_alone", ask_alone)
    monkeypatch.setattr(Verification, "outcome", outcome)
    return main(["verify", str(model), "--json", *words])


@pytest.mark.quick(2)
@pytest.mark.parametrize(
    ("verdict", "code"),
    [(Verdict.SAME, 0), (Verdict.LEFT_OUT, 0), (Verdict.DIFFERENT, 1), (Verdict.FAILED, 1), (Verdict.NOT_SHOWN, 2)],
)
def test_verify_exit_code_is_0_only_if_every_circumstance_was_shown_or_left_out(
    verdict: Verdict, code: int, embedded_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert exit_of([], verdict, Verdict.SAME, embedded_model, monkeypatch) == code


@pytest.mark.parametrize(
    ("words", "others", "code"),
    [
        ([], Verdict.LEFT_OUT, 2),
        ([], Verdict.NOT_SHOWN, 2),
        (["--at-least=0"], Verdict.LEFT_OUT, 0),
        (["--at-least=1"], Verdict.SAME, 0),
        (["--at-least=100"], Verdict.SAME, 2),
        (["--at-least=100"], Verdict.FAILED, 1),
    ],
)
def test_verify_that_shows_too_little_exits_with_2(
    words: list[str], others: Verdict, code: int, embedded_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert exit_of(words, Verdict.LEFT_OUT, others, embedded_model, monkeypatch) == code


@pytest.mark.slow
def test_every_circumstance_comes_about_and_changes_nothing(
    embedded_model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["verify", str(embedded_model), "--json"]) == 0
    verdicts = {one["name"]: one["verdict"] for one in json.loads(capsys.readouterr().out)}
    assert verdicts.pop("other weights, and these again") == "left out", "the model is a GGUF file"
    assert set(verdicts.values()) == {"same"}, verdicts


@pytest.mark.parametrize(
    ("restriction", "tokens", "broken"),
    [
        ({"stop_token_ids": (7,), "min_tokens": 2}, [5, 7, 6], "ends it after 1 tokens, and may not before 2"),
        ({"stop_token_ids": (7,), "min_tokens": 2}, [5, 6, 7], ""),
        ({"stop_token_ids": (7,)}, [5, 7, 6], "tokens behind token 7"),
        ({"bad_words": ((5, 6),)}, [4, 5, 6], "the bad word (5, 6)"),
        ({"bad_words": ((5, 6),)}, [6, 5, 4], ""),
    ],
)
def test_answer_that_breaks_its_restrictions_alone_is_named(
    restriction: dict[str, Any], tokens: list[int], broken: str
) -> None:
    """C16: it would be the same in every circumstance."""
    found = broken_rule(QUESTION._replace(params=SamplingParams(**restriction)), tokens)
    assert broken in found
    assert bool(found) is bool(broken)


async def test_baseline_that_breaks_a_restriction_is_refused(
    small_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run, "started", without_processes)
    verification = Verification({"model_path": str(small_model)}, num=4, max_tokens=8, seed=0)
    ending = QUESTION._replace(params=SamplingParams(stop_token_ids=(5, 8), min_tokens=2), way="a least length")
    with pytest.raises(EngineError, match=r"\(a least length\), alone: token 8 ends it after 0 tokens"):
        await verification._ask_alone([ending], verification._roomy[0], NONE)
