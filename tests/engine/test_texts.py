"""Texts over streams of token ids (`AsyncEngine.generate`), with streams that say what a test wants."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from forebay.base.errors import Unavailable
from forebay.engine.client.texts import TextStreams
from forebay.requests.sampling_params import SamplingParams
from forebay.requests.updates import FinishReason, Update
from forebay.text.tokenizer import Tokenizer
from tests.models.tiny import Tiny


class Said:
    """A stream of these updates."""

    request_id = 1

    def __init__(self, updates: list[Update]) -> None:
        self._updates = iter(updates)

    def abort(self) -> None: ...

    async def __aenter__(self) -> Said:
        return self

    async def __aexit__(self, *_: object) -> None: ...

    async def __anext__(self) -> Update:
        return next(self._updates)


@pytest.mark.parametrize("told", [[], [5, 6]])
def test_streamed_output_never_mixes_tokens_of_two_weight_versions(checkpoint: Tiny, told: list[int]) -> None:
    begun = [Update(1, told)] if told else []
    anew = [Update(1, [7], restarted=True), Update(1, [8], finish=FinishReason.LENGTH)]
    tokenizer, heard = Tokenizer.from_path(checkpoint.path), list[int]()

    def submit(**_: Any) -> Any:
        return Said([*begun, *anew])

    texts = TextStreams(tokenizer, SamplingParams(), submit)

    async def hear() -> None:
        async for delta in texts.generate("hello", None, ""):
            heard.extend(delta.token_ids)

    if told:
        with pytest.raises(Unavailable, match="behind the first 2 tokens") as raised:
            asyncio.run(hear())
        assert raised.value.code == "weights_changed"
    else:
        asyncio.run(hear())
    assert heard == (told or [7, 8])
