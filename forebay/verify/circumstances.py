"""Circumstances around a request: the engine's settings, the order of the questions, and the proof that it came about.

The engine's counters and reports are the proof: a circumstance that did not come about proves nothing, and one that
came about for greedy requests alone proves nothing about sampled, penalised or constrained ones.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Final

from forebay.base.errors import EngineError
from forebay.base.units import ceil_div, human_bytes
from forebay.config.engine_config import DisaggregationMode, SpeculativeAlgorithm, TransferBackend
from forebay.config.flag import Value
from forebay.engine.frames import TAGS
from forebay.memory.miss_reason import MissReason
from forebay.memory.tier import DISK, HOST
from forebay.requests.updates import FinishReason
from forebay.verify.asking import Answer, Engines
from forebay.verify.questions import FEWEST_WITH_LONG, GREEDY, Question
from forebay.verify.weights import other_weights

Flags = Mapping[str, Value]
Settings = Mapping[str, Flags]  # by name
NO_FLAGS: Final[Flags] = MappingProxyType({})
NOTHING: Final[Settings] = MappingProxyType({})
Play = Callable[[Engines], Awaitable[None]]
Shown = Callable[[Engines, Counter[str]], str]
Touched = Callable[[Engines, Question, Answer], bool]

# How the answers are made that all others are compared with: one request at a time, and nothing but the model.
ALONE: Final[Flags] = {
    "disable_radix_cache": True,
    "disable_cuda_graph": True,
    "overlap_depth": 0,
    "speculative_algorithm": "off",
    "enable_hisparse": False,
    "retraction_host_bytes": 0,
    "host_cache_bytes": 0,
    "max_queued_tokens": 1 << 24,  # of all questions at once, however few run
    "queue_timeout": 3600.0,
    "request_timeout": 3600.0,
    "stall_timeout": 600.0,  # a retracted request waits long where memory is scarce and the machine busy
    "log_level": "error",
    "ledger": "raise",
}
_GRAPHS: Final[Settings] = {"graphs": {"disable_cuda_graph": False}}
_CACHE: Final[Settings] = {"prefix cache": {"disable_radix_cache": False}}
_AHEAD: Final[Settings] = {"steps ahead": {"overlap_depth": 1}}
# Drafts of the host, which is given the known answers with wrong tokens planted.
PLANTED: Final[Flags] = {"speculative_algorithm": SpeculativeAlgorithm.NGRAM.value}
# Of a decode engine: a request comes as soon as its prompt has room, so that answers have to be retracted.
_NO_RESERVE: Final[Settings] = {"no reserve": {"num_reserved_decode_tokens": 1}}
_TWO_RANKS: Final[Settings] = {"ranks": {"tp_size": 2}}
_SPARE_PAGES: Final = 4
_PRESSED_PAGES: Final = 3
_HOST_BYTES: Final = 1 << 30
FOLDER: Final = "prefix_cache_dir"  # of a circumstance whose engine finds there what one before it has cached
# Requests that run at a time, with as many states and windows as they need and no more.
_FEW: Final = 6
_FEWEST: Final = 3  # so few cached states that all of them may be about to be copied
_LEAST_RATIO: Final = 0.01
_CHUNK_PAGES: Final = 2


@dataclass(frozen=True, slots=True)
class Circumstance:
    """`settings` by name are flags of the engine, the later ones before the earlier ones; `prefill_flags` are those of
    a second engine before it. `play` asks the questions. `shown` returns from the engines' counters how far it came
    about, in words; "" if it did not. `touched` returns whether it came about for one answer. Until that is so for each
    way of choosing tokens, the questions are asked again, in another order.

    With `adapted` each question is asked of an adapter, too, and with `pictured` with a picture; with `asks_derived`
    the questions that are made of answers are asked as well."""

    name: str
    settings: Settings
    play: Play
    shown: Shown
    touched: Touched
    prefill_flags: Flags = field(default_factory=dict)
    adapted: bool = False
    pictured: bool = False
    asks_derived: bool = False

    @property
    def flags(self) -> Flags:
        """Return the flags of all settings."""
        return {name: value for flags in self.settings.values() for name, value in flags.items()}

    def with_settings(self, names: Collection[str]) -> Circumstance:
        """Return the same with these of its settings alone."""
        return replace(self, settings={name: flags for name, flags in self.settings.items() if name in names})


class Room:
    """How much memory the questions need, in tokens: `roomy` for all of them and all that is cached of them, `tight`
    for a third of the prompts, and at least for any one with its answer; `pressed` for any one with its answer, and
    beside it for a prompt of three pages, but not for its answer."""

    def __init__(self, questions: Sequence[Question], page_size: int) -> None:
        prompts = [ceil_div(len(question.prompt) + 1, page_size) for question in questions]
        whole = [ceil_div(len(question.prompt) + question.params.max_tokens, page_size) for question in questions]
        self.page_size, self.num_questions = page_size, len(questions)
        self.chunk = page_size * (
            _CHUNK_PAGES if max(len(q.prompt) for q in questions) > _CHUNK_PAGES * page_size else 1
        )
        self.roomy = (2 * sum(whole) + _SPARE_PAGES) * page_size
        self.tight = max(sum(prompts) // 3, max(whole) + _SPARE_PAGES) * page_size
        self.pressed = (max(whole) + _PRESSED_PAGES) * page_size


def circumstances(room: Room, speculative: Flags, num_threads: int, tiers: Flags) -> list[Circumstance]:
    """Return those without adapters. `speculative` and `tiers` are settings; no `tiers` where HiSparse is refused."""
    small: Settings = {"little memory": {"max_total_tokens": room.tight}}
    tight, pressed, chunks = _tight(room), _pressed_for(room), _chunks(room)
    one_token: Settings = {"page size": {"page_size": 1, "mamba_scheduler_strategy": "no_buffer"}}
    to_host: Settings = {"host copies": {"retraction_host_bytes": _HOST_BYTES}}
    tier: Settings = {"host cache": {"host_cache_bytes": _HOST_BYTES}}
    files: Settings = {"files": {FOLDER: "a temporary folder"}}
    drafts = _drafts(speculative)
    often: Settings = {"states often": {"mamba_track_interval": room.page_size}}
    few, fewest = _few(_FEW), _few(_FEWEST)
    found = [
        Circumstance(
            "one by one again, backwards",
            {},
            _backwards,
            lambda engines, count: "each alone",
            _answered,
            asks_derived=True,
        ),
        Circumstance("other seeds", {}, _other_seeds, lambda engines, count: "seeds and positions matter", _answered),
        Circumstance("all at once, from graphs", _GRAPHS, _at_once, _from_graphs, _was_replayed),
        _coming_and_going(room),
        Circumstance("prompts in chunks", {**_GRAPHS, **chunks}, _coming, _in_chunks, _cut),
        Circumstance("steps planned ahead", {**_GRAPHS, **_AHEAD}, _coming, _steps_ahead, _was_ahead),
        Circumstance("two ranks", {**_GRAPHS, **_TWO_RANKS}, _coming_and_greedy, _on_ranks, _was_replayed),
        Circumstance("pages of one token", {**_CACHE, **one_token}, _twice, _from_cache, _hit, asks_derived=True),
        Circumstance(
            "from the prefix cache", {**_GRAPHS, **_CACHE, **often}, _twice, _from_cache, _hit, asks_derived=True
        ),
        Circumstance("evicted and asked again", {**_CACHE, **small}, _twice, _evicted, _missed_as_evicted),
        Circumstance("from host memory", {**_GRAPHS, **_CACHE, **small, **tier}, _twice, _loaded, _came_from_host),
        Circumstance(
            "from files, after a restart", {**_GRAPHS, **_CACHE, **small, **files}, _twice, _restored, _came_from_files
        ),
        Circumstance("retracted", {**pressed, **_GRAPHS}, _pressed, _retracted, _computed_again, asks_derived=True),
        Circumstance("retracted to the host", {**pressed, **to_host}, _pressed, _kept, _copied_back, asks_derived=True),
        *_with_drafts(speculative, {**_GRAPHS, **_CACHE, **often}, one_token),
        Circumstance(
            "others give up",
            {**_CACHE, **often, **fewest, **chunks, **_AHEAD},
            _giving_up,
            _given_up,
            _went_on,
            asks_derived=True,
        ),
        Circumstance("asleep in the middle", _CACHE, _asleep, _released, _interrupted),
        Circumstance(
            "other weights, and these again",
            {**_GRAPHS, **_CACHE, **tier, **to_host, **drafts},
            _reweighed,
            _restarted,
            _began_again,
        ),
        _apart(TransferBackend.SHM, _at_once, {**_NO_RESERVE, **pressed, **to_host}),
        _apart(TransferBackend.TCP, _coming),
        Circumstance(
            "all of it, planned ahead",
            {**tight, **_CACHE, **often, **fewest, **_GRAPHS, **chunks, **_AHEAD},
            _all,
            _much,
            _was_ahead,
            asks_derived=True,
        ),
        Circumstance(
            "all of it, speculative",
            {**tight, **_CACHE, **often, **few, **_GRAPHS, **chunks, **drafts},
            _all,
            _much,
            _drafted(speculative),
            asks_derived=True,
        ),
        _all_apart({**_CACHE, **often, **_GRAPHS, **chunks}, drafts),
    ]
    if tiers:
        found += _in_tiers({"two tiers": tiers}, {**tight, **to_host, **chunks, **drafts}, _drafted(speculative))
    if num_threads > 1:
        found.insert(
            2, Circumstance("one thread", {"threads": {"num_threads": 1}}, _at_once, _concurrency, _was_concurrent)
        )
    return found


def _coming_and_going(room: Room) -> Circumstance:
    """Return the circumstance whose steps are padded. A CPU pads no step of eight requests or fewer. If there are no
    long answers, hardly more decode at a time, so that no padded step is required."""
    name = "coming and going"
    if room.num_questions < FEWEST_WITH_LONG:
        return Circumstance(name, _GRAPHS, _coming, _concurrency, _was_concurrent)
    return Circumstance(name, _GRAPHS, _in_waves, _in_padded_steps, _was_padded)


def _few(num: int) -> Settings:
    """Return settings with `num` rows, and numbers of slots that are raised to the least."""
    return {
        "few states": {"max_running_requests": num, "max_mamba_cache_size": 1, "swa_full_tokens_ratio": _LEAST_RATIO}
    }


def _chunks(room: Room) -> Settings:
    return {"chunks": dict.fromkeys(("chunked_prefill_size", "mixed_chunk_size"), room.chunk)}


def _tight(room: Room) -> Settings:
    return {"little memory": {"max_total_tokens": room.tight, "schedule_conservativeness": 0.0}}


def _pressed_for(room: Room) -> Settings:
    return {"little memory": {"max_total_tokens": room.pressed, "schedule_conservativeness": 0.0}}


def _drafts(speculative: Flags) -> Settings:
    """Return the settings of drafts. A device drafts for steps that are planned ahead; the host needs the last token
    first."""
    return {"drafts": speculative, **({} if _are_planted(speculative) else _AHEAD)}


def _with_drafts(speculative: Flags, cached: Settings, one_token: Settings) -> list[Circumstance]:
    """Return the circumstance with planted drafts, and those with a proposer on the device, if any. With the settings
    `cached` prompts go on from what drafts left. With `one_token` nothing behind a window is held for a rejected
    draft."""
    planted = speculative if _are_planted(speculative) else PLANTED
    found = [
        Circumstance(
            "speculative decoding",
            {**cached, "drafts": planted},
            _twice,
            _rejections,
            _partly_accepted,
            asks_derived=True,
        )
    ]
    if planted is not speculative:
        name, settings = f"drafts by {speculative['speculative_algorithm']}", {**_GRAPHS, **_drafts(speculative)}
        found += [
            Circumstance(name, settings, _twice, _acceptance, _drafted_for),
            Circumstance(f"{name}, pages of one token", {**settings, **one_token}, _twice, _acceptance, _drafted_for),
        ]
    return found


def _apart(backend: TransferBackend, play: Play, of_decode: Settings = NOTHING) -> Circumstance:
    """Return the circumstance of two engines, of which the one that decodes has the settings `of_decode` as well."""
    name = f"prefill and decode apart, {backend}"
    sides = [
        {
            "disaggregation_mode": mode,
            "disaggregation_transfer_backend": backend,
            "disaggregation_bootstrap_port": 0,
            "disaggregation_bootstrap_timeout": 3600.0,  # a request waits long where memory is scarce
        }
        for mode in (DisaggregationMode.DECODE, DisaggregationMode.PREFILL)
    ]
    settings = {**of_decode, "roles": sides[0]}
    return Circumstance(name, settings, play, _transferred, _came_over, prefill_flags=sides[1])


def _all_apart(both: Settings, drafts: Settings) -> Circumstance:
    """Return the circumstance of two engines with as much around a request as can be. If a device drafts, prefill
    computes what the proposer keeps of a prompt."""
    one = _apart(TransferBackend.SHM, _all)
    of_prefill = both if _are_planted(drafts["drafts"]) else {**both, **drafts}
    shared = {name: value for flags in of_prefill.values() for name, value in flags.items()}
    decode: Settings = {"decode's prefix cache": {"disaggregation_decode_enable_radix_cache": True}}
    return Circumstance(
        "all of it, prefill and decode",
        {**both, **decode, **drafts, **one.settings},
        _all,
        _transferred,
        _came_over,
        prefill_flags={**shared, **one.prefill_flags},
        asks_derived=True,
    )


def _in_tiers(tiers: Settings, others: Settings, drafted: Touched) -> list[Circumstance]:
    some: Settings = {**_GRAPHS, **_CACHE}
    everything: Settings = {**some, **others, **tiers}
    return [
        Circumstance("KV in two tiers", {**some, **tiers}, _twice, _from_tiers, _was_loaded_hot),
        Circumstance("all of it, KV in two tiers", everything, _all, _from_tiers, _loaded_hot_and(drafted)),
    ]


def _are_planted(flags: Flags) -> bool:
    return flags["speculative_algorithm"] in PLANTED.values()


def _drafted(flags: Flags) -> Touched:
    """Return the test of an answer with drafts. Those of a proposer on the device may all be wrong."""
    return _partly_accepted if _are_planted(flags) else _was_concurrent


def with_adapters(room: Room, speculative: Flags) -> list[Circumstance]:
    """Return the circumstances with adapters, in `room` for each question with one and without."""
    chunks = _chunks(room)
    apart = _apart(TransferBackend.SHM, _coming)
    prefill = apart.prefill_flags

    def adapted(
        name: str, settings: Settings, play: Play, shown: Shown, touched: Touched, prefill_flags: Flags = NO_FLAGS
    ) -> Circumstance:
        shown, touched = _adapting(shown), _of_an_adapter(touched)
        return Circumstance(name, settings, play, shown, touched, prefill_flags, adapted=True)

    everything: Settings = {**_tight(room), **_CACHE, **_GRAPHS, **chunks, **_drafts(speculative)}
    return [
        adapted("adapters beside the model", {**_GRAPHS, **chunks}, _twice, _cut_beside_others, _was_cut_beside_others),
        adapted("adapters loaded anew", {**_GRAPHS, **_CACHE}, _reloaded, _loads, _hit),
        adapted("adapters, retracted", {**_pressed_for(room), **_GRAPHS}, _pressed, _retracted, _computed_again),
        adapted(
            "adapters, prefill and decode", apart.settings, _coming, _transferred, _came_over, prefill_flags=prefill
        ),
        adapted("all of it, adapters", everything, _all, _much, _drafted(speculative)),
    ]


def with_pictures(room: Room) -> list[Circumstance]:
    """Return the circumstances with pictures, in `room` for each question with one and without."""
    together: Settings = {**_GRAPHS, **_chunks(room)}
    everything: Settings = {**_tight(room), **_CACHE, **together}
    beside = _with_picture(_was_concurrent)
    return [
        Circumstance("pictures beside texts", together, _twice, _encoded, beside, pictured=True),
        Circumstance("all of it, pictures", everything, _all, _encoded, beside, pictured=True),
    ]


def _with_picture(touched: Touched) -> Touched:
    return lambda engines, question, answer: bool(question.pictures) and touched(engines, question, answer)


def _encoded(engines: Engines, count: Counter[str]) -> str:
    tiles, hits, found = count["encoded_tiles"], count["picture_hits"], _concurrency(engines, count)
    return f"{tiles:,.0f} tiles encoded, {hits:,.0f} pictures known, {found}" if tiles and found else ""


def _adapting(shown: Shown) -> Shown:
    """Only where adapters change answers."""

    def both(engines: Engines, count: Counter[str]) -> str:
        num, what = len(engines.questions) // 2, shown(engines, count)
        pairs = zip(engines.alone[:num], engines.alone[num:], strict=True)
        changed = sum(found.tokens != of_model.tokens for found, of_model in pairs)
        return f"{what}; adapters change {changed} of {num} answers" if what and changed else ""

    return both


def _of_an_adapter(touched: Touched) -> Touched:
    return lambda engines, question, answer: bool(question.adapter) and touched(engines, question, answer)


async def _backwards(engines: Engines) -> None:
    await engines.ask_one_by_one(backwards=True)


async def _other_seeds(engines: Engines) -> None:
    await engines.check_draws()
    await engines.ask_one_by_one()


async def _at_once(engines: Engines) -> None:
    await engines.ask_all()


async def _pressed(engines: Engines) -> None:
    await engines.ask_all()
    await engines.ask_beside_the_longest()


async def _coming(engines: Engines) -> None:
    await engines.ask_as_they_come()


async def _in_waves(engines: Engines) -> None:
    await engines.ask_in_waves()


async def _coming_and_greedy(engines: Engines) -> None:
    """Ask all, then the greedy questions alone, in steps without a draw: the next token is the model's likeliest."""
    await engines.ask_as_they_come()
    await engines.ask_all(GREEDY)


async def _twice(engines: Engines) -> None:
    await engines.ask_as_they_come()
    await engines.ask_all()


async def _giving_up(engines: Engines) -> None:
    await engines.ask_as_they_come(some_give_up=True)
    await engines.ask_all()


async def _all(engines: Engines) -> None:
    await _giving_up(engines)
    await engines.ask_all()


async def _reloaded(engines: Engines) -> None:
    """Load another adapter under each name, while requests of the one before continue and its prompts are cached."""
    await engines.ask_as_they_come()
    engines.half_decode.clear()
    async with asyncio.TaskGroup() as group:
        group.create_task(engines.ask_all())
        await engines.half_decode.wait()  # by then all are submitted, under the names that adapters have now
        await engines.load_anew()
    await engines.ask_as_they_come()
    await engines.ask_all()


async def _asleep(engines: Engines) -> None:
    """Release all memory while requests decode; they continue after the wake, and are asked once more later."""
    async with asyncio.TaskGroup() as group:
        group.create_task(engines.ask_all())
        await engines.half_decode.wait()
        await engines.engine.release(TAGS, mode="retract")
        engines.interrupt()
        await engines.engine.wake_up()
    await engines.ask_all()


async def _reweighed(engines: Engines) -> None:
    """Load other weights while the cache has prefixes of these, and these again while requests decode with others."""
    model = Path(engines.config.model_path)
    await engines.ask_as_they_come()
    with other_weights(model) as folder:
        await engines.load_weights(folder, are_others=True)
        await engines.ask(0)
        if engines.alone and engines.answers[0].logprobs == engines.alone[0].logprobs:
            raise EngineError("other weights change no log-probability of an answer")
        engines.half_decode.clear()
        async with asyncio.TaskGroup() as group:
            group.create_task(engines.ask_all())
            await engines.half_decode.wait()
            await engines.load_weights(model, are_others=False)
    await engines.ask_all()


def _concurrency(engines: Engines, count: Counter[str]) -> str:
    return f"up to {engines.most_at_once} decoded at once" if engines.most_at_once > 1 else ""


def _in_padded_steps(engines: Engines, count: Counter[str]) -> str:
    num, found = sum(answer.history.num_padded > 0 for _, answer in engines.all), _concurrency(engines, count)
    return f"{found}, {num:,.0f} answers in padded steps" if num and found else ""


def _from_graphs(engines: Engines, count: Counter[str]) -> str:
    steps, found = count["replayed_steps"], _concurrency(engines, count)
    return f"{found}, {steps:,.0f} steps from graphs" if steps and found else ""


def _steps_ahead(engines: Engines, count: Counter[str]) -> str:
    steps, found = count["engine.steps_ahead"], _concurrency(engines, count)
    return f"{steps:,.0f} steps began before another's end, {found}" if steps and found else ""


def _on_ranks(engines: Engines, count: Counter[str]) -> str:
    """Only if every step of the engine, and so each of a request, was executed by all ranks."""
    steps, found = count["engine.steps_on_ranks"], _from_graphs(engines, count)
    return f"{steps:,.0f} steps on both, {found}" if found and steps == count["engine.steps"] else ""


def _in_chunks(engines: Engines, count: Counter[str]) -> str:
    cut = [len(engines.questions[number].prompt) for number, answer in engines.all if answer.history.num_chunks > 1]
    most = engines.config.scheduling.chunked_prefill_size
    return f"prompts of up to {max(cut)} tokens, {most} a step" if cut else ""


def _cut_beside_others(engines: Engines, count: Counter[str]) -> str:
    found = _concurrency(engines, count), _in_chunks(engines, count)
    return ", ".join(found) if all(found) else ""


def _from_cache(engines: Engines, count: Counter[str]) -> str:
    cached, prompts = count["cached_tokens"], count["prompt_tokens"]
    return f"{cached:,.0f} of {prompts:,.0f} prompt tokens were cached" if cached else ""


def _loads(engines: Engines, count: Counter[str]) -> str:
    found = _from_cache(engines, count)
    return f"{_times(engines.num_loads)} loaded under another's name, {found}" if engines.num_loads and found else ""


def _evicted(engines: Engines, count: Counter[str]) -> str:
    pages = count["evicted_pages"]
    return f"{pages:,.0f} pages evicted, {count['cached_tokens']:,.0f} tokens cached" if pages else ""


def _loaded(engines: Engines, count: Counter[str]) -> str:
    loaded, stored = count["tier_loaded_tokens"], count["tier_stored_tokens"]
    return f"{loaded:,.0f} tokens loaded from there, {stored:,.0f} stored" if loaded else ""


def _restored(engines: Engines, count: Counter[str]) -> str:
    found = [answer.cache.tiers.get(DISK, 0) for _, answer in engines.all]
    return f"{sum(found):,.0f} prompt tokens were in files of an engine before" if any(found) else ""


def _restarted(engines: Engines, count: Counter[str]) -> str:
    num, again = len(engines.other_versions), sum(answer.restarted for _, answer in engines.all)
    return f"{_times(num)} other weights, {again} answers began again" if num and again else ""


def _retracted(engines: Engines, count: Counter[str]) -> str:
    tokens = count["recomputed_tokens"]
    return f"{_times(count['retractions'])} retracted, {tokens:,.0f} tokens again" if count["retractions"] else ""


def _kept(engines: Engines, count: Counter[str]) -> str:
    kept = count["retractions_kept"]
    return f"{_times(count['retractions'])} retracted, {_times(kept)} kept on the host" if kept else ""


def _acceptance(engines: Engines, count: Counter[str]) -> str:
    accepted, drafted = count["accepted_tokens"], count["draft_tokens"]
    return f"{accepted:,.0f} of {drafted:,.0f} draft tokens were accepted" if drafted else ""


def _rejections(engines: Engines, count: Counter[str]) -> str:
    partly = count["partly_accepted_drafts"]
    return f"{_acceptance(engines, count)}, {_times(partly)} only some of a draft" if partly else ""


def _from_tiers(engines: Engines, count: Counter[str]) -> str:
    read, loaded = count["hisparse_read_tokens"], count["hisparse_loaded_tokens"]
    return f"{loaded:,.0f} of {read:,.0f} tokens were loaded into hot buffers" if 0 < loaded < read else ""


def _given_up(engines: Engines, count: Counter[str]) -> str:
    given_up = count["finished.abort"]
    return f"{given_up:,.0f} given up, beside up to {engines.most_at_once - 1}" if given_up else ""


def _released(engines: Engines, count: Counter[str]) -> str:
    state = engines.engine.link.last_state
    if state is None or not state.memory.last_wake_s:
        return ""
    given = human_bytes(sum(state.memory.num_bytes.values()))
    return f"{given} given back, {engines.num_interrupted} were decoding" if engines.num_interrupted else ""


def _transferred(engines: Engines, count: Counter[str]) -> str:
    arrived = sum(_came_over(engines, engines.questions[number], answer) for number, answer in engines.all)
    return f"{arrived} came over, beside up to {engines.most_at_once - 1}" if arrived else ""


def _much(engines: Engines, count: Counter[str]) -> str:
    parts = {
        "cached": count["cached_tokens"],
        "pages evicted": count["evicted_pages"],
        "retracted": count["retractions"],
        "given up": count["finished.abort"],
        "draft tokens accepted": count["accepted_tokens"],
        "drafts accepted in part": count["partly_accepted_drafts"],
    }
    return ", ".join(f"{value:,.0f} {what}" for what, value in parts.items() if value)


def _answered(engines: Engines, question: Question, answer: Answer) -> bool:
    return True


def _came_over(engines: Engines, question: Question, answer: Answer) -> bool:
    """Return whether the engine that decoded it computed nothing of its prompt."""
    return answer.history.num_chunks == 0


def _drafted_for(engines: Engines, question: Question, answer: Answer) -> bool:
    return answer.speculation is not None


def _was_concurrent(engines: Engines, question: Question, answer: Answer) -> bool:
    return answer.concurrency > 1


def _was_replayed(engines: Engines, question: Question, answer: Answer) -> bool:
    return answer.concurrency > 1 and answer.history.num_replayed > 0


def _was_padded(engines: Engines, question: Question, answer: Answer) -> bool:
    return answer.concurrency > 1 and answer.history.num_padded > 0


def _was_ahead(engines: Engines, question: Question, answer: Answer) -> bool:
    return answer.concurrency > 1 and answer.history.num_ahead > 0


def _was_loaded_hot(engines: Engines, question: Question, answer: Answer) -> bool:
    """Return whether tokens were loaded into hot buffers in a step that decoded it."""
    return answer.concurrency > 1 and answer.history.num_hot_loads > 0


def _loaded_hot_and(touched: Touched) -> Touched:
    return lambda engines, question, answer: (
        _was_loaded_hot(engines, question, answer) and touched(engines, question, answer)
    )


def _cut(engines: Engines, question: Question, answer: Answer) -> bool:
    return answer.history.num_chunks > 1


def _was_cut_beside_others(engines: Engines, question: Question, answer: Answer) -> bool:
    return _cut(engines, question, answer) and _was_concurrent(engines, question, answer)


def _hit(engines: Engines, question: Question, answer: Answer) -> bool:
    return answer.cache.cached_tokens > 0


def _came_from_host(engines: Engines, question: Question, answer: Answer) -> bool:
    return answer.cache.tiers.get(HOST, 0) > 0


def _came_from_files(engines: Engines, question: Question, answer: Answer) -> bool:
    return answer.cache.tiers.get(DISK, 0) > 0


def _began_again(engines: Engines, question: Question, answer: Answer) -> bool:
    """Return whether it began anew with these weights, behind tokens of others."""
    return answer.restarted and answer.weights not in engines.other_versions


def _missed_as_evicted(engines: Engines, question: Question, answer: Answer) -> bool:
    return answer.cache.miss_reason is MissReason.EVICTED


def _computed_again(engines: Engines, question: Question, answer: Answer) -> bool:
    """Return whether it was retracted behind its first token: more than its prompt was computed again."""
    return answer.memory.recomputed_tokens > answer.memory.retractions * len(question.prompt)


def _copied_back(engines: Engines, question: Question, answer: Answer) -> bool:
    memory = answer.memory
    return memory.retractions > 0 and memory.recomputed_tokens < memory.retractions * len(question.prompt)


def _partly_accepted(engines: Engines, question: Question, answer: Answer) -> bool:
    return answer.num_partly_accepted > 0


def _went_on(engines: Engines, question: Question, answer: Answer) -> bool:
    return answer.concurrency > 1 and answer.finish is not FinishReason.ABORT


def _interrupted(engines: Engines, question: Question, answer: Answer) -> bool:
    return answer.interrupted


def _times(count: float) -> str:
    return f"{count:,.0f} time{'s' * (count != 1)}"
