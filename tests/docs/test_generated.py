"""What is made of declarations has all of them; nothing made is kept, but the drawings, which are made again here."""

from __future__ import annotations

import re

import pytest
from prometheus_client.parser import text_string_to_metric_families

from forebay.config.server_args import FLAGS
from forebay.server.app import ROUTES, described
from forebay.server.openapi.descriptions import FIELDS, OF
from scripts.site import api, errors, flags, metrics
from scripts.site.drawings import DRAWINGS, FIGURES
from scripts.site.errors import Message
from scripts.site.pages import written
from tests.server.conftest import Running

# Told to no client: between our own processes, and by the client's side of a connection.
INTERNAL = {"connection_lost", "http_error"}


def test_every_field_and_every_route_says_what_it_is() -> None:
    document = described()
    silent = [
        f"{name}.{field}"
        for name, schema in document["components"]["schemas"].items()
        for field, found in schema.get("properties", {}).items()
        if not found.get("description")
    ]
    assert silent == []
    operations = [operation for path in document["paths"].values() for operation in path.values()]
    assert len(operations) == len(ROUTES)
    assert all(operation["summary"].endswith(".") for operation in operations)
    assert all(operation["responses"]["200"]["content"] for operation in operations)


def test_nothing_is_described_that_there_is_not() -> None:
    schemas = described()["components"]["schemas"]
    fields = {field for schema in schemas.values() for field in schema.get("properties", {})}
    assert FIELDS.keys() - fields == set()
    own = {(name, field) for name, texts in OF.items() for field in texts}
    assert {(name, field) for name, field in own if field not in schemas.get(name, {}).get("properties", {})} == set()


def test_every_field_stands_in_the_reference() -> None:
    page = api.page()
    for name, schema in described()["components"]["schemas"].items():
        part = page.partition(f"### {name}\n")[2].partition("\n### ")[0]
        assert {field for field in schema.get("properties", {}) if f"| `{field}`" not in part} == set(), name


def test_every_setting_stands_in_the_list() -> None:
    page = flags.page()
    assert {flag.option for flag in FLAGS if f"| `{flag.option}" not in page} == set()
    assert {alias for flag in FLAGS for alias in flag.aliases if f"`{alias}`" not in page} == set()


@pytest.mark.long
def test_every_code_of_an_error_stands_in_the_list() -> None:
    package = errors._PACKAGE
    written = {code for path in package.rglob("*.py") for code in re.findall(r'code="([a-z_]+)"', path.read_text())}
    assert written - {told.code for told in errors.every()} == INTERNAL


def test_an_error_is_read_with_its_status_and_its_words() -> None:
    words = "the model … is not served here; … is"
    assert Message("model_not_found", 404, words) in errors.every()


def test_every_series_of_a_server_stands_in_the_list(shared: Running) -> None:
    with shared.client() as client:
        told = client.get("/metrics").text
    names = {
        sample.name
        for family in text_string_to_metric_families(told)
        for sample in family.samples
        if not sample.name.endswith("_created")
    }
    page = metrics.page()
    assert names
    assert {name for name in names if f"`{re.sub('_(bucket|count|sum)$', '', name)}`" not in page} == set()


def test_every_series_that_a_page_names_is_one() -> None:
    known = set(re.findall(r"`(forebay:\w+)`", metrics.page()))
    named = {name for text in written().values() for name in re.findall(r"forebay:\w+", text)}
    assert named
    assert named - known == set()


def test_the_drawings_are_those_of_the_script() -> None:
    stale = [name for name, draw in DRAWINGS.items() if (FIGURES / f"{name}.svg").read_text() != draw().svg()]
    assert stale == [], "python -m scripts.site.drawings"
