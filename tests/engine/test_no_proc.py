"""A container without /proc: what is read there is reported another way, and nothing ends."""

from __future__ import annotations

from pathlib import Path

from forebay.config import machine
from forebay.engine.loop.start_report import of_process
from forebay.formats.store import users_of
from forebay.transfer.wire.machine import machine as machine_id


def test_of_process_no_proc_reports_peak(tmp_path: Path) -> None:
    _, _, size, reason = of_process(tmp_path / "proc")
    assert size != "0 B"
    assert "is not mounted" in reason
    assert of_process()[3] == "resident after warm-up"


def test_machine_no_proc_equals_no_peer(tmp_path: Path) -> None:
    assert machine_id() == machine_id()
    assert machine_id(tmp_path) != machine_id(tmp_path)


def test_machine_facts_no_proc_have_defaults(tmp_path: Path) -> None:
    assert machine.available_memory(tmp_path, tmp_path).value > 0
    assert machine.total_memory(tmp_path) > 0
    assert machine.usable_cores(tmp_path, tmp_path).value > 0
    assert machine.cpu_model(tmp_path) == "unknown"
    assert users_of(tmp_path, tmp_path / "locks") == []
