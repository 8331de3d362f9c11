"""Answers of a server whose model is a text encoder: labels, pairs, vectors of tokens, and refusals that say what it
can do."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import httpx
import numpy as np
import pytest

from forebay.engine.client.embedding import Encoder, Texts, as_type, unweighed_ids
from forebay.families.base.embedding import Embedding
from forebay.requests.sampling_params import Pooling, PoolingKind, SamplingParams
from tests.server.conftest import MODEL, Running, start
from tests.server.fake_engine import HIDDEN_SIZE, FakeEngine
from tests.together import together

VOCAB = 49152
PLAIN = Encoder(model_type="bert", vocab_size=VOCAB, num_types=2)
LABELS = ("good", "bad", "none")
PROMPTS = (("query", "find: "), ("document", ""))


def texts(encoder: Encoder, **embedding: Any) -> Texts:
    found = Embedding(is_embedder=True, pooling="cls", **embedding)
    return Texts(embedding=found, pooling=PoolingKind.CLS, encoder=encoder)


def serve(tokenizer: Any, encoder: Encoder, **embedding: Any) -> Running:
    model = replace(MODEL, texts=texts(encoder, **embedding))
    return start(tokenizer, lambda: FakeEngine(num_labels=len(encoder.labels)), model=model)


@pytest.fixture(scope="module")
def embedder(tokenizer, patience: None) -> Iterator[Running]:
    server = serve(tokenizer, PLAIN, prompts=PROMPTS, default_prompt="document")
    yield server
    server.close()


@pytest.fixture(scope="module")
def classifier(tokenizer, patience: None) -> Iterator[Running]:
    server = serve(tokenizer, replace(PLAIN, labels=LABELS))
    yield server
    server.close()


@pytest.fixture(scope="module")
def ranker(tokenizer, patience: None) -> Iterator[Running]:
    server = serve(tokenizer, replace(PLAIN, labels=("fits",)))
    yield server
    server.close()


def post(server: Running, path: str, **body: Any) -> httpx.Response:
    with server.client() as http:
        return http.post(path, json=body)


def shares(ids: list[int]) -> np.ndarray:
    logits = np.array([0.1 * (ids[-1] % 7), 0.3, -0.2], dtype=np.float32).astype(float)
    return np.exp(logits) / np.exp(logits).sum()


def test_classify_texts_have_their_probabilities_and_likeliest_label(classifier: Running) -> None:
    answer = post(classifier, "/classify", input=["hello world", "x"]).json()
    for entry, text in zip(answer["data"], ["hello world", "x"], strict=True):
        expected = shares(classifier.tokenizer.encode(text))
        np.testing.assert_allclose(entry["probs"], expected, rtol=1e-6)
        assert (entry["label"], entry["num_classes"]) == (LABELS[expected.argmax()], 3)
    wanted = SamplingParams.of_pooling(Pooling(PoolingKind.CLS, head=True))
    assert classifier.engine.submitted[-1].params == wanted


def test_predict_labels_come_likeliest_first_for_one_text_and_for_several(classifier: Running) -> None:
    one = post(classifier, "/predict", inputs="x").json()
    several = post(classifier, "/predict", inputs=["x", "hello"]).json()
    assert several[0] == one
    assert [each["score"] for each in one] == sorted((each["score"] for each in one), reverse=True)
    assert {each["label"] for each in one} == set(LABELS)


def test_classify_head_of_tokens_labels_each_token(tokenizer, patience: None) -> None:
    server = serve(tokenizer, replace(PLAIN, labels=LABELS, of_tokens=True))
    (entry,) = post(server, "/classify", input="hello world").json()["data"]
    refused = post(server, "/predict", inputs="x").json()["error"]
    server.close()
    ids = tokenizer.encode("hello world")
    np.testing.assert_allclose(entry["probs"], [shares([token]) for token in ids], rtol=1e-6)
    assert len(entry["label"]) == len(ids)
    assert refused["code"] == "no_labels"


@pytest.mark.parametrize("path", ["/v1/rerank", "/rerank"])
def test_rerank_text_encoder_scores_each_pair_by_its_head(ranker: Running, path: str) -> None:
    answer = post(ranker, path, query="hello", documents=["x", "hello world"]).json()
    for result in answer["results"]:
        ids, kinds = ranker.tokenizer.encode_pair("hello", result["document"]["text"])
        pair = [token + VOCAB * kind for token, kind in zip(ids, kinds, strict=True)]
        logit = np.float64(np.float32(0.1 * (pair[-1] % 7)))
        assert result["relevance_score"] == pytest.approx(1 / (1 + np.exp(-logit)), rel=1e-6)
        assert pair in [stream.prompt for stream in ranker.engine.submitted]


def test_score_text_encoder_without_a_head_compares_vectors(embedder: Running) -> None:
    data = post(embedder, "/score", text_1="hello", text_2=["hello", "x"]).json()["data"]
    assert data[0]["score"] == pytest.approx(1.0)
    assert data[1]["score"] < 1.0


@pytest.fixture(scope="module")
def weigher(tokenizer, patience: None) -> Iterator[Running]:
    model = replace(MODEL, texts=texts(replace(PLAIN, lexical=(0, 1)), prompts=PROMPTS))
    server = start(tokenizer, lambda: FakeEngine(num_labels=1), model=model)
    yield server
    server.close()


def words_of(tokenizer: Any, text: str) -> dict[int, float]:
    """What the fake engine gives each token, without those around a text."""
    ids = set(tokenizer.encode(text)) - unweighed_ids(tokenizer)
    weights = {token: float(np.float32(0.1 * (token % 7))) for token in sorted(ids)}
    return {token: weight for token, weight in weights.items() if weight}


@together("path", ["/embed", "/rerank"])
def test_tei_truncate_cuts_no_text_and_one_above_the_context_is_refused_with_or_without(
    path: str, embedder: Running
) -> None:
    name = "inputs" if path == "/embed" else "texts"
    more = {} if path == "/embed" else {"query": "what"}
    plain = post(embedder, path, **{name: ["hello"]}, **more)
    assert plain.status_code == 200
    for truncate in (True, False):
        assert post(embedder, path, **{name: ["hello"]}, **more, truncate=truncate).json() == plain.json()
        long = post(embedder, path, **{name: ["a " * 100_000]}, **more, truncate=truncate)
        assert (long.status_code, long.json()["error"]["code"]) == (400, "context_length_exceeded")


def test_embed_sparse_each_word_has_its_weight_once(weigher: Running) -> None:
    asked = ["hello world hello", "x"]
    answer = post(weigher, "/embed_sparse", inputs=asked).json()
    assert [{word["index"]: word["value"] for word in words} for words in answer] == [
        words_of(weigher.tokenizer, text) for text in asked
    ]
    assert post(weigher, "/embed_sparse", inputs="x").json() == answer[1:]
    wanted = SamplingParams.of_pooling(Pooling(PoolingKind.ALL, head=True, outputs=(0, 1)))
    assert weigher.engine.submitted[-1].params == wanted
    named = post(weigher, "/embed_sparse", inputs="x", prompt_name="query").json()
    assert {word["index"]: word["value"] for word in named[0]} == words_of(weigher.tokenizer, "find: x")


def test_pooling_token_classify_has_the_weight_of_each_word(weigher: Running) -> None:
    (entry,) = post(weigher, "/pooling", input="hello hello", task="token_classify").json()["data"]
    ids = [token for token in weigher.tokenizer.encode("hello hello") if token not in unweighed_ids(weigher.tokenizer)]
    assert entry["data"] == [[float(np.float32(0.1 * (token % 7)))] for token in ids]


@pytest.mark.parametrize("packed", [False, True])
def test_pooling_each_token_has_a_vector(embedder: Running, packed: bool) -> None:
    asked = {"encoding_format": "base64"} if packed else {}
    (entry,) = post(embedder, "/pooling", input="hello world", **asked).json()["data"]
    got = np.frombuffer(base64.b64decode(entry["data"]), "<f4").reshape(-1, HIDDEN_SIZE) if packed else entry["data"]
    ids = embedder.tokenizer.encode("hello world")
    np.testing.assert_array_equal(got, [[token] * HIDDEN_SIZE for token in ids])


def test_embed_text_stands_behind_the_prompt_of_its_task(embedder: Running) -> None:
    for body, text in (({}, "hello"), ({"prompt_name": "query"}, "find: hello")):
        whole = post(embedder, "/embed", inputs="hello", dimensions=3, **body).json()
        same = post(embedder, "/v1/embeddings", input=["hello"], dimensions=3, **body).json()["data"][0]["embedding"]
        assert whole == [same]
        assert embedder.engine.submitted[-1].prompt == embedder.tokenizer.encode(text)
    assert post(embedder, "/v1/embeddings", input=[5, 6], prompt_name="query").status_code == 200
    assert embedder.engine.submitted[-1].prompt == [5, 6]


@pytest.mark.parametrize("dtype", ["int8", "binary", "ubinary"])
def test_embeddings_output_type_is_that_of_the_float_vector(embedder: Running, dtype: str) -> None:
    def vector(**asked: Any) -> Any:
        return post(embedder, "/v1/embeddings", input=[5, 60, 7], **asked).json()["data"][0]["embedding"]

    expected = as_type(np.array(vector(), dtype=np.float32), dtype)
    assert vector(output_dtype=dtype) == expected.tolist()
    packed = base64.b64decode(vector(output_dtype=dtype, encoding_format="base64"))
    assert packed == expected.tobytes()
    assert len(packed) == (HIDDEN_SIZE if dtype == "int8" else -(-HIDDEN_SIZE // 8))


def test_as_type_signs_and_ends_are_exact() -> None:
    vector = np.array([1.0, -1.0, 0.0, 0.5, -0.5, 0.004, 0.003, 2.0, 1.0], dtype=np.float32)
    assert as_type(vector, "int8").tolist() == [127, -127, 0, 64, -64, 1, 0, 127, 127]
    assert as_type(vector, "ubinary").tolist() == [0b10010111, 0b10000000]
    assert as_type(vector, "binary").tolist() == [0b10010111 - 128, 0]


REFUSED = {
    "chat": ("embedder", "/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}]}, "not_a_decoder"),
    "completion": ("ranker", "/v1/completions", {"prompt": "hi"}, "not_a_decoder"),
    "responses": ("classifier", "/v1/responses", {"input": "hi"}, "not_a_decoder"),
    "generate": ("embedder", "/generate", {"text": "hi"}, "not_a_decoder"),
    "no labels": ("embedder", "/classify", {"input": "hi"}, "no_labels"),
    "several labels": ("classifier", "/v1/rerank", {"query": "a", "documents": ["b"]}, "unsupported_field"),
    "instruction": (
        "ranker",
        "/v1/rerank",
        {"query": "a", "documents": ["b"], "instruction": "c"},
        "unsupported_field",
    ),
    "prompt": ("embedder", "/v1/embeddings", {"input": "a", "prompt_name": "passage"}, "unknown_prompt"),
    "no weights": ("embedder", "/embed_sparse", {"inputs": "a"}, "no_token_weights"),
    "no token weights": ("ranker", "/pooling", {"input": "a", "task": "token_classify"}, "no_token_weights"),
    "other task": ("embedder", "/pooling", {"input": "a", "task": "classify"}, "invalid_value"),
    "no prompt": ("weigher", "/embed_sparse", {"inputs": "a", "prompt_name": "passage"}, "unknown_prompt"),
    "not normal": ("embedder", "/embed", {"inputs": "a", "normalize": False}, "invalid_value"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_text_encoder_refuses_by_name_what_it_cannot_do(request: pytest.FixtureRequest, case: str) -> None:
    fixture, path, body, code = REFUSED[case]
    server: Running = request.getfixturevalue(fixture)
    before = len(server.engine.submitted)
    answer = post(server, path, **body)
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["code"] == code
    assert len(server.engine.submitted) == before


def test_classify_decoder_is_told_that_there_is_no_head(launch) -> None:
    server = launch(FakeEngine)
    answer = post(server, "/classify", input="hi")
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "no_labels")
    assert "answers" in answer.json()["error"]["message"]
