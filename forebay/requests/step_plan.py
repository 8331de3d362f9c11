"""What one step does, decided in full before anything runs.

Shape letters: S sequences in the step, E of them extends, T tokens, A admissions, W row writes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import msgspec
import numpy as np
import numpy.typing as npt

from forebay.requests.sampling_params import SamplingParams

I32 = npt.NDArray[np.int32]
I64 = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Admission:
    """A row handed out for this step, and what the sampler has to know about its tenant.

    `token_ids` are the prompt and whatever was generated before a retraction (`num_prompt` of them are prompt): the
    penalties count them.
    """

    row: int
    request_id: int
    params: SamplingParams
    token_ids: tuple[int, ...] | list[int]
    num_prompt: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPlan:
    """A frozen step: ids and lengths only, so that it prints, compares, replays, and can be sent to other ranks.

    Sequences stand extends first, then decodes. Sequence i computes `q_lens[i]` tokens that end at KV length
    `seq_lens[i]`; its tokens' KV goes to `out_cache_loc` (page * page_size + offset, in sequence order). An extend's
    tokens are in `input_ids`; a decode (q_len 1) reads the row's last sampled token on the device, where the host may
    not know it yet. `sample_mask[i]` says whether a token is sampled from sequence i's last position.

    Row writes come first: `req_to_token[write_rows, write_columns] = write_pages` on the device (one entry per page).
    """

    step: int
    num_extends: int
    rows: I64  # [S]
    q_lens: I64  # [S]
    seq_lens: I64  # [S], after the step
    out_cache_loc: I64  # [T]
    input_ids: I64  # [tokens of the extends]
    sample_mask: npt.NDArray[np.bool_]  # [S]
    write_rows: I64  # [W]
    write_columns: I64  # [W]
    write_pages: I64  # [W]
    admissions: tuple[Admission, ...] = ()
    prompt_logprobs: tuple[int, ...] = ()  # extends (by index) whose every position wants log-probabilities

    @property
    def num_seqs(self) -> int:
        return len(self.rows)

    @property
    def num_tokens(self) -> int:
        return len(self.out_cache_loc)

    @property
    def num_decodes(self) -> int:
        return len(self.rows) - self.num_extends


class TokenLogprob(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """The log-probability of one token and of the most likely alternatives there (ids and values, best first).

    `rank` is the token's place among all of them, 1 the most likely.
    """

    token_id: int
    logprob: float
    rank: int
    top_ids: list[int] = []
    top_logprobs: list[float] = []


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """What a step sampled, in the order of the plan's sampling sequences.

    `failed` holds indices (into the sampling sequences) whose logits were not finite: their token id is meaningless.
    `logprobs` is None where nobody asked. `prompt_logprobs` maps an extend's index to one entry per position of its
    chunk: entry j is about token j + 1 of the chunk, and the last one about the token after the chunk (None there where
    the chunk ends the prompt, since that one is sampled).
    """

    token_ids: list[int]
    failed: tuple[int, ...] = ()
    logprobs: list[TokenLogprob | None] | None = None
    prompt_logprobs: dict[int, list[TokenLogprob | None]] | None = None


class Launched(Protocol):
    """A step on its way; `result` waits for its sampled tokens, the only thing ever copied back."""

    def result(self) -> StepResult: ...


class Runner(Protocol):
    """Whatever carries plans out: the model runner, or the hash model in tests."""

    def launch(self, plan: StepPlan) -> Launched: ...
