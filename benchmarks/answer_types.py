"""What an answer costs as a dict, a msgspec struct and a pydantic model: built and encoded, a chat completion each.

python -m benchmarks.answer_types [--rounds N]
"""

from __future__ import annotations

import argparse
import timeit
from collections.abc import Callable
from typing import Any

import msgspec
from pydantic import BaseModel

from forebay.server.api.core.generation import CachedDetails, CacheUsage, Usage
from forebay.server.api.openai.chat import ChatChoice, ChatCompletion, Message

CACHE: dict[str, Any] = {
    "cached_tokens": 96,
    "miss_reason": "none",
    "matched_tokens": {"kv": 96},
    "differs": None,
    "retractions": 0,
    "recomputed_tokens": 0,
    "checkpoints": [],
}
USAGE: dict[str, Any] = {"prompt_tokens": 100, "completion_tokens": 50, "total_tokens": 150, "weight_version": 0}
HEAD: dict[str, Any] = {"id": "chatcmpl-1", "object": "chat.completion", "created": 1, "model": "m"}
MESSAGE: dict[str, Any] = {"role": "assistant", "content": "word " * 50, "refusal": None}
CHOICE: dict[str, Any] = {"index": 0, "logprobs": None, "finish_reason": "stop"}


class ModelledDetails(BaseModel):
    cached_tokens: int


class ModelledCache(BaseModel):
    cached_tokens: int
    miss_reason: str
    matched_tokens: dict[str, int]
    differs: dict[str, Any] | None
    retractions: int
    recomputed_tokens: int
    checkpoints: list[int]


class ModelledUsage(BaseModel):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: ModelledDetails
    weight_version: int
    cache: ModelledCache


class ModelledMessage(BaseModel):
    role: str
    content: str | None
    refusal: None


class ModelledChoice(BaseModel):
    index: int
    message: ModelledMessage
    logprobs: None
    finish_reason: str


class ModelledCompletion(BaseModel):
    id: str
    object: str
    created: int
    model: str
    choices: list[ModelledChoice]
    usage: ModelledUsage


encode = msgspec.json.Encoder().encode


def as_dict() -> bytes:
    usage = {**USAGE, "prompt_tokens_details": {"cached_tokens": 96}, "cache": {**CACHE}}
    return encode({**HEAD, "choices": [{**CHOICE, "message": {**MESSAGE}}], "usage": usage})


def as_struct() -> bytes:
    usage = Usage(prompt_tokens_details=CachedDetails(cached_tokens=96), cache=CacheUsage(**CACHE), **USAGE)
    return encode(ChatCompletion(choices=[ChatChoice(message=Message(**MESSAGE), **CHOICE)], usage=usage, **HEAD))


def as_model() -> bytes:
    details, cache = ModelledDetails(cached_tokens=96), ModelledCache(**CACHE)
    usage = ModelledUsage(prompt_tokens_details=details, cache=cache, **USAGE)
    choices = [ModelledChoice(message=ModelledMessage(**MESSAGE), **CHOICE)]
    return ModelledCompletion(choices=choices, usage=usage, **HEAD).model_dump_json().encode()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=20_000)
    args = parser.parse_args()
    kinds: dict[str, Callable[[], bytes]] = {"dict": as_dict, "msgspec struct": as_struct, "pydantic model": as_model}
    assert len({msgspec.json.encode(msgspec.json.decode(make()), order="sorted") for make in kinds.values()}) == 1
    for name, make in kinds.items():
        best = min(timeit.repeat(make, number=args.rounds, repeat=5)) / args.rounds
        print(f"{name:15} {best * 1e6:6.2f} us")


if __name__ == "__main__":
    main()
