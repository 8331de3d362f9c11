"""Parts of one answer keep their order in the prompt of the next turn, the same in every dialect, and so do results."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from itertools import pairwise, permutations, product
from typing import Any

import pytest

from forebay.base.errors import InvalidRequest
from forebay.server.api.anthropic.messages_request import MessagesRequest
from forebay.server.protocol.requests import ChatRequest
from forebay.server.protocol.results import check_results
from forebay.text.answers.probes import find_formats
from forebay.text.histories import CALLS, TEXT, HistoryRules, adapted, kinds_of
from tests.server.scripted_server import ScriptedServer
from tests.text.answers.templates import GPT_OSS, LLAMA, QWEN3_THINKING, QWEN25
from tests.text.tiny_tokenizer import tiny_tokenizer

ASK = {"role": "user", "content": "Go."}
FUNCTION: dict[str, Any] = {"name": "run", "parameters": {"type": "object", "properties": {"n": {"type": "string"}}}}
# Messages of the assistant in a row have no end of a turn between them.
IN_ORDER = (
    "{% for t in tools or [] %}<tool_call>{{ t | tojson }}{% endfor %}"
    "{% for m in messages %}{% set before = messages[loop.index0 - 1].role if loop.index0 else '' %}"
    "{% if m.role != 'assistant' or before != 'assistant' %}<|im_start|>{{ m.role }}\n{% endif %}{{ m.content or '' }}"
    '{% for c in m.tool_calls or [] %}<tool_call>\n{"name": "{{ c.function.name }}", "arguments": '
    "{{ c.function.arguments | tojson }}}\n</tool_call>{% endfor %}"
    "{% set behind = '' if loop.last else messages[loop.index0 + 1].role %}"
    "{% if m.role != 'assistant' or behind != 'assistant' %}<|im_end|>\n{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TEMPLATES = {"joined": QWEN3_THINKING, "in order": IN_ORDER, "one call": LLAMA, "channels": GPT_OSS}
PARTS = {"t": "thinking", "x": "text", "c": "tool_use"}
# Of thinking (t), texts (x) and calls (c) of one answer, numbered as they come: what the template receives.
JOINED = {
    "txc": "t0 x1 c2",
    "tctc": "t0 t2 c1 c3",
    "txtx": "t0 t2 x1 x3",
    "cxc": "x1 c0 c2",
    "xcxc": "x0 x2 c1 c3",
    "tctxc": "t0 t2 x3 c1 c4",
    "tcctc": "t0 t3 c1 c2 c4",
}


@pytest.fixture(scope="module")
def model(patience: None) -> Iterator[Callable[[str], ScriptedServer]]:
    made: dict[str, ScriptedServer] = {}
    with ExitStack() as undo:

        def get(name: str) -> ScriptedServer:
            if name not in made:
                made[name] = ScriptedServer(TEMPLATES[name])
                made[name].answer = "Well."
                undo.callback(made[name].server.close)
            return made[name]

        yield get


def word(kind: str, number: int) -> str:
    return f"{kind}{number}"


def shown(model: ScriptedServer, path: str, body: dict[str, Any]) -> str:
    limit = "max_output_tokens" if path == "/v1/responses" else "max_tokens"
    with model.server.client() as client:
        answer = client.post(path, json={"model": "tiny", limit: 5, **body})
    assert answer.status_code == 200, answer.text
    return model.prompt()


def messages_of(answer: str) -> dict[str, Any]:
    """Return a request of /v1/messages whose assistant's blocks are `answer`."""
    blocks, results = [], []
    for number, kind in enumerate(answer):
        name = word(kind, number)
        match kind:
            case "t":
                blocks.append({"type": "thinking", "thinking": name, "signature": "s"})
            case "x":
                blocks.append({"type": "text", "text": name})
            case "c":
                blocks.append({"type": "tool_use", "id": name, "name": "run", "input": {"n": name}})
                results.append({"type": "tool_result", "tool_use_id": name, "content": f"r{number}"})
    said = [ASK, {"role": "assistant", "content": blocks}, {"role": "user", "content": results or "More."}]
    tools = [{"name": "run", "input_schema": FUNCTION["parameters"]}]
    return {"messages": said, "tools": tools, "thinking": {"type": "adaptive"}}


def responses_of(answer: str) -> dict[str, Any]:
    items: list[dict[str, Any]] = [ASK]
    outputs: list[dict[str, Any]] = []
    for number, kind in enumerate(answer):
        name = word(kind, number)
        match kind:
            case "t":
                items.append({"type": "reasoning", "content": [{"type": "reasoning_text", "text": name}]})
            case "x":
                items.append({"role": "assistant", "content": name})
            case "c":
                items.append(
                    {"type": "function_call", "call_id": name, "name": "run", "arguments": f'{{"n": "{name}"}}'}
                )
                outputs.append({"type": "function_call_output", "call_id": name, "output": f"r{number}"})
    tools = [{"type": "function", **FUNCTION}]
    return {"input": [*items, *(outputs or [{"role": "user", "content": "More."}])], "tools": tools}


def chat_of(answer: str) -> dict[str, Any]:
    """Return a chat with a message for each part, as clients that stream into one message a part send it."""
    said: list[dict[str, Any]] = []
    results: list[dict[str, Any]] = []
    for number, kind in enumerate(answer):
        name = word(kind, number)
        call = {"id": name, "type": "function", "function": {"name": "run", "arguments": f'{{"n": "{name}"}}'}}
        own = {"t": {"reasoning_content": name}, "x": {"content": name}, "c": {"tool_calls": [call]}}[kind]
        said.append({"role": "assistant", **own})
        if kind == "c":
            results.append({"role": "tool", "tool_call_id": name, "content": f"r{number}"})
    more = results or [{"role": "user", "content": "More."}]
    return {"messages": [ASK, *said, *more], "tools": [{"type": "function", "function": FUNCTION}]}


def names_in(prompt: str, answer: str, *, results: bool = False) -> str:
    """Return the parts in the order in which the prompt has them."""
    wanted = [word(kind, number) for number, kind in enumerate(answer)]
    if results:
        wanted += [f"r{number}" for number, kind in enumerate(answer) if kind == "c"]
    behind = prompt[prompt.index("Go.") :]
    found = [name for name in wanted if name in behind]
    return " ".join(sorted(found, key=behind.index))


@pytest.mark.parametrize("answer", JOINED)
def test_answer_is_shown_the_same_by_every_dialect(model: Callable[[str], ScriptedServer], answer: str) -> None:
    served = model("joined")
    prompts = {
        shown(served, path, make(answer))
        for path, make in (
            ("/v1/messages", messages_of),
            ("/v1/responses", responses_of),
            ("/v1/chat/completions", chat_of),
        )
    }
    assert len(prompts) == 1, prompts
    (prompt,) = prompts
    assert names_in(prompt, answer) == JOINED[answer]
    assert prompt.count("<|im_start|>assistant") == 2, "one answer is one turn"


@pytest.mark.parametrize("answer", ["xcxc", "cxc", "xcxcx"])
def test_template_without_ends_between_gets_the_order_that_the_model_wrote(
    model: Callable[[str], ScriptedServer], answer: str
) -> None:
    for path, make in (("/v1/messages", messages_of), ("/v1/responses", responses_of)):
        prompt = shown(model("in order"), path, make(answer))
        assert names_in(prompt, answer) == " ".join(word(kind, number) for number, kind in enumerate(answer))
        assert prompt.count("<|im_start|>assistant") == 2


def test_template_of_one_call_gets_each_with_its_own_thinking_and_result(
    model: Callable[[str], ScriptedServer],
) -> None:
    expected = {"one call": "c1 r1 c3 r3", "channels": "t0 c1 r1 t2 c3 r3"}
    for name, order in expected.items():
        assert names_in(shown(model(name), "/v1/messages", messages_of("tctc")), "tctc", results=True) == order


def test_split_is_found_only_where_the_template_writes_no_end_of_a_turn() -> None:
    assert find_formats(tiny_tokenizer(template=IN_ORDER)).history.interleaved == {(CALLS, TEXT)}
    assert not find_formats(tiny_tokenizer(template=QWEN25)).history.interleaved


@pytest.mark.parametrize("interleaved", [frozenset(), frozenset({(CALLS, TEXT)}), frozenset({(CALLS, "thinking")})])
def test_adapted_answers_lose_and_repeat_no_part(interleaved: frozenset[tuple[str, str]]) -> None:
    rules = HistoryRules(interleaved=interleaved)
    for kinds in product("txc", repeat=4):
        said = chat_of("".join(kinds))["messages"]
        messages = [{"content": None, **message} for message in said]
        made = adapted(messages, rules).messages
        answers = [message for message in made if message["role"] == "assistant"]
        for one, other in pairwise(answers):
            if kinds == ("x",) * 4:
                continue  # turns of their own
            assert (kinds_of(one)[-1], kinds_of(other)[0]) in interleaved
        found = "".join(
            f"{each.get('reasoning_content', '')}{each['content'] or ''}"
            + "".join(call["id"] for call in each.get("tool_calls", ()))
            for each in answers
        )
        assert all(found.count(word(kind, number)) == 1 for number, kind in enumerate(kinds))


# -- results -----------------------------------------------------------------------------------------------------------

MAKERS = {"/v1/messages": messages_of, "/v1/responses": responses_of, "/v1/chat/completions": chat_of}


def results_of(path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the list that holds the results, to change it."""
    if path == "/v1/messages":
        content: list[dict[str, Any]] = body["messages"][-1]["content"]
        return content
    found: list[dict[str, Any]] = body["input" if path == "/v1/responses" else "messages"]
    return found


@pytest.mark.parametrize("path", MAKERS)
def test_results_in_any_order_are_shown_in_that_of_the_calls(model: Callable[[str], ScriptedServer], path: str) -> None:
    for order in permutations(range(3)):
        body = MAKERS[path]("ccc")
        found = results_of(path, body)
        found[-3:] = [found[-3:][number] for number in order]
        assert names_in(shown(model("joined"), path, body), "ccc", results=True) == "c0 c1 c2 r0 r1 r2"


ID = {"/v1/messages": "tool_use_id", "/v1/responses": "call_id", "/v1/chat/completions": "tool_call_id"}
PARAM = {"/v1/messages": None, "/v1/responses": "input", "/v1/chat/completions": "messages"}


@pytest.mark.parametrize("path", MAKERS)
@pytest.mark.parametrize("wrong", ["missing", "of none", "twice", "same ids"])
def test_call_without_its_one_result_is_a_typed_400(
    model: Callable[[str], ScriptedServer], path: str, wrong: str
) -> None:
    body = MAKERS[path]("cc")
    found = results_of(path, body)
    match wrong:
        case "missing":
            del found[-1]
        case "of none":
            found[-1] = {**found[-1], ID[path]: "other"}
        case "twice":
            found.append(dict(found[-1]))
        case "same ids":
            body = MAKERS[path]("c")
            found = results_of(path, body)
            call = found[-2] if path != "/v1/messages" else body["messages"][1]["content"][0]
            (found if path != "/v1/messages" else body["messages"][1]["content"]).insert(1, dict(call))
            found.append(dict(found[-1]))
    with model("joined").server.client() as client:
        limit = "max_output_tokens" if path == "/v1/responses" else "max_tokens"
        answer = client.post(path, json={"model": "tiny", limit: 5, **body})
    error = answer.json()["error"]
    assert (answer.status_code, error.get("code", error.get("details", {}).get("error_code"))) == (
        400,
        "invalid_combination",
    )
    assert error.get("param") == PARAM[path]
    words = {"missing": "1 of 2 calls have no result ('c1')", "same ids": "two calls of one answer have the id 'c0'"}
    assert words.get(wrong, "the result of ") in error["message"]


def test_ids_that_begin_anew_in_each_turn_belong_to_the_call_before_them() -> None:
    turns = [message for text in ("a", "b") for message in _turn("call_0", text)]
    chat = ChatRequest.parse({"messages": [ASK, *turns]})
    check_results(chat.messages)
    assert [message.content for message in chat.messages if message.role == "tool"] == ["a", "b"]


def _turn(call: str, text: str) -> list[dict[str, Any]]:
    called = {"id": call, "type": "function", "function": {"name": "run", "arguments": "{}"}}
    return [
        {"role": "assistant", "tool_calls": [called]},
        {"role": "tool", "tool_call_id": call, "content": text},
    ]


def test_user_between_a_call_and_its_result_comes_behind_it() -> None:
    call, result = _turn("a", "Done.")
    chat = ChatRequest.parse({"messages": [ASK, call, {"role": "user", "content": "Quick!"}, result]})
    check_results(chat.messages)
    assert [message.role for message in chat.messages] == ["user", "assistant", "tool", "user"]


def test_answer_that_is_continued_may_have_open_calls() -> None:
    call, _ = _turn("a", "Done.")
    chat = ChatRequest.parse({"messages": [ASK, call]})
    check_results(chat.messages, unfinished=True)
    with pytest.raises(InvalidRequest, match="1 of 1 calls have no result"):
        check_results(chat.messages)


def test_error_image_and_empty_results_keep_their_parts() -> None:
    png = {"type": "base64", "media_type": "image/png", "data": "aGk="}
    mixed = [{"type": "text", "text": "a"}, {"type": "image", "source": png}, {"type": "text", "text": "b"}]
    contents: list[Any] = [mixed, [], None]
    body = {"model": "m", "max_tokens": 5, **messages_of("ccc")}
    for block, content in zip(body["messages"][-1]["content"], contents, strict=True):
        block |= {"content": content, "is_error": True}
    results = [m for m in MessagesRequest.parse(body, images=True).chat.messages if m.role == "tool"]
    kinds = [[part.type for part in message.content] for message in results]  # type: ignore[union-attr]
    assert kinds == [["text", "text", "image_url", "text"], ["text", "text"], ["text", "text"]]
    assert all(message.content[0].text == "Error: " for message in results)  # type: ignore[union-attr,index]
