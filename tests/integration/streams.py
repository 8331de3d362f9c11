"""Requests to a tree of processes, and how to know that they are under way."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterable
from typing import Any, TypeVar

import httpx

from tests import loopback
from tests.deadlines import wait_until
from tests.integration.tree import Tree

ENDLESS = 8000  # tokens of who is to be under way until the test ends it
Answer = TypeVar("Answer")


def ask(prompt: list[int] | str = "hello", max_tokens: int = 8, **fields: Any) -> dict[str, Any]:
    return {"prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True, **fields}


def asyncly(tree: Tree) -> httpx.AsyncClient:
    return loopback.async_client(base_url=tree.url)


async def read(client: httpx.AsyncClient, body: dict[str, Any], started: asyncio.Event | None = None) -> str:
    """A stream's text until it ends or breaks off."""
    text = ""
    try:
        async with client.stream("POST", "/v1/completions", json={**body, "stream": True}) as response:
            if started is not None:
                started.set()
            async for piece in response.aiter_text():
                text += piece
    except httpx.TransportError as error:
        text += f"\nbroken: {type(error).__name__}"
    return text


async def under_way(
    tree: Tree, requests: Iterable[Coroutine[Any, Any, Answer]], num_tokens: int = 0
) -> list[asyncio.Task[Answer]]:
    """These requests as tasks, once the engine has them all, and has generated `num_tokens` since.

    Told by counters, which only grow: that so many run is a moment, which may have passed before anybody looks.
    """
    come, told = (tree.counted(name) for name in ("requests", "generated_tokens"))
    tasks = [asyncio.create_task(request) for request in requests]

    def are_under_way() -> bool:
        return tree.counted("requests") >= come + len(tasks) and tree.counted("generated_tokens") >= told + num_tokens

    await asyncio.to_thread(wait_until, are_under_way)
    return tasks
