"""A model_type that is not served is refused in a short line with similar types."""

from __future__ import annotations

from typing import Any

import pytest

from forebay.base.errors import ModelError
from forebay.families.config.model_config import config_of


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"model_type": "qwen9"}, "similar ones are qwen"),
        ({"model_type": "zzz"}, "models make --help"),
        ({"model_type": ["llama"]}, "is not one of the"),
        ({}, "there is no model_type"),
    ],
)
def test_config_of_unknown_type_is_one_short_line(fields: dict[str, Any], says: str) -> None:
    with pytest.raises(ModelError) as refused:
        config_of(fields)
    assert says in refused.value.message
    assert len(refused.value.message) < 220
    assert refused.value.message.count(",") < 5
