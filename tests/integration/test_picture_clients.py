"""The official clients send images unchanged to a server of a small model with an encoder."""

from __future__ import annotations

import base64
import io
from collections.abc import Iterator
from typing import Any

import anthropic
import openai
import pytest
from PIL import Image

from forebay.cli.main import main
from tests import loopback
from tests.deadlines import HANGS_S
from tests.integration.tree import Tree, serving

MODEL = "pictured"
QUESTION = "What is in this picture?"
COUNT = 8


def png(seed: int) -> str:
    """A picture of some noise, in base64."""
    image = Image.new("RGB", (90, 60))
    image.putdata([((x * seed) % 256, (x * 7) % 256, (x * x) % 256) for x in range(90 * 60)])
    file = io.BytesIO()
    image.save(file, "PNG")
    return base64.b64encode(file.getvalue()).decode()


OTHERS = (
    *("gemma3", "gemma4", "kimi_k25", "lfm2_vl", "mistral3", "muse_glimmer", "qwen2_5_vl", "qwen3_5", "qwen3_vl"),
    "qwen4_exp",
)


@pytest.fixture(scope="module", params=["smolvlm", *(pytest.param(kind, marks=pytest.mark.slow) for kind in OTHERS)])
def tree(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tree]:
    folder = tmp_path_factory.mktemp("picture-clients")
    request.getfixturevalue("embedded_model")
    assert main(["models", "make", MODEL, "--like", request.param, "--out", str(folder / MODEL)]) == 0
    flags = ("--dtype=float32", "--kv-cache-bytes=16MiB", "--context-length=2048")
    with serving(folder / "tree", folder / MODEL, *flags) as started:
        yield started


@pytest.fixture(scope="module")
def chats(tree: Tree) -> Iterator[openai.OpenAI]:
    own: dict[str, Any] = {"api_key": "none", "max_retries": 0, "timeout": HANGS_S}
    with loopback.client() as http, openai.OpenAI(base_url=f"{tree.url}/v1", http_client=http, **own) as client:
        yield client


@pytest.fixture(scope="module")
def messages(tree: Tree) -> Iterator[anthropic.Anthropic]:
    own: dict[str, Any] = {"api_key": "none", "max_retries": 0, "timeout": HANGS_S}
    with anthropic.Anthropic(base_url=tree.url, **own) as client:
        yield client


def chat(chats: openai.OpenAI, data: str) -> Any:
    parts = [
        {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{data}"}},
        {"type": "text", "text": QUESTION},
    ]
    asked: Any = [{"role": "user", "content": parts}]
    return chats.chat.completions.create(model=MODEL, messages=asked, max_tokens=COUNT, temperature=0)


@pytest.mark.slow
def test_chat_counts_the_tokens_of_an_image_and_finds_it_in_the_cache(chats: openai.OpenAI) -> None:
    first, again = chat(chats, png(3)), chat(chats, png(3))
    details = first.usage.prompt_tokens_details.model_dump()
    assert details["image_tokens"] > 0
    assert again.choices[0].message.content == first.choices[0].message.content
    assert again.usage.prompt_tokens_details.cached_tokens > details["image_tokens"]


@pytest.mark.slow
def test_chat_with_another_image_is_not_found_in_the_cache(chats: openai.OpenAI) -> None:
    chat(chats, png(5))
    other = chat(chats, png(11))
    details = other.usage.prompt_tokens_details.model_dump()
    assert details["cached_tokens"] < other.usage.prompt_tokens - details["image_tokens"]


@pytest.mark.slow
def test_messages_and_responses_answer_as_chats(chats: openai.OpenAI, messages: anthropic.Anthropic) -> None:
    data = png(7)
    source = {"type": "base64", "media_type": "image/png", "data": data}
    content: Any = [{"type": "image", "source": source}, {"type": "text", "text": QUESTION}]
    message = messages.messages.create(
        model=MODEL,
        max_tokens=COUNT,
        messages=[{"role": "user", "content": content}],
        extra_body={"temperature": 0},
    )
    parts: Any = [
        {"type": "input_image", "image_url": f"data:image/png;base64,{data}", "detail": "auto"},
        {"type": "input_text", "text": QUESTION},
    ]
    asked: Any = [{"role": "user", "content": parts}]
    response = chats.responses.create(model=MODEL, input=asked, max_output_tokens=COUNT, temperature=0)
    text = chat(chats, data).choices[0].message.content
    assert message.content[0].text == text
    assert response.output_text == text


@pytest.mark.slow
def test_url_is_refused_in_the_shape_of_each_client(chats: openai.OpenAI, messages: anthropic.Anthropic) -> None:
    parts: Any = [{"type": "image_url", "image_url": {"url": "http://127.0.0.1/x.png"}}]
    with pytest.raises(openai.BadRequestError, match="--allowed-media-domains"):
        chats.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": parts}], max_tokens=1)
    content: Any = [{"type": "image", "source": {"type": "url", "url": "http://127.0.0.1/x.png"}}]
    with pytest.raises(anthropic.BadRequestError, match="--allowed-media-domains"):
        messages.messages.create(model=MODEL, max_tokens=1, messages=[{"role": "user", "content": content}])
