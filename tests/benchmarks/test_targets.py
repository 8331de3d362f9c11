"""The driver of the target table, end to end on a model of a few weights."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from benchmarks import kinds, targets
from benchmarks.rows import Load
from forebay.cli.main import main as forebay


def test_a_quick_run_starts_a_server_loads_it_and_writes_its_results(
    embedded_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    model, out = tmp_path / "model", tmp_path / "out"
    assert forebay(["models", "make", "--like", "llama", "--out", str(model), "--hidden-size", "32"]) == 0
    words = ["targets", "--quick", "--only", "memory", "streams-4", "--model", str(model), "--out", str(out)]
    monkeypatch.setattr(sys, "argv", words)
    targets.main()
    record = json.loads((out / "targets.json").read_text())
    assert [run["row"] for run in record["runs"]] == ["start", "streams-4"]
    assert record["runs"][0]["result"]["idle_pss_mb"] > 10
    assert record["runs"][1]["result"]["total_output_tokens"] == 4 * 8
    assert "4 streams, 128 in, 128 out" in (out / "targets.md").read_text()
    assert (out / "targets.svg").read_text().startswith("<svg")
    assert "resident memory, idle" in capsys.readouterr().out


def test_a_peer_that_is_not_installed_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setitem(kinds.PEERS, "absent", lambda: kinds.Kind("Absent", "1", (str(tmp_path / "absent"),)))
    monkeypatch.setattr(sys, "argv", ["targets", "--quick", "--peers", "absent", "--out", str(tmp_path)])
    with pytest.raises(SystemExit, match="Absent: not installed"):
        targets.main()


def test_a_failed_load_has_no_figure_and_the_next_server_is_measured(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Fleet:
        kinds = (kinds.Kind("Frail", "1", ("frail",)), kinds.Kind("Sound", "1", ("sound",)))

        def server(self, kind: kinds.Kind, streams: int) -> kinds.Kind:
            return kind

    class NoOtherWork:
        def __init__(self, server: object) -> None: ...

        def share(self) -> float:
            return 0.0

    def client(server: kinds.Kind, load: Load, seed: int) -> dict[str, float]:
        if server.title == "Frail":
            raise targets.LoadFailed("1 requests failed")
        return {"duration": targets.LONG_RUN_S}

    monkeypatch.setattr(targets, "client", client)
    monkeypatch.setattr(targets, "OtherWork", NoOtherWork)
    runs = list(targets.alternate(Fleet(), "row", Load(num_prompts=1, concurrency=1), repeats=3, seed=0))  # type: ignore[arg-type]
    assert [run.server for run in runs] == ["Sound"], "and a long run is not repeated"
    assert capsys.readouterr().err.count("Frail, row") == 3
