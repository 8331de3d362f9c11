"""The fields that say what an answer must look like, in OpenAI's words and in those of other engines.

Each of them is enforced, a schema whether it is `strict` or not: nothing else can be sampled.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import cached_property
from typing import Annotated, Any, Literal, NamedTuple, Self

from pydantic import Field, StringConstraints, Tag, model_validator
from pydantic_core import PydanticCustomError

from forebay.grammar.compiler import MAX_CHOICES
from forebay.requests.sampling_params import Grammar, GrammarKind
from forebay.server.protocol.strict import Label, Strict, Text
from forebay.server.protocol.validation import (
    INVALID_COMBINATION,
    INVALID_VALUE,
    MISSING_FIELD,
    branch,
    by_shape,
    refusal,
)


class Asked(NamedTuple):
    """A constraint of the answer; `field` is the client's field that requires it."""

    grammar: Grammar
    field: str


def _schema_shape(value: Any) -> str | None:
    return branch("text") if isinstance(value, str) else branch("schema") if isinstance(value, dict) else None


Object = Annotated[dict[str, Any], Field(fail_fast=True)]
Schema = Annotated[
    Annotated[Text, Tag(branch("text"))] | Annotated[Object, Tag(branch("schema"))],
    by_shape(_schema_shape, "a JSON schema, as an object or in a string"),
]
Choices = Annotated[list[Text], Field(min_length=1, max_length=MAX_CHOICES, fail_fast=True)]
Word = Annotated[Label, Field(min_length=1)]


class NamedSchema(Strict):
    """The name and the description are the client's own."""

    name: Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9_-]{1,64}$")]
    description: Text | None = None
    schema_: Object = Field(alias="schema")
    strict: bool | None = None


class Structure(Strict):
    """A part of the output with its own JSON schema, between two fixed texts."""

    begin: Annotated[Text, Field(min_length=1)]
    schema_: Object = Field(alias="schema")
    end: Text


class StructuralTag(Strict):
    """Behind each of the `triggers` comes one of the structures that begin so; other text is free."""

    structures: Annotated[list[Structure], Field(min_length=1, max_length=MAX_CHOICES, fail_fast=True)]
    triggers: Annotated[list[Word], Field(min_length=1, max_length=64, fail_fast=True)]

    def asked(self, field: str) -> Asked:
        """Return the grammar; `field` names the place in the request for errors."""
        tag = self.model_dump(by_alias=True, include={"structures", "triggers"})
        return Asked(Grammar(GrammarKind.STRUCTURAL, _as_json(field, tag)), field)


class TextFormat(Strict):
    """Any text."""

    type: Literal["text"]

    def asked(self, field: str) -> None:
        """Return None: nothing is enforced."""
        return


class ObjectFormat(Strict):
    """Any JSON object, or as llama-server has it one that matches `schema`."""

    type: Literal["json_object"]
    schema_: Object | None = Field(None, alias="schema")

    def asked(self, field: str) -> Asked:
        """Return the grammar of any JSON object, or of the schema; `field` names the place in the request for
        errors."""
        if self.schema_ is None:
            return Asked(Grammar(GrammarKind.JSON_OBJECT), field)
        return _schema(f"{field}.schema", self.schema_)


class SchemaFormat(Strict):
    """JSON that matches a schema."""

    type: Literal["json_schema"]
    json_schema: NamedSchema | None = None
    schema_: Object | None = Field(None, alias="schema")  # as llama-server has it

    def asked(self, field: str) -> Asked:
        """Return the grammar of the schema; `field` names the place in the request for errors."""
        if self.json_schema is None:
            return _schema(f"{field}.schema", self.schema_)
        return _schema(f"{field}.json_schema.schema", self.json_schema.schema_)

    @model_validator(mode="after")
    def _one_schema(self) -> Self:
        if (self.json_schema is None) == (self.schema_ is None):
            what = "json_schema is missing: send it, or a schema beside type, and not both"
            raise refusal(MISSING_FIELD if self.schema_ is None else INVALID_COMBINATION, "json_schema", what)
        return self


class StructuralFormat(StructuralTag):
    """Text with parts that have schemas of their own."""

    type: Literal["structural_tag"]


_FORMATS = {"text": TextFormat, "json_object": ObjectFormat, "json_schema": SchemaFormat}
_FORMATS |= {"structural_tag": StructuralFormat}


def _format_type(value: Any) -> str | None:
    name = value.get("type") if isinstance(value, dict) else None
    return branch(name) if isinstance(name, str) and name in _FORMATS else None


ResponseFormat = Annotated[
    Annotated[TextFormat, Tag(branch("text"))]
    | Annotated[ObjectFormat, Tag(branch("json_object"))]
    | Annotated[SchemaFormat, Tag(branch("json_schema"))]
    | Annotated[StructuralFormat, Tag(branch("structural_tag"))],
    by_shape(_format_type, "an object whose type is text, json_object, json_schema or structural_tag"),
]


class StructuredOutputs(Strict):
    """One of these."""

    json_: Schema | None = Field(None, alias="json")
    json_object: bool | None = None
    regex: Text | None = None
    choice: Choices | None = None
    grammar: Text | None = None
    structural_tag: StructuralTag | None = None

    def asked(self, field: str) -> Iterator[Asked]:
        """Yield the grammars that were requested; the request refuses more than one."""
        if self.json_object:
            yield Asked(Grammar(GrammarKind.JSON_OBJECT), f"{field}.json_object")
        if self.structural_tag is not None:
            yield self.structural_tag.asked(f"{field}.structural_tag")
        yield from _asked(f"{field}.", self.json_, self.regex, self.choice, self.grammar)


class Structured(Strict):
    """Fields that constrain the answer after its thinking. At most one of them may be set."""

    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: Schema | None = None
    guided_regex: Text | None = None
    guided_choice: Choices | None = None
    guided_grammar: Text | None = None
    json_schema: Schema | None = None  # llama-server's name, as the next one
    grammar: Text | None = None

    @cached_property
    def grammars(self) -> list[Asked]:
        """All that was asked for: one, or none."""
        if self.model_fields_set.isdisjoint(Structured.model_fields):
            return []
        guided = (self.guided_json, self.guided_regex, self.guided_choice, self.guided_grammar)
        response = self.response_format and self.response_format.asked("response_format")
        outputs = self.structured_outputs.asked("structured_outputs") if self.structured_outputs else ()
        own = [] if self.json_schema is None else [_schema("json_schema", self.json_schema)]
        own += _asked("", None, None, None, self.grammar or None)
        return [*([response] if response else []), *outputs, *_asked("guided_", *guided), *own]

    @model_validator(mode="after")
    def _one_grammar(self) -> Self:
        if len(self.grammars) > 1:
            raise two_forms(self.grammars[0].field, self.grammars[1].field)
        return self


def two_forms(first: str, second: str) -> PydanticCustomError:
    """Return the refusal of two fields that both constrain the answer."""
    what = f"both {first} and {second} say what the answer looks like: send one of them"
    return refusal(INVALID_COMBINATION, second, what)


def _asked(before: str, schema: Any, regex: str | None, choice: Any, grammar: str | None) -> Iterator[Asked]:
    """`before` begins the names of the fields."""
    if schema is not None:
        yield _schema(f"{before}json", schema)
    if regex is not None:
        yield Asked(Grammar(GrammarKind.REGEX, regex), f"{before}regex")
    if choice is not None:
        yield Asked(Grammar(GrammarKind.CHOICE, _as_json(f"{before}choice", choice)), f"{before}choice")
    if grammar is not None:
        yield Asked(Grammar(GrammarKind.LARK, grammar), f"{before}grammar")


def _schema(field: str, schema: Any) -> Asked:
    text = schema if isinstance(schema, str) else _as_json(field, schema)
    return Asked(Grammar(GrammarKind.JSON_SCHEMA, text), field)


def _as_json(field: str, value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise refusal(INVALID_VALUE, field, f"{field} has a lone surrogate: that is not valid Unicode text") from error
    return text
