"""A request as the scheduler knows it."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from enum import Enum

from forebay.memory.footprint import final_kv_len
from forebay.memory.holding import Residency
from forebay.memory.radix_node import OPERATOR
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

    `tokens` are the prompt and the output so far (int32). `held` is there exactly while it holds something: from its
    admission until it is retracted or released.
    """

    __slots__ = (
        "arrival",
        "author",
        "cache_report",
        "held",
        "id",
        "last_progress",
        "max_kv_len",
        "namespace",
        "num_prompt",
        "num_retractions",
        "order",
        "overtaken",
        "params",
        "priority",
        "prompt_logprobs",
        "resume_after",
        "resume_points",
        "status",
        "stop_ids",
        "tokens",
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
        resume_points: Sequence[int] = (),
    ) -> None:
        self.id = id
        self.tokens = array("i", prompt_token_ids)
        self.num_prompt = len(self.tokens)
        self.params = params
        self.priority = priority
        self.namespace = namespace
        self.author = author
        self.arrival = arrival
        self.resume_points = tuple(resume_points)  # lengths of the prompt from which others are likely to go on
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

        self.held: Residency | None = None

    @property
    def num_output(self) -> int:
        return len(self.tokens) - self.num_prompt

    @property
    def wants_prompt_logprobs(self) -> bool:
        return self.params.prompt_logprobs >= 0 and self.num_output == 0

    @property
    def residency(self) -> Residency:
        """What it holds, of a request that holds something."""
        assert self.held is not None, f"{self} holds nothing"
        return self.held

    def key(self, num_tokens: int) -> bytes:
        """The first `num_tokens` tokens as the prefix cache wants them."""
        return self.tokens[:num_tokens].tobytes()

    def move(self, to: Status) -> None:
        assert to in _MOVES[self.status], f"request {self.id}: {self.status.name} -> {to.name}"
        self.status = to

    def __repr__(self) -> str:
        return f"Request({self.id}, {self.status.name}, prompt={self.num_prompt}, output={self.num_output})"
