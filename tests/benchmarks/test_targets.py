"""The driver of the target table, end to end on a model of a few weights."""

from __future__ import annotations

import json
import sys
from functools import partial
from pathlib import Path

import pytest

from benchmarks import kinds, targets
from benchmarks.report import Run
from benchmarks.rows import ROWS, Load
from forebay.base.cpu import this_cpu
from forebay.base.variants import Variant
from forebay.cli.main import main as forebay

ROW = {row.name: row for row in ROWS}


def test_a_quick_run_starts_a_server_loads_it_and_writes_its_results(
    embedded_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    model, out = tmp_path / "model", tmp_path / "out"
    assert forebay(["models", "make", "--like", "llama", "--out", str(model), "--hidden-size", "32"]) == 0
    words = ["targets", "--quick", "--only", "memory", "streams-4", "--model", str(model), "--out", str(out)]
    monkeypatch.setattr(sys, "argv", words)
    targets.main()
    record = json.loads((out / "targets-native.json").read_text())
    assert [run["row"] for run in record["runs"]] == ["start", "streams-4"]
    assert record["runs"][0]["result"]["idle_pss_mb"] > 10
    assert record["runs"][1]["result"]["total_output_tokens"] == 4 * 8
    assert "4 streams, 128 in, 128 out" in (out / "targets-native.md").read_text()
    assert (out / "targets-native.svg").read_text().startswith("<svg")
    assert "resident memory, idle" in capsys.readouterr().out
    assert [run.row for run in targets.kept(out / "targets-native", [ROW["streams-4"]])] == ["start"]
    assert targets.kept(out / "targets-avx2", []) == []
    if this_cpu().variants:
        assert record["runs"][1]["ideal"]["output_throughput"] > 0


def test_results_have_a_line_for_each_run_and_are_read_as_they_were_written(tmp_path: Path) -> None:
    peaks = {"peaks": {"read": 1234567890.0}, "bound_by": "read"}
    runs = [
        Run(server="Forebay", row="a", repeat=i, other_cpu_share=1 / 3, result={"n": i}, ideal=peaks) for i in (0, 1)
    ]
    text = targets.by_lines({"cpu": "one"}, {"Forebay": "1"}, runs)
    assert len(text.splitlines()) == 2 + 1 + len(runs) + 1
    (tmp_path / "targets.json").write_text(text)
    first, second = targets.kept(tmp_path / "targets", [])
    assert (first.other_cpu_share, first.ideal["peaks"]["read"], second.result) == (0.333333, 1234570000.0, {"n": 1})


def test_a_peer_that_is_not_installed_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(isa: Variant | None) -> kinds.Kind:
        return kinds.Kind(title="Absent", version="1", command=(str(tmp_path / "no"),), models={"default": tmp_path})

    monkeypatch.setitem(kinds.PEERS, "absent", absent)
    monkeypatch.setattr(sys, "argv", ["targets", "--quick", "--peers", "absent", "--out", str(tmp_path)])
    with pytest.raises(SystemExit, match=r"Absent \(.*/no\): not installed"):
        targets.main()


def test_a_table_without_a_place_is_told_of_before_it_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, embedded_model: Path
) -> None:
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "benchmarks.md").write_text("no marks")
    monkeypatch.setattr(targets, "ROOT", tmp_path)
    monkeypatch.setattr(targets, "measure", None)
    monkeypatch.setattr(sys, "argv", ["targets", "--quick", "--record"])
    with pytest.raises(ValueError, match="lacks the lines <!-- targets-native: begin -->"):
        targets.main()


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(targets, "wait_until_quiet", lambda limit_s: None)


def turn(server: str, repeat: int, other: float = 0.0, seconds: float = 1.0) -> Run:
    result = {"duration": seconds}
    return Run(server=server, row="row", repeat=repeat, other_cpu_share=other, result=result, ideal={})


def kind(title: str) -> kinds.Kind:
    return kinds.Kind(title=title, version="1", command=(title,), models={})


def test_a_run_that_somebody_disturbed_is_tried_again() -> None:
    busy = iter([0.0, 0.5, 0.0, 0.0, 0.0])
    asked = []

    def measure(server: kinds.Kind, repeat: int, attempt: int) -> Run:
        asked.append((server.title, repeat, attempt))
        return turn(server.title, repeat, next(busy))

    runs = list(targets.rounds([kind("one"), kind("two")], 2, 3, lambda: measure))
    assert asked == [("one", 0, 0), ("two", 0, 0), ("two", 0, 1), ("one", 1, 0), ("two", 1, 0)]
    assert len(runs) == 5


def test_a_machine_that_is_never_quiet_is_given_up_on() -> None:
    runs = targets.rounds([kind("one")], 2, 3, lambda: lambda server, repeat, attempt: turn("one", repeat, 0.5))
    assert [run.repeat for run in runs] == [0, 0, 0, 1, 1, 1]


def test_a_long_run_is_not_repeated() -> None:
    def measure(server: kinds.Kind, repeat: int, attempt: int) -> Run:
        return turn(server.title, repeat, seconds=targets.LONG_RUN_S if server.title == "slow" else 1.0)

    runs = list(targets.rounds([kind("slow"), kind("quick")], 3, 1, lambda: measure))
    assert [run.server for run in runs] == ["slow", "quick", "quick", "quick"]


def test_a_failed_load_has_no_figure_and_the_next_server_is_measured(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Fleet:
        def server(self, kind: kinds.Kind, streams: int, model: str) -> kinds.Kind:
            return kind

    class NoOtherWork:
        def __init__(self, server: object) -> None: ...

        def share(self) -> float:
            return 0.0

    def client(server: kinds.Kind, load: Load, seed: int) -> dict[str, float]:
        if server.title == "Frail":
            raise targets.LoadFailed("1 requests failed")
        return {"duration": 1.0}

    monkeypatch.setattr(targets, "client", client)
    monkeypatch.setattr(targets, "OtherWork", NoOtherWork)
    row = next(row for row in ROWS if row.load)
    measure = partial(targets.measure_load, Fleet(), row, row.load, 0, {})
    runs = list(targets.rounds([kind("Frail"), kind("Sound")], 3, 1, lambda: measure))
    assert [run.server for run in runs] == ["Sound"] * 3
    assert capsys.readouterr().err.count(f"Frail, {row.name}") == 3
