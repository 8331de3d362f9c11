"""The plan of one step, decided in full before anything runs.

Lengths of columns: S sequences in the step, X of them extends, E tokens of those, G draft tokens, Q sequences under a
grammar; W row writes; K tokens that a request brings. The parts about kinds of cache have lengths of their own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any, Final, Protocol

import msgspec
import numpy as np

from forebay.base.parts import I32, I64, Column, Mask, Part
from forebay.memory.kinds.build import KINDS
from forebay.memory.slots import NO_IDS, PAD
from forebay.requests.sampling_params import SamplingParams


class Admission(Part, frozen=True, kw_only=True):
    """A row handed out for this step, and the sampler's data of its request.

    `token_ids` are the prompt and the tokens generated before a retraction (`num_prompt` of them are prompt): the
    penalties count them. `stop_ids` end the request, and may not come before its least length; () if it has none, or it
    is reached. `adapter` is the slot of its adapter. With M-RoPE, tokens behind the prompt are rotated by their place +
    `rope_delta`, at most 0. With `prebuilt` the row begins as one that decodes: every token but the last has KV, and
    the other caches of its layers, from elsewhere.
    """

    row: int
    request_id: int
    params: SamplingParams
    token_ids: Annotated[I32, Column("K", "tokens")]
    num_prompt: int
    stop_ids: tuple[int, ...] = ()
    prebuilt: bool = False
    adapter: int = PAD
    rope_delta: int = 0

    @property
    def kv_len(self) -> int:
        """Tokens of a prebuilt row that have KV before the step."""
        return len(self.token_ids) - 1


class HostCopy(Part, frozen=True, kw_only=True):
    """A request's copy in host memory: by kind of cache, the slots on the device that it is taken from or goes to, in
    the order of its tokens."""

    request_id: int
    slots: dict[str, I64]

    def __post_init__(self) -> None:
        for ids in self.slots.values():
            ids.setflags(write=False)


class RowWrites(Part, frozen=True, kw_only=True):
    """`req_to_token[write_rows, write_columns] = write_pages` on the device (one entry per page)."""

    write_rows: Annotated[I64, Column("W", "rows", device=np.int64)] = NO_IDS
    write_columns: Annotated[I64, Column("W", "columns", device=np.int64)] = NO_IDS
    write_pages: Annotated[I64, Column("W", "kv", device=np.int32)] = NO_IDS


WORK_OF: Final[Mapping[str, type[Part]]] = {declared.name: declared.work for declared in KINDS}

if TYPE_CHECKING:
    KindWork = Any
else:
    KindWork = msgspec.defstruct(
        "KindWork",
        [(declared.name, declared.work, declared.work()) for declared in KINDS],
        bases=(Part,),
        frozen=True,
        kw_only=True,
        array_like=True,
        eq=False,
    )
"""The parts of a plan about kinds of cache, each under the kind's name; those of kinds that a model lacks are empty."""


def kind_work(columns: Mapping[str, Mapping[str, I64]]) -> KindWork:
    """Make the parts of the kinds of cache from their columns, both by name. Kinds without a part are left out."""
    parts = {name: WORK_OF[name](**own) for name, own in columns.items() if name in WORK_OF}
    return KindWork(**parts)


class TierCopy(Part, frozen=True, kw_only=True):
    """A copy between the device and another tier of the prefix cache: by kind of cache, `slots` on the device and as
    many in the tier, `there`. No other copy of the engine has its `number`. For a tier that outlasts the process,
    `record` says what is copied, as a `formats.prefix_files.Record` without checksums."""

    number: int
    tier: str
    slots: dict[str, I64]
    there: dict[str, I64]
    record: bytes = b""

    def __post_init__(self) -> None:
        for ids in (*self.slots.values(), *self.there.values()):
            ids.setflags(write=False)


class HostWork(Part, frozen=True, kw_only=True):
    """`saves` are copies of retracted requests' caches, made in host memory under the request's id; `drops` those that
    are not needed any more, if they exist; `loads` those that go back into new slots, and are then dropped.

    `stores` copy slots of the prefix cache into other tiers, and `fetches` copy slots of these tiers to the device."""

    saves: tuple[HostCopy, ...] = ()
    drops: tuple[int, ...] = ()
    loads: tuple[HostCopy, ...] = ()
    stores: tuple[TierCopy, ...] = ()
    fetches: tuple[TierCopy, ...] = ()

    @property
    def copies(self) -> tuple[HostCopy | TierCopy, ...]:
        """Return all copies: saves, loads, stores and fetches."""
        return (*self.saves, *self.loads, *self.stores, *self.fetches)


NO_KIND_WORK: Final = KindWork()
NO_HOST_WORK: Final = HostWork()


class Encode(Part, frozen=True, kw_only=True):
    """Slice of an encoder's work: layers `first_layer` up to, not including, `last_layer` of tile `tile` of the
    picture with that number, which no other picture of this engine has. Slices of a tile come in order. The first one
    has the tile's `pixels`, uint8 [height, width, 3]; the last one says to which `rows` of the encodings the result
    goes, one for each token."""

    picture: int
    tile: int
    first_layer: int
    last_layer: int
    height: int
    width: int
    pixels: bytes = b""
    rows: Annotated[I64, Column("R", "encodings", least=1)] = NO_IDS


class PictureWork(Part, frozen=True, kw_only=True):
    """Pictures in a step, empty if the model has no encoder. Of the step's E prompt tokens, number `picture_tokens[i]`
    takes row `picture_rows[i]` of the encodings instead of its id's embedding. If attention within pictures is in both
    directions, the `span_lens[i]` tokens from number `span_starts[i]` on see each other, and are in one sequence.
    `encodes` come before the model runs; before them, unfinished work on the pictures `drops` is discarded.
    `rope_positions` [3, E] are there if the model has M-RoPE and a prompt of the step has pictures."""

    picture_tokens: Annotated[I64, Column("P")] = NO_IDS
    picture_rows: Annotated[I64, Column("P", "encodings", least=1)] = NO_IDS
    span_starts: Annotated[I64, Column("B")] = NO_IDS
    span_lens: Annotated[I64, Column("B")] = NO_IDS
    rope_positions: Annotated[I64, Column("3E", "positions")] = NO_IDS
    encodes: tuple[Encode, ...] = ()
    drops: tuple[int, ...] = ()


class StepPlan(Part, frozen=True, kw_only=True):
    """A step: ids and lengths only, so that the runner needs nothing else. Its own columns are the step's sequences;
    its parts have the other work, and are empty for features that the model does not have.

    It is carried out in this order: saves, stores, drops, row writes, the changes of other kinds of cache, loads,
    fetches, the encoding of pictures, and then the model.

    Sequences are ordered: extends first, then decodes. Sequence i computes `q_lens[i]` tokens. An extend's are in
    `input_ids`, and follow the `starts[i]` tokens that the row has KV of. A decode computes the row's last sampled
    token, which the host may not know yet, and behind it draft tokens: those of host proposers are in `drafts`, those
    of others on the device already. Its length, and so the places of its KV, are computed on the device.
    `sample_mask[i]` says whether anything is sampled from sequence i: of an extend at its last position, of a decode at
    each. The sequences `masked` are sampled from under a grammar: its masks are computed meanwhile. From prompts that
    are `pooled` nothing is ever sampled.
    """

    step: int
    num_extends: int
    rows: Annotated[I64, Column("S", "rows", device=np.int32, device_name="req_pool_indices", pad=PAD)]
    q_lens: Annotated[I64, Column("S")]
    starts: Annotated[I64, Column("X", "lengths", device=np.int64)]
    input_ids: Annotated[I64, Column("E", "tokens", device=np.int64)]
    sample_mask: Annotated[Mask, Column("S")]
    drafts: Annotated[I64, Column("G", "tokens", device=np.int64)] = NO_IDS
    masked: Annotated[I64, Column("Q", "seqs")] = NO_IDS
    writes: RowWrites = RowWrites()
    kinds: KindWork = NO_KIND_WORK
    host: HostWork = NO_HOST_WORK
    pictures: PictureWork = PictureWork()
    admissions: tuple[Admission, ...] = ()
    prompt_logprobs: tuple[int, ...] = ()  # extends (by index) whose every position wants log-probabilities
    pooled: tuple[int, ...] = ()  # extends (by index) that become a vector when their prompt ends

    @property
    def num_seqs(self) -> int:
        return len(self.rows)

    @property
    def num_tokens(self) -> int:
        return int(np.add.reduce(self.q_lens))  # `sum` is a function in Python around it

    @property
    def num_decodes(self) -> int:
        return len(self.rows) - self.num_extends

    @property
    def width(self) -> int:
        """The most tokens that a decode computes; 1 without decodes."""
        return int(self.q_lens[self.num_extends :].max(initial=1))

    @property
    def ends(self) -> I64:
        """KV lengths of the extends after the step [X]."""
        lengths: I64 = self.starts + self.q_lens[: self.num_extends]
        return lengths


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
    """Tokens that a step sampled, in the order of the plan's sampling sequences: `num_new[j]` tokens of sequence j,
    which are the accepted drafts and the token behind them; None if each has one.

    `failed` holds indices (into all of the plan's sequences) for which a value was not finite, of the logits or of the
    other results: their last token is none, and all that the step wrote for them is invalid (C30). `logprobs` is None
    if none was requested, else has an entry for each token. `prompt_logprobs` maps an extend's index to one entry per
    position of its chunk: entry j is about token j + 1 of the chunk, and the last one about the token after the chunk.
    That is None if the chunk ends the prompt, since the next token is sampled. `vectors` has by index those of pooled
    extends that end their prompt, as `Update.vector`. `counts` are the totals that kinds of cache count on the device,
    by kind. `lost` are the numbers of copies of tiers that failed: their targets hold anything. `replayed`: whether
    it is a step of decodes that ran from a captured graph, and `padded` whether it is one with padded rows. `num_ranks`
    executed it.
    """

    token_ids: list[int]
    num_new: list[int] | None = None
    failed: tuple[int, ...] = ()
    logprobs: list[TokenLogprob | None] | None = None
    prompt_logprobs: dict[int, list[TokenLogprob | None]] | None = None
    vectors: dict[int, bytes] | None = None
    counts: Mapping[str, I64] = field(default_factory=dict)
    lost: tuple[int, ...] = ()
    replayed: bool = False
    padded: bool = False
    num_ranks: int = 1


class Launched(Protocol):
    """A step on its way; `result` waits for its sampled tokens, the only thing ever copied back."""

    def result(self) -> StepResult:
        """Wait for the step and return what it sampled. Raises the error of a step that failed."""


class Runner(Protocol):
    """Interface of components that execute plans: the model runner, and the hash model in tests."""

    def launch(self, plan: StepPlan) -> Launched:
        """Start the step and return without waiting for it. Steps run in the order of their launch."""


class CapturingRunner(Runner, Protocol):
    """A runner that captures graphs in idle time."""

    def capture_next(self) -> bool:
        """Capture one more size; False if all are."""
        ...
