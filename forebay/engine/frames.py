"""The frames between the server process and the engine process: a closed set of plain types, msgpack on the wire.

Nothing here can carry code: no pickle, no extension types, no escape type.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import repeat
from typing import Any, Final

import msgspec

from forebay.config.engine_config import EngineConfig
from forebay.memory.ghosts import Reuse
from forebay.memory.radix_node import OPERATOR, Branch
from forebay.memory.retention import RetentionRequest
from forebay.requests.pictures import Picture
from forebay.requests.sampling_params import SamplingParams
from forebay.requests.transfers import Rendezvous
from forebay.requests.updates import Failure, SpeculationReport, Update
from forebay.scheduler.state import SchedulerState

# What memory that can be released is called.
KV_CACHE: Final = "kv_cache"
WEIGHTS: Final = "weights"
TAGS: Final = (KV_CACHE, WEIGHTS, "cuda_graph")


class Configure(msgspec.Struct, frozen=True, tag="configure"):
    """The first frame an engine process gets, and the only place its configuration comes from."""

    config: EngineConfig


class AddRequest(msgspec.Struct, frozen=True, tag="add", kw_only=True, omit_defaults=True):
    """`request_id` is the sender's own number, never the client's string. `namespace` separates prefix caches (tenant
    salt); requests of one namespace share prefixes. `author` names the session of this prompt: details of other cached
    prompts are reported only for prompts of the same author, or of all to the operator (""). `tenant`, a name in the
    scheduler's `tenants` or "", names the tenant that is charged. `resume_points` are lengths of the prompt from which
    later requests are likely to continue, `retentions` ask for prefixes of it, the shortest first. `rendezvous`, in a
    role, is the address of the request's other half. `adapter` names the adapter of the request, "" for none; with an
    `adapter_number` it must be that load. `pictures` are those of the prompt, in its order."""

    request_id: int
    prompt_token_ids: list[int]
    params: SamplingParams
    priority: int = 0
    namespace: str = ""
    author: str = OPERATOR
    tenant: str = ""
    resume_points: list[int] = []
    retentions: list[RetentionRequest] = []
    rendezvous: Rendezvous | None = None
    adapter: str = ""
    adapter_number: int = 0
    pictures: tuple[Picture, ...] = ()


class AddEndTokens(msgspec.Struct, frozen=True, tag="add_end_tokens"):
    """Have these tokens, too, end the answers of requests that are added from now on: those that the tokenizer's files
    and the chat template name, which the engine does not read."""

    token_ids: list[int]


class AbortRequest(msgspec.Struct, frozen=True, tag="abort"):
    """End a request, wherever it is. An id that has ended already is ignored."""

    request_id: int


class FlushCache(msgspec.Struct, frozen=True, tag="flush"):
    """Drop every prefix that no running request holds; answered by a `State` that names `serial`."""

    serial: int = 0


class SaveCache(msgspec.Struct, frozen=True, tag="save"):
    """Write what is stored of the prefix cache to its files; answered by a `State` that names `serial`."""

    serial: int = 0


class GetState(msgspec.Struct, frozen=True, tag="get_state"):
    """Ask for a `State` that names `serial`; one (of serial 0) is also sent about every second of work."""

    serial: int = 0


class GetTree(msgspec.Struct, frozen=True, tag="get_tree"):
    """Ask for the next part of the cached prefixes, or with `begin` for the first; answered by a `TreePart`."""

    serial: int = 0
    begin: bool = False


class GetReuse(msgspec.Struct, frozen=True, tag="get_reuse"):
    """Ask what more memory would bring the prefix cache; answered by a `ReuseReport`."""

    serial: int = 0


class Release(msgspec.Struct, frozen=True, tag="release", kw_only=True):
    """Release the memory of these tags; () to pause and release nothing. Before, the requests that run are treated as
    `mode` says: `wait`, `retract` or `abort`, within `timeout_s`. Answered by a `State` that names `serial`."""

    serial: int
    tags: list[str]
    mode: str = "wait"
    timeout_s: float = 300.0


class Resume(msgspec.Struct, frozen=True, tag="resume", kw_only=True):
    """Map the memory of these tags again; () ends a pause. Answered by a `State` that names `serial`."""

    serial: int
    tags: list[str]


class UpdateWeights(msgspec.Struct, frozen=True, tag="update_weights", kw_only=True):
    """Take the weights of another checkpoint of the same model; as `Release` otherwise."""

    serial: int
    path: str
    mode: str = "wait"
    timeout_s: float = 300.0


class LoadAdapter(msgspec.Struct, frozen=True, tag="load_adapter", kw_only=True):
    """Load the adapter at `path` under a name, which may `replace` one of that name: earlier requests continue with
    that one. Answered by a `State` that names `serial`."""

    serial: int
    name: str
    path: str
    replace: bool = False


class UnloadAdapter(msgspec.Struct, frozen=True, tag="unload_adapter", kw_only=True):
    """Take no more requests for an adapter, and free its slot when those that it has have ended. Answered by a `State`
    that names `serial` then, or after `timeout_s`."""

    serial: int
    name: str
    timeout_s: float = 300.0


class LoadedAdapter(msgspec.Struct, frozen=True, kw_only=True):
    """An adapter that requests may name. `number` is of this load alone, `digest` of its tensors; `num_users` are the
    requests that compute with it."""

    name: str
    number: int
    path: str
    rank: int
    num_bytes: int
    num_users: int
    digest: str


class CheckTransfers(msgspec.Struct, frozen=True, tag="check_transfers", kw_only=True):
    """Decode: fetch a pattern from the prefill server that listens there. Answered by a `State` that names `serial`,
    with `checked`."""

    serial: int
    host: str
    port: int


class Shutdown(msgspec.Struct, frozen=True, tag="shutdown"):
    """Stop now. Draining is the server's business: it sends this when nothing runs any more or time is up."""


class Speculating(msgspec.Struct, frozen=True, kw_only=True):
    """The width of the last decode step, and what the recent ones brought."""

    width: int
    recent: SpeculationReport


class Transferring(msgspec.Struct, frozen=True, kw_only=True):
    """The number of requests that wait for their other half, and of those in transfer; of open tickets, and of broken
    tickets that a peer may still write to; and of sessions that ended because a peer's message could not be handled,
    since the start."""

    pending: int
    transferring: int
    open: int
    unfenced: int
    rejected: int


class Checked(msgspec.Struct, frozen=True, kw_only=True):
    """The result of a check: `bytes_per_s` by `transport`, 0 if too few bytes were measured; `layout` by name, the same
    on both sides except for the page size; `wrong` are the columns with other values, with both values."""

    num_bytes: int
    bytes_per_s: float
    transport: str
    layout: dict[str, Any]
    wrong: list[str]


class Occupied(msgspec.Struct, frozen=True, kw_only=True):
    """`phase` is serving, draining, asleep or waking; `released` are the tags without memory, and `num_bytes` what each
    has when it has some. Of the last sleep and the last wake, how long they took. `kept_tokens` of the prefix cache are
    in host memory while `kv_cache` is released, and take `kept_bytes` there. `weights` names those that were loaded by
    an update: their digest, or a name of its own for tensors from memory."""

    phase: str = "serving"
    released: list[str] = []
    paused: bool = False
    num_bytes: dict[str, int] = {}
    weight_version: int = 0
    weights: str = ""
    last_sleep_s: float = 0.0
    last_wake_s: float = 0.0
    kept_tokens: int = 0
    kept_bytes: int = 0


class State(SchedulerState, frozen=True, tag="state", kw_only=True):
    """The state of the engine. Times are seconds of its monotonic clock; counters are in `engine/loop/stats.py`."""

    last_step_age_s: float  # since a step last completed, 0 when idle
    answers: int = 0  # the serial of the frame that asked for it
    refused: Failure | None = None  # why what that frame asked for was not done
    memory: Occupied = Occupied()
    speculation: Speculating | None = None  # where something is guessed
    transfers: Transferring | None = None  # in a role
    checked: Checked | None = None  # where that was asked for
    adapters: list[LoadedAdapter] = []


class TreePart(msgspec.Struct, frozen=True, tag="tree_part"):
    """Some nodes of the prefix cache, as they were passed, with what each of the `kinds` keeps there; `more` are to be
    asked for. The last part of a tree that is too large to be shown `is_cut`."""

    answers: int
    branches: list[Branch]
    kinds: list[str]
    more: bool = False
    is_cut: bool = False


class ReuseReport(msgspec.Struct, frozen=True, tag="reuse"):
    """The reuse of the prefix cache by tenant: measured, and estimated for more memory. `tiers` has the bytes of each
    tier; it is empty if nothing is cached."""

    answers: int
    tiers: dict[str, int]
    tenants: dict[str, Reuse]


class Beat(msgspec.Struct, frozen=True, tag="beat", kw_only=True):
    """Sent about every second by a thread that does nothing else: while these arrive, the process runs.

    Their fields say whether the loop runs. `turn_age_s` is the time for which the loop has been in one turn without an
    answer (in one tensor while weights are loaded), and 0 when it waits for frames; `step_age_s` is the time since a
    step last completed, 0 when there is nothing to do. A turn longer than `step_limit_s` counts as a hang.
    """

    turn_age_s: float
    step_age_s: float
    step_limit_s: float


class Ready(msgspec.Struct, frozen=True, tag="ready", kw_only=True):
    """The engine is up. `report` rows are (section, item, value, reason) for the start-up table and /server_info.
    `wants_resume_points`: the model keeps states or windows, which are cached at chosen lengths only. `bootstrap_port`
    is where a prefill engine listens for decode, `vector_size` how many numbers a pooled prompt becomes, and
    `hidden_size` each token; `slot_bytes` are those of a slot of each pool, in all layers together. `model_type` names
    the family, as config.json does. `environment`: see `environment_of`."""

    max_total_tokens: int
    max_running_requests: int
    max_requests: int  # those that may wait included
    context_length: int
    page_size: int
    vocab_size: int
    eos_token_ids: list[int]
    load_seconds: float
    report: list[tuple[str, str, str, str]]
    pid: int
    wants_resume_points: bool = False
    bootstrap_port: int = 0
    hidden_size: int = 0
    vector_size: int = 0
    environment: dict[str, str] = {}
    slot_bytes: dict[str, int] = {}
    model_type: str = ""
    weight_bytes: int = 0
    adapters: list[LoadedAdapter] = []


class Updates(msgspec.Struct, frozen=True, tag="updates", omit_defaults=True):
    """The updates of all requests after one step. Most updates have tokens only: these come before `updates`, for
    request `request_ids[i]` the next `counts[i]` of `token_ids`, or one each if there are no counts. Made by `pack`,
    read by `tokens` and `updates`. `cache_events` is a batch of events of the prefix cache, encoded for routers."""

    updates: list[Update] = []
    request_ids: list[int] = []
    token_ids: list[int] = []
    counts: list[int] = []
    cache_events: bytes = b""

    def __post_init__(self) -> None:
        counts = self.counts or [1] * len(self.request_ids)
        if len(counts) != len(self.request_ids) or sum(counts) != len(self.token_ids) or min(counts, default=1) < 1:
            raise ValueError(f"{len(self.token_ids)} tokens of {len(self.request_ids)} requests, {self.counts} of each")

    @classmethod
    def pack(cls, updates: list[Update]) -> Updates:
        """`updates` in order; each request's stay in order."""
        request_ids: list[int] = []
        token_ids: list[int] = []
        counts: list[int] = []
        others: list[Update] = []
        with_others = set()  # requests in `others`
        for update in updates:
            only_tokens = (
                update.token_ids
                and update.finish is None
                and update.cache is None
                and update.logprobs is None
                and update.prompt_logprobs is None
            )
            if only_tokens and update.request_id not in with_others:
                request_ids.append(update.request_id)
                token_ids += update.token_ids
                counts.append(len(update.token_ids))
            else:
                others.append(update)
                with_others.add(update.request_id)
        return cls(others, request_ids, token_ids, counts if len(token_ids) > len(counts) else [])

    def tokens(self) -> Iterator[tuple[int, list[int]]]:
        """Yield the requests that have tokens only, each with these."""
        end = 0
        for request_id, count in zip(self.request_ids, self.counts or repeat(1), strict=False):
            yield request_id, self.token_ids[end : (end := end + count)]


class Dead(msgspec.Struct, frozen=True, tag="dead"):
    """The engine's last words: the root cause, in one line."""

    failure: Failure


ToEngine = (
    Configure
    | AddRequest
    | AbortRequest
    | AddEndTokens
    | FlushCache
    | SaveCache
    | GetState
    | GetTree
    | GetReuse
    | Release
    | Resume
    | UpdateWeights
    | LoadAdapter
    | UnloadAdapter
    | CheckTransfers
    | Shutdown
)
FromEngine = Ready | Updates | State | TreePart | ReuseReport | Beat | Dead
