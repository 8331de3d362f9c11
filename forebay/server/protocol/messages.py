"""Input of the chat template: messages, and the variables that a client may set."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from itertools import accumulate
from typing import Annotated, Any, Final, Literal, NamedTuple, Self

from pydantic import (
    AfterValidator,
    ConfigDict,
    Discriminator,
    Field,
    StringConstraints,
    Tag,
    ValidationInfo,
    model_validator,
)
from pydantic_core import PydanticCustomError

from forebay.server.protocol.cache_control import CacheControl
from forebay.server.protocol.ignored import MESSAGE_IGNORED
from forebay.server.protocol.images import Image, ImageUrl, accepts_images
from forebay.server.protocol.results import in_order
from forebay.server.protocol.strict import History, Label, Passing, Strict, Text
from forebay.server.protocol.tools import MAX_TOOLS, AnyCall
from forebay.server.protocol.validation import (
    CHAT_TEMPLATE_REFUSED,
    INVALID_COMBINATION,
    INVALID_VALUE,
    MISSING_FIELD,
    UNSUPPORTED_FIELD,
    branch,
    by_shape,
    refusal,
)
from forebay.text.resumption import IMAGE_CHARS, MAX_BREAKPOINTS

MAX_MESSAGES: Final = 4096
MAX_PARTS: Final = 256
CHAT_TEMPLATE: Final = "chat_template"


_TEXT, _LIST, _IMAGE = branch("text"), branch("list"), branch("image")


def text_or_list(value: Any) -> str | None:
    """Return the tag of the union's branch for a text or a list, or None for anything else."""
    return _TEXT if isinstance(value, str) else _LIST if isinstance(value, list) else None


class TextPart(History):
    """A text within a message's content. Other media than images are refused."""

    type: Literal["text"]
    text: Text
    cache_control: CacheControl | None = None

    @property
    def num_chars(self) -> int:
        return len(self.text)

    @model_validator(mode="before")
    @classmethod
    def _refuse_other_media(cls, data: Any, info: ValidationInfo) -> Any:
        kind = data.get("type") if isinstance(data, dict) else None
        if isinstance(kind, str) and kind != "text":
            served = "text and image parts" if accepts_images(info) else "text parts"
            raise refusal(UNSUPPORTED_FIELD, "type", f"type is {kind[:64]!a}: only {served} are supported")
        return data


class ImagePart(Image):
    """An image within a message's content."""

    type: Literal["image_url"]
    image_url: ImageUrl
    cache_control: CacheControl | None = None

    @property
    def num_chars(self) -> int:
        """Return the length that it has among texts."""
        return IMAGE_CHARS


def text_or_image(name: str, image: type[Image]) -> Discriminator:
    """Return a discriminator of the parts of a content: a part whose type is not `name` is a text."""

    def choose(value: Any) -> str:
        says = value.get("type") == name if isinstance(value, dict) else isinstance(value, image)
        return _IMAGE if says else _TEXT

    return Discriminator(choose)


Part = Annotated[
    Annotated[TextPart, Tag(_TEXT)] | Annotated[ImagePart, Tag(_IMAGE)], text_or_image("image_url", ImagePart)
]
Content = Annotated[
    Annotated[Text, Tag(branch("text"))]
    | Annotated[list[Part], Field(max_length=MAX_PARTS, fail_fast=True), Tag(branch("list"))],
    by_shape(text_or_list, "a string or a list of text parts"),
]


class ChatMessage(History):
    """A message of the conversation."""

    ignored = MESSAGE_IGNORED
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Content | None = None
    reasoning_content: Text | None = None
    tool_calls: Annotated[list[AnyCall], Field(max_length=MAX_TOOLS, fail_fast=True)] | None = None
    tool_call_id: Label | None = None
    name: Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9_-]{1,64}$")] | None = None
    cache_control: CacheControl | None = None

    @property
    def num_chars(self) -> int:
        """Return the length of the content."""
        content = self.content or ""
        return len(content) if isinstance(content, str) else sum(part.num_chars for part in content)

    @property
    def marks(self) -> list[tuple[int, float]]:
        """Behind how many characters of the content the client set its marks, and the seconds of each."""
        parts = [] if isinstance(self.content, str) else self.content or []
        ends = list(accumulate(part.num_chars for part in parts))
        marked = zip(ends, parts, strict=True)
        marks = [(end, part.cache_control.ttl_s) for end, part in marked if part.cache_control is not None]
        return [*marks, (self.num_chars, self.cache_control.ttl_s)] if self.cache_control is not None else marks

    @property
    def images(self) -> dict[int, ImagePart]:
        """Return the images of the content, by their place in it."""
        parts = self.content if isinstance(self.content, list) else []
        return {place: part for place, part in enumerate(parts) if isinstance(part, ImagePart)}

    @model_validator(mode="after")
    def _check_role(self) -> Self:
        own = {"tool_calls": "assistant", "reasoning_content": "assistant", "tool_call_id": "tool"}
        wrong = next((field for field, role in own.items() if getattr(self, field) and self.role != role), None)
        if wrong is not None:
            raise refusal(INVALID_COMBINATION, wrong, f"{wrong} is only allowed with role {own[wrong]}")
        if self.content in (None, []) and self.role not in ("assistant", "tool"):
            what = "content is missing: only an answer and the result of a tool may have none"
            raise refusal(MISSING_FIELD, "content", what)
        if self.role == "tool" and self.tool_call_id is None:
            raise refusal(MISSING_FIELD, "tool_call_id", "tool_call_id is missing: it says whose result this is")
        if isinstance(self.content, list) and self.role not in ("user", "tool") and (images := self.images):
            at = f"content.{min(images)}.type"
            what = f"{at} is image_url, which is for messages of role user and tool, and role is {self.role}"
            raise refusal(INVALID_COMBINATION, at, what)
        return self

    def for_template(self) -> dict[str, Any]:
        """`content` is None in a message of calls alone. Templates know the thinking by one of two names, and those of
        the second refuse it in a message with both words and calls."""
        content = _for_template(self.content) if isinstance(self.content, list) else self.content
        content = "" if content is None and not self.tool_calls else content
        thought = self.reasoning_content
        thinking = None if content and self.tool_calls else thought
        more = {
            "name": self.name,
            "reasoning_content": thought,
            "thinking": thinking,
            "tool_call_id": self.tool_call_id,
        }
        calls = {"tool_calls": [call.for_template() for call in self.tool_calls]} if self.tool_calls else {}
        role = "system" if self.role == "developer" else self.role
        return {"role": role, "content": content, **{key: value for key, value in more.items() if value}, **calls}


def _for_template(parts: Sequence[TextPart | ImagePart]) -> str | list[dict[str, str]]:
    """Return the texts as one, unless there are images between them."""
    texts = [part for part in parts if isinstance(part, TextPart)]
    if len(texts) == len(parts):
        return "".join(part.text for part in texts)
    return [{"type": "text", "text": part.text} if isinstance(part, TextPart) else {"type": "image"} for part in parts]


def check_breakpoints(count: int) -> None:
    """Raise a refusal of more marks than a request may have."""
    if count > MAX_BREAKPOINTS:
        what = f"{count} blocks have cache_control; at most {MAX_BREAKPOINTS} may: keep those of the longest prefixes"
        raise refusal(INVALID_VALUE, "cache_control", what)


def _check_marks(messages: list[ChatMessage]) -> list[ChatMessage]:
    marked = (m for m in messages if m.cache_control is not None or isinstance(m.content, list))
    if count := sum(len(message.marks) for message in marked):
        check_breakpoints(count)
    return in_order(messages) if any(message.role == "tool" for message in messages) else messages


Messages = Annotated[
    list[ChatMessage],
    Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True),
    AfterValidator(_check_marks),
]


class ThinkingSwitch(Strict):
    """The switch that turns thinking on or off."""

    type: Literal["enabled", "disabled"]


def _is_on(value: bool | ThinkingSwitch) -> bool:
    return value if isinstance(value, bool) else value.type == "enabled"


def _switch_shape(value: Any) -> str | None:
    return branch("bool") if isinstance(value, bool) else branch("object") if isinstance(value, dict) else None


Switch = Annotated[
    Annotated[bool, Tag(branch("bool"))] | Annotated[ThinkingSwitch, Tag(branch("object"))],
    by_shape(_switch_shape, 'true, false or {"type": "enabled"} or {"type": "disabled"}'),
    AfterValidator(_is_on),
]


class Thinking(Strict):
    """Whether the model is to think, and how long, in the field's three ways of saying so."""

    enable_thinking: bool | None = None
    thinking: Switch | None = None
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh"] | None = None


# What the server itself gives to a rendering: messages and tools come in fields of their own.
_OWN_VARIABLES: Final = frozenset(
    {
        *("messages", "tools", "add_generation_prompt", "continue_final_message"),
        *("max_tokens", "size", "breakpoints", "encode"),
        *("bos_token", "eos_token", "pad_token", "unk_token", "sep_token", "cls_token", "mask_token"),
    }
)


class TemplateVariables(Thinking):
    """Variables for the chat template: those of `Thinking`, and any others that the template reads."""

    model_config = ConfigDict(extra="allow")

    @property
    def others(self) -> dict[str, Any]:
        return self.model_extra or {}

    @model_validator(mode="before")
    @classmethod
    def _drop_what_asks_for_nothing(cls, data: Any) -> Any:
        for name in data if isinstance(data, dict) else ():
            if name == CHAT_TEMPLATE:
                raise _refused_template()
            if name in _OWN_VARIABLES:
                what = f"{name[:64]!a} is not a variable that a request may set: the server gives it to the template"
                raise refusal(UNSUPPORTED_FIELD, name, what)
        return data


def _refused_template() -> PydanticCustomError:
    what = "chat_template is the operator's choice: the server is started with --chat-template"
    return refusal(CHAT_TEMPLATE_REFUSED, CHAT_TEMPLATE, what)


class RequestedThinking(NamedTuple):
    """Whether the model is to think (None: unstated), how much, and the field that says so."""

    thinks: bool | None
    effort: str | None
    field: str


class WithVariables(Strict):
    """`chat_template_kwargs` are the variables that a client may hand to the chat template."""

    chat_template_kwargs: TemplateVariables | None = None


def variables_as_chat(body: WithVariables) -> dict[str, Any]:
    """Return the variables of a body as a field of a chat completion, if there are any."""
    given = body.chat_template_kwargs
    return {} if given is None else {"chat_template_kwargs": given.model_dump(exclude_unset=True)}


class Templated(WithVariables):
    """Fields that go through the chat template."""

    add_generation_prompt: bool = True
    continue_final_message: bool = False

    @classmethod
    def _check_unknown(cls, name: str, passing: Passing) -> None:
        if name == CHAT_TEMPLATE:
            raise _refused_template()
        super()._check_unknown(name, passing)

    @cached_property
    def requested_thinking(self) -> RequestedThinking:
        """The request for thinking, wherever the body states it. Raises a refusal if two fields contradict."""
        values = [
            (field, getattr(source, field, None))
            for source in (self, self.chat_template_kwargs)
            for field in Thinking.model_fields
        ]
        stated = [(field, value) for field, value in values if value is not None]
        wanted = {value not in (False, "none") for _, value in stated}
        levels = {value for field, value in stated if field == "reasoning_effort"}
        if len(wanted) > 1 or len(levels) > 1:
            what = (
                "enable_thinking, thinking and reasoning_effort, also those in chat_template_kwargs, must say the same"
            )
            raise refusal(INVALID_COMBINATION, stated[0][0], f"the request contradicts itself: {what}")
        level = next(iter(levels - {"none"}), None)
        return RequestedThinking(next(iter(wanted), None), level, stated[0][0] if stated else "")

    @property
    def template_variables(self) -> dict[str, Any]:
        """Return the variables for the chat template that follow from the request."""
        asked = self.requested_thinking
        switches = {} if asked.thinks is None else {"enable_thinking": asked.thinks, "thinking": asked.thinks}
        others = self.chat_template_kwargs.others if self.chat_template_kwargs else {}
        return {**others, **switches, **({} if asked.effort is None else {"reasoning_effort": asked.effort})}

    @model_validator(mode="after")
    def _agree(self) -> Self:
        if (
            self.continue_final_message
            and self.add_generation_prompt
            and "add_generation_prompt" in self.model_fields_set
        ):
            what = "continue_final_message opens no new answer: set add_generation_prompt=false, or leave it out"
            raise refusal(INVALID_COMBINATION, "continue_final_message", what)
        self.requested_thinking  # noqa: B018
        return self
