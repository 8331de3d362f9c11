"""The fields of tools: what a chat offers, which calls were made, and which may be."""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal, Self

import msgspec
from pydantic import Field, StringConstraints, Tag, model_validator

from forebay.server.protocol.ignored import Harmless
from forebay.server.protocol.strict import Label, Strict, Text
from forebay.server.protocol.validation import INVALID_VALUE, branch, by_shape, refusal

MAX_TOOLS: Final = 128
ToolName = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9_-]{1,64}$")]


class CalledFunction(Strict):
    """`arguments` is an object of JSON in a string."""

    name: Annotated[str, StringConstraints(min_length=1, max_length=128)]
    arguments: Text

    @property
    def decoded(self) -> dict[str, Any]:
        """Raises ValueError."""
        value = msgspec.json.decode(self.arguments or "{}")
        if not isinstance(value, dict):
            raise ValueError(f"{type(value).__name__} is no object")
        return value

    @model_validator(mode="after")
    def _is_json(self) -> Self:
        try:
            self.decoded  # noqa: B018
        except (ValueError, RecursionError) as error:
            what = f"arguments is no object of JSON in a string ({str(error)[:100]})"
            raise refusal(INVALID_VALUE, "arguments", what) from error
        return self


class ToolCall(Strict):
    ignored = {"index": Harmless(lambda value: value is None or isinstance(value, int), {"type": ["integer", "null"]})}
    id: Label
    type: Literal["function"] = "function"
    function: CalledFunction

    def for_template(self) -> dict[str, Any]:
        function = {"name": self.function.name, "arguments": self.function.decoded}
        return {"id": self.id, "type": "function", "function": function}


class ToolFunction(Strict):
    """Where it is `strict`, or must be called and does not say that it is not, its arguments are what `parameters`
    say."""

    name: ToolName
    description: Text | None = None
    parameters: Annotated[dict[str, Any], Field(fail_fast=True)] | None = None
    strict: bool | None = None


class Tool(Strict):
    type: Literal["function"]
    function: ToolFunction


def _choice_shape(value: Any) -> str | None:
    return branch("text") if isinstance(value, str) else branch("tool") if isinstance(value, dict) else None


class NamedFunction(Strict):
    name: ToolName


class NamedTool(Strict):
    type: Literal["function"]
    function: NamedFunction


ToolChoice = Annotated[
    Annotated[Literal["none", "auto", "required"], Tag(branch("text"))] | Annotated[NamedTool, Tag(branch("tool"))],
    by_shape(_choice_shape, "none, auto, required or the name of a tool"),
]
