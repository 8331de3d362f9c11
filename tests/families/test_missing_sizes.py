"""A configuration without the sizes of its model is refused by the name of the missing field."""

from __future__ import annotations

from typing import Any

import pytest

from forebay.base.errors import ModelError
from forebay.families import TYPES
from forebay.families.config.model_config import config_of
from forebay.families.small import small_config
from tests.together import together

NESTED = [name for name in TYPES if name.endswith("_text")]
SIZES = "hidden_size", "num_hidden_layers", "intermediate_size"


@together("model_type", TYPES)
def test_config_of_type_alone_names_missing_field(model_type: str) -> None:
    with pytest.raises(ModelError, match=r"is (missing|'None')"):
        config_of({"model_type": model_type})


@pytest.mark.parametrize("inner", [{}, None, "absent"], ids=["empty", "null", "absent"])
@pytest.mark.parametrize("text_type", NESTED)
def test_config_of_empty_text_config_names_missing_field(text_type: str, inner: Any) -> None:
    outer = {"model_type": text_type.removesuffix("_text"), "text_config": inner}
    if inner == "absent":
        del outer["text_config"]
    with pytest.raises(ModelError, match="is missing"):
        config_of(outer)


@pytest.mark.parametrize("name", SIZES)
@pytest.mark.parametrize("text_type", ["gemma3_text", "gemma4_text"])
def test_config_of_gemma_without_size_names_it(text_type: str, name: str) -> None:
    """The defaults of transformers describe no published model. Those of the 4B model count for the other fields."""
    inner = small_config(text_type, hidden_size=32, num_layers=8, vocab_size=64)
    outer = {"model_type": text_type.removesuffix("_text"), "text_config": inner}
    assert config_of(outer).hidden_size == 32
    del inner[name]
    with pytest.raises(ModelError, match=f"{name} is missing"):
        config_of(outer)
