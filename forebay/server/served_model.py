"""Facts that the server needs about its model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from forebay.config.config import Setting
from forebay.config.engine_config import DisaggregationMode
from forebay.engine.client.embedding import Texts
from forebay.families.base.embedding import Embedding
from forebay.requests.sampling_params import PoolingKind
from forebay.server.images.tiling import Tiling
from forebay.text.answers.probes import Findings

LIMITS: Final = ("max_running_requests", "max_total_tokens", "context_length")  # of the engine, null until it is up


@dataclass(frozen=True, kw_only=True, slots=True)
class ServedModel:
    """The model that this server serves. `created` is in seconds since 1970. `settings` are the effective
    configuration, for /server_info. A step of `stall_timeout_s` ends the engine. With `uses_priority`, admission or
    eviction reads the priorities of requests. `mode`: the half of requests that it computes. An engine that is asleep
    `wakes_on_request`, or lets requests wait. `answers`: the model's formats of calls and thinking; `texts`: how texts
    become vectors. `end_tokens`: those that end an answer besides those of the engine's configuration, each with the
    reason. `tiling`: how images become tiles, None for a model without an encoder."""

    name: str
    path: str
    created: int
    settings: tuple[Setting, ...] = ()
    stall_timeout_s: float = 60.0
    uses_priority: bool = True
    mode: DisaggregationMode = DisaggregationMode.NULL
    wakes_on_request: bool = False
    tiling: Tiling | None = None
    end_tokens: Mapping[int, str] = field(default_factory=dict)
    answers: Findings = field(default_factory=Findings)
    texts: Texts = field(default_factory=lambda: Texts(embedding=Embedding(), pooling=PoolingKind.LAST))
