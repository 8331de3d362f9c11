"""The target table: medians, who was ahead pair by pair, and its place in a page."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.plot import Log, svg
from benchmarks.report import BEGIN, END, Report, Run, number, put_between_marks
from benchmarks.rows import ROWS

ROW = {row.name: row for row in ROWS}
PEER = "llama.cpp <Q4_1>"


def run(server: str, row: str, repeat: int, **result: float) -> Run:
    return Run(server=server, row=row, repeat=repeat, other_cpu_share=0.0, result=result)


def rates(server: str, row: str, *values: float) -> list[Run]:
    return [run(server, row, repeat, output_throughput=value) for repeat, value in enumerate(values)]


def test_a_row_is_the_median_of_its_repeats() -> None:
    report = Report(ROWS, rates("Forebay", "streams-1", 100.0, 400.0, 310.0))
    assert report.median(ROW["streams-1"], "Forebay") == 310.0
    assert [row.name for row in report.rows] == ["streams-1"]
    assert "| 300 tok/s | **310** | 103 % | 162 (llama.cpp Q4_0) |" in report.markdown()


def test_only_what_both_ran_is_a_pair() -> None:
    runs = rates("Forebay", "streams-1", 100.0, 400.0, 310.0) + rates(PEER, "streams-1", 150.0, 150.0)
    report = Report(ROWS, runs)
    assert report.pairs_ahead(ROW["streams-1"], PEER) == (1, 2)
    assert report.markdown().endswith("| 150 (ahead 1/2) |\n")


def test_where_less_is_better_the_lower_is_ahead_and_twice_the_target_is_half_of_it() -> None:
    row = ROW["start"]
    runs = [run("Forebay", "start", 0, first_token_s=3.0, idle_pss_mb=300.0),
            run(PEER, "start", 0, first_token_s=4.0, idle_pss_mb=200.0)]  # fmt: skip
    report = Report(ROWS, runs)
    assert row.share_of_target(3.0) == 0.5
    assert report.pairs_ahead(row, PEER) == (1, 1)
    assert report.pairs_ahead(ROW["memory"], PEER) == (0, 1), "both rows come from one start"


def test_rows_that_nobody_ran_are_left_out_and_a_peer_without_a_figure_has_a_dash() -> None:
    report = Report(ROWS, rates("Forebay", "streams-1", 1.0) + rates(PEER, "streams-4", 2.0))
    lines = report.markdown().splitlines()
    assert len(lines) == 4
    assert lines[2].endswith("| - |")
    assert "| - | - |" in lines[3]


@pytest.mark.parametrize(
    ("value", "text"), [(1234.6, "1,235"), (99.96, "100"), (15.04, "15"), (1.567, "1.57"), (0.0, "0")]
)
def test_numbers_show_three_figures(value: float, text: str) -> None:
    assert number(value) == text


def test_the_table_replaces_what_stood_between_the_marks(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(f"before\n{BEGIN}\nold\n{END}\nafter\n")
    put_between_marks(page, "new")
    assert page.read_text() == f"before\n{BEGIN}\nnew\n{END}\nafter\n"
    page.write_text("no marks")
    with pytest.raises(ValueError, match="lacks the lines"):
        put_between_marks(page, "new")


def test_the_plot_is_well_formed_and_names_every_server() -> None:
    from xml.etree import ElementTree

    runs = (
        rates("Forebay", "streams-1", 310.0) + rates("Forebay", "streams-64", 9000.0) + rates(PEER, "streams-1", 150.0)
    )
    root = ElementTree.fromstring(svg(Report(ROWS, runs), "a caption & more"))
    words = {element.text for element in root.iter() if element.text and element.text.strip()}
    assert {"Forebay", PEER, "target", "a caption & more", ROW["streams-64"].title} <= words


def test_the_plot_of_nothing_is_no_error() -> None:
    assert svg(Report(ROWS, []), "").startswith("<svg")


@pytest.mark.parametrize(("low", "high"), [(27.0, 3000.0), (5.0, 5.0), (1.0, 10.0)])
def test_the_scale_spans_its_values(low: float, high: float) -> None:
    scale = Log(low, high)
    assert 0.0 <= scale(low) <= scale(high) <= 1.0
    assert len(scale.ticks()) >= 2
