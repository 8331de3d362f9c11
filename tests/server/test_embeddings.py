"""What is told of prompts behind which nothing is generated: vectors, scores and ranks."""

from __future__ import annotations

import base64
import json
import threading
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import httpx
import numpy as np
import openai
import pytest

from forebay.config.engine_config import DisaggregationMode
from forebay.engine.client.embedding import Texts, verdict
from forebay.families.base.embedding import Embedding
from forebay.requests.sampling_params import Pooling, PoolingKind, SamplingParams
from forebay.requests.updates import Failure, FinishReason
from tests.deadlines import HANGS_S
from tests.server.conftest import MODEL, Running, start
from tests.server.fake_engine import HIDDEN_SIZE, FakeEngine

EMBEDDER = Embedding(is_embedder=True, pooling="mean", why="1_Pooling/config.json says so")
JUDGE = Embedding(judges_by=(5, 6))


def texts(embedding: Embedding) -> Texts:
    return Texts(embedding=embedding, pooling=PoolingKind(embedding.pooling))


@pytest.fixture(scope="module")
def embedder(tokenizer, patience: None) -> Iterator[Running]:
    server = start(tokenizer, lambda: FakeEngine(max_running=3), model=replace(MODEL, texts=texts(EMBEDDER)))
    yield server
    server.close()


@pytest.fixture(scope="module")
def judge(tokenizer, patience: None) -> Iterator[Running]:
    server = start(tokenizer, FakeEngine, model=replace(MODEL, texts=texts(JUDGE)))
    yield server
    server.close()


def post(server: Running, path: str, **body: Any) -> httpx.Response:
    with server.client() as http:
        return http.post(path, json=body)


def unit(values: list[float]) -> np.ndarray:
    vector = np.array(values, dtype=np.float64)
    return (vector / np.linalg.norm(vector)).astype(np.float32)


def test_the_official_client_gets_vectors_in_order_more_than_run_at_once(embedder: Running) -> None:
    inputs = [f"{'x' * i}hello world" for i in range(9)]
    with openai.OpenAI(base_url=f"{embedder.url}/v1", api_key="none", max_retries=0, timeout=HANGS_S) as api:
        answer = api.embeddings.create(model="tiny", input=inputs)  # in base64, which it decodes
    embedder.until(lambda: not embedder.engine.running)
    assert embedder.engine.peak == 3
    ids = [embedder.tokenizer.encode(text) for text in inputs]
    assert [entry.index for entry in answer.data] == list(range(9))
    for entry, tokens in zip(answer.data, ids, strict=True):
        expected = unit([*tokens[:HIDDEN_SIZE], *[1.0] * 8][:HIDDEN_SIZE])
        np.testing.assert_array_equal(np.array(entry.embedding, dtype=np.float32), expected)
    assert answer.usage.prompt_tokens == answer.usage.total_tokens == sum(map(len, ids))
    assert answer.usage.cache["cached_tokens"] == 9
    assert answer.usage.prompt_tokens_details == {"cached_tokens": 9}
    assert answer.usage.weight_version == 0
    assert embedder.engine.submitted[-1].params == SamplingParams.of_pooling(Pooling(PoolingKind.MEAN))


def test_ids_fewer_dimensions_and_plain_numbers(embedder: Running) -> None:
    answer = post(embedder, "/v1/embeddings", input=[[5, 6, 7], [9] * 20], dimensions=2, encoding_format="float").json()
    assert [entry["embedding"] for entry in answer["data"]] == [unit([5, 6]).tolist(), unit([9, 9]).tolist()]
    packed = post(embedder, "/v1/embeddings", input=[5, 6, 7], encoding_format="base64").json()["data"][0]["embedding"]
    assert np.frombuffer(base64.b64decode(packed), "<f4")[:3].tolist() == unit([5, 6, 7, *[1] * 5]).tolist()[:3]


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"input": []}, "input"),
        ({"input": "a", "dimensions": HIDDEN_SIZE + 1}, "dimensions"),
        ({"input": "a", "dimensions": 0}, "dimensions"),
        ({"input": "a", "encoding_format": "int8"}, "encoding_format"),
        ({"input": ["a"] * 2049}, "input"),
        ({"input": [49152]}, "input"),
        ({"input": [5] * 8193}, "input"),
        ({"input": "a", "temperature": 0}, "temperature"),
    ],
)
def test_what_is_wrong_is_said_by_name(embedder: Running, body: dict[str, Any], param: str) -> None:
    answer = post(embedder, "/v1/embeddings", **body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param), answer.text


def test_one_failure_ends_all_others_and_is_told(launch) -> None:
    server = launch(lambda: FakeEngine(manual=True, max_running=2))
    with server.client() as http:
        refused = Failure("NumericalError", "not_finite", "it was not finite")

        def fail() -> None:
            server.engine.submitted[1].end(FinishReason.ERROR, refused)

        answers: list[httpx.Response] = []
        asking = threading.Thread(
            target=lambda: answers.append(http.post("/v1/embeddings", json={"input": ["a", "b", "c"]}))
        )
        asking.start()
        server.until(lambda: len(server.engine.submitted) == 2)
        server.call(fail)
        asking.join(HANGS_S)
    assert answers[0].json()["error"]["code"] == "not_finite"
    assert server.engine.aborted == [1]
    assert len(server.engine.submitted) == 2


def test_c27_a_client_that_leaves_ends_its_prompts(launch) -> None:
    server = launch(lambda: FakeEngine(manual=True))
    body = json.dumps({"input": ["a", "b"]}).encode()
    with server.connect() as sock:
        head = f"POST /v1/embeddings HTTP/1.1\r\nhost: localhost\r\ncontent-length: {len(body)}\r\n"
        sock.sendall(head.encode() + b"content-type: application/json\r\n\r\n" + body)
        server.until(lambda: len(server.engine.submitted) == 2)
    server.until(lambda: server.engine.aborted == [1, 2])


def test_documents_are_ranked_by_how_likely_yes_is(judge: Running) -> None:
    documents = ["one", {"text": "two"}, "three", "four"]
    answer = post(judge, "/v1/rerank", query="what", documents=documents, top_n=3).json()
    asked = judge.engine.submitted[-4:]
    assert {stream.params.pooling for stream in asked} == {Pooling(PoolingKind.LAST, (5, 6))}
    assert all("<Document>: " in judge.tokenizer.decode(stream.prompt) for stream in asked)
    scores = [verdict(np.array([-0.1 * (1 + sum(s.prompt) % 7), -0.9], "<f4").tobytes()) for s in asked]
    best = sorted(range(4), key=lambda i: -scores[i])[:3]
    assert [result["index"] for result in answer["results"]] == best
    assert [result["relevance_score"] for result in answer["results"]] == [scores[i] for i in best]
    assert answer["results"][0]["document"]["text"] in ("one", "two", "three", "four")
    pairs = post(judge, "/v1/score", text_1="what", text_2=["one", "two", "three", "four"]).json()
    assert [entry["score"] for entry in pairs["data"]] == scores


def test_scores_of_an_embedder_are_cosines(embedder: Running) -> None:
    answer = post(embedder, "/v1/score", text_1=["a", "b"], text_2=["a", "hello"]).json()
    same, other = (entry["score"] for entry in answer["data"])
    assert same == pytest.approx(1.0)
    assert 0 < other < 1
    for wrong in ({"text_2": ["a", "b", "c"]}, {"instruction": "be kind"}):
        assert post(embedder, "/v1/score", **{"text_1": ["a", "b"], "text_2": "a", **wrong}).status_code == 400


def test_what_the_checkpoint_wants_and_is_not_done_here_is_refused_by_name(launch) -> None:
    server = launch(model=replace(MODEL, texts=texts(Embedding(refused="modules.json wants a Dense"))))
    answer = post(server, "/v1/embeddings", input="a")
    assert answer.status_code == 400
    assert "Dense" in answer.text
    assert "no token" in post(server, "/v1/rerank", query="a", documents=["b"]).text  # its yes is several


def test_a_decode_server_names_where_to_go(launch) -> None:
    server = launch(model=replace(MODEL, mode=DisaggregationMode.DECODE))
    answer = post(server, "/v1/embeddings", input="a")
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "wrong_role")


def test_embeddings_of_ids_and_texts_in_one_input_are_of_their_tokens_together(embedder: Running) -> None:
    encode = embedder.tokenizer.encode
    whole = [12, 34, *encode("hello", add_special_tokens=False), 56]
    for asked, expected in (
        ([12, 34, "hello", 56], [whole]),
        (["hello", [12, 34, "hello", 56], [1, 2]], [encode("hello"), whole, [1, 2]]),
    ):
        answer = post(embedder, "/v1/embeddings", input=asked)
        assert answer.status_code == 200, answer.text
        assert [stream.prompt for stream in embedder.engine.submitted[-len(expected) :]] == expected
    for wrong in ([12, None], [[]], [1.5], [["a", -1]], [True]):
        assert post(embedder, "/v1/embeddings", input=wrong).status_code == 400, wrong


def test_rerank_of_texts_answers_in_the_form_of_text_embeddings_inference(judge: Running) -> None:
    texts = ["one", "two", "three", "four"]
    ours = post(judge, "/v1/rerank", query="what", documents=texts).json()["results"]
    theirs = post(judge, "/rerank", query="what", texts=texts, return_text=True).json()
    assert theirs == [
        {"index": each["index"], "score": each["relevance_score"], "text": texts[each["index"]]} for each in ours
    ]
    assert post(judge, "/rerank", query="what", texts=texts, raw_scores=False).json()[0].keys() == {"index", "score"}
    for wrong in ({}, {"texts": texts, "documents": texts}, {"texts": texts, "raw_scores": True}):
        assert post(judge, "/rerank", query="what", **wrong).status_code == 400
