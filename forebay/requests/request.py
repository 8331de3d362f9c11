"""A request as the scheduler knows it."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import KW_ONLY, InitVar, dataclass, field
from enum import Enum

from forebay.memory.adapters import AdapterLoad
from forebay.memory.holding import Allocation
from forebay.memory.radix_node import OPERATOR
from forebay.memory.retention import RetentionRequest
from forebay.requests.account import Account
from forebay.requests.pictures import PromptPictures
from forebay.requests.sampling_params import PoolingKind, SamplingParams
from forebay.requests.step_plan import TokenLogprob
from forebay.requests.transfers import Rendezvous
from forebay.requests.updates import CacheReport, MemoryReport, WaitedFor


class Status(Enum):
    """State of a request in its life cycle; `_MOVES` lists the allowed transitions."""

    PENDING = "pending"  # holds nothing: the other half of it, or places for what that sends, are not there yet
    WAITING = "waiting"  # holds nothing
    EXTENDING = "extending"  # holds a row; some of its known tokens have no KV yet
    DECODING = "decoding"  # holds a row; every token but the last has KV, or a launched step writes it
    TRANSFERRING = "transferring"  # what layers keep of it is on its way to another engine, or from there
    FINISHED = "finished"


_MOVES: dict[Status, tuple[Status, ...]] = {
    Status.PENDING: (Status.WAITING, Status.TRANSFERRING, Status.FINISHED),
    Status.WAITING: (Status.PENDING, Status.EXTENDING, Status.FINISHED),
    Status.EXTENDING: (Status.DECODING, Status.WAITING, Status.FINISHED),
    Status.DECODING: (Status.WAITING, Status.TRANSFERRING, Status.FINISHED),
    Status.TRANSFERRING: (Status.WAITING, Status.DECODING, Status.FINISHED),
    Status.FINISHED: (),
}


@dataclass(slots=True, eq=False, repr=False)
class Request:
    """One request, from `Scheduler.add` to its last update.

    `tokens` are the prompt and the output so far. It has an `allocation` from its admission until it is retracted or
    released.
    """

    id: int
    prompt_token_ids: InitVar[Sequence[int]]
    params: SamplingParams
    _: KW_ONLY
    priority: int = 0
    namespace: str = ""
    author: str = OPERATOR
    tenant: str = ""  # whose API key it came with; scheduled by weight among others
    arrival: float = 0.0
    eos_token_ids: InitVar[Sequence[int]] = ()
    resume_points: Sequence[int] = ()  # lengths of the prompt from which others are likely to go on
    retentions: Sequence[RetentionRequest] = ()  # prefixes of the prompt to retain, the shortest first
    rendezvous: Rendezvous | None = None  # with its other half, where prompts are computed by other engines
    adapter: AdapterLoad | None = None  # the LoRA adapter to apply
    is_check: bool = False  # computes an entry of the prefix cache again, to compare it: no other tier gets a copy
    pictures: PromptPictures | None = None  # given by the scheduler, whose engine knows them

    tokens: array[int] = field(init=False)  # int32
    account: Account = field(init=False)  # of its tenant, once a scheduler has it
    num_prompt: int = field(init=False)
    prompt_digest: bytes = b""  # of the prompt as it came, once it is known to have another half
    stop_ids: frozenset[int] = field(init=False)
    max_kv_len: int = field(init=False)
    pools_all: bool = field(init=False)  # it becomes a vector of hidden states that nobody keeps: none may be skipped
    weight_version: int = field(init=False)  # of the weights that compute it
    cache_namespace: str = field(init=False)  # in which it shares what was computed

    status: Status = Status.WAITING
    # Given once, by the scheduler: the smaller, the more it is served, of its tenant's. Because this order never
    # changes, preemption cannot cycle: the first in it is never a victim, so it finishes.
    rank: tuple[int, int] = (0, 0)
    overtaken: int = 0  # how often somebody behind it was admitted first
    num_retractions: int = 0
    num_charged: int = 0  # tokens of the prompt that its tenant has been charged for, or that were cached
    num_recomputed: int = 0  # tokens, after retractions
    num_chunks: int = 0  # computed
    chunk_ends_s: list[float] = field(default_factory=list)  # of the first `MOST_CHUNK_ENDS`, since it arrived
    num_replayed: int = 0  # of its steps that decoded, those that ran from a captured graph
    num_ahead: int = 0  # of its steps that gave tokens, those that were launched while another was in flight
    num_hot_loads: int = 0  # of its steps without prompts, those that loaded tokens into hot buffers
    num_padded: int = 0  # of its steps without prompts, those that had padded rows
    waited_s: float = 0.0  # until it started
    waited_for: WaitedFor = WaitedFor.TURN
    num_partly_accepted: int = 0  # drafts of which a token was accepted and a later one rejected
    resume_after: int = 0  # after a retraction: the last step that still computes for it
    last_progress: float = 0.0
    cache_report: CacheReport | None = None  # of the first admission; sent with the first token
    kept: MemoryReport | None = None  # once its prompt was computed, if it has retentions; sent with the first token
    prompt_logprobs: list[TokenLogprob | None] = field(default_factory=list)
    loaded: dict[str, int] = field(default_factory=dict)  # tokens that were copied for it, by tier of the prefix cache
    load_failed: bool = False  # a tier had more of its prefix, which was not copied
    maybe_allocation: Allocation | None = None

    def __post_init__(self, prompt_token_ids: Sequence[int], eos_token_ids: Sequence[int]) -> None:
        self.tokens = array("i", prompt_token_ids)
        self.account = Account(self.tenant)
        self.num_prompt = len(self.tokens)
        stops = self.params.stop_token_ids
        self.stop_ids = frozenset(stops if self.params.ignore_eos else (*stops, *eos_token_ids))
        # The last sampled token is never read back, so it has no KV.
        self.max_kv_len = self.num_prompt + self.params.max_tokens - 1
        self.pools_all = self.params.pooling is not None and self.params.pooling.kind is not PoolingKind.LAST

        self.compute_with(0)

    def compute_with(self, weight_version: int) -> None:
        """Set the version of the weights, which separates the request's cache from that of other versions; so does the
        load of its adapter."""
        weights = f"{weight_version}+{self.adapter.number}" if self.adapter else str(weight_version)
        self.weight_version, self.cache_namespace = weight_version, f"{weights}/{self.namespace}"

    @property
    def durable_namespace(self) -> str | None:
        """The namespace of its cache in files, which outlasts the process; None if what is computed for it cannot be
        kept there: with weights that were changed since the start, or an adapter without a digest."""
        if self.weight_version or (self.adapter and not self.adapter.digest):
            return None
        return f"{self.adapter.digest if self.adapter else ''}/{self.namespace}"

    @property
    def num_output(self) -> int:
        return len(self.tokens) - self.num_prompt

    @property
    def wants_prompt_logprobs(self) -> bool:
        return self.params.prompt_logprobs >= 0 and self.num_output == 0

    @property
    def allocation(self) -> Allocation:
        """The memory of a request that has some: `maybe_allocation`, which is not None."""
        assert self.maybe_allocation is not None, f"{self} has no allocation"
        return self.maybe_allocation

    def key(self, num_tokens: int) -> bytes:
        """The first `num_tokens` tokens as the prefix cache wants them."""
        return self.tokens[:num_tokens].tobytes()

    def move(self, to: Status) -> None:
        """Change the status; the transition must be one of `_MOVES`."""
        assert to in _MOVES[self.status], f"request {self.id}: {self.status.name} -> {to.name}"
        self.status = to

    def __repr__(self) -> str:
        return f"Request({self.id}, {self.status.name}, prompt={self.num_prompt}, output={self.num_output})"


class RequestFault(Exception):
    """Something went wrong, as `__cause__` says, while work was done for one request alone."""

    def __init__(self, req: Request) -> None:
        super().__init__(f"request {req.id}")
        self.req = req


@contextmanager
def blamed_on(req: Request) -> Iterator[None]:
    """Blame `req` for any exception raised inside."""
    try:
        yield
    except Exception as error:
        raise RequestFault(req) from error
