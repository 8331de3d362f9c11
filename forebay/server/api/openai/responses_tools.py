"""The tools of /v1/responses, and the tools of a chat that they stand for."""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal, TypeAlias

from pydantic import Field, Tag, WithJsonSchema

from forebay.server.protocol.ignored import one_of
from forebay.server.protocol.strict import Strict, Text
from forebay.server.protocol.tools import MAX_TOOLS, AnyInput, GrammarDefinition, ToolFunction, ToolName
from forebay.server.protocol.validation import branch, by_shape


class FunctionTool(ToolFunction):
    """A function that the client offers."""

    ignored = {
        "allowed_callers": one_of(None, ["direct"]),
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

    ignored = {"allowed_callers": one_of(None, ["direct"])}
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


_OWN_TOOLS: Final = ("function", "custom")
_OTHER_TOOL: Final = {
    "type": "object",
    "properties": {"type": {"type": "string", "not": {"enum": list(_OWN_TOOLS)}}},
    "required": ["type"],
}


def _shape(value: Any, *kinds: str, other: str | None = None) -> str | None:
    """Return the branch of an object's `type`, `other` if it has another one."""
    kind = value.get("type") if isinstance(value, dict) else getattr(value, "type", None)
    name = kind if kind in kinds else other
    return branch(name) if isinstance(kind, str) and name else None


Tool: TypeAlias = Annotated[
    Annotated[FunctionTool, Tag(branch("function"))]
    | Annotated[TextInputTool, Tag(branch("custom"))]
    | Annotated[dict[str, Any], Field(fail_fast=True), WithJsonSchema(_OTHER_TOOL), Tag(branch("other"))],
    by_shape(lambda value: _shape(value, *_OWN_TOOLS, other="other"), "an object with a type"),
]


class FunctionChoice(Strict):
    """The choice of one function that must be called."""

    type: Literal["function"]
    name: ToolName

    def as_chat(self) -> dict[str, Any]:
        """Return the choice as a chat's `tool_choice`."""
        return {"type": "function", "function": {"name": self.name}}


class TextToolChoice(Strict):
    """The choice of one custom tool that must be called."""

    type: Literal["custom"]
    name: ToolName

    def as_chat(self) -> dict[str, Any]:
        """Return the choice as a chat's `tool_choice`."""
        return {"type": "custom", "custom": {"name": self.name}}


_AnyChoice: TypeAlias = Annotated[
    Annotated[FunctionChoice, Tag(branch("function"))]
    | Annotated[TextToolChoice, Tag(branch("custom"))]
    | Annotated[dict[str, Any], Field(fail_fast=True), WithJsonSchema(_OTHER_TOOL), Tag(branch("other"))],
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
