"""`forebay serve --log-format json`: no process writes a line that is not an object, from the first to the last."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from forebay.base.relay import Relay
from forebay.cli import route
from forebay.cli.log_format import asks_for_json
from scripts.site.log_events import events
from tests import loopback
from tests.deadlines import HANGS_S, wait_until
from tests.integration.tree import Tree

GUIDE = Path(__file__).resolve().parents[2] / "docs" / "guide" / "observability.md"
COMMON = {"ts", "level", "process", "event"}


def lines(tree: Tree) -> list[dict[str, Any]]:
    return [json.loads(line) for line in tree.output.splitlines(keepends=True) if line.endswith("\n")]


@pytest.mark.slow
@pytest.mark.usefixtures("embedded_model")
def test_serve_whose_engine_is_killed_writes_objects_alone(tmp_path: Path) -> None:
    tree = Tree(
        tmp_path,
        "--log-format=json",
        "--kv-cache-bytes=64MiB",
        "--dtype=float32",
        "--max-running-requests=4",
        "--jinja",
        "--report",
    )
    try:
        wait_until(lambda: any(line["event"] == "serving" for line in lines(tree)), lambda: tree.output)
        (serving,) = [line for line in lines(tree) if line["event"] == "serving"]
        body = {"model": "SmolLM2-135M-Instruct", "prompt": [5, 6, 7], "max_tokens": 2}
        answer = loopback.post(f"{serving['url']}/v1/completions", json=body, headers={"x-request-id": "asked"})
        assert answer.status_code == 200, answer.text
        os.kill(tree.engine_pid, signal.SIGKILL)
        tree.server.wait(HANGS_S)
    finally:
        tree.end()
    found = lines(tree)
    by_event = {line["event"]: line for line in found}
    assert by_event["finished"]["request_id"] == "asked"
    assert by_event["ready"]["process"] == "engine"
    assert by_event["start_row"]["section"] == "settings"
    assert "--jinja" in by_event["note"]["text"]
    assert "SIGKILL" in by_event["engine_dead"]["cause"]
    assert "SIGKILL" in by_event["error"]["text"]
    guide, known = GUIDE.read_text(), events()
    for line in found:
        undocumented = line.keys() - COMMON - known.get(line["event"], set())
        assert all(f"`{name}`" in guide for name in undocumented), line


@pytest.mark.parametrize(
    ("words", "variables", "expected"),
    [
        (["--log-format", "json"], {}, True),
        (["m", "--log-format=json"], {"FOREBAY_LOG_FORMAT": "text"}, True),
        (["--log-format=text"], {"FOREBAY_LOG_FORMAT": "json"}, False),
        (["m"], {"FOREBAY_LOG_FORMAT": "json"}, True),
        (["--config", "FILE"], {}, True),
        (["m"], {"FOREBAY_CONFIG": "FILE"}, True),
        (["--config=FILE"], {"FOREBAY_LOG_FORMAT": "text"}, False),
        (["--config", "absent"], {}, False),
        (["--log-format"], {}, False),
        ([], {}, False),
    ],
)
def test_format_of_the_log_is_known_before_the_settings_are(
    words: list[str], variables: dict[str, str], expected: bool, tmp_path: Path
) -> None:
    file = tmp_path / "settings.toml"
    file.write_text('log_format = "json"\n')
    there = [word.replace("FILE", str(file)) for word in words]
    assert asks_for_json(there, {name: text.replace("FILE", str(file)) for name, text in variables.items()}) is expected


def test_router_logs_where_it_listens(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Relay, "running", object())
    with caplog.at_level("INFO", logger="forebay"):
        route._say("routing at http://127.0.0.1:1")
    assert caplog.messages == ['routing text="routing at http://127.0.0.1:1"']


def test_every_documented_event_has_a_name_of_its_own_fields() -> None:
    assert not [name for name, fields in events().items() if fields & COMMON]
