"""The resolved configuration. Nothing below reads flags, the environment or files, and nothing here is "auto"."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final

from forebay.config.pictures import DEFAULT_PICTURES, PictureConfig, PictureOptions
from forebay.formats.quantization import Quantization

MAX_PAGE_SIZE: Final = 1024  # tokens


class Ledger(StrEnum):
    """The reaction of a pool to a double free, a free of another holder's slot, or a leak (C8)."""

    OFF = "off"
    COUNT = "count"  # log, count, quarantine, go on
    RAISE = "raise"


class SchedulePolicy(StrEnum):
    """Order in which waiting requests are admitted."""

    FCFS = "fcfs"
    LPM = "lpm"  # longest prefix match first
    PRIORITY = "priority"  # higher number first, then fcfs


class EvictionPolicy(StrEnum):
    """Order in which unpinned pages of the prefix cache are evicted."""

    LRU = "lru"
    LFU = "lfu"
    PRIORITY = "priority"


class CacheIsolation(StrEnum):
    """The requests that share a prefix cache; a `cache_salt` always has a cache of its own."""

    NONE = "none"  # everybody
    KEY = "key"  # whoever holds the same API key
    USER = "user"  # of those, whoever says to be the same: `user`, `safety_identifier`, `prompt_cache_key`


class SpeculativeAlgorithm(StrEnum):
    """The source of draft tokens, under the field's names."""

    OFF = "off"
    NGRAM = "NGRAM"  # what followed before: in the request itself, then in recent outputs
    NEXTN = "NEXTN"  # MTP: a head inside the checkpoint
    EAGLE = "EAGLE"  # a head beside it, fed with the model's last hidden states
    EAGLE3 = "EAGLE3"  # the same, fed with those of three layers
    FROZEN_KV_MTP = "FROZEN_KV_MTP"  # an assistant that only reads the model's KV
    STANDALONE = "STANDALONE"  # a smaller model of its own

    @property
    def on_host(self) -> bool:
        """Whether the guesses continue the last token on the host, by a `Proposer`."""
        return self is SpeculativeAlgorithm.NGRAM

    @property
    def on_device(self) -> bool:
        """Whether the guesses are made where the model computes, and the host never sees them."""
        return self is not SpeculativeAlgorithm.OFF and not self.on_host

    @property
    def keeps_hidden(self) -> bool:
        """Whether the drafter continues from the model's hidden state of a row's last token, which is kept for each
        row."""
        return self.on_device and self is not SpeculativeAlgorithm.STANDALONE

    @property
    def keeps_kv(self) -> bool:
        """Whether the drafter keeps KV of its own of every token, in the model's pages."""
        return self.on_device and self is not SpeculativeAlgorithm.FROZEN_KV_MTP


class DisaggregationMode(StrEnum):
    """Which half of a request an engine computes."""

    NULL = "null"  # both
    PREFILL = "prefill"  # the prompt and its first token; what layers keep of it goes to a decode server
    DECODE = "decode"  # all tokens behind the first


class TransferBackend(StrEnum):
    """How what layers keep comes from one engine to another."""

    AUTO = "auto"  # by the peer: shm where it is on this machine, else tcp
    SHM = "shm"  # one copy into memory that both processes map
    TCP = "tcp"
    NIXL = "nixl"
    MOONCAKE = "mooncake"


class StateStrategy(StrEnum):
    """How states of recurrent layers come into the prefix cache; see `memory.anchors`."""

    NO_BUFFER = "no_buffer"  # steps end where a state is wanted, and the live state is copied or given away there
    EXTRA_BUFFER = "extra_buffer"  # the step that passes such a place writes the state to a tracking slot as well


@dataclass(frozen=True, kw_only=True, slots=True)
class CacheTypes:
    """The types in which values are computed and cached, by name."""

    dtype: str = "float32"  # bfloat16 | float32: weights, activations and convolution states
    kv_cache_dtype: str = "float32"  # as dtype, or smaller: bfloat16, int8, fp8
    mamba_ssm_dtype: str = "float32"  # float32 | bfloat16: the states of scans
    sparse_kv_on_host: bool = False  # HiSparse: the KV of layers that read few tokens is in the host tier
    width: int = 1  # tokens of a request in a step that decodes or verifies, at most
    movable: bool = False  # what layers keep goes to engines with other pages and widths
    chunked_scans: bool = False  # the kernels' scans keep the inputs of an open chunk behind the state

    @property
    def dtypes(self) -> dict[str, str]:
        """The types, on which tokens depend, by what they are of."""
        return {"dtype": self.dtype, "kv dtype": self.kv_cache_dtype, "scan dtype": self.mamba_ssm_dtype}


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryOptions:
    """Limits of the caches' memory. `memory.division` divides it into pages, slots and rows before weights are
    loaded; `max_total_tokens` and `max_running_requests` are upper limits to it. The context of one request comes
    before a second request, unless `requests_first`. Without `spare_cache` the caches take no more than
    `max_running_requests` of the full context need."""

    kv_cache_bytes: int
    page_size: int
    max_running_requests: int
    context_length: int
    max_total_tokens: int | None = None  # None: what the memory holds
    spare_cache: bool = True
    requests_first: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class KindOptions:
    """How many recurrent states and windows there are, what becomes of them, and of a retracted request's memory."""

    max_mamba_cache_size: int | None = None  # state slots; None: by the ratio
    mamba_full_memory_ratio: float = 0.9  # bytes of states to bytes of KV
    swa_full_tokens_ratio: float = 0.8  # tokens of windowed to tokens of full KV
    strategy: StateStrategy = StateStrategy.EXTRA_BUFFER
    track_interval: int = 64  # tokens between the states that a decoding request tracks
    anchor_interval: int = 1024  # tokens between the states kept of a long prompt, besides those for better reasons
    retraction_host_bytes: int = 0  # for copies of what retracted requests had; 0: they compute everything again


@dataclass(frozen=True, kw_only=True, slots=True)
class HisparseOptions:
    """HiSparse: the KV of layers with sparse attention is in the host tier, and each decoding request has a hot buffer
    of `device_buffer_size` tokens on the device, 0 for no HiSparse.

    There are `host_to_device_ratio` times as many pages of KV as resident copies on the device. `top_k` is what the
    model must select, 0 for whatever it does. With a `host_path` the host tier is a file in that folder.
    """

    device_buffer_size: int = 0
    top_k: int = 0
    host_to_device_ratio: float = 2.0
    host_path: str = ""

    @property
    def enabled(self) -> bool:
        return self.device_buffer_size > 0


NO_HISPARSE: Final = HisparseOptions()


@dataclass(frozen=True, kw_only=True, slots=True)
class KindConfig(KindOptions):
    """Facts that the scheduler needs about layers that keep something else than all tokens' KV, by kind of cache.

    `num_slots`: pages or slots without the padding one; a kind that no layer keeps is missing. `num_read`: the last
    tokens that a query reads, for kinds that keep no others. `slot_bytes`: the bytes of a page or slot over all layers,
    full KV included, for the cost of copying it to the host.
    """

    num_slots: Mapping[str, int] = field(default_factory=dict)
    num_read: Mapping[str, int] = field(default_factory=dict)
    slot_bytes: Mapping[str, int] = field(default_factory=dict)
    recompute_bytes_per_token: int = 0  # bytes that can be copied to the host and back while one token is recomputed

    def num_slots_of(self, kind: str) -> int:
        """Return the number of pages or slots of a kind, 0 if no layer keeps it."""
        return self.num_slots.get(kind, 0)


@dataclass(frozen=True, kw_only=True, slots=True)
class SchedulingOptions:
    """Limits on requests that run and wait. Limits are in requests, tokens and seconds, as named."""

    chunked_prefill_size: int = 2048  # most tokens of prompts in one step
    mixed_chunk_size: int = 2048  # the same, in a step in which others decode
    max_step_ms: float | None = None  # of such a step; None: no limit, 0: by the median decode step
    schedule_policy: SchedulePolicy = SchedulePolicy.FCFS
    schedule_conservativeness: float = 1.0
    radix_cache: bool = True
    radix_eviction_policy: EvictionPolicy = EvictionPolicy.LRU
    pinned_cache_fraction: float = 0.25  # of each pool, which prefixes that clients want kept may take
    overlap_depth: int = 0
    max_queued_requests: int = 256
    max_queued_tokens: int = 1 << 20
    queue_timeout_s: float = 60.0
    request_timeout_s: float = 600.0
    stall_timeout_s: float = 60.0
    tenants: Mapping[str, int] = field(default_factory=dict)  # weights by name; "", whom no key names, has 1
    ledger: Ledger = Ledger.COUNT
    max_loras: int = 0  # adapters that are loaded at once; 0: none is served
    text_encoder: bool = False  # all prompts are pooled, and each is computed whole, in one step
    head_outputs: int = 0  # of the head behind the pooling; 0: it has none


@dataclass(frozen=True, kw_only=True, slots=True)
class KnownAnswer:
    """The tokens that follow a prompt. Each has an alternative, which is another token."""

    prompt: tuple[int, ...]
    tokens: tuple[int, ...]
    alternatives: tuple[int, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class SpeculationOptions:
    """Speculative decoding: which proposer drafts tokens, which the model then verifies in one step.

    `num_draft_tokens` is W, the most tokens that one decode step computes of a request: the one that is certain, and up
    to W - 1 guesses behind it; 1 for none. `adaptive`: steps take the width up to it that pays, 1 included.
    `known_answers`, which no flag sets, become the drafts on the host, with wrong tokens planted (`forebay verify`).
    """

    algorithm: SpeculativeAlgorithm = SpeculativeAlgorithm.OFF
    adaptive: bool = False
    num_draft_tokens: int = 1
    draft_model_path: str | None = None  # of EAGLE, EAGLE3, FROZEN_KV_MTP and STANDALONE
    ngram_max_trie_depth: int = 18  # tokens: the longest match, and the most that one is trusted for
    ngram_capacity: int = 1 << 18  # tokens of recent outputs in all namespaces together; 36 bytes each
    known_answers: tuple[KnownAnswer, ...] = field(default=(), repr=False)

    @property
    def by_own_head(self) -> bool:
        """Whether the draft head in the checkpoint guesses."""
        return self.algorithm is SpeculativeAlgorithm.NEXTN and self.draft_model_path is None


@dataclass(frozen=True, kw_only=True, slots=True)
class Chaos:
    """Faults on purpose, between servers of this machine alone: shares of messages and chunks that are lost, doubled,
    reordered or altered, the delay of each message, and the mean time between kills of a role's servers (0: never)."""

    drop: float = 0.0
    double: float = 0.0
    reorder: float = 0.0
    alter: float = 0.0
    delay_s: float = 0.0
    kill_prefill_s: float = 0.0
    kill_decode_s: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class DisaggregationOptions:
    """Which half of requests is computed here, and how the other half is reached. Times are in seconds.

    `host` and `bootstrap_port` are where prefill listens for decode (0: any free port). Both sides of a connection have
    the `cluster_key`; it may be empty between servers on loopback alone. On decode, `decode_extra_slots` requests may
    hold memory besides those that run, and each is offered `num_reserved_decode_tokens` tokens of room.
    """

    mode: DisaggregationMode = DisaggregationMode.NULL
    transfer_backend: TransferBackend = TransferBackend.AUTO
    host: str = "127.0.0.1"
    bootstrap_port: int = 8998
    bootstrap_timeout_s: float = 15.0  # for the other half to be found
    lease_s: float = 30.0  # of a transfer that nothing is heard of
    heartbeat_s: float = 2.0  # a peer that misses three is taken for dead
    decode_extra_slots: int = 0
    num_reserved_decode_tokens: int = 512
    cluster_key: bytes = field(default=b"", repr=False)
    chaos: Chaos = Chaos()

    def named(self, process: str) -> str:
        """Name of a process of this role in logs."""
        return process if self.mode is DisaggregationMode.NULL else f"{self.mode}-{process}"

    @property
    def is_prefill(self) -> bool:
        return self.mode is DisaggregationMode.PREFILL

    @property
    def is_decode(self) -> bool:
        return self.mode is DisaggregationMode.DECODE


@dataclass(frozen=True, kw_only=True, slots=True)
class SchedulerConfig(SchedulingOptions):
    """The options, and the pools as memory was divided."""

    page_size: int = 16
    num_pages: int
    max_running_requests: int
    context_length: int
    kinds: KindConfig = KindConfig()
    speculation: SpeculationOptions = SpeculationOptions()
    disaggregation: DisaggregationOptions = DisaggregationOptions()  # with as many extra slots as memory has room for
    pictures: PictureConfig | None = None  # None: the model has no encoder
    # By name the tiers of the prefix cache behind the device, and of each the slots by kind of cache, full KV included.
    tiers: Mapping[str, Mapping[str, int]] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class AdapterOptions:
    """Adapters (LoRA) beside the model: slots for `max_loras` of them, of ranks up to `max_lora_rank`. `lora_modules`
    are the names and paths of those that a start loads."""

    max_loras: int = 0
    max_lora_rank: int = 0
    lora_modules: tuple[tuple[str, str], ...] = ()

    @property
    def enabled(self) -> bool:
        return self.max_loras > 0


NO_ADAPTERS: Final = AdapterOptions()


class Exact(StrEnum):
    """Whether tokens may not depend on the other requests of a step, or may if kernels are then faster."""

    ON = "on"
    OFF = "off"


class ActivationDtype(StrEnum):
    """The type of the inputs of products: that of the model, or FP8 (E4M3) for weights that have it."""

    MODEL = "model"
    FP8 = "fp8"


class RankExchange(StrEnum):
    """How ranks exchange tensors: through memory of the host, a process group of gloo or NCCL, or memory of a GPU."""

    SHM = "shm"
    GLOO = "gloo"
    NCCL = "nccl"
    IPC = "ipc"


@dataclass(frozen=True, kw_only=True, slots=True)
class RankOptions:
    """The ranks of an engine: `size` processes, each with its share of the model and of the caches. `own_gpus`: rank r
    computes on the r-th GPU, and not on the one of rank 0. All end if one stalls for `stall_timeout_s`, which holds for
    the library too: its requests have no such limit."""

    size: int = 1
    exchange: RankExchange = RankExchange.SHM
    own_gpus: bool = False
    stall_timeout_s: float = 60.0


ONE_RANK: Final = RankOptions()


@dataclass(frozen=True, kw_only=True, slots=True)
class TierOptions:
    """Memory of the tiers of the prefix cache behind the device, 0 bytes for no such tier, and the checks of all."""

    host_cache_bytes: int = 0
    prefix_cache_dir: str = ""  # of files that outlast the engine; "": none
    prefix_cache_disk_bytes: int = 0
    cache_check_rate: float = 0.0  # entries that are checked, a minute; of the device's cache, too


NO_TIERS: Final = TierOptions()


@dataclass(frozen=True, kw_only=True, slots=True)
class CacheEventOptions:
    """Whether the engine reports what its prefix cache stores and removes, for routers: with hashes under `event_key`,
    and with the ids of tokens, too."""

    cache_events: bool = False
    event_tokens: bool = False
    event_key: bytes = field(default=b"", repr=False)


NO_CACHE_EVENTS: Final = CacheEventOptions()


@dataclass(frozen=True, kw_only=True, slots=True)
class RecorderOptions:
    """The flight recorder: bytes of its buffer, 0 for none, and whether its files may have the tokens of requests."""

    flight_recorder: int = 0
    record_tokens: bool = False


NO_RECORDER: Final = RecorderOptions()


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineConfig:
    """Settings of the engine process, in groups that are passed on whole to the components that use them."""

    model_path: str  # a folder with config.json and *.safetensors, or a .gguf file, of several parts the first
    served_model_name: str
    quantization: Quantization  # of weights that are matrices
    device: str
    num_threads: int
    kernels: str  # of `forebay.backends`
    activation_bits: int  # 8 | 16
    disable_cuda_graph: bool
    cuda_graph_max_bs: int
    log_level: str
    types: CacheTypes
    memory: MemoryOptions
    scheduling: SchedulingOptions
    kinds: KindOptions
    log_format: str = "text"
    exact: Exact = Exact.ON
    activation_dtype: ActivationDtype = ActivationDtype.MODEL
    hisparse: HisparseOptions = NO_HISPARSE
    tiers: TierOptions = NO_TIERS
    adapters: AdapterOptions = NO_ADAPTERS
    ranks: RankOptions = ONE_RANK
    pictures: PictureOptions = DEFAULT_PICTURES
    speculation: SpeculationOptions = SpeculationOptions()
    disaggregation: DisaggregationOptions = DisaggregationOptions()
    enable_memory_saver: bool = False  # of a GPU's memory; a CPU's can always be released
    weights_cache_bytes: int = 0  # of all files in which starts keep packed weights; 0: none is read or written
    verify_weights_cache: bool = False  # all bytes, not only the header
    weights_cpu_backup: bool = False  # of a GPU's, while they are released
    sleep_idle_seconds: float = 0.0  # without a request after which all memory is given back; 0: never
    wake_on_request: bool = False
    recorder: RecorderOptions = NO_RECORDER
    events: CacheEventOptions = NO_CACHE_EVENTS
    keep_prefix_cache: bool = False  # over a release of the caches, in as much as `retraction_host_bytes`
