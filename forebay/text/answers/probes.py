"""Which formats a model has, found by what its chat template writes of a call and of thinking."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import Any, Final

from forebay.base.errors import ConfigError, InvalidRequest
from forebay.base.log import event, get_logger
from forebay.text.answers.formats import (
    CALL_FORMATS,
    CALL_NAMES,
    CALL_PARSERS,
    CHANNELS,
    REASONING_NAMES,
    REASONING_PARSERS,
    THINK_TAGS,
    call_id_of,
)
from forebay.text.answers.parts import CallArguments, CallBegun
from forebay.text.answers.reading import AnswerFormats, reader_for
from forebay.text.tokenizer import Tokenizer

log = get_logger("text")

Message = dict[str, Any]
Render = Callable[..., str]

_NAME: Final = "probe_tool"
_ARGUMENTS: Final = {"probe_key": "probe value"}
_SCHEMA: Final = {"type": "object", "properties": {"probe_key": {"type": "string", "description": "A key."}}}
_TOOLS: Final = [
    {"type": "function", "function": {"name": _NAME, "description": "A probe.", "parameters": _SCHEMA}}
]  # fmt: skip
_ASKED: Final[Message] = {"role": "user", "content": "Probe."}
_VARIABLES: Final[Mapping[str, tuple[Any, Any]]] = {
    "enable_thinking": (True, False),
    "thinking": (True, False),
    "reasoning_effort": ("low", "high"),
    "verbosity": ("low", "high"),
}
_MAX_EVIDENCE: Final = 160
AUTO: Final = "auto"
NONE: Final = "none"
_HERMES: Final = "hermes"  # the format in which tools are described in text
_IGNORED: Final = "the chat template writes nothing of tools: a system text tells of them"


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """`hidden`: the template writes nothing of calls. `as_text`: it wants their arguments as text, and not as objects.
    `content`: what it takes for that of a message of calls alone."""

    hidden: bool = False
    as_text: bool = False
    content: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Findings:
    """`ignores_tools`: the template writes nothing of tools. `calls`: how it wants them in a conversation. `variables`
    are those for thinking that change what it writes. `evidence` says why, for who asks."""

    formats: AnswerFormats = field(default_factory=AnswerFormats)
    ignores_tools: bool = True
    calls: Wanted = Wanted()
    variables: frozenset[str] = frozenset()
    evidence: Mapping[str, str] = field(default_factory=dict)

    @property
    def has_efforts(self) -> bool:
        return bool(self.variables & {"enable_thinking", "thinking", "reasoning_effort"})

    @property
    def can_switch(self) -> bool:
        """Whether the model can be told to think or not to."""
        return bool(self.variables & {"enable_thinking", "thinking"})

    def opens_thinking(self, prompt: str) -> bool:
        """Return whether an answer to this prompt begins within the thinking."""
        tags = THINK_TAGS.get(self.formats.thinking or "")
        return tags is not None and prompt.rstrip().endswith(tags.opens)


def find_formats(tokenizer: Tokenizer, *, calls: str = AUTO, thinking: str = AUTO) -> Findings:
    """By about twenty renderings of a few words. `calls` and `thinking` are what the operator says instead, by name or
    NONE. Raises ConfigError for a name that there is not, or that does not go with the chat template."""
    calls, thinking = CALL_NAMES.get(calls, calls), REASONING_NAMES.get(thinking, thinking)
    _check_known("--tool-call-parser", calls, CALL_PARSERS)
    _check_known("--reasoning-parser", thinking, REASONING_PARSERS)
    if tokenizer.chat_template is None:
        return Findings(evidence={"tool_calls": "there is no chat template"})
    render = tokenizer.render
    plain, shown = _rendered(render, [_ASKED]), _rendered(render, [_ASKED], tools=_TOOLS)
    if plain is None:
        return Findings(evidence={"tool_calls": "the chat template refuses a question"})
    ignores = shown is None or shown == plain
    names = CALL_PARSERS if calls in (AUTO, NONE) else (calls,)
    wanted, found, why = _calls(render, names) if not ignores else (Wanted(), _HERMES, _IGNORED)
    if not found:
        found, why = _tools_form(shown or "")
    if ignores and calls not in (AUTO, NONE, _HERMES):
        raise ConfigError(
            f"--tool-call-parser {calls}: {why}, in the form of {_HERMES}: give --chat-template, or {_HERMES}"
        )
    if calls != AUTO:
        found, why = _named(calls), f"--tool-call-parser {calls}"
    thinks, seen = _thinking(render)
    if thinking != AUTO:
        thinks, seen = _named(thinking), f"--reasoning-parser {thinking}"
    log.info(event("answers", tool_calls=found or NONE, reasoning=thinks or NONE, why=f"{why}; {seen}"))
    return Findings(
        formats=AnswerFormats(found or None, thinks or None),
        ignores_tools=ignores,
        calls=wanted,
        variables=frozenset(name for name, values in _VARIABLES.items() if _heeds(render, name, values)),
        evidence={"tool_calls": why, "reasoning": seen},
    )


def _check_known(flag: str, name: str, known: Sequence[str]) -> None:
    if name not in (AUTO, NONE, *known):
        raise ConfigError(f"{flag}: {name!r} is not one of {', '.join((AUTO, NONE, *known))}")


def _named(name: str) -> str:
    return "" if name == NONE else name


def _heeds(render: Render, name: str, values: tuple[Any, Any]) -> bool:
    one, other = (_rendered(render, [_ASKED], **{name: value}) for value in values)
    return one is not None and other is not None and one != other


def _rendered(render: Render, messages: Sequence[Message], **variables: Any) -> str | None:
    try:
        return render(list(messages), **{"add_generation_prompt": True, **variables})
    except InvalidRequest:
        return None


def _answered(render: Render, answer: Message) -> str:
    """Return what the template writes for an answer, which the model would have generated."""
    before = _rendered(render, [_ASKED], tools=_TOOLS) or ""
    whole = _rendered(render, [_ASKED, answer], tools=_TOOLS, add_generation_prompt=False) or ""
    pairs = enumerate(zip(before, whole, strict=False))
    common = next((i for i, (one, other) in pairs if one != other), min(len(before), len(whole)))
    while common and not (whole[common - 1].isspace() or whole[common - 1] in ">]"):
        common -= 1  # the tags of calls and of thinking begin alike
    return whole[common:]


def _calls(render: Render, names: Sequence[str]) -> tuple[Wanted, str, str]:
    """How calls are wanted, and in which of the formats they are written ("" for none of them), and why."""
    hidden = True
    written = (_ARGUMENTS, json.dumps(_ARGUMENTS)), (None, ""), sorted({call_id_of(name) for name in names})
    for arguments, content, pattern in product(*written):
        call = {"id": pattern.format(0, name=_NAME), "type": "function", "function": _function(arguments)}
        text = _answered(render, {"role": "assistant", "content": content, "tool_calls": [call]})
        hidden = hidden and _NAME not in text
        if content is None and "None" in text:
            continue
        for name in names:
            if call_id_of(name) == pattern and _reads(name, text):
                wanted = Wanted(as_text=isinstance(arguments, str), content=content)
                return wanted, name, f"a call is written {text.strip()[:_MAX_EVIDENCE]!r}"
    return Wanted(hidden=hidden, content=""), "", ""


def _tools_form(shown: str) -> tuple[str, str]:
    """Return the call format whose tool description the template renders, and the evidence."""
    for each in CALL_FORMATS.values():
        for marker in filter(None, (*each.begins, each.told)):
            if marker in shown:
                return each.name, f"tools are told of with {marker!r}"
    return "", "the chat template writes calls in no form that is known"


def _function(arguments: Any) -> dict[str, Any]:
    return {"name": _NAME, "arguments": arguments}


def _reads(name: str, text: str) -> bool:
    reader = reader_for(AnswerFormats(name, name if name == CHANNELS else None), {_NAME: _SCHEMA})
    parts = reader.push(text) + reader.finish()
    names = [part.name for part in parts if isinstance(part, CallBegun)]
    arguments = "".join(part.text for part in parts if isinstance(part, CallArguments))
    try:
        return names == [_NAME] and json.loads(arguments) == _ARGUMENTS
    except ValueError:
        return False


def _thinking(render: Render) -> tuple[str, str]:
    thought: Message = {"role": "assistant", "content": "Said.", "reasoning_content": "Probed.", "thinking": "Probed."}
    switches: tuple[dict[str, bool], ...] = (
        {},
        {"enable_thinking": True, "thinking": True},
        {"enable_thinking": False},
    )
    texts = [_answered(render, thought), *(_rendered(render, [_ASKED], **each) or "" for each in switches)]
    for each in THINK_TAGS.values():
        for text in texts:
            if each.opens in text:
                at = text.index(each.opens)
                return each.name, f"the chat template writes {text[at : at + _MAX_EVIDENCE]!r}"
    call = {"type": "function", "function": _function(_ARGUMENTS)}
    if any("<|channel|>" in text for text in (*texts, _answered(render, {**thought, "tool_calls": [call]}))):
        return CHANNELS, "the chat template writes '<|channel|>'"
    return "", "the chat template writes nothing of thinking"
