"""The fields of tools: what a chat offers, which calls were made, and which may be."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Final, Literal, TypeAlias

from pydantic import Field, StringConstraints, Tag
from pydantic_core import from_json

from forebay.base import json_text
from forebay.server.protocol.cache_control import CacheControl
from forebay.server.protocol.ignored import Harmless
from forebay.server.protocol.strict import History, Label, Strict, Text
from forebay.server.protocol.validation import branch, by_shape

MAX_TOOLS: Final = 1024  # clients offer all tools of several MCP servers
INPUT: Final = "input"  # the parameter by which a model is told of a tool that takes one text
ToolName = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9_.-]{1,128}$")]


class CalledFunction(History):
    """`arguments` is the text that the model wrote: usually a JSON object, and any text if the call was cut off."""

    name: Annotated[str, StringConstraints(min_length=1, max_length=128)]
    arguments: Text

    @property
    def decoded(self) -> dict[str, Any] | str:
        """The arguments as an object, or the text itself if it is not a JSON object."""
        try:
            value = json_text.decode(self.arguments or "{}")
        except ValueError:
            return self.arguments
        return value if isinstance(value, dict) else self.arguments


class ToolCall(History):
    """A function call of an earlier message."""

    ignored = {"index": Harmless(lambda value: value is None or isinstance(value, int), {"type": ["integer", "null"]})}
    id: Label
    type: Literal["function"] = "function"
    function: CalledFunction

    def for_template(self) -> dict[str, Any]:
        """Return the call as the chat template expects it, with arguments as an object."""
        return _call_for_template(self.id, self.function.name, self.function.decoded)


class CalledWithText(History):
    """The custom tool that was called, and its input."""

    name: Annotated[str, StringConstraints(min_length=1, max_length=128)]
    input: Text


class TextCall(History):
    """The call of a tool that takes one text."""

    ignored = ToolCall.ignored
    id: Label
    type: Literal["custom"]
    custom: CalledWithText

    def for_template(self) -> dict[str, Any]:
        """Return the call as one of a function whose only argument is the input."""
        return _call_for_template(self.id, self.custom.name, {INPUT: self.custom.input})


def _call_for_template(call_id: str, name: str, arguments: dict[str, Any] | str) -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


class ToolFunction(Strict):
    """If it is `strict`, or a tool must be called, its arguments are what `parameters` say. A mark is the tool's."""

    name: ToolName
    description: Text | None = None
    parameters: Annotated[dict[str, Any], Field(fail_fast=True)] | None = None
    strict: bool | None = None
    cache_control: CacheControl | None = None


class Tool(Strict):
    """A function that the client offers. Tools stand before all messages, so a mark of any keeps all of them."""

    type: Literal["function"]
    function: ToolFunction
    cache_control: CacheControl | None = None

    @property
    def marks(self) -> list[float]:
        """Return for each mark of the tool the seconds for which it is kept."""
        return [mark.ttl_s for mark in (self.cache_control, self.function.cache_control) if mark is not None]


class GrammarDefinition(Strict):
    """A grammar in Lark's syntax, or a regular expression."""

    syntax: Literal["lark", "regex"]
    definition: Annotated[Text, Field(min_length=1)]


class AnyInput(Strict):
    """The format of a custom tool that takes any text."""

    type: Literal["text"]


class GrammarInput(Strict):
    """The format of a custom tool whose input must match a grammar."""

    type: Literal["grammar"]
    grammar: GrammarDefinition


class TextToolOptions(Strict):
    """The name, purpose and input format of a custom tool."""

    name: ToolName
    description: Text | None = None
    format: (
        Annotated[
            Annotated[AnyInput, Tag(branch("text"))] | Annotated[GrammarInput, Tag(branch("grammar"))],
            by_shape(lambda value: _by_type(value, "text", "grammar"), "an object whose type is text or grammar"),
        ]
        | None
    ) = None


class TextTool(Strict):
    """A tool that takes one text. The model sees a function with one parameter."""

    type: Literal["custom"]
    custom: TextToolOptions
    cache_control: CacheControl | None = None

    @property
    def marks(self) -> list[float]:
        """Return the seconds for which the tool is kept if it is marked."""
        return [] if self.cache_control is None else [self.cache_control.ttl_s]

    @property
    def grammar(self) -> GrammarDefinition | None:
        return self.custom.format.grammar if isinstance(self.custom.format, GrammarInput) else None

    @property
    def function(self) -> ToolFunction:
        """The function that stands for the custom tool in the chat template: its only argument is the input."""
        described = (
            {} if self.grammar is None else {"description": f"Must match this grammar:\n{self.grammar.definition}"}
        )
        return ToolFunction(
            name=self.custom.name,
            description=self.custom.description,
            parameters={
                "type": "object",
                "properties": {INPUT: {"type": "string", **described}},
                "required": [INPUT],
                "additionalProperties": False,
            },
            strict=True,
        )


def input_of(arguments: str) -> str:
    """Return the text of a `TextTool`'s call; of a call that was cut off, what there is of it."""
    try:
        found = from_json(arguments, allow_partial="trailing-strings")
    except ValueError:
        return arguments
    text = found.get(INPUT) if isinstance(found, dict) else None
    return text if isinstance(text, str) else arguments


def _by_type(value: Any, *kinds: str) -> str | None:
    """Return the branch of the `type` of an object; the first if it has no other."""
    kind = value.get("type") if isinstance(value, dict) else getattr(value, "type", None)
    if not isinstance(value, dict | Strict):
        return None
    return branch(kind if isinstance(kind, str) and kind in kinds else kinds[0])


def _choice_shape(value: Any) -> str | None:
    return branch("text") if isinstance(value, str) else _by_type(value, "function", "custom", "allowed_tools")


class NamedFunction(Strict):
    """The name of a function."""

    name: ToolName


class NamedTool(Strict):
    """The choice of one function that must be called."""

    names_at: ClassVar[str] = "function.name"
    type: Literal["function"]
    function: NamedFunction

    @property
    def tool_names(self) -> list[str]:
        return [self.function.name]


class NamedTextTool(Strict):
    """The choice of one custom tool that must be called."""

    names_at: ClassVar[str] = "custom.name"
    type: Literal["custom"]
    custom: NamedFunction

    @property
    def tool_names(self) -> list[str]:
        return [self.custom.name]


AnyTool: TypeAlias = Annotated[
    Annotated[Tool, Tag(branch("function"))] | Annotated[TextTool, Tag(branch("custom"))],
    by_shape(lambda value: _by_type(value, "function", "custom"), "an object"),
]
AnyCall: TypeAlias = Annotated[
    Annotated[ToolCall, Tag(branch("function"))] | Annotated[TextCall, Tag(branch("custom"))],
    by_shape(lambda value: _by_type(value, "function", "custom"), "an object"),
]
AnyName: TypeAlias = Annotated[
    Annotated[NamedTool, Tag(branch("function"))] | Annotated[NamedTextTool, Tag(branch("custom"))],
    by_shape(lambda value: _by_type(value, "function", "custom"), "an object"),
]


class AllowedNames(Strict):
    """The tools that may be called, by name, and whether one of them must be."""

    mode: Literal["auto", "required"]
    tools: Annotated[list[AnyName], Field(min_length=1, max_length=MAX_TOOLS, fail_fast=True)]


class AllowedTools(Strict):
    """The tools that the model may call, among all that the prompt shows."""

    names_at: ClassVar[str] = "allowed_tools.tools"
    type: Literal["allowed_tools"]
    allowed_tools: AllowedNames

    @property
    def tool_names(self) -> list[str]:
        return [name for tool in self.allowed_tools.tools for name in tool.tool_names]


ToolChoice = Annotated[
    Annotated[Literal["none", "auto", "required"], Tag(branch("text"))]
    | Annotated[NamedTool, Tag(branch("function"))]
    | Annotated[NamedTextTool, Tag(branch("custom"))]
    | Annotated[AllowedTools, Tag(branch("allowed_tools"))],
    by_shape(_choice_shape, "none, auto, required, the name of a tool or allowed_tools"),
]
