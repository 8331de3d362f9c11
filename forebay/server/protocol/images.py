"""Images in messages: where each comes from, and how closely the model is to look at it."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import PlainSerializer, PlainValidator, ValidationInfo, WithJsonSchema, model_validator
from pydantic_core import PydanticCustomError

from forebay.server.protocol.strict import MAX_TEXT, History, Passing
from forebay.server.protocol.validation import INVALID_VALUE, UNSUPPORTED_FIELD, refusal

Detail = Literal["auto", "low", "high"]


class Source:
    """The URL of an image, until `take` removes it: a body outlives its request's prompt, and must not keep 32 MiB of
    data for as long."""

    __slots__ = ("_text",)

    def __init__(self, text: str) -> None:
        self._text = text

    @property
    def text(self) -> str:
        """The URL; "" once it was taken."""
        return self._text

    def take(self) -> str:
        """Return the URL and forget it."""
        taken, self._text = self._text, ""
        return taken


def _source(value: Any) -> Source:
    if isinstance(value, Source):
        return value
    if not isinstance(value, str) or not 0 < len(value) <= MAX_TEXT or not value.isascii():
        raise PydanticCustomError(INVALID_VALUE, "must be a string of ASCII that is not empty")
    return Source(value)


SourceText = Annotated[
    Source,
    PlainValidator(_source),
    PlainSerializer(lambda source: source.text, return_type=str),
    WithJsonSchema({"type": "string", "minLength": 1, "maxLength": MAX_TEXT}),
]


class Image(History):
    """A part of a message that is an image. Where the model accepts none it is refused as other media are."""

    others: ClassVar[str] = "only text parts are supported"

    @model_validator(mode="before")
    @classmethod
    def _refuse_where_none_are_accepted(cls, data: Any, info: ValidationInfo) -> Any:
        if isinstance(data, dict) and not accepts_images(info):
            raise refusal(UNSUPPORTED_FIELD, "type", f"type is {str(data.get('type'))[:64]!a}: {cls.others}")
        return data


def accepts_images(info: ValidationInfo) -> bool:
    """Return whether the body that is parsed may have images."""
    return isinstance(info.context, Passing) and info.context.images


class ImageUrl(History):
    """An image's URL: `data:image/...;base64,...`, or http(s) at a host that the server may fetch from. With `detail`
    low it is one tile."""

    url: SourceText
    detail: Detail | None = None
