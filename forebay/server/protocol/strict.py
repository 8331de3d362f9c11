"""The base of request types and all that is inside them: closed, bounded, and refused by the name of the field."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Annotated, Any, ClassVar, Final, Self

from pydantic import (
    BaseModel,
    ConfigDict,
    GetJsonSchemaHandler,
    PrivateAttr,
    StringConstraints,
    ValidationError,
    ValidationInfo,
    model_validator,
)

from forebay.base.foreign import ABSENT_FIELDS, why_field_is_absent
from forebay.http.security import Session
from forebay.server.protocol.ignored import MAX_LABEL, Harmless
from forebay.server.protocol.validation import UNKNOWN_FIELD, refusal, validation_error

MAX_TEXT: Final = 64 << 20  # characters; the body's limit comes first
MAX_PASSED_OVER: Final = 64  # names that are kept: a body may hold any number of unknown fields
Text = Annotated[str, StringConstraints(max_length=MAX_TEXT)]
Label = Annotated[str, StringConstraints(max_length=MAX_LABEL)]


@dataclass(slots=True)
class Passing:
    """The state of parsing one body, which may have `images` or not."""

    lenient: bool
    images: bool = False
    over: dict[str, None] = field(default_factory=dict)

    def count(self, name: str, value: Any) -> None:
        """Count a field without effect, unless its value is empty."""
        if value not in (None, "", [], {}) and len(self.over) < MAX_PASSED_OVER:
            self.over[name[:MAX_LABEL]] = None


class Strict(BaseModel):
    """`ignored` are fields that pass with values that ask for nothing, `passed` those that cannot change an answer,
    whatever they say. The latter are in `passed_over` where they say anything."""

    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False, frozen=True)
    ignored: ClassVar[dict[str, Harmless]] = {}
    passed: ClassVar[frozenset[str]] = frozenset()
    _passed_over: tuple[str, ...] = PrivateAttr(())

    @property
    def passed_over(self) -> tuple[str, ...]:
        """The names of the fields without effect, at any depth of the body."""
        return self._passed_over

    @model_validator(mode="before")
    @classmethod
    def _drop_what_asks_for_nothing(cls, data: Any, info: ValidationInfo) -> Any:
        if not isinstance(data, dict):
            return data
        passing = info.context or Passing(lenient=False)
        for name in cls.ignored.keys() & data.keys():
            cls._pass_ignored(name, data[name], passing)
        kept = {key: value for key, value in data.items() if key not in cls.ignored}
        unknown = [key for key in kept if key not in cls.names()]
        if unknown:
            _pass_unknown(cls, {key: kept.pop(key) for key in unknown}, passing)
        return kept

    @classmethod
    def _pass_ignored(cls, name: str, value: Any, passing: Passing) -> None:
        """Raise a refusal if the value of an `ignored` field asks for something."""
        cls.ignored[name].check(name, value)

    @classmethod
    def _check_unknown(cls, name: str, passing: Passing) -> None:
        """Raise a refusal if an unknown field may change the answer."""
        why = why_field_is_absent(name)
        if name not in cls.passed and (name in ABSENT_FIELDS or not passing.lenient):
            raise refusal(UNKNOWN_FIELD, name[:MAX_LABEL].encode("utf-8", "backslashreplace").decode(), why)

    @classmethod
    @cache
    def names(cls) -> dict[str, None]:
        """Return the names of the fields, as clients write them."""
        return {field.alias or name: None for name, field in cls.model_fields.items()}

    @classmethod
    def __get_pydantic_json_schema__(cls, core_schema: Any, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        """With the fields that may be there and do nothing."""
        found = handler(core_schema)
        properties = handler.resolve_ref_schema(found).setdefault("properties", {})
        for name in sorted(cls.passed):
            properties.setdefault(name, {"description": "Taken, and named in x-forebay-ignored."})
        for name, harmless in cls.ignored.items():
            properties.setdefault(name, {**harmless.schema, "description": "Taken where it asks for nothing."})
        return found

    def model_copy(self, *, update: Mapping[str, Any] | None = None, deep: bool = False) -> Self:
        """Return a copy with other values; cached properties are computed again."""
        copied = super().model_copy(update=update, deep=deep)
        for name in copied.__dict__.keys() - type(self).model_fields.keys():
            del copied.__dict__[name]
        return copied

    @classmethod
    def parse(cls, data: dict[str, Any], *, lenient: bool = False, images: bool = False) -> Self:
        """Return the body of `data`. `lenient`: unknown fields are ignored; `images`: messages may have images. Raises
        InvalidRequest that names the field."""
        passing = Passing(lenient, images)
        try:
            body = cls.model_validate(data, context=passing)
            body._passed_over = tuple(passing.over)
            return body
        except ValidationError as error:
            details = [dict(item) for item in error.errors(include_url=False)]
            raise validation_error(
                details, frozenset(name for kind in body_types() for name in kind.names()), list(cls.names()), data
            ) from error


def _pass_unknown(kind: type[Strict], unknown: Mapping[str, Any], passing: Passing) -> None:
    """Count fields that `kind` does not have. Raises a refusal for one that may change the answer."""
    for key, value in unknown.items():
        if value is not None or not why_field_is_absent(key):  # null asks for nothing
            kind._check_unknown(key, passing)
        passing.count(key, value)


class History(Strict):
    """A message, or a part of one. Clients send back what they received, with fields of their own: a field that is
    unknown, or an `ignored` one with a value that is not expected, is ignored and counted."""

    @classmethod
    def _pass_ignored(cls, name: str, value: Any, passing: Passing) -> None:
        if not cls.ignored[name].accepts(value):
            passing.count(name, value)

    @classmethod
    def _check_unknown(cls, name: str, passing: Passing) -> None:
        """Accept every field."""

    @classmethod
    def __get_pydantic_json_schema__(cls, core_schema: Any, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        found = super().__get_pydantic_json_schema__(core_schema, handler)
        schema = handler.resolve_ref_schema(found)
        schema["additionalProperties"] = True
        for name in cls.ignored:
            schema["properties"][name] = {"description": "Ignored."}
        return found


def body_types(kind: type[Strict] = Strict) -> Iterator[type[Strict]]:
    """Yield the types of bodies, and of objects within bodies."""
    for inside in kind.__subclasses__():
        yield inside
        yield from body_types(inside)


CacheSalt = Annotated[str, StringConstraints(max_length=128)]


class Sender(Strict):
    """The fields that say which model is asked, and on whose behalf."""

    model: Annotated[str, StringConstraints(max_length=512)] | None = None
    user: Label | None = None
    safety_identifier: Label | None = None
    prompt_cache_key: Label | None = None
    cache_salt: CacheSalt | None = None

    @property
    def session(self) -> Session:
        return Session(
            self.user or "", self.safety_identifier or "", self.prompt_cache_key or "", self.cache_salt or ""
        )
