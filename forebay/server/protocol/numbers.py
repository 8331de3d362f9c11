"""The sampling numbers as fields of bodies."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Annotated, Any, Final

from pydantic import Field

from forebay.base.sampling import NUMBERS
from forebay.server.protocol.strict import Strict

WITHIN: Final = {  # the bounds of a field for the sampling number of this name
    name: Field(gt=number.low, le=number.high) if number.above_low else Field(ge=number.least, le=number.high)
    for name, number in NUMBERS.items()
}


class Numbered(Strict):
    """The base of bodies with a field for each sampling number: `numbers` has its name by the field's. None is "the
    default"."""

    def __init_subclass__(cls, numbers: Mapping[str, str] | None = None, **options: Any) -> None:
        kinds = {field: int if NUMBERS[name].is_whole else float for field, name in (numbers or {}).items()}
        added = {field: Annotated[kinds[field], WITHIN[name]] | None for field, name in (numbers or {}).items()}
        cls.__annotations__ = {**added, **inspect.get_annotations(cls)}
        for field in added:
            setattr(cls, field, None)
        super().__init_subclass__(**options)
