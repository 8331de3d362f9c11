"""Partners of a chat in the terminal: a running server, or an engine of our own; one interface."""

from __future__ import annotations

import argparse
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any, Final, Protocol

from forebay.base.errors import ConfigError, ForebayError
from forebay.base.http_client import Origin, get_json, stream_json
from forebay.cli.generate import given, sampling
from forebay.cli.local import LocalModel, Took
from forebay.requests.sampling_params import RANDOM_SEED

Message = dict[str, Any]


class Talker(Protocol):
    """Model that answers a chat; `name` is shown in the prompt."""

    @property
    def name(self) -> str: ...

    @property
    def accepts_images(self) -> bool:
        """Return whether messages may have images."""
        ...

    @property
    def why_no_images(self) -> str:
        """Return what to do for images if it accepts none."""
        ...

    def reply(self, messages: list[Message], took: Took) -> AsyncIterator[str]:
        """The answer, piece by piece; `took` is filled meanwhile. Raises what went wrong."""
        ...

    async def choose(self, name: str) -> None:
        """Select a model. Raises ConfigError if there is no model of that name."""
        ...


async def _accepts_images(origin: Origin) -> bool:
    try:
        return bool((await get_json(origin, "/server_info")).get("accepts_images", True))
    except ForebayError:  # a server of another project, or one that shows this to others only
        return True


class Remote:
    """Chat over HTTP with a server of the OpenAI API."""

    why_no_images: Final = "the server's model takes no images: serve one that does, such as a smolvlm"

    def __init__(self, origin: Origin, model: str, own: argparse.Namespace, *, accepts_images: bool = True) -> None:
        """A server of another project says nothing of images: they are sent, and it may refuse them."""
        self.accepts_images = accepts_images
        self.name, self._origin, self._model = f"{model} at {origin}", origin, model
        self._options = given(own)
        self._options |= {} if own.max_tokens is None else {"max_completion_tokens": own.max_tokens}
        self._options |= {} if own.seed == RANDOM_SEED else {"seed": own.seed}

    @classmethod
    async def find(cls, origin: Origin, own: argparse.Namespace) -> Remote:
        """Connect to the server and choose the adapter of `--lora`, else its first model."""
        model = (await get_json(origin, "/v1/models"))["data"][0]["id"]
        talker = cls(origin, model, own, accepts_images=await _accepts_images(origin))
        if own.lora:
            await talker.choose(own.lora)
        return talker

    async def reply(self, messages: list[Message], took: Took) -> AsyncIterator[str]:
        """Stream the answer from /v1/chat/completions; token counts come from its usage."""
        payload = {"model": self._model, "messages": messages, "stream": True, **self._options}
        payload["stream_options"] = {"include_usage": True}
        async for event in stream_json(self._origin, "/v1/chat/completions", payload):
            if usage := event.get("usage"):
                took.prompt_tokens, took.output_tokens = usage["prompt_tokens"], usage["completion_tokens"]
                took.cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
            for choice in event.get("choices", ()):
                if piece := choice.get("delta", {}).get("content"):
                    took.came()
                    yield piece

    async def choose(self, name: str) -> None:
        """Select another model of the server; ConfigError if the server does not have it."""
        there = [model["id"] for model in (await get_json(self._origin, "/v1/models"))["data"]]
        if name not in there:
            raise ConfigError(f"{self._origin} does not serve {name}; it serves {', '.join(there)}")
        self._model, self.name = name, f"{name} at {self._origin}"


class Local:
    """Chat with an engine that this command has started. `name` is that of its model."""

    accepts_images: Final = False
    why_no_images: Final = "images need a server: forebay serve MODEL, and then forebay chat without a model's name"

    def __init__(self, name: str, model: LocalModel, own: argparse.Namespace) -> None:
        self._base, self._model, self._own = name, model, own

    @property
    def name(self) -> str:
        """Return the name of the model, and of the adapter that answers."""
        adapter = self._model.adapter
        return f"{self._base} with {adapter}" if adapter else self._base

    async def reply(self, messages: list[Message], took: Took) -> AsyncIterator[str]:
        """Stream the answer from the engine."""
        ids = self._model.tokenizer.encode_chat(messages, max_tokens=self._model.context_length)
        took.prompt_tokens = len(ids)
        params = sampling(self._own, self._model.sampling, self._model.room(len(ids), self._own.max_tokens))
        async for piece in self._model.stream(ids, params, took):
            yield piece

    async def choose(self, name: str) -> None:
        """Select the engine's model, or an adapter that it has loaded. Raises ConfigError for another name."""
        adapters = self._model.engine.adapters
        if name not in (self._base, *adapters):
            there = ", ".join([self._base, *adapters])
            raise ConfigError(f"this engine has {there} alone: start another, `forebay chat {name}`")
        self._model = replace(self._model, adapter=name if name in adapters else "")
