"""Updates that a client receives about its request."""

from __future__ import annotations

from enum import StrEnum
from typing import Final

import msgspec

from forebay.base.errors import ForebayError, from_code
from forebay.memory.miss_reason import MissReason
from forebay.requests.step_plan import TokenLogprob

__all__ = [
    "CacheReport",
    "Failure",
    "FinishReason",
    "History",
    "MemoryReport",
    "MissReason",
    "SpeculationReport",
    "Update",
    "WaitedFor",
]


class FinishReason(StrEnum):
    """Reason why a request ended, as the OpenAI API names it."""

    STOP = "stop"  # end of sequence or a stop token id
    LENGTH = "length"  # max_tokens or the context is full
    ABORT = "abort"  # the client asked for it, or went away
    ERROR = "error"


class CacheReport(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """How much of a prompt came from the prefix cache, and why not more. `miss_reason` is about position
    `cached_tokens`, the first that had to be computed.

    `kv_tokens` had their KV in the cache; within them, `resumable` has the last place at which each other kind of cache
    of the layers could be resumed. `tiers` has by name how many of the cached tokens other tiers of the cache than the
    device had, for this request. If the prompt left a cached one of the same author, `differs_at` is the position
    (-1: it did not), with the token here and the one there.
    """

    cached_tokens: int = 0
    miss_reason: MissReason = MissReason.NONE
    kv_tokens: int = 0
    resumable: dict[str, int] = {}
    differs_at: int = -1
    token_here: int = -1
    token_there: int = -1
    tiers: dict[str, int] = {}


class MemoryReport(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The history of a request's memory: how often it was retracted and how many tokens were computed again for that;
    the lengths of prompt and answer at which others can resume from the cache, if not after every page.

    `kept_tokens` of it are kept for `kept_s` more seconds. `not_kept` says why no more, or for no longer: "" if all
    that was asked for is kept."""

    retractions: int = 0
    recomputed_tokens: int = 0
    checkpoints: list[int] = []
    kept_tokens: int = 0
    kept_s: float = 0.0
    not_kept: str = ""


class WaitedFor(StrEnum):
    """Obstacle that a request waited for last before it started."""

    TURN = "turn"  # the steps before it were full, or in flight
    ROW = "row"  # as many requests ran as may
    MEMORY = "memory"  # too few free pages or slots
    PREFIX = "prefix"  # another request computed the same beginning, which it then reused
    PICTURES = "pictures"  # these were encoded


MOST_CHUNK_ENDS: Final = 64


class History(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """How a request came to its answer: it waited `waited_s` until it started, and its tokens were computed in
    `num_chunks` parts before it decoded, those after retractions included. `chunk_ends_s` are the ends of the first
    `MOST_CHUNK_ENDS` of these, in seconds since its arrival. `num_replayed` of the steps that decoded it ran from a
    captured graph, and `num_ahead` of those that gave it tokens were launched while another step was in flight.
    `num_hot_loads` of the steps that decoded it had no prompts, and loaded tokens into hot buffers (HiSparse).
    `num_padded` of the steps that decoded it had no prompts, and had padded rows."""

    waited_s: float = 0.0
    waited_for: WaitedFor = WaitedFor.TURN
    num_chunks: int = 0
    chunk_ends_s: list[float] = []
    num_replayed: int = 0
    num_ahead: int = 0
    num_hot_loads: int = 0
    num_padded: int = 0


class Failure(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A typed error in a form that crosses a process boundary; see `base.errors.from_code`. `param` is the field of the
    request that has the fault, if there is one."""

    kind: str
    code: str
    message: str
    param: str | None = None

    @classmethod
    def of(cls, error: ForebayError) -> Failure:
        """Convert an exception to what crosses the process boundary."""
        return cls(type(error).__name__, error.code, error.message, error.param)

    @property
    def error(self) -> ForebayError:
        return from_code(self.kind, self.message, self.code, self.param)


class SpeculationReport(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The effect of speculative decoding on a request.

    `accepted_per_step`: its tokens per decode step that brought them; 1 if no draft token was accepted. `net_speedup`:
    how much sooner it had them than without drafts, by the time that steps without drafts took meanwhile.
    """

    accepted_per_step: float
    net_speedup: float


class Update(msgspec.Struct, array_like=True, gc=False):
    """News of one request after one step.

    A request's updates carry its tokens in order and exactly once; the last one, and only that, has `finish`. `cache`
    comes with the first. `logprobs` has one entry per token where the request asked for them; `prompt_logprobs` arrives
    whole with the first token (entry i about prompt token i; None for token 0). Behind one that has `restarted` all
    begins anew. Of a prompt that is pooled there is one update, with its `vector`, float32 in little-endian order.
    """

    request_id: int
    token_ids: list[int]
    finish: FinishReason | None = None
    failure: Failure | None = None
    cache: CacheReport | None = None
    logprobs: list[TokenLogprob] | None = None
    prompt_logprobs: list[TokenLogprob | None] | None = None
    matched_stop: int | None = None  # the stop or end token that ended it
    speculation: SpeculationReport | None = None  # with the last, where something was guessed
    weight_version: int = 0  # of the weights that compute it, with the first
    num_partly_accepted: int = 0  # with the last: its drafts of which a token was accepted and a later one rejected
    restarted: bool = False  # the weights have changed: the tokens told so far count for nothing, others follow
    vector: bytes = b""
    memory: MemoryReport | None = (
        None  # with the last, where there is something to tell; of what is kept with the first
    )
    history: History | None = None  # with the last
