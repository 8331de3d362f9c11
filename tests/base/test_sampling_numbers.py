"""A sampling number is declared once: few files of the package name one."""

from __future__ import annotations

import re
from pathlib import Path

import msgspec
import pytest

from forebay.base.package import ROOT
from forebay.base.sampling import DRAWS, NUMBERS
from forebay.ops import Draws
from forebay.requests.sampling_params import SamplingParams
from forebay.server.console import load_assets
from forebay.server.protocol.requests import CompletionRequest

MOST_FILES = 5  # the declaration, the definition, its two twins, and a question of `forebay verify`


def test_min_p_is_named_by_five_files_of_the_package() -> None:
    suffixes = {".py", ".cpp", ".h", ".js", ".html"}
    paths = [
        path for path in Path(ROOT, "forebay").rglob("*") if path.suffix in suffixes and "vendor" not in path.parts
    ]
    named = [path.relative_to(ROOT) for path in paths if re.search(r"\bmin_p\b", path.read_text())]
    assert len(named) <= MOST_FILES, named


def test_draws_have_a_column_for_each_number_that_draws_in_the_order_of_declaration() -> None:
    """C++ and Triton take them by position."""
    assert Draws._fields == ("uniform", *(number.name for number in DRAWS))


@pytest.mark.parametrize("name", NUMBERS)
def test_number_has_its_default_in_parameters_a_field_in_bodies_and_a_control_on_the_page(name: str) -> None:
    assert getattr(SamplingParams(), name) == NUMBERS[name].default
    assert CompletionRequest.parse({"prompt": "a", name: NUMBERS[name].high}).names().keys() >= {name}
    controls = load_assets()["/console/sampling.js"].body.partition(b"(")[2].rpartition(b")")[0]
    control = next(each for each in msgspec.json.decode(controls) if each["name"] == name)
    assert NUMBERS[name].least <= control["low"] < control["high"] <= NUMBERS[name].high


def test_number_read_from_a_client_has_the_default_for_what_clients_write_instead() -> None:
    assert NUMBERS["top_k"].read(-1) == NUMBERS["top_k"].default
    assert NUMBERS["top_p"].read(0.5) == 0.5
