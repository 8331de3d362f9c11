"""Selection of the `Reader` for the formats of a model."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Final

from forebay.text.answers.answer import Answer, Tools
from forebay.text.answers.calls import no_calls
from forebay.text.answers.cursor import Cursor, Markers, Reading, Sink, drop, json_value, markers_of
from forebay.text.answers.declared.declaration import Declaration, Region
from forebay.text.answers.declared.reading import Regions
from forebay.text.answers.declared.trees import beginnings, literal_text
from forebay.text.answers.formats import (
    CALL_FORMATS,
    CHANNEL_SPELLINGS,
    CHANNELS,
    CITING,
    DECLARED,
    THINK_TAGS,
    CallFormat,
    ThinkTags,
)
from forebay.text.answers.parts import CallArguments, Kind, Part, Said, Thought

_MAX_HEADER_CHARS: Final = 512
_BETWEEN: Final = Markers("<|channel|>", "<|start|>", " to=functions.")
_MESSAGE: Final = Markers("<|message|>")
_BODY_END: Final = Markers("<|end|>", "<|call|>", "<|return|>", "<|start|>", "<|channel|>")
_CHANNEL: Final = re.compile(r"<\|channel\|>\s*(\w+)")
_CITATION_MARKS: Final = ("<co", "</co")
_CITATION: Final = re.compile(r"</?co(: ?[\d:,\[\] ]*)?>")  # <co>text</co: 0:[1,2]>
_MAX_CITATION_CHARS: Final = 256
_TAG_END: Final = Markers(">")
_RECIPIENT: Final = re.compile(r"to=functions\.([\w.\-/]+?)(?=[\s<]|$)")


@dataclass(frozen=True)
class AnswerFormats:
    """How a model spells calls and thinking, by the names of `answers.formats`; None if it has neither. `marks` are the
    texts around calls in its chat template for which the format has no markers. `declared` is what the checkpoint
    says of both, which are then called DECLARED."""

    calls: str | None = None
    thinking: str | None = None
    marks: tuple[str, str] = ("", "")
    declared: Declaration | None = None

    @cached_property
    def spellings(self) -> frozenset[str]:
        """Return the markers, which must be visible in the text even if they are tokens that texts omit."""
        if self.declared is not None:
            return self.declared.spellings
        found = set[str]()
        if CHANNELS in (self.calls, self.thinking):
            found |= set(CHANNEL_SPELLINGS)
        for each in (self.call_format, self.think_tags):
            found |= set(each.spellings if each is not None else ())
        return frozenset(found)

    @property
    def think_tags(self) -> ThinkTags | None:
        """The tags around the thinking; None if there are none, or the declared ones are of many spellings."""
        if self.thinking != DECLARED or self.declared is None:
            return THINK_TAGS.get(self.thinking or "")
        return _think_tags(self.declared.thinking)

    @cached_property
    def call_format(self) -> CallFormat | None:
        """The format of calls, with the marks that this model has around them."""
        if self.calls == DECLARED and self.declared is not None:
            return _call_format(self.declared)
        form = CALL_FORMATS.get(self.calls or "")
        if form is None or not any(self.marks):
            return form
        begin, end = self.marks
        begins = tuple(dict.fromkeys(filter(None, (begin, *form.begins))))
        return replace(form, begins=begins, after=tuple(dict.fromkeys(filter(None, (end, *form.after)))))

    @property
    def with_thinking_said(self) -> AnswerFormats:
        """Return formats that treat thinking as text. Channels stay separate, since their marks would show in it."""
        return replace(self, calls=CHANNELS if self.thinking == CHANNELS else self.calls, thinking=None)


def _think_tags(region: Region | None) -> ThinkTags | None:
    if region is None or region.opens is None or region.closes is None:
        return None
    opens, closes = literal_text(region.opens.tree), literal_text(region.closes.tree)
    return ThinkTags(DECLARED, opens, closes) if opens and closes else None


def _call_format(declared: Declaration) -> CallFormat | None:
    """Return the markers of declared calls, by which grammars tell them from text: the declaration's reader is its own.
    None if they begin with no text that is always the same."""
    opens = declared.calls.opens if declared.calls is not None else None
    begins = beginnings(opens.tree)[0] if opens is not None else []
    return CallFormat(DECLARED, no_calls, begins=tuple(begins), inside=tuple(declared.spellings)) if begins else None


class AnswerReader:
    """A `Reader`."""

    def __init__(self, formats: AnswerFormats, tools: Tools | None, *, opened: bool | Region = False) -> None:
        """Without `tools` nothing is a call. `opened`: the prompt ends within the thinking, or within this region."""
        self._cursor = Cursor()
        channels = CHANNELS in (formats.calls, formats.thinking)
        thinks = bool(opened) and formats.thinking is not None
        begins: Kind = Thought if thinks or channels else Said
        self._answer = Answer(self._cursor, tools or {}, exact=channels, marks=[(0, begins)], thinking=thinks)
        form = formats.call_format
        self._calls = form.of_tools(tools) if tools and form is not None else None
        self._think = THINK_TAGS.get(formats.thinking or "")
        self._shows_thinking = formats.thinking is not None
        self._citations = _CITATION_MARKS if CITING & {formats.calls, formats.thinking} else ()
        self._calls_in_channels = bool(tools) and formats.calls == CHANNELS
        answer = self._answer
        self._kinds: dict[Sink, Kind] = {answer.say: Said, answer.think: Thought, answer.argue: CallArguments}
        self._program = self._program_of(formats, bool(tools), opened)
        self._advance()

    @property
    def thinking(self) -> bool:
        """Return whether the next text belongs to the thinking."""
        return self._answer.thinking and self._answer.marks[-1][1] is not CallArguments

    def push(self, text: str) -> list[Part]:
        """Read more text of the answer, and return the parts that are certain by now."""
        self._cursor.feed(text)
        self._advance()
        return self._answer.taken()

    def pass_by(self, text: str) -> Part | None:
        """Return the text as one part without parsing, if it cannot contain a marker; None if it must be pushed."""
        idle = self._cursor.idle
        if idle is None or not idle[0].fullmatch(text):
            return None
        kind = self._kinds.get(idle[1])
        return None if kind is None else self._answer.pass_by(kind, text)

    def finish(self) -> list[Part]:
        """Return the last parts; unfinished markers become text."""
        self._cursor.ended = True
        self._advance()
        if self._answer.thinking:
            self._answer.turn()
        self._answer.finish()
        return self._answer.taken()

    @property
    def settled(self) -> int:
        return self._answer.settled

    def kind(self, begin: int, end: int) -> Kind:
        """Return whether the characters [begin, end) of the answer are visible text, reasoning or a call."""
        return self._answer.kind(begin, end)

    def _program_of(self, formats: AnswerFormats, has_tools: bool, opened: bool | Region) -> Reading[None]:
        if formats.declared is not None:
            calls, thoughts = has_tools and formats.calls is not None, formats.thinking is not None
            begun = opened if isinstance(opened, Region) else formats.declared.thinking if opened else None
            return Regions(formats.declared, self._answer, calls=calls, thoughts=thoughts).read(begun)
        return self._channels() if CHANNELS in (formats.calls, formats.thinking) else self._tags()

    def _advance(self) -> None:
        next(self._program, None)

    def _tags(self) -> Reading[None]:
        closes = ""
        if self._think is not None:
            closes = yield from self._thinking(self._think)
        calls = self._calls
        layout = (*(self._think.layout if self._think is not None else ()), *filter(None, [closes]))
        begins: tuple[str, ...] = ()
        if calls is not None:
            layout, begins = (*layout, *calls.layout), (*calls.begins, *calls.own)
            if calls.may_be_bare and not closes:
                yield from self._bare(calls)
        markers = markers_of(*begins, *layout, *self._citations)
        while marker := (yield from self._cursor.until(markers, self._answer.say)):
            if marker in self._citations:
                yield from self._cited(marker)
                continue
            if calls is None or marker in layout:
                self._answer.turn()
                continue
            yield from self._marked(calls, marker)
            self._answer.give_up()

    def _cited(self, marker: str) -> Reading[None]:
        """Leave out a tag beside a citation, which begins with `marker`. If it is no such tag, the marker is text, and
        what follows is read again: it may have another marker."""
        cursor, record = self._cursor, [marker]
        cursor.record = record
        yield from cursor.until(_TAG_END, drop, _MAX_CITATION_CHARS)
        cursor.record = None
        if _CITATION.fullmatch("".join(record)):
            self._answer.settled = cursor.taken
            return
        cursor.restore("".join(record))
        self._answer.say(cursor.take(len(marker)))

    def _thinking(self, tags: ThinkTags) -> Reading[str]:
        """Return the closing tag if a call ended the thinking instead, else ""."""
        cursor, answer = self._cursor, self._answer
        cursor.record = []
        yield from cursor.spaces()
        found = yield from cursor.literal(tags.opens)
        if not found and not self._answer.thinking:
            answer.give_up()
            return ""
        if found and not (yield from cursor.literal(tags.label)):
            begun = yield from cursor.peek(len(tags.label))
            if cursor.ended and tags.label.startswith(begun):  # the answer was cut off within the label
                cursor.take(len(begun))
        recorded, cursor.record = cursor.record or [], None
        self._answer.thinking = True
        answer.turn(Thought)
        if not found:
            answer.think("".join(recorded))
        called = yield from self._thought(tags)
        self._answer.thinking = False
        if called:
            answer.give_up()
            return tags.closes
        answer.turn()
        return ""

    def _thought(self, tags: ThinkTags) -> Reading[bool]:
        """Read up to the closing tag, or behind a call of a tool that exists: models also call without closing the
        thinking. Return whether there was one."""
        cursor, answer, calls = self._cursor, self._answer, self._calls
        markers = markers_of(*tags.ends, *(calls.marks if calls is not None else ()))
        while (marker := (yield from cursor.until(markers, answer.think))) not in ("", *tags.ends):
            before = answer.calls
            if calls is not None:
                yield from self._marked(calls, marker, known=True)
            if answer.calls > before:
                return True
            answer.give_up(Thought)
        return False

    def _marked(self, calls: CallFormat, marker: str, *, known: bool = False) -> Reading[None]:
        """Read calls behind a marker, or those that begin with it. What follows a marker without a call is read
        again: there may be another one."""
        cursor, own, before = self._cursor, marker in calls.own, self._answer.calls
        cursor.record = [] if own else [marker]
        if own:
            cursor.put_back(marker)
        yield from self._call(calls, known=known or own, in_text=own)
        if self._answer.calls == before:
            cursor.restore("".join(cursor.record))
            cursor.record = []
            cursor.take(len(marker))

    def _bare(self, calls: CallFormat) -> Reading[None]:
        self._cursor.record = []
        yield from self._cursor.spaces()
        if calls.named or (yield from self._cursor.peek()) == calls.bare:
            yield from self._call(calls, known=True)
        if not self._answer.calls:
            self._cursor.restore("".join(self._cursor.record))
            self._cursor.record = []
        self._answer.give_up()

    def _call(self, calls: CallFormat, *, known: bool, in_text: bool = False) -> Reading[None]:
        """Read one or more calls in a row."""
        cursor, answer = self._cursor, self._answer
        body = calls.in_text if in_text and calls.in_text is not None else calls.body
        more = True
        if calls.before:
            yield from cursor.spaces()
            yield from cursor.literal(calls.before)
        while more:
            before = answer.calls
            yield from body(answer, known)
            if answer.calls == before:
                return
            for word in calls.after:
                yield from cursor.spaces()
                if (yield from cursor.literal(word)):
                    answer.layout()
            yield from cursor.spaces()
            more = bool(calls.before) and (yield from cursor.literal(calls.before))

    def _channels(self) -> Reading[None]:
        cursor, answer = self._cursor, self._answer
        marker = yield from cursor.until(_BETWEEN, answer.say)
        while marker:
            cursor.record, header = [marker], [marker]
            if not (yield from cursor.until(_MESSAGE, header.append, _MAX_HEADER_CHARS)):
                answer.give_up()
                marker = yield from cursor.until(_BETWEEN, answer.say)
                continue
            cursor.record = None
            marker = yield from self._message("".join(header))
            if marker not in ("<|start|>", "<|channel|>"):
                marker = yield from cursor.until(_BETWEEN, answer.say)

    def _message(self, header: str) -> Reading[str]:
        """The body behind a header; the marker that ended it."""
        answer = self._answer
        channel, recipient = _CHANNEL.search(header), _RECIPIENT.search(header)
        if recipient is not None and self._calls_in_channels:
            answer.begin(recipient[1])
            yield from self._cursor.spaces()
            yield from json_value(self._cursor, answer.argue)
            answer.end()
            answer.give_up()
            return (yield from self._cursor.until(_BODY_END, answer.say))
        self._answer.thinking = self._shows_thinking and channel is not None and channel[1] == "analysis"
        sink: Sink = answer.think if self._answer.thinking else answer.say
        marker = yield from self._cursor.until(_BODY_END, sink)
        self._answer.thinking = False
        return marker


def reader_for(formats: AnswerFormats, tools: Tools | None, *, opened: bool | Region = False) -> AnswerReader:
    """Return a reader for the answer's formats. With `opened`, the prompt ends inside the reasoning, or the region."""
    return AnswerReader(formats, tools, opened=opened)
