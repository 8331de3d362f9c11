"""A 0, -1 or null in any field means to Forebay what it means to transformers, or is refused."""

from __future__ import annotations

import re

import pytest

from tests.models.off_values import OFF, Fate, fate_of, fields_of
from tests.models.tiny import CASE_OF

# Numbers that other engines switch off with a 0, in types that have such.
_BOUNDS = re.compile(r"limit|cap|clip|window|scal|factor|multiplier|_size$")
_FIRST = ("deepseek_v4", "gpt_oss", "gemma2", "mimo_v2_flash", "granite", "cohere2")


def silent(case: str, names: list[str]) -> list[tuple[str, object, float]]:
    """Return the values with which logits differ without a word."""
    found = ((name, value, fate_of(case, name, value)) for name in names for value in OFF)
    return [(name, value, fate[1]) for name, value, fate in found if fate[0] is Fate.OTHER]


@pytest.mark.quick(2)
@pytest.mark.parametrize("model_type", _FIRST)
def test_value_that_switches_a_bound_off_elsewhere_is_transformers_or_refused(model_type: str) -> None:
    names = [name for name in fields_of(CASE_OF[model_type]) if _BOUNDS.search(name)]
    assert names
    assert silent(CASE_OF[model_type], names) == []


@pytest.mark.parametrize(
    ("model_type", "value", "fate"),
    [
        *(("deepseek_v4", value, Fate.REFUSED) for value in OFF),
        ("gpt_oss", 0, Fate.EQUAL),  # a limit of 0, as the oracle has it
        ("gpt_oss", -1, Fate.REFUSED),
        ("gpt_oss", None, Fate.REFUSED),
    ],
)
def test_limit_of_experts_is_that_of_transformers_or_refused(model_type: str, value: object, fate: Fate) -> None:
    assert fate_of(CASE_OF[model_type], "swiglu_limit", value)[0] is fate


@pytest.mark.slow
@pytest.mark.parametrize("model_type", CASE_OF)
def test_value_that_may_mean_off_in_any_field_is_transformers_or_refused(model_type: str) -> None:
    assert silent(CASE_OF[model_type], fields_of(CASE_OF[model_type])) == []
