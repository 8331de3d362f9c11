"""State that every route shares, and facts about one request before its route runs."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Final, Protocol, TypeVar

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Scope, Send

from forebay.base.errors import ForebayError, InvalidRequest, NotFound
from forebay.config.config import ServerConfig
from forebay.engine.client.async_engine import AsyncEngine
from forebay.engine.frames import Ready
from forebay.http.bodies import Bodies
from forebay.http.lifecycle import Lifecycle, UnderWay
from forebay.http.preparation import Client
from forebay.http.protocol import Connection
from forebay.http.route import Handler
from forebay.http.security import Cluster, Isolation, Security, Sender, Tenant
from forebay.http.tracing import Trace, Tracer
from forebay.http.workers import TextWorkers, Workers
from forebay.requests.sampling_params import SamplingParams
from forebay.requests.updates import CacheReport
from forebay.server.admin.metrics import Metrics
from forebay.server.admin.prefix_tree import Trees
from forebay.server.api.core.answered import Answered
from forebay.server.api.core.ended import EndedByKey, ended_by_key
from forebay.server.api.openai.background import Background
from forebay.server.api.openai.response_store import ResponseStore
from forebay.server.api.openai.seals import Seals
from forebay.server.grammars import GrammarWorkers
from forebay.server.images.reader import ImageReader
from forebay.server.protocol.requests import Sampling
from forebay.server.protocol.strict import Strict
from forebay.server.protocol.validation import INVALID_COMBINATION
from forebay.server.served_model import ServedModel
from forebay.text.token_bytes import TokenBytes
from forebay.text.tokenizer import Tokenizer

Known = TypeVar("Known", bound=Strict)

REQUEST: Final = "forebay.request"
MAX_HEADER_CHARS: Final = 1024
MOST_NAMES: Final = 20  # of adapters, in an error
IGNORED_HEADER: Final = b"x-forebay-ignored"
CACHE_HEADER: Final = b"x-forebay-cache"


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerContext:
    """Everything that the routes share, made once at start-up."""

    config: ServerConfig
    model: ServedModel
    engine: AsyncEngine
    tokenizer: Tokenizer
    security: Security
    cluster: Cluster
    isolation: Isolation
    lifecycle: Lifecycle
    metrics: Metrics
    bodies: Bodies
    json_workers: Workers
    workers: TextWorkers
    grammars: GrammarWorkers
    sampling: SamplingParams  # of what requests do not say
    started_at: float
    responses: ResponseStore
    client: Client  # of the request, whose turns its work takes; each request has a context of its own
    tracer: Tracer | None = None  # None: nothing is traced
    images: ImageReader | None = None  # None: the model has no encoder
    under_way: UnderWay = field(default_factory=UnderWay)
    trees: Trees = field(default_factory=Trees)
    answered: Answered = field(default_factory=Answered)
    ended: EndedByKey = field(default_factory=ended_by_key)
    seals: Seals = field(default_factory=Seals)
    background: Background = field(default_factory=Background)

    def endpoint(self, handler: Handler[ServerContext]) -> Callable[[Request], Awaitable[Response]]:
        """Bind a route's handler to this context, with the client of each request."""

        async def endpoint(request: Request) -> Response:
            return await handler(request, replace(self, client=RequestContext.of(request.scope).client))

        return endpoint

    @property
    def loaded_info(self) -> Ready | None:
        """Return what the engine has said of the model; None while it loads."""
        try:
            return self.engine.info
        except ForebayError:
            return None

    @property
    def environment(self) -> dict[str, str]:
        """Return the digests and names of what an answer is computed with now, beside the request."""
        state = self.engine.link.last_state
        return self.environment_of(0 if state is None else state.memory.weight_version)

    def environment_of(self, weight_version: int) -> dict[str, str]:
        """Return the same for an answer of weights of this version."""
        info, state = self.loaded_info, self.engine.link.last_state
        found = {} if info is None else dict(info.environment)
        if weight_version and state is not None:
            is_known = state.memory.weight_version == weight_version
            found["weights"] = state.memory.weights if is_known else f"update {weight_version}"
        return {**found, "template": self.tokenizer.template_digest}

    def table(self, body: Sampling) -> TokenBytes:
        """The bytes of each token in the text of an answer."""
        return self.tokenizer.table if body.skip_special_tokens else self.tokenizer.whole_table

    def check_model(self, context: RequestContext, name: str | None, *, field: str = "model") -> None:
        """Choose the model, or the adapter of that name (`NAME` or `MODEL:NAME`), for what the context's request
        computes, which is the model if nothing is chosen. Raises NotFound (code `model_not_found`) for another name."""
        if name is None or name == self.model.name:
            context.model = context.model or self.model.name
            return
        adapters, adapter = self.engine.adapters, name.removeprefix(f"{self.model.name}:")
        if adapter not in adapters:
            named = ", ".join([self.model.name, *sorted(adapters)[:MOST_NAMES]])
            known = f"one of {named}" if adapters else named
            raise NotFound(
                f"the model {name[:200]!a} is not served here; {known} is",
                code="model_not_found",
                param=field,
            )
        if context.adapter not in ("", adapter):
            what = f"two adapters are named, {context.adapter!a} and {adapter!a}: name one"
            raise InvalidRequest(what, code=INVALID_COMBINATION, param=field)
        context.model = context.adapter = adapter
        context.adapter_number = adapters[adapter].number


class FromCache(Protocol):
    """The result of one prompt."""

    @property
    def cache(self) -> CacheReport: ...


@dataclass(slots=True, kw_only=True)
class RequestContext:
    """`send` and `connection` are below every middleware: a stream's chunks go straight there."""

    request_id: str
    route: str
    tenant: Tenant
    sender: Sender
    client: Client
    send: Send
    connection: Connection
    headers: list[tuple[bytes, bytes]]  # of the answer, beside those that its route gives it
    trace: Trace | None = None
    model: str = ""  # what computes it, as answers name it; see `ServerContext.check_model`
    adapter: str = ""  # the LoRA adapter to apply, and the number of its load
    adapter_number: int = 0

    def note_ignored(self, names: Sequence[str]) -> None:
        """Name fields without effect in a header of the answer, once for all of them."""
        before = [value.decode() for name, value in self.headers if name == IGNORED_HEADER]
        value = ", ".join([*before, *(name.encode("unicode_escape").decode() for name in names)])  # no line breaks
        others = [header for header in self.headers if header[0] != IGNORED_HEADER]
        self.headers[:] = [*others, (IGNORED_HEADER, value[:MAX_HEADER_CHARS].encode())]

    def note_cache(self, prompts: Sequence[FromCache], num_tokens: int) -> None:
        """Say in a header of the answer how many of the `num_tokens` tokens of its prompts were cached, and why not
        more of the first one."""
        cached = sum(prompt.cache.cached_tokens for prompt in prompts)
        others = [header for header in self.headers if header[0] != CACHE_HEADER]
        self.headers[:] = [*others, (CACHE_HEADER, f"{cached}/{num_tokens} {prompts[0].cache.miss_reason}".encode())]

    @property
    def arrived_at(self) -> float:
        return self.client.arrived_at

    @classmethod
    def of(cls, scope: Scope) -> RequestContext:
        """Return the context that the gateway has put into the scope."""
        context: RequestContext = scope[REQUEST]
        return context


async def read_body(request: Request, server: ServerContext, kind: type[Known]) -> Known:
    """Parse the client's body as `kind`. Raises Unavailable while the model loads: how many token ids make sense is
    known from it alone."""
    max_ids = server.engine.info.context_length * server.config.max_prompts
    context = RequestContext.of(request.scope)
    body = await server.bodies.read(kind, request.scope, context.client, max_ids)
    if body.passed_over:
        context.note_ignored(body.passed_over)
    return body
