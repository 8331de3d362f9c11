"""`forebay models list --supported`: what is served of each type."""

from __future__ import annotations

import json

import pytest

from forebay.cli.main import main
from forebay.families.config.model_config import family
from forebay.families.config.outer import OTHER_NAMES, OUTERS


def test_supported_types_are_those_with_a_family_or_an_outer_one(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["models", "list", "--supported", "--json"]) == 0
    served = json.loads(capsys.readouterr().out)
    for name in served:
        assert name in OUTERS or callable(family(OTHER_NAMES.get(name, name)).parse)
    expected = {"llama": "text", "qwen3_vl": "text and images", "bert": "vectors and labels of texts"}
    assert expected.items() <= served.items()
    assert served["xlm-roberta"] == served["xlm_roberta"]
    assert served["new"] == served["gte"]


def test_supported_types_are_printed_one_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["models", "list", "--supported"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "jina_bert_v2" in {line.split()[0] for line in lines}
