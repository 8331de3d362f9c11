"""The programs of `make test-gpu` and `make bench-gpu`, without a GPU."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from benchmarks import gpu, gpu_loading, gpu_table
from forebay.base.cpu import this_cpu

STARTED = gpu.Section(60.0, "does it start?", (sys.executable, "-c", "print('started')"))


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_gpu_sections_without_a_gpu_are_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert gpu.main(["tests", "kernels"]) == 1
    out = capsys.readouterr().out
    assert out.startswith("not run (tests, kernels): there is no NVIDIA GPU")
    assert out.count("\n") == 1


def test_gpu_section_beyond_its_limit_is_stopped_and_the_next_one_runs(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(gpu, "require_gpu", lambda: None)
    hangs = replace(STARTED, limit_s=0.1, command=(sys.executable, "-c", "import time; time.sleep(10**6)"))
    fails = replace(STARTED, command=(sys.executable, "-c", "raise SystemExit(3)"))
    monkeypatch.setattr(gpu, "SECTIONS", {"hangs": hangs, "fails": fails, "starts": STARTED})
    assert gpu.main(["hangs", "fails", "starts"]) == 1
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.startswith("== hangs: stopped at 0 s; fails: exit code 3 in ")
    assert "; starts: exit code 0 in " in last
    assert gpu.main(["starts"]) == 0


@pytest.mark.slow
@pytest.mark.parametrize("name", ["benchmark", "another"])
def test_gpu_section_of_tests_runs_beside_plugins_of_the_machine(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A plugin that ends each run which loads it: in the process that collects, and in a worker of xdist."""
    (tmp_path / "of_the_machine.py").write_text("def pytest_configure(config):\n    raise RuntimeError('loaded')\n")
    about = tmp_path / "of_the_machine-1.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: of-the-machine\nVersion: 1.0\n")
    (about / "entry_points.txt").write_text(f"[pytest11]\n{name} = of_the_machine\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    section = gpu.SECTIONS["tests"]
    command = (*section.command, "-n", "1", "-p", "no:cacheprovider", "tests/ops/test_triton_pictures.py")
    assert gpu.run(replace(section, command=command))[0] == 0
    assert gpu.run(replace(section, command=command, variables={}))[0] not in (0, None), "the plugin ends a run"


def test_gpu_sections_of_the_benchmark_take_five_minutes_at_most_and_cover_the_table() -> None:
    limits = {name: section.limit_s for name, section in gpu.SECTIONS.items()}
    assert limits.pop("tests") <= 240
    assert sum(limits.values()) <= 300
    assert {case for _, _, cases in gpu.TABLE.values() for case in cases} == gpu_table.CASES.keys()


IN_SECONDS = ("llama", "gpt_oss")


@pytest.mark.quick(1)
@pytest.mark.skipif(not this_cpu().variants, reason="no native ops on this machine")
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.slow][: name not in IN_SECONDS])
        for name in gpu_table.CASES
        if name != "kv_fp8"  # which CPUs have not
    ],
)
def test_gpu_table_has_a_row_and_a_limit_for_each_measurement(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    limits: list[float] = []
    alarm = SimpleNamespace(
        dump_traceback_later=lambda seconds, *, exit: limits.append(seconds),
        cancel_dump_traceback_later=lambda: limits.append(0.0),
    )
    monkeypatch.setattr(gpu_table, "faulthandler", alarm)
    gpu_table.main([name, "--tiny", "--device", "cpu"])
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in capsys.readouterr().out.splitlines()[2:]]
    expected = [gpu_table.tiny(row) for row in gpu_table.CASES[name].rows]
    assert [row[:2] for row in rows] == [[name, row.name] for row in expected]
    assert limits == [gpu_table.SET_UP_S, *[row.limit_s for row in expected], 0.0]
    for row, of in zip(rows, expected, strict=True):
        assert float(row[3].replace(",", "")) > 0
        assert bool(row[2]) == (name != gpu_table.TRANSFORMERS and of.what != "arrival")  # a floor
        assert row[5] == ("" if of.before_ms is None else f"{of.before_ms:,.2f}")
        share = of.goal_share and float(row[2].replace(",", "")) / of.goal_share
        assert float(row[6].replace(",", "") or 0) == pytest.approx(share or of.goal_ms or 0, abs=0.01)
        assert row[8] == ("" if of.host_goal_ms is None else f"{of.host_goal_ms:,.2f}")
        assert row[10] == ("97%" if of.what == "decode" else "")


def test_gpu_table_has_the_goals_of_the_host_and_of_decodes_that_no_tiny_row_has() -> None:
    rows = {row.name: row for row in gpu_table.CASES["llama"].rows}
    goals = {name: row.host_goal_ms for name, row in rows.items()}
    assert goals["decode, 64 x 1,024"] == 0.3
    assert goals["decode, 256 x 1,024"] == 0.6
    assert goals["decode, 1 x 1,024"] is None
    assert goals["prompt of 2,048"] == goals["64 decode, a prompt of 2,048 arrives"] == 3.0
    for name, case in gpu_table.CASES.items():
        assert all(row.goal_ms or row.goal_share for row in case.rows) != (name == gpu_table.TRANSFORMERS)


@pytest.mark.skipif(not this_cpu().variants, reason="no native ops on this machine")
def test_gpu_loading_prints_the_bytes_of_the_model_and_its_goal(capsys: pytest.CaptureFixture[str]) -> None:
    gpu_loading.main(["--tiny", "--device", "cpu"])
    cells = [cell.strip() for cell in capsys.readouterr().out.splitlines()[-1].split("|")[1:-1]]
    assert cells[-1] == "3.00"
    assert float(cells[0]) > 0
    assert "gpu_loading" in gpu.SECTIONS["loading"].command[-1]


@pytest.mark.slow
def test_gpu_kernels_fill_their_table_in_the_interpreter(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("triton", reason="Triton is not installed: scripts/bootstrap.py --dev brings it under Linux")
    from benchmarks import gpu_kernels
    from tests.ops import triton_device  # noqa: F401 - its interpreter repeats less

    monkeypatch.setattr(sys, "argv", ["gpu_kernels", "--tiny", "--device", "cpu", "--limit", "1e9"])
    monkeypatch.setattr(gpu_kernels, "FORMS", {name: gpu_kernels.FORMS[name] for name in ("bfloat16", "MXFP4")})
    gpu_kernels.main()
    rows = [
        line.split("|")[1:-1]
        for line in capsys.readouterr().out.splitlines()
        if line.startswith(("| p", "| a", "| M", "| d"))
    ]
    scans = ["Mamba", "delta", "delta"]
    assert [row[0].split()[0].rstrip(",") for row in rows] == scans * 2 + ["product"] * 4 + ["attention"] * 2
    assert all(float(row[2].replace(",", "")) > 0 for row in rows)
    has_goal = [bool(row[4].strip()) for row in rows]
    dense_without = [False, False, True, True]
    assert has_goal == [True] * 3 + [False] * 3 + dense_without + [True] * 2
