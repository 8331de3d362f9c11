"""Images in chats of every dialect, of a server whose model accepts them."""

from __future__ import annotations

import asyncio
import json
import threading
from base64 import b64encode
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from forebay.cli.main import main
from forebay.config.engine_config import DisaggregationMode
from forebay.families.small_pictures import WITH_PICTURES
from forebay.http.lifecycle import ClientGone, Watch
from forebay.requests.pictures import digest_of
from forebay.requests.sampling_params import SamplingParams
from forebay.server.images import reader
from forebay.server.images.cutting import tiles_of
from forebay.server.images.reader import AdmittedImages
from forebay.server.images.tiling import Tiling, tiling_at
from forebay.server.protocol.requests import ChatRequest
from forebay.text.tokenizer import Tokenizer
from tests.deadlines import HANGS_S, wait_until
from tests.proven import Proven
from tests.server.conftest import MODEL, Running, start
from tests.server.fake_engine import FakeEngine
from tests.server.images.smolvlm import PER_TILE, PLACEHOLDER, TEMPLATE, TILING, file_of, noise, write_tokenizer

pytestmark = pytest.mark.usefixtures("patience")

IMAGE = file_of(noise(50, 70))
OTHER = file_of(noise(20, 90, seed=1), "JPEG")
GREEN = "Is it green?"
MARKS = "<image><fake_token_around_image><row_1_col_1><image><global-img>"


def data_of(file: bytes, kind: str = "png") -> str:
    return f"data:image/{kind};base64,{b64encode(file).decode()}"


def text(said: str) -> dict[str, Any]:
    return {"type": "text", "text": said}


def part(file: bytes, **how: str) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": data_of(file), **how}}


def block(file: bytes) -> dict[str, Any]:
    source = {"type": "base64", "media_type": "image/png", "data": b64encode(file).decode()}
    return {"type": "image", "source": source}


class Chats:
    """A server with an encoder, and the last prompt that its engine was given."""

    def __init__(self, folder: Path, template: str = TEMPLATE, **config: Any) -> None:
        self._start(Tokenizer.from_path(write_tokenizer(folder, template)), TILING, **config)

    @classmethod
    def of(cls, folder: Path) -> Chats:
        """A server of the checkpoint in a folder."""
        made, tiling = cls.__new__(cls), tiling_at(str(folder))
        assert tiling is not None
        made._start(Tokenizer.from_path(folder), tiling)
        return made

    def _start(self, tokenizer: Tokenizer, tiling: Tiling, **config: Any) -> None:
        self.model, self.tokenizer = replace(MODEL, tiling=tiling), tokenizer
        self.server: Running = start(self.tokenizer, self._engine, model=self.model, **config)
        self.client = self.server.client()

    @staticmethod
    def _engine() -> FakeEngine:
        def script(prompt: list[int], params: SamplingParams) -> list[int]:
            return [70] * 4

        return FakeEngine(script, vocab_size=1 << 16)

    def post(self, path: str, **body: Any) -> Any:
        return self.client.post(path, json={"model": "tiny", **body})

    def chat(self, *content: dict[str, Any], **body: Any) -> Any:
        messages = [{"role": "user", "content": list(content)}]
        return self.post("/v1/chat/completions", **{"messages": messages, "max_tokens": 4, **body})

    @property
    def prompt(self) -> list[int]:
        return self.server.engine.submitted[-1].prompt

    @property
    def pictures(self) -> Any:
        return self.server.engine.pictures[-1]

    def close(self) -> None:
        self.client.close()
        self.server.close()


@pytest.fixture(scope="module")
def chats(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Chats]:
    found = Chats(tmp_path_factory.mktemp("api"), responses_store_bytes=1 << 24)
    yield found
    found.close()


def refused(answer: Any, code: str, param: str | None = None) -> str:
    """The message of a 400 in the shape of OpenAI's API."""
    error = answer.json()["error"]
    assert (answer.status_code, error["code"]) == (400, code), error
    assert param is None or error["param"] == param
    return str(error["message"])


def test_chat_image_reaches_the_engine_as_tiles_and_placeholders(chats: Chats) -> None:
    answer = chats.chat(part(IMAGE), text(GREEN)).json()
    (picture,), tiles = chats.pictures, tiles_of(IMAGE, TILING, splits=True)
    assert (picture.grid, picture.sizes, picture.pixels) == tiles
    assert picture.digest == digest_of(tiles.pixels, tiles.grid, tiles.sizes)
    assert picture.num_tokens == len(tiles.sizes) * PER_TILE == chats.prompt.count(PLACEHOLDER)
    for begin, length in picture.runs:
        assert chats.prompt[begin : begin + length] == [PLACEHOLDER] * length
    told = answer["usage"]
    assert told["prompt_tokens_details"]["image_tokens"] == picture.num_tokens
    assert told["prompt_tokens"] == len(chats.prompt)


def test_ollama_images_reach_the_engine_as_a_chats_do(chats: Chats) -> None:
    """In front of the text, as plain base64 or a data URL."""
    chats.chat(part(IMAGE), part(OTHER), text(GREEN))
    prompt, digests = chats.prompt, [each.digest for each in chats.pictures]
    encoded = [b64encode(IMAGE).decode(), data_of(OTHER, "jpeg")]
    message = {"role": "user", "content": GREEN, "images": encoded}
    for path, body in (("chat", {"messages": [message]}), ("generate", {"prompt": GREEN, "images": encoded})):
        answer = chats.post(f"/api/{path}", **body, stream=False)
        assert answer.status_code == 200, answer.text
        assert (chats.prompt, [each.digest for each in chats.pictures]) == (prompt, digests)
    alone = chats.post("/api/generate", prompt="", images=encoded[:1], stream=False)
    assert (alone.status_code, len(chats.pictures)) == (200, 1)
    assert "vision" in chats.post("/api/show").json()["capabilities"]
    broken = chats.post("/api/chat", messages=[{**message, "images": ["aGk="]}], stream=False)
    assert (broken.status_code, "messages.0.images" in broken.json()["error"]) == (400, True), broken.text
    wrong = chats.post("/api/chat", messages=[message, {**message, "role": "assistant"}], stream=False)
    assert "role is assistant" in wrong.json()["error"]
    raw = chats.post("/api/generate", prompt="x", images=encoded, raw=True)
    assert "leave images out" in raw.json()["error"]


@pytest.mark.long
@pytest.mark.quick(1)
@pytest.mark.parametrize("model_type", WITH_PICTURES)
def test_chat_image_of_every_type_reaches_the_engine_as_the_type_has_it(
    model_type: str, tmp_path: Path, embedded_model: Path
) -> None:
    words = ["--hidden-size", "32", "--num-layers", "1", "--out", str(tmp_path / "tiny")]
    assert main(["models", "make", "--like", model_type, *words]) == 0
    chats = Chats.of(tmp_path / "tiny")
    try:
        for detail in ("high", "low"):
            answer = chats.chat(text("a"), part(IMAGE, detail=detail), text("b")).json()
            (picture,), tiling = chats.pictures, chats.model.tiling
            assert (picture.grid, picture.sizes, picture.pixels) == tiles_of(IMAGE, tiling, splits=detail == "high")
            assert picture.num_tokens == chats.prompt.count(tiling.placeholder) > 0
            for begin, length in picture.runs:
                assert chats.prompt[begin : begin + length] == [tiling.placeholder] * length
            assert answer["usage"]["prompt_tokens_details"]["image_tokens"] == picture.num_tokens
            shown = chats.tokenizer.decode(chats.prompt)
            assert shown.index("a") < shown.rindex("b")
    finally:
        chats.close()


def test_chat_texts_between_images_keep_their_order(chats: Chats) -> None:
    chats.chat(text("a"), part(IMAGE), text("b"), part(OTHER), text("c"))
    shown = chats.tokenizer.decode(chats.prompt, skip_special_tokens=False)
    rows, cols = chats.pictures[0].grid
    assert shown.startswith("<|im_start|>User: a<fake_token_around_image><row_1_col_1>")
    assert f"<row_{rows}_col_{cols}>" in shown
    assert [len(shown.split("<global-img>")), shown.count("<fake_token_around_image>b<")] == [3, 1]
    assert shown.endswith("<fake_token_around_image>c<end_of_utterance>\nAssistant:")
    assert [picture.pixels for picture in chats.pictures] == [
        tiles_of(file, TILING, splits=True).pixels for file in (IMAGE, OTHER)
    ]


def test_chat_without_images_reports_no_image_tokens(chats: Chats) -> None:
    answer = chats.chat(text(GREEN)).json()
    assert "image_tokens" not in answer["usage"]["prompt_tokens_details"]
    assert chats.pictures == ()


def test_every_dialect_makes_the_same_prompt_of_an_image(chats: Chats) -> None:
    chats.chat(part(IMAGE), text(GREEN))
    wanted = chats.prompt, chats.pictures
    messages = [{"role": "user", "content": [block(IMAGE), text(GREEN)]}]
    assert chats.post("/v1/messages", messages=messages, max_tokens=4).status_code == 200
    assert (chats.prompt, chats.pictures) == wanted
    messages[0]["content"][0]["source"] = {"type": "url", "url": data_of(IMAGE)}
    assert chats.post("/v1/messages", messages=messages, max_tokens=4).status_code == 200
    assert (chats.prompt, chats.pictures) == wanted
    content = [{"type": "input_image", "image_url": data_of(IMAGE)}, {"type": "input_text", "text": GREEN}]
    answer = chats.post("/v1/responses", input=[{"role": "user", "content": content}], max_output_tokens=4)
    assert answer.json()["usage"]["input_tokens_details"]["image_tokens"] == wanted[1][0].num_tokens
    assert (chats.prompt, chats.pictures) == wanted


def test_streamed_chat_reports_image_tokens(chats: Chats) -> None:
    answer = chats.chat(part(IMAGE), stream=True, stream_options={"include_usage": True})
    assert f'"image_tokens":{chats.pictures[0].num_tokens}' in answer.text


@pytest.mark.parametrize("detail", ["low", "auto", "high"])
def test_detail_low_makes_one_tile(chats: Chats, detail: str) -> None:
    chats.chat(part(IMAGE, detail=detail))
    (picture,) = chats.pictures
    tiles = tiles_of(IMAGE, TILING, splits=detail != "low")
    assert (picture.grid, picture.pixels) == (tiles.grid, tiles.pixels)
    assert (len(picture.sizes) == 1) == (detail == "low")


def test_result_of_a_tool_may_have_an_image(chats: Chats) -> None:
    call = {"type": "tool_use", "id": "a", "name": "look", "input": {}}
    result = {"type": "tool_result", "tool_use_id": "a", "content": [text("There:"), block(IMAGE)], "is_error": True}
    messages = [
        {"role": "user", "content": "Look"},
        {"role": "assistant", "content": [call]},
        {"role": "user", "content": [result, text(GREEN)]},
    ]
    answer = chats.post("/v1/messages", messages=messages, max_tokens=4)
    assert answer.status_code == 200, answer.text
    shown = chats.tokenizer.decode(chats.prompt, skip_special_tokens=False)
    assert "<tool_response>\nError: There:<fake_token_around_image><row_1_col_1>" in shown
    assert "<fake_token_around_image>\n</tool_response>" in shown
    assert len(chats.pictures) == 1


def test_response_that_continues_a_stored_one_has_its_images(chats: Chats) -> None:
    content = [{"type": "input_image", "image_url": data_of(IMAGE), "detail": "low"}]
    first = chats.post("/v1/responses", input=[{"role": "user", "content": content}], max_output_tokens=4).json()
    picture = chats.pictures[0]
    content = [{"type": "input_image", "image_url": data_of(OTHER)}]
    more = {"previous_response_id": first["id"], "max_output_tokens": 4}
    answer = chats.post("/v1/responses", input=[{"role": "user", "content": content}], **more)
    assert answer.status_code == 200, answer.text
    assert [picture.pixels, tiles_of(OTHER, TILING, splits=True).pixels] == [p.pixels for p in chats.pictures]


def test_counts_of_tokens_include_those_of_images(chats: Chats) -> None:
    chats.chat(part(IMAGE), text(GREEN))
    count = len(chats.prompt)
    messages = [{"role": "user", "content": [block(IMAGE), text(GREEN)]}]
    assert chats.post("/v1/messages/count_tokens", messages=messages).json() == {"input_tokens": count}
    content = [{"type": "input_image", "image_url": data_of(IMAGE)}, {"type": "input_text", "text": GREEN}]
    counted = chats.post("/v1/responses/input_tokens", input=[{"role": "user", "content": content}]).json()
    assert counted["input_tokens"] == count
    messages = [{"role": "user", "content": [part(IMAGE), text(GREEN)]}]
    assert chats.post("/tokenize", messages=messages).json()["tokens"] == chats.prompt
    shown = chats.post("/apply-template", messages=messages).json()["prompt"]
    assert shown == f"<|im_start|>User:<image>{GREEN}<end_of_utterance>\nAssistant:"


@pytest.mark.parametrize("images", [0, 1])
def test_users_text_cannot_make_placeholders_or_marks(chats: Chats, images: int) -> None:
    answer = chats.chat(text(MARKS), *[part(IMAGE, detail="low")] * images, text(MARKS))
    assert answer.status_code == 200
    assert chats.prompt.count(PLACEHOLDER) == images * PER_TILE
    frames = chats.tokenizer.encode("<fake_token_around_image>", add_special_tokens=False, parse_special=True)
    assert chats.prompt.count(frames[0]) == 2 * images
    assert chats.tokenizer.decode(chats.prompt, skip_special_tokens=False).count(MARKS) == 2


@pytest.mark.parametrize("special", [True, False])
def test_tokenizer_marks_of_images_are_control_tokens(tmp_path: Path, special: bool) -> None:
    """Whatever the checkpoint says of them."""
    tokenizer = Tokenizer.from_path(write_tokenizer(tmp_path, template="{{ messages[0].content }}", special=special))
    plain = tokenizer.encode_chat([{"role": "user", "content": MARKS}])
    assert max(plain) < 256  # a byte each
    assert tokenizer.decode(plain) == MARKS
    assert len(tokenizer.encode(MARKS, add_special_tokens=False, parse_special=True)) == 5


# Refusals.


def test_too_many_images_are_refused_with_the_limit(chats: Chats) -> None:
    answer = chats.chat(*[part(IMAGE)] * 9)
    message = refused(answer, "too_many_images", "messages.0.content.8")
    assert message == "the prompt has 9 images; at most 8 are taken (--limit-mm-per-prompt): send fewer"
    many = chats.chat(*[part(b"small")] * 300)
    assert "at most 256 are allowed" in refused(many, "invalid_value", "messages.0.content")


def test_broken_image_is_refused_by_its_place(chats: Chats) -> None:
    message = refused(chats.chat(part(IMAGE), text("a"), part(b"GIF")), "invalid_image", "messages.0.content.2")
    assert message.startswith("image 2 of 2 is no PNG, JPEG, WebP or GIF file")
    message = refused(chats.chat(part(IMAGE[:-50])), "invalid_image", "messages.0.content.0")
    assert message.startswith("the image cannot be decoded (OSError: image file is truncated")


def test_broken_image_is_refused_in_the_words_of_other_dialects(chats: Chats) -> None:
    messages = [{"role": "user", "content": [block(b"no image")]}]
    answer = chats.post("/v1/messages", messages=messages, max_tokens=4)
    assert answer.status_code == 400
    assert answer.json()["type"] == "error"
    assert answer.json()["error"]["type"] == "invalid_request_error"
    assert "the image is no PNG" in answer.json()["error"]["message"]
    content = [{"type": "input_image", "image_url": data_of(b"no image")}]
    refused(chats.post("/v1/responses", input=[{"role": "user", "content": content}]), "invalid_image", "input")


@pytest.mark.parametrize("url", ["http://127.0.0.1/a.png", "https://example.com/a.png", "file:///etc/passwd", "a.png"])
def test_image_elsewhere_is_refused_unless_its_host_is_allowed(chats: Chats, url: str) -> None:
    message = refused(chats.chat({"type": "image_url", "image_url": {"url": url}}), "invalid_image")
    assert "--allowed-media-domains" in message or "only data:, http: and https: URLs are read" in message


@pytest.mark.parametrize("kind", ["input_audio", "video_url", "file", "image"])
def test_other_media_are_refused_with_one_line(chats: Chats, kind: str) -> None:
    message = refused(chats.chat({"type": kind}), "unsupported_field", "messages.0.content.0.type")
    assert message.endswith(f"type is '{kind}': only text and image parts are supported")


def test_image_of_another_role_is_refused(chats: Chats) -> None:
    for role in ("system", "assistant", "developer"):
        messages = [{"role": role, "content": [text("a"), part(IMAGE)]}, {"role": "user", "content": "b"}]
        answer = chats.post("/v1/chat/completions", messages=messages)
        refused(answer, "invalid_combination", "messages.0.content.1.type")
    item = {"role": "system", "content": [{"type": "input_image", "image_url": data_of(IMAGE)}]}
    refused(chats.post("/v1/responses", input=[item]), "invalid_combination", "input.0.content.0.type")
    messages = [{"role": "assistant", "content": [block(IMAGE)]}, {"role": "user", "content": "b"}]
    assert chats.post("/v1/messages", messages=messages, max_tokens=4).status_code == 400


@pytest.mark.parametrize(
    "image",
    [
        {},
        {"url": ""},
        {"url": 5},
        {"url": "http://\u00e9/"},
        {"url": None},
        {"url": data_of(IMAGE), "detail": "ultra"},
        "a",
    ],
)
def test_image_part_of_another_shape_is_refused(chats: Chats, image: Any) -> None:
    answer = chats.chat({"type": "image_url", "image_url": image})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"].startswith("messages.0.content.0.image_url")


def test_image_url_with_a_lone_surrogate_is_refused(chats: Chats) -> None:
    body = json.dumps({"messages": [{"role": "user", "content": [part(IMAGE)]}]}).replace("data:", "data:\\ud800")
    answer = chats.client.post("/v1/chat/completions", content=body, headers={"content-type": "application/json"})
    assert "must be a string of ASCII" in refused(answer, "invalid_value", "messages.0.content.0.image_url.url")


def test_prompt_of_images_longer_than_the_context_is_refused(chats: Chats) -> None:
    chats.chat(part(IMAGE))
    length = len(chats.prompt)
    message = refused(chats.chat(part(IMAGE), max_tokens=8192 - length + 1), "context_length_exceeded")
    assert str(length) in message


def test_images_without_room_are_refused_until_there_is_some(chats: Chats, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reader, "ROOM_BYTES", 10_000)
    answer = chats.chat(part(file_of(noise(90, 90))))
    assert (answer.status_code, answer.json()["error"]["code"]) == (429, "queue_full")
    monkeypatch.undo()
    assert chats.chat(part(IMAGE)).status_code == 200


def test_routes_without_chats_refuse_images(chats: Chats) -> None:
    for path, field in (("/v1/completions", "prompt"), ("/v1/embeddings", "input")):
        assert chats.post(path, **{field: [part(IMAGE)]}).status_code == 400
    answer = chats.post("/api/chat", messages=[{"role": "user", "content": "a", "images": ["YWJj"]}])
    assert answer.status_code == 400


def test_server_says_that_it_accepts_images(chats: Chats, shared: Running) -> None:
    with shared.client() as client:
        for found, accepts in ((chats.client, True), (client, False)):
            assert found.get("/server_info").json()["accepts_images"] is accepts
            assert found.get("/props").json()["modalities"] == {"vision": accepts, "audio": False}


def test_model_without_an_encoder_refuses_images_as_other_media(shared: Running) -> None:
    with shared.client() as client:
        messages = [{"role": "user", "content": [part(IMAGE)]}]
        answer = client.post("/v1/chat/completions", json={"messages": messages})
        message = refused(answer, "unsupported_field", "messages.0.content.0.type")
        assert message == "messages.0.content.0.type is 'image_url': only text parts are supported"
        messages = [{"role": "user", "content": [block(IMAGE)]}]
        answer = client.post("/v1/messages", json={"model": "tiny", "messages": messages, "max_tokens": 4})
        assert "only text, tool_use, tool_result and thinking blocks are served" in answer.json()["error"]["message"]
        content = [{"type": "input_image", "image_url": data_of(IMAGE)}]
        answer = client.post("/v1/responses", json={"input": [{"role": "user", "content": content}]})
        assert "type is 'input_image': only texts are served" in refused(answer, "unsupported_field")


def test_limits_are_what_their_flags_say(tmp_path: Path) -> None:
    chats = Chats(tmp_path, max_image_bytes=len(IMAGE), limit_mm_per_prompt=1)
    try:
        assert chats.chat(part(IMAGE)).status_code == 200
        message = refused(chats.chat(part(IMAGE + b"x")), "invalid_image")
        assert f"has {len(IMAGE) + 1} bytes or more; at most {len(IMAGE)} are read (--max-image-bytes)" in message
        assert "2 images; at most 1" in refused(chats.chat(part(IMAGE), part(IMAGE)), "too_many_images")
    finally:
        chats.close()


def test_template_that_shows_no_images_is_named(tmp_path: Path) -> None:
    without = "{% for message in messages %}{{ message.role }}{% endfor %}"
    chats = Chats(tmp_path, without)
    try:
        message = refused(chats.chat(part(IMAGE)), "chat_template_error", "messages")
        assert message.startswith("the chat template wrote 0 placeholders for 1 images")
    finally:
        chats.close()


def test_chat_image_reaches_half_a_request_as_it_reaches_a_whole_one(chats: Chats) -> None:
    chats.chat(part(IMAGE), text(GREEN))
    model, key = replace(chats.model, mode=DisaggregationMode.DECODE), b"cluster-canary-0123456789"
    half = start(chats.tokenizer, chats._engine, model=model, cluster_key=key)
    content, where = [part(IMAGE), text(GREEN)], {"bootstrap_host": "10.0.0.7", "bootstrap_room": 5}
    body = {"model": "tiny", "messages": [{"role": "user", "content": content}], "max_tokens": 4, **where}
    with half.client(auth=Proven(key)) as client:
        assert client.post("/v1/chat/completions", json=body).is_success
        assert client.get("/server_info").json()["accepts_images"]
    engine = half.engine
    assert (engine.submitted[-1].prompt, engine.pictures[-1]) == (chats.prompt, chats.pictures)
    assert [its.room for its in engine.rendezvous if its] == [5]
    half.close()


@pytest.mark.parametrize(("gone", "raised"), [(True, ClientGone), (False, asyncio.CancelledError)])
def test_download_that_is_cancelled_ends_as_its_client_did(gone: bool, raised: type[BaseException]) -> None:
    admitted = AdmittedImages(SimpleNamespace(), SimpleNamespace(watch=Watch(asyncio.sleep)), [None])  # type: ignore[arg-type, list-item]
    admitted._client.watch.gone = False

    async def cancelled() -> None:
        admitted._file = lambda number: asyncio.sleep(HANGS_S)  # type: ignore[method-assign, assignment]
        task = asyncio.ensure_future(admitted._files())
        await asyncio.sleep(0)
        admitted._client.watch.gone = gone
        task.cancel()
        with pytest.raises(raised):
            await task

    asyncio.run(cancelled())


def test_source_is_forgotten_once_it_was_taken() -> None:
    body = ChatRequest.parse({"messages": [{"role": "user", "content": [part(IMAGE)]}]}, images=True)
    source = body.messages[0].images[0].image_url.url
    assert source.take() == data_of(IMAGE)
    assert source.text == ""


@pytest.mark.slow
def test_server_that_ends_ends_its_threads(tmp_path: Path) -> None:
    def threads() -> set[str]:
        ours = [thread for thread in threading.enumerate() if thread not in before]
        return {thread.name.partition("-")[0] for thread in ours} & {"image", "text"}

    before = threading.enumerate()
    chats = Chats(tmp_path)
    try:
        chats.chat(part(IMAGE), {"type": "text", "text": "word " * 1000})
        assert threads() == {"image", "text"}
    finally:
        chats.close()
    wait_until(lambda: not threads())
