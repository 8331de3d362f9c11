"""What every request type and everything inside it is: closed, bounded, and refused by the name of the field."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Annotated, Any, ClassVar, Final, Self

from pydantic import BaseModel, ConfigDict, GetJsonSchemaHandler, StringConstraints, ValidationError, model_validator

from forebay.server.ignored import MAX_LABEL, Harmless
from forebay.server.validation import UNKNOWN_FIELD, refusal, validation_error

MAX_TEXT: Final = 64 << 20  # characters; the body's limit comes first
Text = Annotated[str, StringConstraints(max_length=MAX_TEXT)]
Label = Annotated[str, StringConstraints(max_length=MAX_LABEL)]


class Strict(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False, frozen=True)
    ignored: ClassVar[dict[str, Harmless]] = {}

    @model_validator(mode="before")
    @classmethod
    def _drop_what_asks_for_nothing(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        for name, harmless in cls.ignored.items():
            if name in data:
                harmless.check(name, data[name])
        kept = {key: value for key, value in data.items() if key not in cls.ignored}
        unknown = next((key for key in kept if key not in cls.names()), None)  # one is enough: there may be many
        if unknown is not None:
            raise refusal(UNKNOWN_FIELD, unknown[:MAX_LABEL].encode("utf-8", "backslashreplace").decode(), "")
        return kept

    @classmethod
    @cache
    def names(cls) -> dict[str, None]:
        """Of its fields, as clients write them."""
        return {field.alias or name: None for name, field in cls.model_fields.items()}

    @classmethod
    def __get_pydantic_json_schema__(cls, core_schema: Any, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        """With the fields that may be there and do nothing."""
        found = handler(core_schema)
        properties = handler.resolve_ref_schema(found).setdefault("properties", {})
        for name, harmless in cls.ignored.items():
            properties.setdefault(name, {**harmless.schema, "description": "Taken where it asks for nothing."})
        return found

    @classmethod
    def parse(cls, data: dict[str, Any]) -> Self:
        """Raises InvalidRequest that names the field."""
        try:
            return cls.model_validate(data)
        except ValidationError as error:
            details = [dict(item) for item in error.errors(include_url=False)]
            raise validation_error(
                details, frozenset(name for kind in body_types() for name in kind.names()), list(cls.names())
            ) from error


def body_types(kind: type[Strict] = Strict) -> Iterator[type[Strict]]:
    """All that may be a body, or stand in one."""
    for inside in kind.__subclasses__():
        yield inside
        yield from body_types(inside)
