"""The cost of bodies and answers in msgspec and in pydantic (decision 66).

An answer is built and encoded: a chat completion as a dict, a struct and a model. A body is decoded and checked: chats
of 3 and of 101 messages, as a closed struct and a closed model with types and bounds alone, and as the server's
`ChatRequest`, with its checks in Python.

python -m benchmarks.schema_types [--rounds N]
"""

from __future__ import annotations

import argparse
import timeit
from collections.abc import Callable
from functools import partial
from typing import Annotated, Any, Literal

import msgspec
from pydantic import BaseModel, ConfigDict, Field

from forebay.server.api.core.generation import CachedDetails, CacheUsage, Usage
from forebay.server.api.openai.chat import ChatChoice, ChatCompletion, Message
from forebay.server.protocol.requests import ChatRequest

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


class Part(msgspec.Struct, forbid_unknown_fields=True):
    type: Literal["text"]
    text: Annotated[str, msgspec.Meta(max_length=64 << 20)]


class StructMessage(msgspec.Struct, forbid_unknown_fields=True):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Annotated[str, msgspec.Meta(max_length=64 << 20)] | list[Part] | None = None


class StructChat(msgspec.Struct, forbid_unknown_fields=True):
    messages: Annotated[list[StructMessage], msgspec.Meta(min_length=1, max_length=4096)]
    model: Annotated[str, msgspec.Meta(max_length=512)] | None = None
    temperature: Annotated[float, msgspec.Meta(ge=0, le=100)] | None = None
    top_p: Annotated[float, msgspec.Meta(gt=0, le=1)] | None = None
    max_tokens: Annotated[int, msgspec.Meta(ge=1, le=2**31 - 1)] | None = None
    seed: int | None = None
    stream: bool | None = None
    stop: str | list[str] | None = None


class Closed(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid")


class ModelPart(Closed):
    type: Literal["text"]
    text: Annotated[str, Field(max_length=64 << 20)]


class ModelMessage(Closed):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Annotated[str, Field(max_length=64 << 20)] | list[ModelPart] | None = None


class ModelChat(Closed):
    messages: Annotated[list[ModelMessage], Field(min_length=1, max_length=4096)]
    model: Annotated[str, Field(max_length=512)] | None = None
    temperature: Annotated[float, Field(ge=0, le=100)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    max_tokens: Annotated[int, Field(ge=1, le=2**31 - 1)] | None = None
    seed: int | None = None
    stream: bool | None = None
    stop: str | list[str] | None = None


def body(num_messages: int) -> bytes:
    roles = ["system", *(["user", "assistant"] * num_messages)][:num_messages]
    messages = [{"role": role, "content": "word " * 50} for role in roles]
    options = {"temperature": 0.7, "top_p": 0.9, "max_tokens": 256, "seed": 1, "stream": True, "stop": ["x"]}
    return encode({"model": "m", "messages": messages, **options})


def read_request(content: bytes) -> ChatRequest:
    return ChatRequest.parse(msgspec.json.decode(content))


def read_model(content: bytes) -> ModelChat:
    return ModelChat.model_validate(msgspec.json.decode(content))


def read_struct(content: bytes) -> StructChat:
    return msgspec.json.decode(content, type=StructChat)


def measure(name: str, make: Callable[[], object], rounds: int) -> None:
    best = min(timeit.repeat(make, number=rounds, repeat=5)) / rounds
    print(f"{name:40} {best * 1e6:8.2f} us")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=20_000)
    args = parser.parse_args()
    kinds: dict[str, Callable[[], bytes]] = {"dict": as_dict, "msgspec struct": as_struct, "pydantic model": as_model}
    assert len({msgspec.json.encode(msgspec.json.decode(make()), order="sorted") for make in kinds.values()}) == 1
    for name, make in kinds.items():
        measure(f"answer, {name}", make, args.rounds)
    for num_messages in (3, 101):
        content, rounds = body(num_messages), args.rounds // num_messages
        measure(f"body of {num_messages} messages, msgspec struct", partial(read_struct, content), rounds)
        measure(f"body of {num_messages} messages, pydantic model", partial(read_model, content), rounds)
        measure(f"body of {num_messages} messages, ChatRequest", partial(read_request, content), rounds)


if __name__ == "__main__":
    main()
