"""The types of a part's columns, however numpy spells them."""

from __future__ import annotations

from typing import Annotated, TypeVar

import numpy as np
from typing_extensions import TypeAliasType

from forebay.base.parts import Column, Part

_Scalar = TypeVar("_Scalar", bound=np.generic)
AliasedArray = TypeAliasType("AliasedArray", np.ndarray[tuple[int, ...], np.dtype[_Scalar]], type_params=(_Scalar,))


class Aliased(Part, frozen=True, kw_only=True):
    """A part as numpy 2.5 makes it, whose NDArray is such an alias."""

    lengths: Annotated[AliasedArray[np.int64], Column("S")]


def test_a_column_may_be_annotated_with_an_alias_of_numpy_2_5() -> None:
    assert Aliased.columns["lengths"].dtype == np.int64
