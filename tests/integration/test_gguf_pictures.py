"""A GGUF model beside its encoder's file sees images as the folder of safetensors with the same weights does."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest
import torch

from forebay.formats.mmproj_files import mmproj_beside
from forebay.server.images.cutting import tiles_of
from forebay.server.images.decoding import CutImage, Decoded
from forebay.server.images.expansion import Expanded, Expansion
from forebay.server.images.tiling import tiling_at
from forebay.text.tokenizer import Tokenizer
from tests.integration.rig import Rig
from tests.integration.test_pictures import Prompt, greedy, run
from tests.integration.tree import serving
from tests.kernels import NATIVE
from tests.models.vision_pairs import PAIRS, Pair, make_pair
from tests.server.images.smolvlm import file_of, noise

pytestmark = pytest.mark.slow

IMAGES: Final = (file_of(noise(50, 70)), file_of(noise(20, 60, seed=1)))
QUESTION: Final = "What is in these pictures?"
TEXTS_ALONE: Final = (
    "{%- for message in messages -%}<|im_start|>{{ message['role'] + '\n' + message['content'] }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""The template of InternVL's GGUF files: that of the language model alone."""


@pytest.fixture(scope="module", params=PAIRS)
def pair(request: pytest.FixtureRequest, embedded_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return make_pair(request.param, embedded_model, tmp_path_factory.mktemp(request.param))


def seen(path: Path, mmproj: Path | None) -> Expanded:
    """Return a conversation about the images as the model's files make a prompt of it."""
    tokenizer, tiling = Tokenizer.from_path(path), tiling_at(str(path), None if mmproj is None else str(mmproj))
    assert tiling is not None
    parts: list[Any] = [{"type": "text", "text": "one: "}, {"type": "image"}, {"type": "image"}]
    messages = [{"role": "user", "content": [*parts, {"type": "text", "text": QUESTION}]}]
    cut = [CutImage(Decoded(*tiles_of(image, tiling, splits=True)), bytes([i]) * 32) for i, image in enumerate(IMAGES)]
    return Expansion(tokenizer, tiling).expand(tokenizer.encode_chat(messages), (), cut)


def answers(path: Path, mmproj: Path | None, prompt: Expanded) -> tuple[list[int], list[float]]:
    """Return the tokens that follow the prompt, and their log-probabilities."""
    rig = Rig(path, mmproj=mmproj, dtype=torch.float32, kernels=NATIVE, num_threads=1, context_length=2048)
    (result,) = run(rig.engine(num_rows_of_pictures=1024), [Prompt(prompt.token_ids, prompt.pictures)], [greedy(8)])
    return result.token_ids, [each.logprob for each in result.logprobs]


def check(pair: Pair) -> Expanded:
    """Check that the files give the pixels and the answer of the folder, and return the folder's own prompt."""
    prompt, wanted = seen(pair.model, pair.mmproj), seen(pair.folder, None)
    assert len(prompt.pictures) == len(IMAGES)
    assert [picture.pixels for picture in prompt.pictures] == [picture.pixels for picture in wanted.pictures]
    found, expected = answers(pair.model, pair.mmproj, prompt), answers(pair.folder, None, prompt)
    assert found[0] == expected[0]
    assert found[1] == pytest.approx(expected[1], abs=1e-5)
    return wanted


def test_gguf_pair_answers_about_images_as_its_folder(pair: Pair) -> None:
    assert mmproj_beside(pair.model) == pair.mmproj
    assert check(pair).token_ids == seen(pair.model, pair.mmproj).token_ids


def test_gguf_internvl_with_a_template_for_texts_alone_answers_about_images(
    embedded_model: Path, tmp_path: Path
) -> None:
    pair = make_pair("internvl", embedded_model, tmp_path, chat_template=TEXTS_ALONE)
    check(pair)
    tokenizer = Tokenizer.from_path(pair.model)
    text = tokenizer.decode(seen(pair.model, pair.mmproj).token_ids, skip_special_tokens=False)
    assert text.startswith("<|im_start|>user\none: <img><IMG_CONTEXT>")
    assert text.endswith(f"<IMG_CONTEXT></img>\n{QUESTION}<|im_end|>\n<|im_start|>assistant\n")


def chats(folder: Path, *words: str | Path) -> Iterator[Any]:
    """Serve a model, and yield its answers: the text, its log-probabilities, and the number of images' tokens."""
    flags = ("--dtype=float32", "--kv-cache-bytes=64MiB", "--context-length=4096", "--served-model-name=tiny")
    urls = [f"data:image/png;base64,{base64.b64encode(image).decode()}" for image in IMAGES]
    parts = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    messages = [{"role": "user", "content": [*parts, {"type": "text", "text": QUESTION}]}]
    body = {"model": "tiny", "messages": messages, "max_tokens": 8, "temperature": 0, "logprobs": True}
    with serving(folder, *words, *flags) as tree, tree.client() as client:
        assert client.get("/server_info").json()["accepts_images"]
        answer = client.post("/v1/chat/completions", json=body).json()
        yield answer["choices"][0]["message"]["content"]
        yield [each["logprob"] for each in answer["choices"][0]["logprobs"]["content"]]
        yield answer["usage"]["prompt_tokens_details"]["image_tokens"]


def test_gguf_pair_served_over_http_answers_as_its_folder(pair: Pair, tmp_path: Path) -> None:
    own = list(chats(tmp_path / "own", pair.model, f"--mmproj={pair.mmproj}"))
    found = list(chats(tmp_path / "folder", pair.folder))
    assert own[1] == pytest.approx(found[1], abs=1e-5)
    assert own[::2] == found[::2]
    assert own[2] >= len(IMAGES)
