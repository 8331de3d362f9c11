"""The driver of the target table, end to end on a model of a few weights."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from benchmarks import kinds, targets
from benchmarks.report import Failure, Run
from benchmarks.rows import ROWS
from benchmarks.servers import Server, StartFailed
from forebay.base.cpu import this_cpu
from forebay.cli.main import main as forebay

ROW = {row.name: row for row in ROWS}


@pytest.mark.slow
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


def absent(path: Path, title: str = "Absent") -> kinds.Kind:
    return kinds.Kind(title=title, version="1", command=(str(path / "no"),), models={"default": path})


def test_targets_peer_not_installed_lists_failure_and_keeps_others(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    present = kinds.Kind(title="Forebay", version="1", command=(sys.executable,), models={"default": tmp_path})
    servers, failures = targets.installed([present, absent(tmp_path)], "native")
    assert [server.title for server in servers] == ["Forebay"]
    assert [(failure.server, failure.row) for failure in failures] == [("Absent", None)]
    assert "not installed; python -m benchmarks.peers.install --isa native" in capsys.readouterr().err


def test_targets_forebay_absent_ends_with_message(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="Forebay cannot start"):
        targets.installed([absent(tmp_path, "Forebay")], "native")


def test_targets_failed_peer_ends_with_exit_code_and_column(
    embedded_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The table is written first: one peer's failure costs no other server's figures."""
    figures = {"first_token_s": 1.0, "idle_pss_mb": 80.0}
    monkeypatch.setattr(targets, "start_figures", lambda kind: figures)
    monkeypatch.setitem(kinds.PEERS, "absent", lambda isa: absent(tmp_path))
    words = ["targets", "--quick", "--only", "memory", "--peers", "absent", "--out", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", words)
    with pytest.raises(SystemExit, match="1 failures") as ended:
        targets.main()
    assert ended.value.code != 0
    table = (tmp_path / "targets-native.md").read_text()
    assert "| **80** MB |" in table
    assert "| failed |" in table
    assert "- Absent, all rows: " in table
    assert "not installed" in table
    assert "| failed |" in capsys.readouterr().out


def test_table_without_a_marker_is_reported_before_it_is_measured(
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

    runs = list(targets.rounds([kind("one"), kind("two")], 2, 3, lambda: measure, "row", []))
    assert asked == [("one", 0, 0), ("two", 0, 0), ("two", 0, 1), ("one", 1, 0), ("two", 1, 0)]
    assert len(runs) == 5


def test_a_machine_that_is_never_quiet_is_given_up_on() -> None:
    runs = targets.rounds(
        [kind("one")], 2, 3, lambda: lambda server, repeat, attempt: turn("one", repeat, 0.5), "row", []
    )
    assert [run.repeat for run in runs] == [0, 0, 0, 1, 1, 1]


def test_a_long_run_is_not_repeated() -> None:
    def measure(server: kinds.Kind, repeat: int, attempt: int) -> Run:
        return turn(server.title, repeat, seconds=targets.LONG_RUN_S if server.title == "slow" else 1.0)

    runs = list(targets.rounds([kind("slow"), kind("quick")], 3, 1, lambda: measure, "row", []))
    assert [run.server for run in runs] == ["slow", "quick", "quick", "quick"]


@pytest.mark.parametrize("error", [targets.LoadFailed("1 requests failed"), StartFailed("Frail did not start")])
def test_rounds_server_fails_records_failure_and_measures_others(error: BaseException) -> None:
    def measure(server: kinds.Kind, repeat: int, attempt: int) -> Run:
        if server.title == "Frail":
            raise error
        return turn(server.title, repeat)

    failures: list[Failure] = []
    runs = list(targets.rounds([kind("Frail"), kind("Sound")], 3, 1, lambda: measure, "row", failures))
    assert [run.server for run in runs] == ["Sound"] * 3
    assert failures == [Failure("Frail", "row", str(error))]


def test_server_command_ends_raises_start_failed() -> None:
    ends = kinds.Kind(
        title="Frail", version="1", command=(sys.executable, "-c", "exit('no')"), models={"default": Path()}
    )
    with pytest.raises(StartFailed, match="Frail did not start"), Server(ends, streams=1):
        pass
