"""The bodies of requests behind whose prompts nothing is generated."""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal, Self

from pydantic import Field, Tag, model_validator

from forebay.base.foreign import passed_fields
from forebay.server.protocol.ignored import neutral
from forebay.server.protocol.messages import text_or_list
from forebay.server.protocol.requests import I32, MAX_IDS, PlainText, TokenId
from forebay.server.protocol.strict import Sender, Strict, Text
from forebay.server.protocol.validation import INVALID_COMBINATION, MISSING_FIELD, branch, by_shape, refusal

MAX_INPUTS: Final = 2048  # OpenAI's: the engine takes as many at a time as it can run


def _text_or_object(value: Any) -> str | None:
    return branch("text") if isinstance(value, str) else branch("object") if isinstance(value, dict) else None


TextOrTexts = Annotated[
    Annotated[Text, Tag(branch("text"))]
    | Annotated[list[Text], Field(min_length=1, max_length=MAX_INPUTS, fail_fast=True), Tag(branch("list"))],
    by_shape(text_or_list, "a string or a list of strings"),
]


def _input_shape(value: Any) -> str | None:
    if isinstance(value, list) and any(isinstance(piece, int | float) for piece in value):
        return branch("pieces")
    return text_or_list(value)


def _piece_shape(value: Any) -> str | None:
    return branch("text") if isinstance(value, str) else branch("id")


Pieces = Annotated[
    list[
        Annotated[
            Annotated[Text, Tag(branch("text"))] | Annotated[TokenId, Tag(branch("id"))],
            by_shape(_piece_shape, "a string or a token id"),
        ]
    ],
    Field(min_length=1, max_length=MAX_IDS, fail_fast=True),
]
OneInput = Annotated[
    Annotated[Text, Tag(branch("text"))] | Annotated[Pieces, Tag(branch("list"))],
    by_shape(text_or_list, "a string or a list of token ids and strings"),
]
Inputs = Annotated[
    Annotated[Text, Tag(branch("text"))]
    | Annotated[Pieces, Tag(branch("pieces"))]
    | Annotated[list[OneInput], Field(min_length=1, max_length=MAX_INPUTS, fail_fast=True), Tag(branch("list"))],
    by_shape(_input_shape, "a string, a list of token ids and strings, or a list of these"),
]


def listed(given: Any) -> list[str | list[int | str]]:
    """Return inputs as a list: a single text or a single list of token ids is one input."""
    one = isinstance(given, str) or any(isinstance(piece, int) for piece in given)
    return [given] if one else list(given)


class EmbeddingRequest(PlainText, Sender):
    """An input is a text, or a list of token ids with texts between them."""

    input: Inputs
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: Annotated[int, Field(ge=1, le=I32)] | None = None
    output_dtype: Literal["float", "int8", "binary", "ubinary"] = "float"
    prompt_name: Text | None = None

    @property
    def inputs(self) -> list[str | list[int | str]]:
        """The inputs as a list: a single text or a single list of token ids is one input."""
        return listed(self.input)


class ScoreRequest(Sender):
    """`text_1` is one for all of `text_2`, or one for each."""

    text_1: TextOrTexts
    text_2: TextOrTexts
    instruction: Text | None = None


class Document(Strict):
    """A document as an object with its text."""

    text: Text


AnyDocument = Annotated[
    Annotated[Text, Tag(branch("text"))] | Annotated[Document, Tag(branch("object"))],
    by_shape(_text_or_object, "a string or an object with a text"),
]


class RerankRequest(Sender):
    """Either `documents`, or in the form of text-embeddings-inference `texts` and `return_text`."""

    ignored = neutral("rerank")
    passed = passed_fields("rerank")
    query: Text
    documents: Annotated[list[AnyDocument], Field(min_length=1, max_length=MAX_INPUTS, fail_fast=True)] | None = None
    texts: Annotated[list[Text], Field(min_length=1, max_length=MAX_INPUTS, fail_fast=True)] | None = None
    top_n: Annotated[int, Field(ge=1, le=I32)] | None = None
    return_documents: bool = True
    return_text: bool = False
    instruction: Text | None = None

    @property
    def source(self) -> str:
        """The field that the texts are in."""
        return "documents" if self.texts is None else "texts"

    @property
    def all_texts(self) -> list[str]:
        """The documents' texts, under whichever of the two names they were sent."""
        found = self.documents if self.texts is None else self.texts
        return [document if isinstance(document, str) else document.text for document in found or ()]

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        if self.documents is None and self.texts is None:
            raise refusal(MISSING_FIELD, "documents", "documents is missing: send documents, or texts")
        if self.documents is not None and self.texts is not None:
            raise refusal(INVALID_COMBINATION, "texts", "there are both documents and texts: send one of them")
        return self


class ClassifyRequest(PlainText, Sender):
    """Texts that a classification head labels."""

    input: Inputs

    @property
    def inputs(self) -> list[str | list[int | str]]:
        """The inputs as a list, as of `EmbeddingRequest`."""
        return listed(self.input)


class PoolingRequest(PlainText, Sender):
    """Texts whose tokens become vectors, or with the task `token_classify` weights."""

    input: Inputs
    task: Literal["token_embed", "token_classify"] = "token_embed"
    encoding_format: Literal["float", "base64"] = "float"

    @property
    def inputs(self) -> list[str | list[int | str]]:
        """The inputs as a list, as of `EmbeddingRequest`."""
        return listed(self.input)


class TeiEmbedRequest(Strict):
    """The body of /embed, in the form of text-embeddings-inference."""

    ignored = neutral("tei")
    inputs: TextOrTexts
    normalize: bool = True
    dimensions: Annotated[int, Field(ge=1, le=I32)] | None = None
    prompt_name: Text | None = None


class TeiPredictRequest(Strict):
    """The body of /predict, in the form of text-embeddings-inference: a text, or several."""

    ignored = neutral("tei")
    inputs: TextOrTexts


class TeiSparseRequest(Strict):
    """The body of /embed_sparse, in the form of text-embeddings-inference: a text, or several."""

    ignored = neutral("tei")
    inputs: TextOrTexts
    prompt_name: Text | None = None
