"""The bodies of requests behind whose prompts nothing is generated."""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal

from pydantic import Field, Tag

from forebay.server.protocol.requests import I32, PlainText, Prompts
from forebay.server.protocol.sender import Sender
from forebay.server.protocol.strict import Strict, Text
from forebay.server.protocol.validation import branch, by_shape

MAX_INPUTS: Final = 2048  # OpenAI's: the engine takes as many at a time as it can run


def _text_or_list(value: Any) -> str | None:
    return branch("text") if isinstance(value, str) else branch("list") if isinstance(value, list) else None


def _text_or_object(value: Any) -> str | None:
    return branch("text") if isinstance(value, str) else branch("object") if isinstance(value, dict) else None


TextOrTexts = Annotated[
    Annotated[Text, Tag(branch("text"))]
    | Annotated[list[Text], Field(min_length=1, max_length=MAX_INPUTS, fail_fast=True), Tag(branch("list"))],
    by_shape(_text_or_list, "a string or a list of strings"),
]


class EmbeddingRequest(PlainText, Sender):
    input: Prompts
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: Annotated[int, Field(ge=1, le=I32)] | None = None

    @property
    def inputs(self) -> list[str | list[int]]:
        one = isinstance(self.input, str) or isinstance(self.input[0], int)
        return [self.input] if one else self.input  # type: ignore[list-item,return-value]


class ScoreRequest(Sender):
    """`text_1` is one for all of `text_2`, or one for each."""

    text_1: TextOrTexts
    text_2: TextOrTexts
    instruction: Text | None = None


class Document(Strict):
    text: Text


AnyDocument = Annotated[
    Annotated[Text, Tag(branch("text"))] | Annotated[Document, Tag(branch("object"))],
    by_shape(_text_or_object, "a string or an object with a text"),
]


class RerankRequest(Sender):
    query: Text
    documents: Annotated[list[AnyDocument], Field(min_length=1, max_length=MAX_INPUTS, fail_fast=True)]
    top_n: Annotated[int, Field(ge=1, le=I32)] | None = None
    return_documents: bool = True
    instruction: Text | None = None

    @property
    def texts(self) -> list[str]:
        return [document if isinstance(document, str) else document.text for document in self.documents]
