"""What a model of each format writes for an answer."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from forebay.text.answers.reading import AnswerFormats


class Answer(NamedTuple):
    said: str = ""
    thought: str = ""
    calls: tuple[tuple[str, str], ...] = ()  # names and the JSON of arguments


ANSWERS = [
    Answer(case.get("said", ""), case.get("thought", ""), tuple((name, text) for name, text in case.get("calls", ())))
    for case in json.loads(Path(__file__).with_name("answers.json").read_text())
]
TOOLS: dict[str, dict[str, Any]] = {
    "get_weather": {"type": "object", "properties": {"city": {"type": "string"}, "unit": {"enum": ["°C", "°F"]}}},
    "search": {
        "type": "object",
        "properties": {
            "query": {"anyOf": [{"type": "string"}, {"type": "null"}]},
            "limit": {"type": "number"},
            "filter": {"type": "object"},
        },
    },
    "write_file": {"type": "object", "properties": {"path": {"type": "string"}, "text": {"type": "string"}}},
}


def think(answer: Answer) -> str:
    return f"<think>\n{answer.thought}\n</think>\n\n" if answer.thought else ""


def blocks(write: Callable[[str, str], str]) -> Callable[[Answer], str]:
    def spell(answer: Answer) -> str:
        calls = [f"<tool_call>\n{write(name, text)}\n</tool_call>" for name, text in answer.calls]
        return think(answer) + answer.said + "\n".join(calls)

    return spell


def _object(name: str, text: str, member: str = "arguments") -> str:
    return f'{{"name": "{name}", "{member}": {text}}}'


def _raw(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _tags(name: str, text: str, line: str = "\n") -> str:
    values = json.loads(text).items()
    inside = "".join(f"<parameter={key}>{line}{_raw(value)}{line}</parameter>\n" for key, value in values)
    return f"<function={name}>\n{inside}</function>"


def minimax(answer: Answer) -> str:
    """All calls stand in one section."""
    calls = "".join(f"{_invoke(name, text)}\n" for name, text in answer.calls)
    section = f"<minimax:tool_call>\n{calls}</minimax:tool_call>" if calls else ""
    return think(answer) + answer.said + section


def _invoke(name: str, text: str) -> str:
    values = json.loads(text).items()
    inside = "".join(f'<parameter name="{key}">{_raw(value)}</parameter>\n' for key, value in values)
    return f'<invoke name="{name}">\n{inside}</invoke>'


def _glm(name: str, text: str) -> str:
    values = json.loads(text).items()
    return "\n".join(
        [name, *(f"<arg_key>{key}</arg_key>\n<arg_value>{_raw(value)}</arg_value>" for key, value in values)]
    )


def _python(answer: Answer) -> str:
    calls = (
        f"{name}({', '.join(f'{key}={value!r}' for key, value in json.loads(text).items())})"
        for name, text in answer.calls
    )
    return f"[{', '.join(calls)}]" if answer.calls else ""


def llama(answer: Answer) -> str:
    tag = "<|python_tag|>" if answer.said else ""
    calls = "; ".join(_object(name, text, "parameters") for name, text in answer.calls)
    return think(answer) + answer.said + (tag + calls if calls else "")


def pythonic(answer: Answer) -> str:
    calls = _python(answer)
    wrapped = f"<|python_start|>{calls}<|python_end|>" if answer.said and calls else calls
    return think(answer) + answer.said + wrapped


def lfm2(answer: Answer) -> str:
    calls = _python(answer)
    return think(answer) + (f"<|tool_call_start|>{calls}<|tool_call_end|>" if calls else "") + answer.said


def _mistral_thought(answer: Answer) -> str:
    return f"[THINK]{answer.thought}[/THINK]" if answer.thought else ""


def mistral_list(answer: Answer) -> str:
    calls = ", ".join(_object(name, text) for name, text in answer.calls)
    return _mistral_thought(answer) + answer.said + (f"[TOOL_CALLS] [{calls}]" if calls else "")


def mistral(answer: Answer) -> str:
    calls = "".join(f"[TOOL_CALLS]{name}[ARGS]{text}" for name, text in answer.calls)
    return _mistral_thought(answer) + answer.said + calls


def deepseek(write: Callable[[str, str], str]) -> Callable[[Answer], str]:
    def spell(answer: Answer) -> str:
        calls = "\n".join(f"<｜tool▁call▁begin｜>{write(name, text)}<｜tool▁call▁end｜>" for name, text in answer.calls)
        return think(answer) + answer.said + (f"<｜tool▁calls▁begin｜>{calls}<｜tool▁calls▁end｜>" if calls else "")

    return spell


def kimi(answer: Answer) -> str:
    calls = "".join(
        f"<|tool_call_begin|>functions.{name}:{i}<|tool_call_argument_begin|>{text}<|tool_call_end|>"
        for i, (name, text) in enumerate(answer.calls)
    )
    section = f"<|tool_calls_section_begin|>{calls}<|tool_calls_section_end|>" if calls else ""
    return think(answer) + answer.said + section


def hunyuan(answer: Answer) -> str:
    calls = ", ".join(_object(name, text) for name, text in answer.calls)
    return think(answer) + answer.said + (f"<tool_calls>[{calls}]</tool_calls>" if calls else "")


def nemotron(answer: Answer) -> str:
    calls = ", ".join(_object(name, text) for name, text in answer.calls)
    return think(answer) + answer.said + (f"<TOOLCALL>[{calls}]</TOOLCALL>" if calls else "")


def gigachat(answer: Answer) -> str:
    """A message of its own for each call."""
    texts = [answer.said] if answer.said or not answer.calls else []
    texts += [f"function call<|role_sep|>\n{_object(name, text)}" for name, text in answer.calls]
    return think(answer) + "<|message_sep|>\n\n".join(texts)


def seed(answer: Answer) -> str:
    thought = f"<seed:think>{answer.thought}</seed:think>\n" if answer.thought else ""
    calls = [f"<seed:tool_call>\n{_tags(name, text, line='')}\n</seed:tool_call>" for name, text in answer.calls]
    return thought + answer.said + "\n".join(calls)


def gemma(answer: Answer) -> str:
    thought = f"<|channel>thought\n{answer.thought}\n<channel|>" if answer.thought else ""
    calls = (
        f"<|tool_call>call:{name}{{{_gemma_members(json.loads(text))}}}<tool_call|>" for name, text in answer.calls
    )
    return thought + answer.said + "".join(calls)


def _gemma_members(values: dict[str, Any]) -> str:
    return ",".join(f"{key}:{_gemma_value(value)}" for key, value in values.items())


def _gemma_value(value: Any) -> str:
    match value:
        case str():
            return f'<|"|>{value}<|"|>'
        case dict():
            return f"{{{_gemma_members(value)}}}"
        case list():
            return f"[{','.join(map(_gemma_value, value))}]"
        case _:
            return json.dumps(value)


def gpt_oss(answer: Answer) -> str:
    messages = [f"<|channel|>analysis<|message|>{answer.thought}"] if answer.thought else []
    if answer.said or not (answer.thought or answer.calls):
        messages.append(f"<|channel|>{'commentary' if answer.calls else 'final'}<|message|>{answer.said}")
    messages += [
        f"<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>{text}" for name, text in answer.calls
    ]
    return "<|end|><|start|>assistant".join(messages) + ("<|call|>" if answer.calls else "")


class Spelling(NamedTuple):
    formats: AnswerFormats
    spell: Callable[[Answer], str]
    copies: bool = True  # arguments are JSON in the answer


SPELLINGS = {
    "hermes": Spelling(AnswerFormats("hermes", "think"), blocks(_object)),
    "qwen3_coder": Spelling(AnswerFormats("qwen3_coder", "think"), blocks(_tags), copies=False),
    "minimax_m2": Spelling(AnswerFormats("minimax_m2", "think"), minimax, copies=False),
    "seed_oss": Spelling(AnswerFormats("seed_oss", "seed_oss"), seed, copies=False),
    "nemotron": Spelling(AnswerFormats("nemotron", "think"), nemotron),
    "gigachat3": Spelling(AnswerFormats("gigachat3", "think"), gigachat),
    "gemma4": Spelling(AnswerFormats("gemma4", "gemma4"), gemma, copies=False),
    "marked": Spelling(AnswerFormats("llama3_json", "think", ("<TOOLCALL>", "</TOOLCALL>")), nemotron),
    "glm45": Spelling(AnswerFormats("glm45", "think"), blocks(_glm), copies=False),
    "llama3_json": Spelling(AnswerFormats("llama3_json", "think"), llama),
    "pythonic": Spelling(AnswerFormats("pythonic", "think"), pythonic, copies=False),
    "lfm2": Spelling(AnswerFormats("lfm2", "think"), lfm2, copies=False),
    "mistral_list": Spelling(AnswerFormats("mistral", "mistral"), mistral_list),
    "mistral": Spelling(AnswerFormats("mistral", "mistral"), mistral),
    "deepseek_v3": Spelling(
        AnswerFormats("deepseek_v3", "think"),
        deepseek(lambda name, text: f"function<｜tool▁sep｜>{name}\n```json\n{text}\n```"),
    ),
    "deepseek_v31": Spelling(
        AnswerFormats("deepseek_v31", "think"), deepseek(lambda name, text: f"{name}<｜tool▁sep｜>{text}")
    ),
    "kimi_k2": Spelling(AnswerFormats("kimi_k2", "think"), kimi),
    "hunyuan": Spelling(AnswerFormats("hunyuan", "think"), hunyuan),
    "gpt_oss": Spelling(AnswerFormats("gpt_oss", "gpt_oss"), gpt_oss),
}
