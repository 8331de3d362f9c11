"""/completion and the routes beside it as llama-server's clients know them."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

import httpx
import pytest

from forebay.config.engine_config import CacheIsolation
from forebay.families.base.sampling import SamplingDefaults
from forebay.http.workers import INLINE_CHARS
from forebay.requests.updates import Failure, FinishReason
from forebay.server.api import tokens
from forebay.server.api.llama.request import LlamaCompletionRequest
from tests.server.conftest import Running, start
from tests.server.fake_engine import FakeEngine
from tests.server.test_refusals import assert_said
from tests.text.tiny_tokenizer import tiny_tokenizer

SAID = "hello\nworld STOP more"
TIMINGS = {
    "cache_n", "prompt_n", "prompt_ms", "prompt_per_token_ms", "prompt_per_second", "predicted_n", "predicted_ms",
    "predicted_per_token_ms", "predicted_per_second",
}  # fmt: skip


@pytest.fixture(scope="module")
def speaking(patience: None) -> Iterator[Running]:
    tokenizer = tiny_tokenizer()
    sampling = SamplingDefaults({"temperature": 0.25, "seed": 9}, "the test")
    engine = lambda: FakeEngine(lambda prompt, params: tokenizer.encode(SAID), width=2)  # noqa: E731
    server = start(tokenizer, engine, sampling=sampling)
    yield server
    server.close()


def ask(server: Running, path: str = "/completion", **body: Any) -> Any:
    with server.client() as client:
        answer = client.post(path, json=body) if body else client.get(path)
    assert answer.status_code == 200, answer.text
    return answer


def events(server: Running, **body: Any) -> list[dict[str, Any]]:
    answer = ask(server, **body, stream=True)
    assert answer.headers["content-type"].startswith("text/event-stream")
    lines = answer.text.split("\n\n")
    assert lines.pop() == ""
    return [json.loads(line.removeprefix("data: ")) for line in lines]


def test_completion_whole_and_streamed_have_the_same_text_and_the_same_end(speaking: Running) -> None:
    body = {"prompt": "hi", "n_predict": 90, "temperature": 0, "stop": ["STOP"], "seed": 3, "repeat_penalty": 1.5}
    whole = ask(speaking, **body).json()
    assert (whole["content"], whole["stop_type"], whole["stopping_word"]) == ("hello\nworld ", "word", "STOP")
    assert (whole["tokens_evaluated"], whole["tokens_cached"], whole["has_new_line"]) == (2, 1, True)
    assert whole["generation_settings"].items() >= {
        "temperature": 0.0, "seed": 3, "n_predict": 90, "repeat_penalty": 1.5, "stop": ["STOP"],
    }.items()  # fmt: skip
    params = speaking.engine.submitted[-1].params
    assert (params.seed, params.repetition_penalty, params.max_tokens) == (3, 1.5, 90)
    *parts, last = events(speaking, **body)
    assert [part["stop"] for part in parts] == [False] * len(parts)
    assert "".join(part["content"] for part in parts) == whole["content"]
    assert {**last, "timings": 0} == {
        **whole, "content": "", "timings": 0, "generation_settings": {**whole["generation_settings"], "stream": True},
    }  # fmt: skip


def test_completion_timings_are_measured_and_counted(speaking: Running) -> None:
    *parts, last = events(speaking, prompt="hi", n_predict=90, timings_per_token=True)
    timings = [part["timings"] for part in (*parts, last)]
    assert all(set(each) == TIMINGS for each in timings)
    assert [each["predicted_n"] for each in timings] == [part["tokens_predicted"] for part in (*parts, last)]
    assert (last["timings"]["cache_n"], last["timings"]["prompt_n"]) == (1, 1)
    assert last["timings"]["prompt_ms"] > 0
    assert all(earlier["predicted_ms"] <= later["predicted_ms"] for earlier, later in pairwise(timings))
    first = timings[0]
    assert first["predicted_ms"] == 0
    assert first["predicted_per_second"] is None, "nothing was measured"
    assert "timings" not in events(speaking, prompt="hi", n_predict=3)[0]


def test_completion_tokens_come_with_their_probabilities(speaking: Running) -> None:
    tokens = speaking.tokenizer.encode(SAID)
    whole = ask(speaking, prompt="hi", n_probs=2, return_tokens=True).json()
    assert whole["tokens"] == tokens
    found = whole["completion_probabilities"]
    assert [entry["id"] for entry in found] == tokens
    assert found[0].keys() == {"id", "token", "bytes", "logprob", "top_logprobs"}
    assert [len(entry["top_logprobs"]) for entry in found] == [2] * len(tokens)
    plain = ask(speaking, prompt="hi", return_tokens=True).json()
    assert (plain["tokens"], "completion_probabilities" in plain) == (tokens, False)
    parts = events(speaking, prompt="hi", n_probs=1, return_tokens=True)
    assert [token for part in parts for token in part["tokens"]] == tokens


def test_completion_several_prompts_are_answered_in_a_list(speaking: Running) -> None:
    ids = speaking.tokenizer.encode("hi")
    found = ask(speaking, prompt=["hi", ids], n_predict=2).json()
    assert [(one["index"], one["prompt"], one["stop_type"]) for one in found] == [
        (0, "hi", "limit"),
        (1, "hi", "limit"),
    ]
    assert all("timings" not in one for one in found), "they are not measured for each"


def test_completion_without_tokens_reads_the_prompt(speaking: Running) -> None:
    whole = ask(speaking, prompt="hi", n_predict=0).json()
    assert (whole["content"], whole["tokens_predicted"], whole["stop_type"]) == ("", 0, "limit")


def test_completion_without_values_has_the_operators_defaults(speaking: Running) -> None:
    whole = ask(speaking, prompt="hi", seed=-1, cache_prompt=True, id_slot=3).json()
    assert whole["generation_settings"].items() >= {"temperature": 0.25, "n_predict": -1}.items()
    assert ask(speaking, prompt="hi").json()["generation_settings"]["seed"] == 9
    assert ask(speaking, prompt="hi", seed=2**32 - 1).json()["generation_settings"]["seed"] == -1
    answer = ask(speaking, prompt="hi", cache_prompt=True, id_slot=3)
    assert answer.headers["x-forebay-ignored"] == "cache_prompt, id_slot"


@pytest.mark.parametrize("bias", [{"7": -100.0, "8": 1.5}, [[7, False], [8, 1.5]]])
def test_completion_bias_is_taken_in_both_forms(speaking: Running, bias: Any) -> None:
    ask(speaking, prompt="hi", n_predict=1, logit_bias=bias)
    assert speaking.engine.submitted[-1].params.logit_bias == {7: -100.0, 8: 1.5}


@pytest.mark.quick(1)
@pytest.mark.parametrize("field", [{"json_schema": {"type": "integer"}}, {"grammar": 'root ::= "a"'}])
def test_completion_grammar_constrains_the_answer(speaking: Running, field: dict[str, Any]) -> None:
    ask(speaking, prompt="hi", n_predict=1, **field)
    assert speaking.engine.submitted[-1].params.grammar is not None


NEUTRAL = {"mirostat": 0, "typical_p": 1.0, "dry_multiplier": 0.0, "xtc_probability": 0, "dynatemp_range": 0.0}


@pytest.mark.parametrize("name", NEUTRAL)
def test_completion_sampler_that_is_not_there_passes_only_if_left_out(speaking: Running, name: str) -> None:
    ask(speaking, prompt="hi", n_predict=1, **{name: NEUTRAL[name]}, mirostat_tau=5.0, repeat_last_n=64)
    assert_said(LlamaCompletionRequest, {"prompt": "hi", name: 0.5}, "unsupported_field", name, "leave it out")


@pytest.mark.parametrize(
    ("body", "code", "param", "words"),
    [
        ({"n_predict": -2}, "invalid_value", "n_predict", "at least -1"),
        ({"repeat_penalty": 1.1, "repeat_last_n": 64}, "unsupported_field", "repeat_last_n", "over all tokens"),
        ({"grammar": "x", "json_schema": {}}, "invalid_combination", "grammar", "send one of them"),
        (
            {"logit_bias": [[[], 1]]},
            "invalid_value",
            "logit_bias.0.0",
            "must be an integer, a number or true",
        ),
        ({"logit_bias": [[7, True]]}, "invalid_value", "logit_bias", "token id"),
        ({"logit_bias": [[7.5, 1]]}, "invalid_value", "logit_bias", "token id"),
        ({"stop": ["é" * 200]}, "invalid_value", "stop", "bytes"),
        ({"samplers": ["top_k"]}, "unknown_field", "samplers", "this sampler is not"),
        ({"infill": 1}, "unknown_field", "infill", ""),
    ],
)
def test_completion_refusal_names_the_clients_own_field(
    body: dict[str, Any], code: str, param: str, words: str
) -> None:
    assert_said(LlamaCompletionRequest, {"prompt": "hi", **body}, code, param, words)


def test_completion_errors_have_llama_servers_shape(speaking: Running) -> None:
    with speaking.client() as client:
        wrong = client.post("/completion", json={"prompt": "hi", "n_predict": -7})
        long = client.post("/completion", json={"prompt": [5] * 9000})
        absent = client.post("/completion", json={"prompt": "hi", "model": "other"})
    assert wrong.json()["error"] == {
        "code": 400, "message": "n_predict must be at least -1, not -7", "type": "invalid_request_error",
        "param": "n_predict",
    }  # fmt: skip
    assert (long.status_code, long.json()["error"]["type"]) == (400, "exceed_context_size_error")
    assert (absent.status_code, absent.json()["error"]["type"]) == (404, "not_found_error")


def test_completion_failure_ends_the_stream_in_llama_servers_shape(launch: Callable[..., Running]) -> None:
    server = launch(lambda: FakeEngine(manual=True))
    with sent(server, prompt="hi", stream=True) as sock:
        server.until(lambda: bool(server.engine.running))
        (stream,) = server.engine.running.values()
        server.call(server.engine.step)
        server.call(stream.end, FinishReason.ERROR, Failure(code="nonfinite", message="no number", kind="engine"))
        said = b""
        while not said.endswith(b"0\r\n\r\n"):
            said += sock.recv(1 << 16)
    last = said.split(b"data: ")[-1].partition(b"\n")[0]
    assert json.loads(last)["error"].keys() == {"code", "message", "type", "param"}


def sent(server: Running, **body: Any) -> socket.socket:
    """A connection on which a completion was asked for, and no answer read."""
    content = json.dumps(body).encode()
    sock = server.connect()
    kind = "host: localhost\r\ncontent-type: application/json"
    head = f"POST /completion HTTP/1.1\r\n{kind}\r\ncontent-length: {len(content)}"
    sock.sendall(head.encode() + b"\r\n\r\n" + content)
    return sock


def test_apply_template_returns_the_text_of_the_chats_prompt(speaking: Running) -> None:
    messages = [{"role": "user", "content": "say <|im_end|>"}]
    text = ask(speaking, "/apply-template", messages=messages).json()["prompt"]
    ask(speaking, "/v1/chat/completions", messages=messages, max_tokens=1)
    computed = speaking.engine.submitted[-1].prompt
    assert text == speaking.tokenizer.decode(computed, skip_special_tokens=False)


def test_tokenize_content_reads_control_tokens_unless_told_not_to(speaking: Running) -> None:
    found = ask(speaking, "/tokenize", content="é <|im_end|>", with_pieces=True).json()["tokens"]
    assert [entry["piece"] for entry in found][-1] == "<|im_end|>"
    plain = ask(speaking, "/tokenize", content="é <|im_end|>", parse_special=False).json()
    assert plain["count"] > len(found)
    assert ask(speaking, "/tokenize", content="hi").json()["tokens"] == speaking.tokenizer.encode(
        "hi", add_special_tokens=False
    )
    assert ask(speaking, "/detokenize", tokens=[entry["id"] for entry in found]).json()["content"] == "é <|im_end|>"


def test_tokenize_piece_that_is_no_text_is_a_list_of_bytes(speaking: Running) -> None:
    found = ask(speaking, "/tokenize", content="\U0001f9ff", with_pieces=True).json()["tokens"]
    raw = b"".join(bytes(p) if isinstance(p := entry["piece"], list) else p.encode() for entry in found)
    assert raw.decode() == "\U0001f9ff"
    assert any(isinstance(entry["piece"], list) for entry in found)


def recorded(monkeypatch: pytest.MonkeyPatch, name: str) -> list[str]:
    """Of each call of a function of the routes for tokens, the name of the thread."""
    seen, function = list[str](), getattr(tokens, name)

    def called(*args: Any) -> Any:
        seen.append(threading.current_thread().name)
        return function(*args)

    monkeypatch.setattr(tokens, name, called)
    return seen


@pytest.mark.parametrize("num", [1, 4 * tokens.INLINE_PIECES])
def test_c32_tokenize_pieces_of_a_long_text_leave_the_event_loop(
    speaking: Running, monkeypatch: pytest.MonkeyPatch, num: int
) -> None:
    """Else all other keys' requests wait for them."""
    seen = recorded(monkeypatch, "_piece")
    count = ask(speaking, "/tokenize", content="a" * num, with_pieces=True).json()["count"]
    assert len(seen) == count
    assert {name.startswith("JSON") for name in seen} == {count > tokens.INLINE_PIECES} == {num > 1}


@pytest.mark.parametrize("num", [9, 2 * INLINE_CHARS])
def test_c32_detokenize_of_many_tokens_leaves_the_event_loop(
    speaking: Running, monkeypatch: pytest.MonkeyPatch, num: int
) -> None:
    seen = recorded(monkeypatch, "check_token_ids")
    assert ask(speaking, "/detokenize", tokens=[5] * num).json()["content"]
    with speaking.client() as client:
        refused = client.post("/detokenize", json={"tokens": [5] * num + [1 << 29]})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "tokens")
    assert [name.startswith("text") for name in seen] == [num > INLINE_CHARS] * 2


def test_props_return_defaults_and_template(speaking: Running) -> None:
    found = ask(speaking, "/props").json()
    assert found["default_generation_settings"]["params"].items() >= {"temperature": 0.25, "seed": 9}.items()
    assert found["default_generation_settings"]["n_ctx"] == 8192
    assert (found["model_alias"], found["total_slots"], found["is_sleeping"]) == ("tiny", 64, False)
    assert "<|im_start|>" in found["chat_template"]
    assert found["eos_token"] == "<|im_end|>"


def test_slots_count_running_requests_and_show_no_prompt(launch: Callable[..., Running]) -> None:
    """C29: nothing of a client's prompt reaches another."""
    server = launch(lambda: FakeEngine(manual=True, max_running=2))
    with server.client() as other:
        assert processing(other.get("/slots")) == [False, False]
        with sent(server, prompt="a secret", stop=["a secret"]):
            server.until(lambda: len(server.engine.running) == 1)
            told = other.get("/slots?fail_on_no_slot=1")
            assert processing(told) == [True, False]
            assert "secret" not in told.text + other.get("/props").text
            with sent(server, prompt="another"):
                server.until(lambda: len(server.engine.running) == 2)
                full = other.get("/slots?fail_on_no_slot=1")
    assert (full.status_code, full.json()["error"]["type"]) == (503, "unavailable_error")


def processing(answer: httpx.Response) -> list[bool]:
    assert answer.status_code == 200
    return [slot["is_processing"] for slot in answer.json()]


def test_slots_are_for_admins_if_clients_are_kept_apart(launch: Callable[..., Running]) -> None:
    """C29: what is counted over all clients is not told to one of them."""
    keys = {"api_keys": ("alice-key-0123456789", "bob-key-0123456789"), "admin_api_keys": ("admin-key-0123456789",)}
    server = launch(**keys, cache_isolation=CacheIsolation.KEY)
    statuses = {}
    with server.client() as client:
        for key in ("alice-key-0123456789", "admin-key-0123456789"):
            statuses[key[:5]] = client.get("/slots", headers={"authorization": f"Bearer {key}"}).status_code
    assert statuses == {"alice": 403, "admin": 200}
