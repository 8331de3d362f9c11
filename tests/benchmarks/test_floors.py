"""What a server that lost nothing would do, by hand; and what a machine gives, where it can be measured."""

from __future__ import annotations

import math
import os
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks.floors import INSTRUCTIONS, Peaks, Work, measure_peaks, work_of
from benchmarks.rows import ROWS, Load, Row
from benchmarks.targets import bound
from forebay.base.cpu import this_cpu
from forebay.cli.main import main
from tests.together import together

ROW = {row.name: row for row in ROWS}
WORK = Work(weight_bytes=1000, layer_products=2000, head_products=100, token_bytes=10, state_bytes=50)
READING = Peaks(read=1e3, products=math.inf, products_by="fma")
MULTIPLYING = Peaks(read=math.inf, products=1e3, products_by="fma")


def test_a_step_reads_all_weights_and_what_its_requests_keep() -> None:
    load = Load(num_prompts=4, concurrency=2, input_len=8, output_len=5)
    step = (1000 + 2 * (8 + 5 / 2) * 10 + 2 * 2 * 50) / 1e3
    first = (1000 + 2 * 2 * 50) / 1e3
    assert WORK.ideal(load, READING)["duration"] == pytest.approx(first + 4 * step)
    assert WORK.ideal(load, READING)["output_throughput"] == pytest.approx(10 / (first + 4 * step))


def test_a_prompt_multiplies_every_weight_with_every_token_and_the_head_with_its_last() -> None:
    load = Load(num_prompts=1, concurrency=1, input_len=512, output_len=1)
    ideal = WORK.ideal(load, MULTIPLYING)
    assert ideal["median_ttft_ms"] == pytest.approx(512 * 2000 + 100)
    assert ROW["prefill-1"].figure(ideal) == pytest.approx(512 / (512 * 2 + 0.1))


def test_a_shared_prefix_is_read_once_and_computed_before() -> None:
    load = Load(num_prompts=4, concurrency=2, input_len=1050, prefix_len=1000, output_len=64)
    assert WORK.ideal(load, MULTIPLYING)["median_ttft_ms"] == pytest.approx(2 * (50 * 2000 + 100))
    more = WORK.ideal(replace(load, concurrency=3), READING)["duration"]
    assert more - WORK.ideal(load, READING)["duration"] == pytest.approx((63 * 82 * 10 + 64 * 2 * 50) / 1e3)


def test_experts_that_no_token_takes_are_neither_read_nor_multiplied() -> None:
    work = replace(WORK, layer_products=900, head_products=100, expert_products=800, chosen=0.25)
    load = Load(num_prompts=1, concurrency=1, input_len=2, output_len=1)
    first = 1000 * (1 - 0.8 * 0.75**2) + 2 * 50
    assert work.ideal(load, READING)["median_ttft_ms"] == pytest.approx(first)
    assert work.ideal(load, MULTIPLYING)["median_ttft_ms"] == pytest.approx(2 * (100 + 800 / 4) + 100)


@together("row", [row for row in ROWS if row.load is not None])
def test_every_row_with_a_load_has_a_floor(row: Row) -> None:
    assert row.load is not None
    assert row.figure(WORK.ideal(row.load, READING)) > 0


def test_what_alone_gives_the_worse_figure_is_the_bound() -> None:
    row = ROW["streams-1"]
    assert row.load is not None
    both = Peaks(read=1e3, products=1e9, products_by="fma")
    assert bound(WORK, row, row.load, both) == "read"
    assert bound(WORK, row, row.load, replace(both, products=1.0)) == "fma"


@pytest.mark.slow
@pytest.mark.skipif(not this_cpu().variants, reason="no native ops on this machine")
def test_a_machine_reads_and_multiplies() -> None:
    peaks = measure_peaks(this_cpu().variants[0], 1 << 20)
    assert peaks.read > 0
    assert peaks.products > 0
    assert INSTRUCTIONS[peaks.products_by] in this_cpu().variants[0].needs


def test_the_work_of_a_model_is_what_its_plan_says(
    embedded_model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(command: list[str], **options: Any) -> SimpleNamespace:
        """Run the command in this process."""
        assert Path(command[0]).name == "forebay"
        assert options.pop("env").items() >= os.environ.items()
        assert main(command[1:]) == 0
        return SimpleNamespace(stdout=capsys.readouterr().out)

    monkeypatch.setattr("benchmarks.floors.subprocess.run", run)
    work = work_of(embedded_model, [], {})
    assert work.head_products == 49152 * 576
    assert work.head_products + work.layer_products == pytest.approx(134.5e6, rel=0.001)
    assert work.weight_bytes == pytest.approx(embedded_model.stat().st_size, rel=0.05)
    assert work.token_bytes % (30 * 2 * 3 * 64) == 0
    assert work.state_bytes == 0
