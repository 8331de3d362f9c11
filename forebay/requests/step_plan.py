"""What one step does, decided in full before anything runs.

Shape letters: S sequences in the step, E of them extends, T tokens, A admissions, W row writes, M window page writes,
N snapshots, C clears, D copies.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final, Protocol

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


_NOTHING: Final = np.empty(0, dtype=np.int64)


def _nothing() -> I64:
    return _NOTHING


@dataclass(frozen=True, slots=True, kw_only=True)
class Kept:
    """What a request keeps on the device: the pages of its tokens in order, those window pages among them that are
    there, in order, and its live state slot (PAD for none)."""

    request_id: int
    pages: I64
    window_pages: I64
    state_slot: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPlan:
    """A step: ids and lengths only, so that whoever carries it out needs nothing else. Its columns are numpy arrays:
    not to be written to, and plans are not compared with `==`.

    It is carried out in this order: `saves` (copies to host memory, under the request's id, of what retracted requests
    kept), `drops` (host copies that nobody will want again, if there are such), row writes and window page writes,
    `clears` (state slots that become zeros), copies of state slots, `loads` (host copies back into new places; then
    they are gone), and then the model.

    Sequences stand extends first, then decodes. Sequence i computes `q_lens[i]` tokens that end at KV length
    `seq_lens[i]`; its tokens' KV goes to `out_cache_loc` (page * page_size + offset, in sequence order). An extend's
    tokens are in `input_ids`; a decode (q_len 1) reads the row's last sampled token on the device, where the host may
    not know it yet. `sample_mask[i]` says whether a token is sampled from sequence i's last position.

    Row writes: `req_to_token[write_rows, write_columns] = write_pages` on the device (one entry per page). Window page
    writes: `full_to_window[map_pages] = map_windows`; a windowed layer has page `full_to_window[p]` for p, and its KV
    goes to `out_window_loc`.

    Sequence i's recurrent state is in slot `state_slots[i]`. Snapshots, by sequence and then by length: the state of
    sequence `snap_seqs[j]` at KV length `snap_lens[j]` (behind the step's first token, at most at its end) also goes to
    slot `snap_slots[j]`. Columns of what the model does not have are empty.
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
    out_window_loc: I64 = field(default_factory=_nothing)  # [T]
    map_pages: I64 = field(default_factory=_nothing)  # [M]
    map_windows: I64 = field(default_factory=_nothing)  # [M]
    state_slots: I64 = field(default_factory=_nothing)  # [S]
    snap_seqs: I64 = field(default_factory=_nothing)  # [N]
    snap_lens: I64 = field(default_factory=_nothing)  # [N]
    snap_slots: I64 = field(default_factory=_nothing)  # [N]
    clears: I64 = field(default_factory=_nothing)  # [C]
    copy_src: I64 = field(default_factory=_nothing)  # [D]
    copy_dst: I64 = field(default_factory=_nothing)  # [D]
    saves: tuple[Kept, ...] = ()
    loads: tuple[Kept, ...] = ()
    drops: tuple[int, ...] = ()
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

    `failed` holds indices (into all of the plan's sequences) for which something was not finite, logits or what else
    the step computed: a token id of theirs is meaningless, and so is whatever the step wrote for them (C30).
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
