"""The tools of /v1/responses, and the tools of a chat that they stand for."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Annotated, Any, ClassVar, Final, Literal, NamedTuple, TypeAlias

from pydantic import Field, Tag, WithJsonSchema

from forebay.server.protocol.ignored import one_of
from forebay.server.protocol.strict import Strict, Text
from forebay.server.protocol.tools import MAX_TOOLS, AnyInput, GrammarDefinition, ToolFunction, ToolName
from forebay.server.protocol.validation import branch, by_shape


class FunctionTool(ToolFunction):
    """A function that the client offers."""

    call_type: ClassVar[str] = "function_call"  # of the item that calls it
    ignored = {
        "allowed_callers": one_of(None, ["direct"]),
        "async": one_of(None, False),
        "output_schema": one_of(None),
    }
    type: Literal["function"]
    defer_loading: bool | None = None  # all tools are in the prompt: none has to be searched for

    def as_chat(self) -> dict[str, Any]:
        """Return the tool as a function of a chat."""
        return {"type": "function", "function": self.model_dump(exclude={"type", "defer_loading"}, exclude_none=True)}


class InlineGrammar(GrammarDefinition):
    """A grammar that a custom tool's input must match."""

    type: Literal["grammar"]


class TextInputTool(Strict):
    """A tool that takes one text."""

    call_type: ClassVar[str] = "custom_tool_call"
    ignored = {"allowed_callers": one_of(None, ["direct"]), "async": one_of(None, False)}
    type: Literal["custom"]
    defer_loading: bool | None = None
    name: ToolName
    description: Text | None = None
    format: (
        Annotated[
            Annotated[AnyInput, Tag(branch("text"))] | Annotated[InlineGrammar, Tag(branch("grammar"))],
            by_shape(lambda value: _shape(value, "text", "grammar"), "an object whose type is text or grammar"),
        ]
        | None
    ) = None

    def as_chat(self) -> dict[str, Any]:
        """Return the tool as a custom tool of a chat."""
        options: dict[str, Any] = self.model_dump(include={"name", "description"}, exclude_none=True)
        if isinstance(self.format, InlineGrammar):
            options["format"] = {"type": "grammar", "grammar": self.format.model_dump(exclude={"type"})}
        return {"type": "custom", "custom": options}


class ToolSearch(ToolFunction):
    """A search for further tools, which the client does. What it finds is offered from then on."""

    call_type: ClassVar[str] = "tool_search_call"
    type: Literal["tool_search"]
    execution: Literal["client"]
    name: Literal["tool_search"] = "tool_search"

    def as_chat(self) -> dict[str, Any]:
        """Return the search as a function of a chat."""
        return {"type": "function", "function": self.model_dump(exclude={"type", "execution"}, exclude_none=True)}


_OWN_TOOLS: Final = ("function", "custom")


def _other_than(*kinds: str) -> WithJsonSchema:
    """Return the schema of an object of any other type."""
    other = {"type": "string", "not": {"enum": list(kinds)}}
    return WithJsonSchema({"type": "object", "properties": {"type": other}, "required": ["type"]})


def _shape(value: Any, *kinds: str, other: str | None = None) -> str | None:
    """Return the branch of an object's `type`, `other` if it has another one."""
    kind = value.get("type") if isinstance(value, dict) else getattr(value, "type", None)
    name = kind if kind in kinds else other
    return branch(name) if isinstance(kind, str) and name else None


_ToolOfNamespace: TypeAlias = Annotated[
    Annotated[FunctionTool, Tag(branch("function"))]
    | Annotated[TextInputTool, Tag(branch("custom"))]
    | Annotated[dict[str, Any], Field(fail_fast=True), _other_than(*_OWN_TOOLS), Tag(branch("other"))],
    by_shape(lambda value: _shape(value, *_OWN_TOOLS, other="other"), "an object with a type"),
]


class NamespaceTool(Strict):
    """Functions and custom tools of one origin, such as an MCP server."""

    type: Literal["namespace"]
    name: ToolName
    description: Text | None = None
    tools: Annotated[list[_ToolOfNamespace], Field(max_length=MAX_TOOLS, fail_fast=True)]


def _tool_shape(value: Any) -> str | None:
    """Return the branch of a tool. A search that the server would do is one of the other tools."""
    if isinstance(value, dict) and value.get("type") == "tool_search" and value.get("execution") != "client":
        return branch("other")
    return _shape(value, *_OWN_TOOLS, "namespace", "tool_search", other="other")


Tool: TypeAlias = Annotated[
    Annotated[FunctionTool, Tag(branch("function"))]
    | Annotated[TextInputTool, Tag(branch("custom"))]
    | Annotated[NamespaceTool, Tag(branch("namespace"))]
    | Annotated[ToolSearch, Tag(branch("tool_search"))]
    | Annotated[dict[str, Any], Field(fail_fast=True), _other_than(*_OWN_TOOLS, "namespace"), Tag(branch("other"))],
    by_shape(_tool_shape, "an object with a type"),
]


def name_in_chat(namespace: str | None, name: str) -> str:
    """Return the name by which the model calls a tool: that of a namespace has both names, joined as those of MCP
    servers are."""
    return f"{namespace.rstrip('_')}__{name}" if namespace else name


class OfferedTool(NamedTuple):
    """A tool that the client runs, its place in the request, and its namespace. `about` is the description of the
    namespace, which the first of its tools has."""

    tool: FunctionTool | TextInputTool | ToolSearch
    place: str
    namespace: str | None = None
    about: str = ""

    @property
    def name(self) -> str:
        """The name by which the model calls the tool."""
        return name_in_chat(self.namespace, self.tool.name)

    def as_chat(self) -> dict[str, Any]:
        """Return the tool as one of a chat."""
        described = "\n\n".join(text for text in (self.about, self.tool.description) if text)
        changed = {"name": self.name, "description": described or self.tool.description}
        return self.tool.model_copy(update=changed).as_chat()


def offered_tools(tools: Sequence[Tool]) -> Iterator[OfferedTool]:
    """Yield the tools that the client runs, those of namespaces too. Hosted tools are left out."""
    for place, tool in enumerate(tools):
        if isinstance(tool, FunctionTool | TextInputTool | ToolSearch):
            yield OfferedTool(tool, f"tools.{place}")
        elif isinstance(tool, NamespaceTool):
            about = tool.description or ""
            for inner_place, inner in enumerate(tool.tools):
                if not isinstance(inner, dict):
                    yield OfferedTool(inner, f"tools.{place}.tools.{inner_place}", tool.name, about)
                    about = ""


def hosted_tools(tools: Sequence[Tool]) -> Iterator[dict[str, Any]]:
    """Yield the tools that a server would have to run, those of namespaces too."""
    for tool in tools:
        if isinstance(tool, dict):
            yield tool
        elif isinstance(tool, NamespaceTool):
            yield from (inner for inner in tool.tools if isinstance(inner, dict))


def shown_tools(tools: Sequence[Tool]) -> list[dict[str, Any]]:
    """Return the tools that the client runs as the answer repeats them: without their schemas."""
    return [_shown(tool) for tool in tools if not isinstance(tool, dict)]


def _shown(tool: FunctionTool | TextInputTool | NamespaceTool | ToolSearch) -> dict[str, Any]:
    if isinstance(tool, ToolSearch):
        return {"type": tool.type, "execution": tool.execution, "description": tool.description, "parameters": None}
    named = {"type": tool.type, "name": tool.name}
    if isinstance(tool, NamespaceTool):
        return {**named, "description": "", "tools": shown_tools(tool.tools)}
    return {**named, "parameters": None} if isinstance(tool, FunctionTool) else named


class FunctionChoice(Strict):
    """The choice of one function that must be called."""

    type: Literal["function"]
    name: ToolName
    namespace: ToolName | None = None

    def as_chat(self) -> dict[str, Any]:
        """Return the choice as a chat's `tool_choice`."""
        return {"type": "function", "function": {"name": name_in_chat(self.namespace, self.name)}}


class TextToolChoice(Strict):
    """The choice of one custom tool that must be called."""

    type: Literal["custom"]
    name: ToolName
    namespace: ToolName | None = None

    def as_chat(self) -> dict[str, Any]:
        """Return the choice as a chat's `tool_choice`."""
        return {"type": "custom", "custom": {"name": name_in_chat(self.namespace, self.name)}}


_AnyChoice: TypeAlias = Annotated[
    Annotated[FunctionChoice, Tag(branch("function"))]
    | Annotated[TextToolChoice, Tag(branch("custom"))]
    | Annotated[dict[str, Any], Field(fail_fast=True), _other_than(*_OWN_TOOLS), Tag(branch("other"))],
    by_shape(lambda value: _shape(value, *_OWN_TOOLS, other="other"), "an object with a type"),
]


class AllowedChoice(Strict):
    """A choice that allows some of the tools, all of which the prompt shows. Tools of other types are left out."""

    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: Annotated[list[_AnyChoice], Field(min_length=1, max_length=MAX_TOOLS, fail_fast=True)]

    def as_chat(self) -> dict[str, Any] | str:
        """Return the choice as a chat's `tool_choice`; `none` if all tools of it were left out."""
        named = [tool.as_chat() for tool in self.tools if not isinstance(tool, dict)]
        allowed = {"mode": self.mode, "tools": named}
        return {"type": "allowed_tools", "allowed_tools": allowed} if named else "none"


def _choice_shape(value: Any) -> str | None:
    if isinstance(value, str):
        return branch("text")
    return _shape(value, "function", "custom", "allowed_tools")


ToolChoice: TypeAlias = Annotated[
    Annotated[Literal["none", "auto", "required"], Tag(branch("text"))]
    | Annotated[FunctionChoice, Tag(branch("function"))]
    | Annotated[TextToolChoice, Tag(branch("custom"))]
    | Annotated[AllowedChoice, Tag(branch("allowed_tools"))],
    by_shape(_choice_shape, "none, auto, required, the name of a tool or allowed_tools"),
]
