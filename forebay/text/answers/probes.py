"""Which formats a model has, found by what its chat template writes of a call and of thinking."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Any, Final, NamedTuple

from forebay.base.errors import ConfigError, InvalidRequest
from forebay.base.log import event, get_logger
from forebay.text.answers.declared.declaration import Declaration, DeclarationError, Region, declaration_of
from forebay.text.answers.declared.reading import region_begun
from forebay.text.answers.formats import (
    CALL_FORMATS,
    CALL_NAMES,
    CALL_PARSERS,
    CHANNELS,
    DECLARED,
    DECLARING_NAMES,
    REASONING_NAMES,
    REASONING_PARSERS,
    THINK_TAGS,
    ThinkTags,
    call_id_of,
)
from forebay.text.answers.parts import CallArguments, CallBegun, Part, Said, Thought
from forebay.text.answers.reading import AnswerFormats, reader_for
from forebay.text.answers.tools_as_text import HERMES
from forebay.text.histories import ANY_HISTORY, CALLS, TEXT, THINKING, HistoryRules, rules_of
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
_BY_CHECKPOINT: Final = "the checkpoint declares it (response_template)"
AUTO: Final = "auto"
NONE: Final = "none"
_IGNORED: Final = "the chat template writes nothing of tools: a system text tells of them"
_SECOND: Final = "second_tool"
_SPARSE: Final = {"type": "object", "properties": {"probe_key": {"description": None}, "other": True}}
_BARE: Final = [  # without what is optional
    {"type": "function", "function": {"name": _NAME}},
    {"type": "function", "function": {"name": _SECOND, "description": "A probe.", "parameters": _SPARSE}},
]
_RESULT: Final = "probe result"
_SAID: Final = "Said."
_THOUGHT: Final = "Probed."


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """How a template takes calls of earlier messages.

    `hidden`: it writes nothing of calls. `as_text`: it wants their arguments as text, and not as objects. `content`:
    what it takes for that of a message of calls alone. `one_call`: it takes or writes one call of a message.
    `example`: what it writes of a call.
    """

    hidden: bool = False
    as_text: bool = False
    content: str | None = None
    one_call: bool = False
    example: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Findings:
    """`ignores_tools`: the template renders no tools. If it shows calls (`calls.hidden` false), the model is instructed
    to use their format. `variables` are those for thinking that change the rendering. `history`: the messages that it
    accepts. `wants_whole_tools`: it refuses a tool without a description or parameters. `evidence` gives the reasons.
    """

    formats: AnswerFormats = field(default_factory=AnswerFormats)
    ignores_tools: bool = True
    calls: Wanted = Wanted(hidden=True)
    variables: frozenset[str] = frozenset()
    history: HistoryRules = ANY_HISTORY
    wants_whole_tools: bool = False
    evidence: Mapping[str, str] = field(default_factory=dict)

    @property
    def has_efforts(self) -> bool:
        return bool(self.variables & {"enable_thinking", "thinking", "reasoning_effort"})

    @property
    def can_switch(self) -> bool:
        """Return whether a variable of the template switches thinking on or off."""
        return bool(self.variables & {"enable_thinking", "thinking"})

    def opened(self, prompt: str) -> bool | Region:
        """Return the declared region within which an answer to this prompt begins, or whether that is the thinking."""
        if self.formats.declared is not None:
            return region_begun(self.formats.declared, prompt) or False
        tags = THINK_TAGS.get(self.formats.thinking or "")
        return tags is not None and prompt.rstrip().endswith(tags.opens)

    def opens_thinking(self, prompt: str) -> bool:
        """Return whether an answer to this prompt begins within the thinking."""
        opened = self.opened(prompt)
        return opened.thinks if isinstance(opened, Region) else opened


def find_formats(tokenizer: Tokenizer, *, calls: str = AUTO, thinking: str = AUTO) -> Findings:
    """By about thirty renderings of a few words. `calls` and `thinking` are what the operator says instead, by name or
    NONE. Raises ConfigError for a name that there is not, or that does not go with the chat template."""
    calls, thinking = _known_name(calls, CALL_NAMES), _known_name(thinking, REASONING_NAMES)
    _check_known("--tool-call-parser", calls, CALL_PARSERS)
    _check_known("--reasoning-parser", thinking, REASONING_PARSERS)
    if tokenizer.chat_template is None:
        return Findings(evidence={"tool_calls": "there is no chat template"})
    found: Findings | None = None
    if calls in (AUTO, NONE) and thinking in (AUTO, NONE) and (declared := _declared(tokenizer)) is not None:
        found = _of_declaration(tokenizer, declared, calls=calls != NONE, thinking=thinking != NONE)
    return found if found is not None else _probed(tokenizer, calls, thinking)


def _declared(tokenizer: Tokenizer) -> Declaration | None:
    """Return what the checkpoint declares of its answers; None if that is nothing, or malformed."""
    if tokenizer.response_template is None:
        return None
    try:
        declared = declaration_of(tokenizer.response_template, tokenizer.added)
    except DeclarationError as error:
        log.warning(event("response_template_ignored", why=str(error), instead="the chat template decides"))
        return None
    if dropped := [region.name for region in declared.regions if region.dropped]:
        log.info(event("response_template_fields_left_out", fields=",".join(dropped)))
    return declared


def _of_declaration(tokenizer: Tokenizer, declared: Declaration, *, calls: bool, thinking: bool) -> Findings | None:
    """None if the template writes neither tools nor calls in the declared form: text must tell the model of a form."""
    names = (DECLARED if calls and declared.calls else None, DECLARED if thinking and declared.thinking else None)
    formats = AnswerFormats(*names, declared=declared)
    render = tokenizer.render
    plain, shown = _rendered(render, [_ASKED]), _rendered(render, [_ASKED], tools=_TOOLS)
    written = _calls(render, [formats] if formats.calls else [])
    if formats.calls and not written.name and _ignores_tools(plain, shown):
        log.warning(event("response_template_ignored", why="the chat template writes no tools and no declared calls"))
        return None
    evidence = dict.fromkeys(("tool_calls", "reasoning"), _BY_CHECKPOINT)
    log.info(event("answers", tool_calls=names[0] or NONE, reasoning=names[1] or NONE, why=_BY_CHECKPOINT))
    return _findings(render, formats, written.wanted, plain, shown, evidence)


def _probed(tokenizer: Tokenizer, calls: str, thinking: str) -> Findings:
    render = tokenizer.render
    plain, shown = _rendered(render, [_ASKED]), _rendered(render, [_ASKED], tools=_TOOLS)
    if plain is None:
        return Findings(evidence={"tool_calls": "the chat template refuses a question"})
    thinks, seen = _thinking(render)
    if thinking != AUTO:
        thinks, seen = _named(thinking), f"--reasoning-parser {thinking}"
    written = _written(render, calls, thinks, plain, shown)
    why = f"{written.why}; {seen}"
    log.info(event("answers", tool_calls=written.name or NONE, reasoning=thinks or NONE, why=why))
    formats = AnswerFormats(written.name or None, thinks or None, written.marks)
    return _findings(render, formats, written.wanted, plain, shown, {"tool_calls": written.why, "reasoning": seen})


def _written(render: Render, calls: str, thinks: str, plain: str, shown: str | None) -> _Written:
    """Return how calls are written: as `calls` names it, or if it names nothing, as the template does."""
    names = CALL_PARSERS if calls in (AUTO, NONE) else (calls,)
    written = _calls(render, [_formats(name, thinks) for name in names])
    if _ignores_tools(plain, shown) and not (written.name and _shows_results(render, written.wanted)):
        written = _in_text(calls)
    elif not written.name:
        name, why = _tools_form(shown or "")
        written = written._replace(name=name, why=why)
    if calls != AUTO:
        leftover = written.leftover if written.name == calls else _Leftover()
        written = written._replace(name=_named(calls), why=f"--tool-call-parser {calls}", leftover=leftover)
    return written


def _ignores_tools(plain: str | None, shown: str | None) -> bool:
    """Return whether a template writes nothing of a tool, by its renderings without and with one."""
    return shown is None or shown == plain


def _in_text(calls: str) -> _Written:
    """Return the form of calls of a chat template without tools, which a system text then describes."""
    if calls not in (AUTO, NONE, HERMES):
        raise ConfigError(
            f"--tool-call-parser {calls}: {_IGNORED}, in the form of {HERMES}: give --chat-template, or {HERMES}"
        )
    return _Written(Wanted(hidden=True), HERMES, _IGNORED)


def _findings(
    render: Render,
    formats: AnswerFormats,
    wanted: Wanted,
    plain: str | None,
    shown: str | None,
    evidence: Mapping[str, str],
) -> Findings:
    """Find what the template does with a conversation in these formats. `plain` and `shown` are its renderings of a
    question without and with a tool; None if it refuses them."""
    return Findings(
        formats=formats,
        ignores_tools=_ignores_tools(plain, shown),
        calls=wanted,
        variables=frozenset(name for name, values in _VARIABLES.items() if _heeds(render, name, values)),
        history=_history(render, wanted, formats, shows_calls=bool(formats.calls) and not wanted.hidden),
        wants_whole_tools=shown is not None and _rendered(render, [_ASKED], tools=_BARE) is None,
        evidence=evidence,
    )


def _formats(calls: str, thinks: str) -> AnswerFormats:
    """Return the formats with which a call in the format `calls` is read. Channels have thinking of their own."""
    return AnswerFormats(calls, calls if calls == CHANNELS else thinks if thinks != CHANNELS else None)


def _known_name(name: str, names: Mapping[str, str]) -> str:
    return AUTO if name in DECLARING_NAMES else names.get(name, name)


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


def _answered(render: Render, *answer: Message) -> str:
    """Return what the template writes for an answer of one or more messages, which the model would have generated."""
    before = _rendered(render, [_ASKED], tools=_TOOLS) or ""
    whole = _rendered(render, [_ASKED, *answer], tools=_TOOLS, add_generation_prompt=False) or ""
    pairs = enumerate(zip(before, whole, strict=False))
    common = next((i for i, (one, other) in pairs if one != other), min(len(before), len(whole)))
    while len(before) > common > 0 and not (whole[common - 1].isspace() or whole[common - 1] in ">]"):
        common -= 1  # the tags of calls and of thinking begin alike
    return whole[common:]


class _Leftover(NamedTuple):
    """Text that a format leaves over of a call on both sides, less the brackets beside it. `likens`: the call does not
    begin with the format's own marker."""

    begin: str = ""
    end: str = ""
    num_brackets: int = 0
    likens: bool = False

    @property
    def size(self) -> tuple[int, int, bool]:
        """How far the format is from that of the template. Brackets between marks are as good as none."""
        length = len(self.begin) + len(self.end)
        return length, 0 if length else self.num_brackets, self.likens


class _Written(NamedTuple):
    """How a template writes calls: `name` is the format of those that reads most of it, "" if none does."""

    wanted: Wanted
    name: str = ""
    why: str = ""
    leftover: _Leftover = _Leftover()

    @property
    def marks(self) -> tuple[str, str]:
        return self.leftover.begin, self.leftover.end


def _calls(render: Render, forms: Sequence[AnswerFormats]) -> _Written:
    """Find the form whose reader leaves least of a call that the template writes."""
    best, hidden = _Written(Wanted(content="")), True
    said = _answered(render, {"role": "assistant", "content": _SAID})
    ending = said.partition(_SAID)[2].strip()
    written = (_ARGUMENTS, json.dumps(_ARGUMENTS)), (None, ""), sorted({call_id_of(each.calls) for each in forms})
    for arguments, content, pattern in product(*written):
        call = _call(_NAME, arguments, pattern)
        text = _answered(render, {"role": "assistant", "content": content, "tool_calls": [call]})
        hidden = hidden and _NAME not in text
        if content is None and "None" in text:
            continue
        for each in forms:
            leftover = _leftover(each, text, ending) if call_id_of(each.calls) == pattern else None
            if leftover is not None and (not best.name or leftover.size < best.leftover.size):
                example = text.strip().removesuffix(ending).strip()
                wanted = Wanted(as_text=isinstance(arguments, str), content=content, example=example)
                best = _Written(
                    wanted, str(each.calls), f"a call is written {text.strip()[:_MAX_EVIDENCE]!r}", leftover
                )
    if not best.name:
        return best._replace(wanted=Wanted(hidden=hidden, content=""))
    wanted = replace(best.wanted, content=_content_beside(render, best), one_call=_takes_one_call(render, best))
    return best._replace(wanted=wanted)


def _call(name: str, arguments: Any, pattern: str, number: int = 0) -> Message:
    function = {"name": name, "arguments": arguments}
    return {"id": pattern.format(number, name=name), "type": "function", "function": function}


def _content_beside(render: Render, written: _Written) -> str | None:
    """Return the content of a message of calls: if the template shows thinking beside them with one of two, that."""
    own = written.wanted.content
    arguments = json.dumps(_ARGUMENTS) if written.wanted.as_text else _ARGUMENTS
    calls = [_call(_NAME, arguments, call_id_of(written.name))]
    for content in (own, "" if own is None else None):
        thought = {"reasoning_content": _THOUGHT, "thinking": _THOUGHT}
        text = _answered(render, {"role": "assistant", "content": content, "tool_calls": calls, **thought})
        if _THOUGHT in text and _NAME in text and "None" not in text:
            return content
    return own


def _takes_one_call(render: Render, written: _Written) -> bool:
    """Return whether the template refuses a message of two calls, or leaves one of them out."""
    arguments = json.dumps(_ARGUMENTS) if written.wanted.as_text else _ARGUMENTS
    pattern = call_id_of(written.name)
    calls = [_call(name, arguments, pattern, number) for number, name in enumerate((_NAME, _SECOND))]
    text = _answered(render, {"role": "assistant", "content": written.wanted.content, "tool_calls": calls})
    return _NAME not in text or _SECOND not in text


def _shows_results(render: Render, wanted: Wanted) -> bool:
    call = _call(_NAME, json.dumps(_ARGUMENTS) if wanted.as_text else _ARGUMENTS, call_id_of(None))
    answer = {"role": "assistant", "content": wanted.content, "tool_calls": [call]}
    result = {"role": "tool", "content": _RESULT, "tool_call_id": call["id"]}
    return _RESULT in (_rendered(render, [_ASKED, answer, result]) or "")


def _history(render: Render, wanted: Wanted, formats: AnswerFormats, *, shows_calls: bool) -> HistoryRules:
    called: list[Message] = []
    if shows_calls:
        call = _call(_NAME, json.dumps(_ARGUMENTS) if wanted.as_text else _ARGUMENTS, call_id_of(formats.calls))
        result = {"role": "tool", "tool_call_id": call["id"], "content": _RESULT}
        called = [_ASKED, {"role": "assistant", "content": wanted.content, "tool_calls": [call]}, result]

    def writes(messages: Sequence[Message]) -> str | None:
        has_calls = any("tool_calls" in message for message in messages)
        return _rendered(render, messages, **({"tools": _TOOLS} if has_calls else {}))

    ending = _answered(render, {"role": "assistant", "content": _SAID}).partition(_SAID)[2].strip()

    def reads(messages: Sequence[Message]) -> list[str]:
        said = {message["content"] for message in messages if message["content"]}
        text = _answered(render, *messages).strip().removesuffix(ending)
        return _kinds_read(formats, text, said)

    return rules_of(writes, called, reads)


def _kinds_read(formats: AnswerFormats, text: str, said: Collection[str]) -> list[str]:
    """Return the kinds of parts of an answer, in their order; none if it has texts that are not in `said`."""
    reader, kinds = reader_for(formats, {_NAME: _SCHEMA}), list[str]()
    for part in reader.push(text) + reader.finish():
        match part:
            case Said(words) if words.strip() and words.strip() not in said:
                return []
            case Said(words):
                kinds += [TEXT] if words.strip() else []
            case Thought():
                kinds.append(THINKING)
            case CallBegun():
                kinds.append(CALLS)
    return kinds


def _tools_form(shown: str) -> tuple[str, str]:
    """Return the call format whose tool description the template renders, and the evidence."""
    for each in CALL_FORMATS.values():
        for marker in filter(None, (*each.begins, each.tools_mark)):
            if marker in shown:
                return each.name, f"tools are told of with {marker!r}"
    return "", "the chat template writes calls in no form that is known"


def _is_the_call(parts: Sequence[Part]) -> bool:
    """Return whether the parts of an answer have the probe's call, and no other."""
    names = [part.name for part in parts if isinstance(part, CallBegun)]
    arguments = "".join(part.text for part in parts if isinstance(part, CallArguments))
    try:
        return names == [_NAME] and bool(json.loads(arguments) == _ARGUMENTS)
    except ValueError:
        return False


def _leftover(formats: AnswerFormats, text: str, ending: str) -> _Leftover | None:
    """Return what a format leaves over of a call, less tags of thinking and what `ending` ends every answer with; None
    if it does not read the call."""
    reader = reader_for(formats, {_NAME: _SCHEMA})
    parts = reader.push(text) + reader.finish()
    if not _is_the_call(parts):
        return None
    if formats.calls in (CHANNELS, DECLARED):
        return _Leftover()
    at = next(i for i, part in enumerate(parts) if isinstance(part, CallBegun))
    before, behind = (
        "".join(part.text for part in some if isinstance(part, Said)) for some in (parts[:at], parts[at:])
    )
    for tag in formats.think_tags.spellings if formats.think_tags is not None else ():
        before = before.replace(tag, "")
    return _trimmed(formats, text, before.strip(), behind.strip(), ending)


def _trimmed(formats: AnswerFormats, text: str, before: str, behind: str, ending: str) -> _Leftover:
    """Take from both sides of a call the brackets beside it, and what every answer ends with."""
    behind = "" if ending.endswith(behind) else behind.removesuffix(ending)
    bare = before.rstrip("[ \n"), behind.lstrip("] \n").strip()
    form = formats.call_format
    likens = form is not None and bool(form.begins) and form.begins[0] not in text
    return _Leftover(*bare, len(before) + len(behind) - len(bare[0]) - len(bare[1]), likens)


def _is_distinct(tags: ThinkTags) -> bool:
    """Return whether no other model has these tags, or no layout tells this one from others."""
    return not tags.layout or sum(each.opens == tags.opens for each in THINK_TAGS.values()) == 1


def _thinking(render: Render) -> tuple[str, str]:
    thought: Message = {"role": "assistant", "content": _SAID, "reasoning_content": _THOUGHT, "thinking": _THOUGHT}
    switches: tuple[dict[str, bool], ...] = (
        {},
        {"enable_thinking": True, "thinking": True},
        {"enable_thinking": False},
    )
    texts = [_answered(render, thought), *(_rendered(render, [_ASKED], **each) or "" for each in switches)]
    for each in THINK_TAGS.values():
        for text in texts:
            if each.opens in text and (_is_distinct(each) or any(word in text for word in each.layout)):
                at = text.index(each.opens)
                return each.name, f"the chat template writes {text[at : at + _MAX_EVIDENCE]!r}"
    call = {"type": "function", "function": {"name": _NAME, "arguments": _ARGUMENTS}}
    if any("<|channel|>" in text for text in (*texts, _answered(render, {**thought, "tool_calls": [call]}))):
        return CHANNELS, "the chat template writes '<|channel|>'"
    return "", "the chat template writes nothing of thinking"
