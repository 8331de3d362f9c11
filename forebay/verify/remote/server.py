"""A server of the OpenAI API: what it is, and requests to it."""

from __future__ import annotations

import json
import math
import uuid
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any, Final, Self
from urllib.parse import urlsplit

import httpx2

from forebay.base.errors import ConfigError, EngineError, ForebayError, Unauthorized, Unavailable
from forebay.verify.remote.questions import Fields
from forebay.verify.remote.replies import Reply

CHAT: Final = "/v1/chat/completions"
COMPLETIONS: Final = "/v1/completions"
_TOPS: Final = 5  # alternatives whose log-probabilities are asked for
_CONNECT_S: Final = 10.0
_INFORMS_S: Final = 30.0  # for what a server knows without computing
_WHOLE: Final = "both"  # role of a member of a router that answers whole requests
_MOST_MEMBERS: Final = 64  # that are compared
_MAX_CONNECTIONS: Final = 256
_MAX_SHOWN: Final = 300  # characters of a server's error
_REFUSED: Final = (400, 404, 405, 413, 415, 422, 501)  # of the request, whatever the load

# By the `owned_by` of a server's models: the field that keeps a request apart from the prefixes of all others.
_SALTED: Final = frozenset({"forebay", "vllm", "sglang"})
_UNCACHED: Final = {"llamacpp": "cache_prompt"}


def new_salt() -> str:
    """Return a salt that no request has had."""
    return uuid.uuid4().hex


class Refused(ForebayError):
    """The server refuses this request: a field that it does not support, or a prompt that does not fit."""


class RateLimited(ForebayError):
    """The server limits the rate of requests."""


@dataclass(frozen=True, slots=True)
class Options:
    """How a request is sent. `cold` keeps it apart from cached prefixes, on servers that can; where that is a salt, it
    is `salt`, or a new one if this is empty. `logprobs` asks for those of the tokens. `stop_after` closes the
    connection after this number of events with text, `on_event` is called for each."""

    stream: bool = False
    cold: bool = True
    salt: str = ""
    logprobs: bool = True
    stop_after: int = 0
    on_event: Callable[[], None] | None = None


COLD: Final = Options()


class Server:
    """A model of a server. Made by `find`; close it with `aclose`."""

    def __init__(self, client: httpx2.AsyncClient, url: str, model: str, entry: Mapping[str, Any]) -> None:
        """`entry` is the model's in the server's list of models."""
        self._client, self.url, self.model = client, url, model
        self.owner = str(entry.get("owned_by", ""))
        self.context_length = _context_length(entry)
        self.gives_logprobs = True  # until an answer has none

    @classmethod
    async def find(cls, url: str, model: str | None, api_key: str, *, most_s: float = math.inf) -> Self:
        """Connect, and choose `model` or the server's first one. Raises ConfigError for a model that is not there, and
        Unavailable if it does not list its models within `most_s` seconds, or 30."""
        url = _base(url)
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        limits = httpx2.Limits(max_connections=_MAX_CONNECTIONS)
        timeout = httpx2.Timeout(None, connect=_CONNECT_S)
        client = httpx2.AsyncClient(base_url=url, headers=headers, limits=limits, timeout=timeout)
        try:
            async with _failures(url):
                listed = _models(url, _json(url, await client.get("/v1/models", timeout=min(most_s, _INFORMS_S))))
        except BaseException:
            await client.aclose()
            raise
        name = model or str(listed[0]["id"])
        entry = next((one for one in listed if one.get("id") == name), None)
        if entry is None:
            await client.aclose()
            known = ", ".join(str(one["id"]) for one in listed[:20])
            raise ConfigError(f"--model {name}: {url} has no model of this name; it lists: {known}")
        return cls(client, url, name, entry)

    @property
    def has_salts(self) -> bool:
        """Whether a request's `cache_salt` keeps it apart from the prefixes of all others."""
        return self.owner in _SALTED

    async def aclose(self) -> None:
        """Close the connections."""
        await self._client.aclose()

    async def ask(self, fields: Fields, max_tokens: int, options: Options = COLD) -> Reply:
        """Send one request and return the answer. If the server refuses it with log-probabilities, send it without.

        Raises Refused for a request that the server does not take, RateLimited, Unauthorized, and Unavailable if no
        server listens. Raises EngineError for any other failure: a broken connection, an answer of another form.
        """
        try:
            return await self._ask(fields, max_tokens, options)
        except Refused:
            if not (options.logprobs and self.gives_logprobs):
                raise
        return await self._ask(fields, max_tokens, replace(options, logprobs=False))

    async def _ask(self, fields: Fields, max_tokens: int, options: Options) -> Reply:
        route = COMPLETIONS if "prompt" in fields else CHAT
        body = {**fields, "model": self.model, "max_tokens": max_tokens, **self._chosen(route, options)}
        if options.stream:
            body |= {"stream": True, "stream_options": {"include_usage": True}}
        async with _failures(self.url):
            if not options.stream:
                return Reply.of_body(_json(self.url, await self._client.post(route, json=body)))
            return await self._streamed(route, body, options)

    async def members(self) -> list[str]:
        """Return the addresses of the servers behind this one that answer whole requests, if it is Forebay's router;
        none of any other server."""
        try:
            async with _failures(self.url):
                found = _json(self.url, await self._client.get("/server_info", timeout=_INFORMS_S)).get("members")
        except ForebayError:
            return []
        each = [one for one in found if isinstance(one, dict)] if isinstance(found, list) else []
        urls = [str(one.get("url")) for one in each if one.get("role") == _WHOLE and one.get("up")]
        return urls[:_MOST_MEMBERS]

    async def environment(self) -> Mapping[str, str]:
        """Return what the server computes with. Raises ConfigError for a server that does not say."""
        async with _failures(self.url):
            info = _json(self.url, await self._client.get("/server_info", timeout=_INFORMS_S))
        found = info.get("environment")
        if not isinstance(found, dict) and info.get("members"):
            raise ConfigError(f"the servers behind {self.url} do not compute with the same: give --url one of them")
        if not isinstance(found, dict):
            raise ConfigError(f"{self.url} does not say what it computes with: receipts are Forebay's")
        return found

    async def answer(self, route: str, body: Mapping[str, Any]) -> Mapping[str, Any]:
        """Send a whole body to a route; return the whole answer. Raises as `ask` does."""
        async with _failures(self.url):
            return _json(self.url, await self._client.post(route, json=body))

    def _chosen(self, route: str, options: Options) -> dict[str, Any]:
        body: dict[str, Any] = {}
        if options.logprobs and self.gives_logprobs:
            body |= {"logprobs": True, "top_logprobs": _TOPS} if route == CHAT else {"logprobs": _TOPS}
        if options.cold and self.has_salts:
            body["cache_salt"] = options.salt or new_salt()
        elif options.cold and self.owner in _UNCACHED:
            body[_UNCACHED[self.owner]] = False
        return body

    async def _streamed(self, route: str, body: dict[str, Any], options: Options) -> Reply:
        reply = Reply()
        async with self._client.stream("POST", route, json=body) as response:
            if response.status_code != httpx2.codes.OK:
                await response.aread()
                _json(self.url, response)
            async for event in _events(response):
                if "error" in event:
                    raise EngineError(f"{self.url}: {_message(event)}")
                if reply.add_event(event) and options.on_event is not None:
                    options.on_event()
                if options.stop_after and reply.num_events >= options.stop_after:
                    return reply
        if not reply.finish:
            raise EngineError(f"{self.url} ended a stream of {reply.num_events} events without a finish_reason")
        return reply


async def _events(response: httpx2.Response) -> AsyncIterator[dict[str, Any]]:
    """Yield the events of a stream up to `[DONE]`. Raises ValueError for an event that is no JSON object."""
    async for line in response.aiter_lines():
        if not line.startswith("data:"):
            continue
        data = line.removeprefix("data:").strip()
        if data == "[DONE]":
            return
        event = json.loads(data)
        if not isinstance(event, dict):
            raise ValueError(f"an event that is no object: {data[:80]!a}")
        yield event


@asynccontextmanager
async def _failures(url: str) -> AsyncIterator[None]:
    """Raise every failure of a connection, and of an answer's form, as an error of one line."""
    try:
        yield
    except httpx2.ConnectError as error:
        raise Unavailable(f"no server answers at {url}: {error}") from None
    except httpx2.TimeoutException as error:
        raise Unavailable(f"{url} does not answer in time ({type(error).__name__})") from None
    except httpx2.HTTPError as error:
        raise EngineError(
            f"{url} broke the connection: {error or type(error).__name__}", code="connection_lost"
        ) from None
    except (ValueError, TypeError, AttributeError, KeyError) as error:
        raise EngineError(f"{url} sent an answer that is not of the OpenAI API: {error}") from None


def _base(url: str) -> str:
    """Return scheme, host and path of a server's address, without `/v1`."""
    parts = urlsplit(url if "//" in url else f"http://{url}")
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ConfigError(f"--url {url} is not an address of a server: write http://HOST:PORT")
    return f"{parts.scheme}://{parts.netloc}{parts.path.rstrip('/').removesuffix('/v1')}"


def _json(url: str, response: httpx2.Response) -> dict[str, Any]:
    """Return the body of a response, or raise the error that its status stands for."""
    status = response.status_code
    if status == httpx2.codes.OK:
        body = response.json()
        if not isinstance(body, dict):
            raise ValueError(f"no JSON object: {response.text[:80]!a}")
        return body
    message = f"{url} answered {status}: {_message(_decoded(response))}"
    if status in (401, 403):
        raise Unauthorized(f"{message}; give a key with --api-key-file FILE")
    if status == httpx2.codes.TOO_MANY_REQUESTS:
        raise RateLimited(f"{message}; it limits the rate: choose fewer with --only, or raise its limit")
    raise Refused(message) if status in _REFUSED else EngineError(message)


def _decoded(response: httpx2.Response) -> object:
    try:
        return response.json()
    except ValueError:
        return response.text


def _message(body: object) -> str:
    """Return the message of a server's error in one line: OpenAI's form, or any other."""
    error = body.get("error", body) if isinstance(body, dict) else body
    if isinstance(error, dict):
        error = error.get("message", error)
    return " ".join(str(error).split())[:_MAX_SHOWN]


def _models(url: str, body: Mapping[str, Any]) -> list[dict[str, Any]]:
    listed = [one for one in body.get("data") or () if isinstance(one, dict) and "id" in one]
    if not listed:
        raise EngineError(f"{url}/v1/models lists no model: {str(body)[:80]!a}")
    return listed


def _context_length(entry: Mapping[str, Any]) -> int | None:
    """Return the tokens of a context, in the field of vLLM, SGLang and Forebay or in that of llama-server."""
    meta = entry.get("meta")
    for value in (entry.get("max_model_len"), meta.get("n_ctx") if isinstance(meta, dict) else None):
        if isinstance(value, int) and value > 0:
            return value
    return None
