"""A request as the scheduler knows it."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from enum import Enum

from forebay.memory.footprint import final_kv_len
from forebay.memory.radix_node import OPERATOR, Pin
from forebay.memory.slots import PAD
from forebay.memory.tracking import Tracking
from forebay.requests.sampling_params import SamplingParams
from forebay.requests.step_plan import TokenLogprob
from forebay.requests.updates import CacheReport


class Status(Enum):
    WAITING = "waiting"  # holds nothing
    EXTENDING = "extending"  # holds a row; some of its known tokens have no KV yet
    DECODING = "decoding"  # holds a row; every token but the last has KV, or a launched step writes it
    FINISHED = "finished"


_MOVES: dict[Status, tuple[Status, ...]] = {
    Status.WAITING: (Status.EXTENDING, Status.FINISHED),
    Status.EXTENDING: (Status.DECODING, Status.WAITING, Status.FINISHED),
    Status.DECODING: (Status.WAITING, Status.FINISHED),
    Status.FINISHED: (),
}


class Request:
    """One request, from `Scheduler.add` to its last update.

    `tokens` are the prompt and the output so far (int32). What it holds: a row (`req_pool_idx`, PAD for none), the
    first `pin.num_pages` pages of that row through the prefix cache, and the rest up to `num_pages` itself.
    """

    __slots__ = (
        "arrival",
        "author",
        "cache_report",
        "checkpoints",
        "extend_target",
        "id",
        "kv_committed",
        "kv_len",
        "last_progress",
        "max_kv_len",
        "namespace",
        "num_pages",
        "num_prompt",
        "num_retractions",
        "order",
        "overtaken",
        "params",
        "pin",
        "priority",
        "prompt_logprobs",
        "req_pool_idx",
        "resume_after",
        "status",
        "stop_ids",
        "tokens",
        "tracking",
        "window_start",
    )

    def __init__(
        self,
        id: int,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        *,
        priority: int = 0,
        namespace: str = "",
        author: str = OPERATOR,
        arrival: float = 0.0,
        eos_token_ids: Sequence[int] = (),
        checkpoints: Sequence[int] = (),
    ) -> None:
        self.id = id
        self.tokens = array("i", prompt_token_ids)
        self.num_prompt = len(self.tokens)
        self.params = params
        self.priority = priority
        self.namespace = namespace
        self.author = author
        self.arrival = arrival
        self.checkpoints = tuple(checkpoints)  # lengths of the prompt from which others are likely to go on
        self.stop_ids = frozenset(
            params.stop_token_ids if params.ignore_eos else (*params.stop_token_ids, *eos_token_ids)
        )
        self.max_kv_len = final_kv_len(self.num_prompt, params.max_new_tokens)

        self.status = Status.WAITING
        self.order = 0  # place in the order of submission, given by the scheduler
        self.overtaken = 0  # how often somebody behind it was admitted first
        self.num_retractions = 0
        self.resume_after = 0  # after a retraction: the last step that still computes for it
        self.last_progress = arrival
        self.cache_report: CacheReport | None = None  # of the first admission; sent with the first token
        self.prompt_logprobs: list[TokenLogprob | None] = []

        self.req_pool_idx = PAD
        self.pin: Pin | None = None
        self.tracking: Tracking | None = None  # where the model has recurrent layers
        self.num_pages = 0  # pages in its row; while it decodes, see `ScheduleBatch`
        self.window_start = 0  # the first page whose window it holds; while it decodes, see `ScheduleBatch`
        self.extend_target = 0  # tokens known at its admission: extends go up to here
        self.kv_len = 0  # positions that launched extends write
        self.kv_committed = 0  # positions that completed extends wrote

    @property
    def num_output(self) -> int:
        return len(self.tokens) - self.num_prompt

    @property
    def wants_prompt_logprobs(self) -> bool:
        return self.params.prompt_logprobs >= 0 and self.num_output == 0

    @property
    def committed_len(self) -> int:
        """Tokens whose KV completed steps have written: all but the last, once its extends are through."""
        return len(self.tokens) - 1 if self.kv_committed == self.extend_target else self.kv_committed

    def key(self, num_tokens: int) -> bytes:
        """The first `num_tokens` tokens as the prefix cache wants them."""
        return self.tokens[:num_tokens].tobytes()

    def move(self, to: Status) -> None:
        assert to in _MOVES[self.status], f"request {self.id}: {self.status.name} -> {to.name}"
        self.status = to

    def __repr__(self) -> str:
        return f"Request({self.id}, {self.status.name}, prompt={self.num_prompt}, output={self.num_output})"
