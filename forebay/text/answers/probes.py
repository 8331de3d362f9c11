"""Which formats a model has, found by what its chat template writes of a call and of thinking."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from forebay.base.errors import InvalidRequest
from forebay.text.answers.formats import CALL_FORMATS, CALL_PARSERS, CHANNELS, THINK_TAGS
from forebay.text.answers.parts import CallArguments, CallBegun
from forebay.text.answers.reading import AnswerFormats, reader_for
from forebay.text.tokenizer import Tokenizer

Message = dict[str, Any]
Render = Callable[..., str]

_NAME: Final = "probe_tool"
_ARGUMENTS: Final = {"probe_key": "probe value"}
_SCHEMA: Final = {"type": "object", "properties": {"probe_key": {"type": "string", "description": "A key."}}}
_TOOLS: Final = [
    {"type": "function", "function": {"name": _NAME, "description": "A probe.", "parameters": _SCHEMA}}
]  # fmt: skip
_ASKED: Final[Message] = {"role": "user", "content": "Probe."}
_VARIABLES: Final = ("reasoning_effort", "enable_thinking", "thinking")
_MAX_EVIDENCE: Final = 160


@dataclass(frozen=True, slots=True, kw_only=True)
class Findings:
    """`ignores_tools`: the template writes nothing of tools. `takes_text`: it wants a call's arguments as text, and not
    as an object. `variables` are those for thinking that it reads. `evidence` says why, for who asks."""

    formats: AnswerFormats = field(default_factory=AnswerFormats)
    ignores_tools: bool = True
    takes_text: bool = False
    variables: frozenset[str] = frozenset()
    evidence: Mapping[str, str] = field(default_factory=dict)

    def opens_thinking(self, prompt: str) -> bool:
        """Whether an answer to this prompt begins within the thinking."""
        tags = THINK_TAGS.get(self.formats.thinking or "")
        return tags is not None and prompt.rstrip().endswith(tags.opens)


def find_formats(tokenizer: Tokenizer) -> Findings:
    """By a dozen renderings of a few words."""
    if tokenizer.chat_template is None:
        return Findings(evidence={"tool_calls": "there is no chat template"})
    render, source = tokenizer.render, tokenizer.chat_template.source
    plain, shown = _rendered(render, [_ASKED]), _rendered(render, [_ASKED], tools=_TOOLS)
    if plain is None:
        return Findings(evidence={"tool_calls": "the chat template refuses a question"})
    ignores = shown is None or shown == plain
    calls, takes_text, why = ("hermes", False, "the chat template writes nothing of tools: a system text tells of them")
    if not ignores:
        calls, takes_text, why = _calls(render, shown or "")
    thinking, seen = _thinking(render)
    return Findings(
        formats=AnswerFormats(calls or None, thinking),
        ignores_tools=ignores,
        takes_text=takes_text,
        variables=frozenset(name for name in _VARIABLES if re.search(rf"\b{name}\b", source)),
        evidence={"tool_calls": why, "reasoning": seen},
    )


def _rendered(render: Render, messages: Sequence[Message], **variables: Any) -> str | None:
    try:
        return render(list(messages), **{"add_generation_prompt": True, **variables})
    except InvalidRequest:
        return None


def _answered(render: Render, answer: Message) -> str:
    """What the template writes of an answer, which the model would have written."""
    before = _rendered(render, [_ASKED], tools=_TOOLS) or ""
    whole = _rendered(render, [_ASKED, answer], tools=_TOOLS, add_generation_prompt=False) or ""
    pairs = enumerate(zip(before, whole, strict=False))
    common = next((i for i, (one, other) in pairs if one != other), min(len(before), len(whole)))
    while common and not (whole[common - 1].isspace() or whole[common - 1] in ">]"):
        common -= 1  # the tags of calls and of thinking begin alike
    return whole[common:]


def _calls(render: Render, shown: str) -> tuple[str, bool, str]:
    """The format of calls ("" for none that is known), whether arguments are wanted as text, and why."""
    for arguments in (_ARGUMENTS, json.dumps(_ARGUMENTS)):
        for content in (None, ""):
            call = {"id": "call00000", "type": "function", "function": {"name": _NAME, "arguments": arguments}}
            text = _answered(render, {"role": "assistant", "content": content, "tool_calls": [call]})
            for name in CALL_PARSERS:
                if _reads(name, text):
                    return name, isinstance(arguments, str), f"a call is written {text.strip()[:_MAX_EVIDENCE]!r}"
    for each in CALL_FORMATS.values():
        if any(marker in shown for marker in each.begins):
            return each.name, False, f"tools are told of with {each.begins[0]!r}"
    return "", False, "the chat template writes calls in no form that is known"


def _reads(name: str, text: str) -> bool:
    reader = reader_for(AnswerFormats(name, name if name == CHANNELS else None), {_NAME: _SCHEMA})
    parts = reader.push(text) + reader.finish()
    names = [part.name for part in parts if isinstance(part, CallBegun)]
    arguments = "".join(part.text for part in parts if isinstance(part, CallArguments))
    try:
        return names == [_NAME] and json.loads(arguments) == _ARGUMENTS
    except ValueError:
        return False


def _thinking(render: Render) -> tuple[str | None, str]:
    thought: Message = {"role": "assistant", "content": "Said.", "reasoning_content": "Probed.", "thinking": "Probed."}
    wishes: tuple[dict[str, bool], ...] = ({}, {"enable_thinking": True, "thinking": True}, {"enable_thinking": False})
    texts = [_answered(render, thought), *(_rendered(render, [_ASKED], **wish) or "" for wish in wishes)]
    for each in THINK_TAGS.values():
        for text in texts:
            if each.opens in text:
                at = text.index(each.opens)
                return each.name, f"the chat template writes {text[at : at + _MAX_EVIDENCE]!r}"
    call = {"type": "function", "function": {"name": _NAME, "arguments": _ARGUMENTS}}
    if any("<|channel|>" in text for text in (*texts, _answered(render, {**thought, "tool_calls": [call]}))):
        return CHANNELS, "the chat template writes '<|channel|>'"
    return None, "the chat template writes nothing of thinking"
