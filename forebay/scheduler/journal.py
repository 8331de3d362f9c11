"""The inputs of a scheduler as records, and what it decided: the same inputs give the same decisions.

A scheduler whose `journal` is set calls it with each record, before it acts on it; `Planned` follows its decision.
Records hold numbers, and the tokens of requests. They hold no text and no other parameter that clients write.
"""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Callable, Sequence
from typing import Final, Self

import msgspec
import numpy as np

from forebay.base.parts import Part
from forebay.base.pixels import Size, num_pixel_bytes
from forebay.config.engine_config import SchedulerConfig
from forebay.memory.adapters import AdapterChanged, AdapterLoad
from forebay.memory.retention import RetentionRequest
from forebay.requests.pictures import Picture
from forebay.requests.request import Request
from forebay.requests.sampling_params import Grammar, GrammarKind, Pooling, SamplingParams
from forebay.requests.step_plan import NO_HOST_WORK, NO_KIND_WORK, Encode, KindWork, StepPlan, StepResult
from forebay.requests.transfers import Arrived, Broken, Closed, Event, Offered, Rendezvous, Renewed, Sent, Ticket

# Parts without work.
_IDLE: Final = [(name, getattr(NO_KIND_WORK, name)) for name in NO_KIND_WORK.__struct_fields__]
_ANY: Final = Grammar(GrammarKind.JSON_OBJECT)


class Entry(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One record; its `tag` is its type."""


class Origin(Entry, frozen=True, tag="origin"):
    """The scheduler before its first input. `instance` is the name of a decode engine among its peers, `drafts` says
    whether a proposer on the host drafts tokens, `wakes` whether requests wake the engine. `state` names what it had
    from before, which no record has."""

    config: SchedulerConfig
    instance: str = ""
    drafts: bool = False
    wakes: bool = False
    state: str = ""


class Kept(msgspec.Struct, frozen=True, array_like=True):
    """The parameters of a request that change when it runs and ends."""

    max_tokens: int
    min_tokens: int
    ignore_eos: bool
    temperature: float
    seed: int
    logprobs: int
    prompt_logprobs: int
    grammar: bool
    pooling: Pooling | None

    @classmethod
    def of(cls, params: SamplingParams) -> Self:
        """Return these parameters of a request."""
        pooling = params.pooling and Pooling(params.pooling.kind, head=params.pooling.head)
        return cls(
            params.max_tokens,
            params.min_tokens,
            params.ignore_eos,
            params.temperature,
            params.seed,
            params.logprobs,
            params.prompt_logprobs,
            params.grammar is not None,
            pooling,
        )

    def params(self) -> SamplingParams:
        """Return parameters with which a request runs and ends alike."""
        values = {name: getattr(self, name) for name in self.__struct_fields__}
        return msgspec.structs.replace(SamplingParams(), **{**values, "grammar": _ANY if self.grammar else None})


class Shown(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A picture of a prompt, as `Picture`, without its pixels."""

    digest: bytes
    grid: tuple[int, int]
    sizes: tuple[Size, ...]
    runs: tuple[tuple[int, int], ...]

    @classmethod
    def of(cls, picture: Picture) -> Self:
        """Return the record of a picture."""
        return cls(picture.digest, picture.grid, picture.sizes, picture.runs)

    def picture(self) -> Picture:
        """Return a picture of as many pixels, which are random numbers of its digest."""
        pixels = hashlib.shake_128(self.digest).digest(num_pixel_bytes(self.sizes))
        return Picture(digest=self.digest, grid=self.grid, sizes=self.sizes, pixels=pixels, runs=self.runs)


class Added(Entry, frozen=True, tag="add"):
    """A request, with its tokens as int32, of which those at the places of `pictures` are placeholders. `stops` are its
    stop tokens."""

    id: int
    tokens: bytes
    params: Kept
    now: float
    priority: int
    namespace: str
    author: str
    tenant: str
    stops: tuple[int, ...]
    resume_points: tuple[int, ...]
    retentions: tuple[tuple[int, float], ...]
    rendezvous: Rendezvous | None
    adapter: str
    pictures: tuple[Shown, ...]
    is_check: bool

    @classmethod
    def of(cls, req: Request, now: float, pictures: Sequence[Picture] = ()) -> Self:
        """Return the record of a request that arrives."""
        return cls(
            req.id,
            req.tokens.tobytes(),
            Kept.of(req.params),
            now,
            req.priority,
            req.namespace,
            req.author,
            req.tenant,
            tuple(sorted(req.stop_ids)),
            tuple(req.resume_points),
            tuple((wish.num_tokens, wish.ttl_s) for wish in req.retentions),
            req.rendezvous,
            req.adapter.name if req.adapter else "",
            tuple(map(Shown.of, pictures)),
            req.is_check,
        )

    def request(self, adapter: AdapterLoad | None) -> Request:
        """Return a request with these tokens and parameters."""
        req = Request(
            self.id,
            np.frombuffer(self.tokens, dtype=np.int32).tolist(),
            self.params.params(),
            priority=self.priority,
            namespace=self.namespace,
            author=self.author,
            tenant=self.tenant,
            resume_points=list(self.resume_points),
            retentions=[RetentionRequest(*wish) for wish in self.retentions],
            rendezvous=self.rendezvous,
            adapter=adapter,
            is_check=self.is_check,
        )
        req.stop_ids = frozenset(self.stops)
        return req


class Aborted(Entry, frozen=True, tag="abort"):
    """A client ends a request, if it has not ended."""

    id: int


class Expired(Entry, frozen=True, tag="expire"):
    """Requests over a time limit end."""

    now: float


class Planning(Entry, frozen=True, tag="plan"):
    """A step is to be decided. `chunk_limit` bounds its prompts."""

    now: float
    width: int
    mixed_limit: int
    chunk_limit: int


class Planned(Entry, frozen=True, tag="planned"):
    """The step that was decided. Columns are as bytes; `admissions` are rows with their requests; `checksum` is
    that of all else but tokens. No record follows if no step was decided."""

    step: int
    num_extends: int = 0
    rows: bytes = b""
    q_lens: bytes = b""
    starts: bytes = b""
    sampled: bytes = b""
    admissions: tuple[tuple[int, int], ...] = ()
    checksum: int = 0

    @classmethod
    def of(cls, plan: StepPlan) -> Self:
        """Return the record of a plan."""
        return cls(
            plan.step,
            plan.num_extends,
            plan.rows.tobytes(),
            plan.q_lens.tobytes(),
            plan.starts.tobytes() if plan.num_extends else b"",
            plan.sample_mask.tobytes(),
            tuple([(start.row, start.request_id) for start in plan.admissions]) if plan.admissions else (),
            checksum_of(plan),
        )


class Again(Entry, frozen=True, tag="again"):
    """As `Planned`, for a step that has the sequences of the one before and admits no request."""

    step: int
    checksum: int


class Committed(Entry, frozen=True, tag="commit"):
    """A result, as `StepResult`, without what only clients get. `pooled` are extends that became a vector. `stopped`
    are the tokens, by their number in `token_ids`, that end their request: only of records without tokens."""

    step: int
    now: float
    token_ids: list[int]
    num_new: list[int] | None
    failed: tuple[int, ...]
    lost: tuple[int, ...]
    pooled: tuple[int, ...]
    counts: dict[str, list[int]]
    step_cost: float
    stopped: tuple[int, ...] = ()

    @classmethod
    def of(cls, plan: StepPlan, result: StepResult, now: float, step_cost: float) -> Self:
        """Return the record of a result."""
        counts = {kind: ids.tolist() for kind, ids in result.counts.items()} if result.counts else {}
        pooled = tuple(result.vectors) if result.vectors else ()
        return cls(
            plan.step, now, result.token_ids, result.num_new, result.failed, result.lost, pooled, counts, step_cost
        )

    def result(self) -> StepResult:
        """Return a result that has the same consequences."""
        return StepResult(
            token_ids=list(self.token_ids),
            num_new=self.num_new,
            failed=self.failed,
            vectors=dict.fromkeys(self.pooled, b"") or None,
            counts={kind: np.array(ids, dtype=np.int64) for kind, ids in self.counts.items()},
            lost=self.lost,
        )


class StepFailed(Entry, frozen=True, tag="fail"):
    """The oldest launched step failed with an error of this code."""

    step: int
    code: str


class Recovering(Entry, frozen=True, tag="recover"):
    """An error was raised that no step raised, in work for the request `culprit`; -1 if that is not known."""

    culprit: int
    code: str


_EVENTS: Final[dict[str, type[Event]]] = {
    kind.__name__: kind for kind in (Offered, Renewed, Arrived, Sent, Broken, Closed)
}


class Transferred(Entry, frozen=True, tag="event"):
    """An event of a transfer, as msgpack of the type with this name. `stopped` says whether its token ends the request:
    only of records without tokens."""

    kind: str
    body: bytes
    now: float
    stopped: bool = False

    @classmethod
    def of(cls, event: Event, now: float, *, stopped: bool = False) -> Self:
        """Return the record of an event, without what only clients get: texts of errors, log-probabilities."""
        match event:
            case Arrived():
                cache = msgspec.structs.replace(event.tail.cache, token_here=-1, token_there=-1)
                tail = msgspec.structs.replace(event.tail, cache=cache, logprob=None, prompt_logprobs=None)
                event = msgspec.structs.replace(event, tail=tail)
            case Broken():
                event = Broken(event.ticket, msgspec.structs.replace(event.failure, message=""))
            case Offered() if event.declined:
                event = msgspec.structs.replace(event, declined=msgspec.structs.replace(event.declined, message=""))
            case _:
                pass
        return cls(type(event).__name__, msgspec.msgpack.encode(event), now, stopped)

    @property
    def event(self) -> Event:
        """Return the event. Raises msgspec.ValidationError if it is none."""
        kind = _EVENTS.get(self.kind)
        if kind is None:
            raise msgspec.ValidationError("an event of an unknown kind")
        return msgspec.msgpack.decode(self.body, type=kind)


class SetAside(Entry, frozen=True, tag="aside"):
    """Places outside of requests, for a check of transfers."""

    ticket: Ticket
    num_tokens: int


class Drafted(Entry, frozen=True, tag="draft"):
    """The number of draft tokens of each request that may have some."""

    counts: list[int]


class Compiled(Entry, frozen=True, tag="grammar"):
    """The grammar of a request is compiled, or cannot be used."""

    id: int
    refused: bool


class Flushed(Entry, frozen=True, tag="flush"):
    """The prefix cache is dropped from now on."""


class FlushedOn(Entry, frozen=True, tag="flush on"):
    """A slice of the prefix cache is dropped."""


class Reclaimed(Entry, frozen=True, tag="reclaim"):
    """Leaked slots are quarantined."""


class Halted(Entry, frozen=True, tag="halt"):
    """A halt begins, with this treatment of running requests."""

    mode: str


class HaltPlanning(Entry, frozen=True, tag="halt plan"):
    """A step of a halt is to be decided."""

    now: float
    width: int
    mixed_limit: int


class Resumed(Entry, frozen=True, tag="resume"):
    """Requests are admitted again."""

    now: float


class Forgotten(Entry, frozen=True, tag="forget"):
    """The caches are released. If `to_host`, as much of them as fits is copied to host memory."""

    now: float
    to_host: bool


class Reweighed(Entry, frozen=True, tag="weights"):
    """Other weights compute from now on."""

    version: int


class Measured(Entry, frozen=True, tag="measure"):
    """The seconds of a step that loaded from other tiers."""

    step: int
    seconds: float


class Unwritable(Entry, frozen=True, tag="unwritable"):
    """Nothing more is stored in this tier of the prefix cache."""

    tier: str


class CheckEnded(Entry, frozen=True, tag="check end"):
    """The tenant of a check of the prefix cache is removed."""


class ChecksCleared(Entry, frozen=True, tag="check clear"):
    """The pages that a check of the prefix cache has computed are dropped."""


class AdapterLost(Entry, frozen=True, tag="adapter lost"):
    """The requests of the adapter with this number end: its tensors are lost."""

    number: int


class Marked(Entry, frozen=True, tag="mark"):
    """The scheduler is at rest behind this step, and has this state; see `engine.recorder.mark`. It is no input."""

    step: int
    state: bytes


class Unmarked(Entry, frozen=True, tag="unmarked"):
    """The scheduler is at rest behind this step, and its state could not be kept. It is no input."""

    step: int
    why: str


class Beyond(Entry, frozen=True, tag="beyond"):
    """From here on something changes the scheduler that no record has."""

    what: str


Record = (
    Added
    | Aborted
    | Expired
    | Planning
    | Planned
    | Again
    | Committed
    | StepFailed
    | Recovering
    | Transferred
    | SetAside
    | Drafted
    | Compiled
    | Flushed
    | FlushedOn
    | Reclaimed
    | Halted
    | HaltPlanning
    | Resumed
    | Forgotten
    | Reweighed
    | Measured
    | Unwritable
    | CheckEnded
    | ChecksCleared
    | AdapterChanged
    | AdapterLost
    | Marked
    | Unmarked
    | Beyond
)
Journal = Callable[[Record | StepPlan], None]
"""Takes records, and plans as they are: a record of a plan costs more than an unchanged one needs."""


def checksum_of(plan: StepPlan) -> int:
    """Return a checksum of where a plan writes and reads: its work for the page table, kinds of cache, copies and
    pictures, without tokens."""
    sum_ = 0
    if len(plan.writes.write_rows):
        sum_ = _of_part(plan.writes, sum_)
    if plan.kinds is not NO_KIND_WORK:
        sum_ = _of_kinds(plan.kinds, sum_)
    pictures = plan.pictures
    if plan.num_extends or plan.admissions or pictures.encodes or pictures.drops:
        sum_ = _of_prompts(plan, sum_)
    if len(plan.masked):
        sum_ = zlib.crc32(plan.masked.tobytes(), sum_)
    if plan.host is not NO_HOST_WORK:
        for copy in plan.host.copies:
            for kind, ids in copy.slots.items():
                sum_ = zlib.crc32(ids.tobytes(), zlib.crc32(kind.encode(), sum_))
        sum_ = zlib.crc32(repr(plan.host.drops).encode(), sum_)
    return sum_


def _of_kinds(work: KindWork, sum_: int) -> int:
    for name, idle in _IDLE:
        part = getattr(work, name)
        if part is not idle:
            sum_ = _of_part(part, sum_)
    return sum_


def _of_prompts(plan: StepPlan, sum_: int) -> int:
    """Return the checksum with what is around prompts: adapters and pictures."""
    begins = [(start.adapter, start.rope_delta) for start in plan.admissions]
    sum_ = _of_part(plan.pictures, zlib.crc32(repr(begins).encode(), sum_))
    for encode in plan.pictures.encodes:
        sum_ = _of_part(encode, zlib.crc32(repr(_slice_of(encode)).encode(), sum_))
    return zlib.crc32(repr(plan.pictures.drops).encode(), sum_)


def _slice_of(encode: Encode) -> tuple[int, ...]:
    return encode.picture, encode.tile, encode.first_layer, encode.last_layer, encode.height, encode.width


def _of_part(part: Part, sum_: int) -> int:
    for i, name in enumerate(part.columns):
        values = getattr(part, name)
        if len(values):
            sum_ = zlib.crc32(values.tobytes(), sum_ ^ i)
    return sum_
