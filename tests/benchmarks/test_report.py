"""The target table: medians, shares of floors, ratios pair by pair, and its place in a page."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.plot import Log, svg
from benchmarks.report import NOISE, Report, Run, number, put_between_marks
from benchmarks.rows import ROWS

ROW = {row.name: row for row in ROWS}
PEER = "llama.cpp <Q4_1>"


def run(server: str, row: str, repeat: int, *, other: float = 0.0, limit: float | None = None, **result: float) -> Run:
    ideal = {} if limit is None else {"output_throughput": limit, "bound_by": "read"}
    return Run(server=server, row=row, repeat=repeat, other_cpu_share=other, result=result, ideal=ideal)


def rates(server: str, row: str, *values: float, other: float = 0.0, limit: float | None = None) -> list[Run]:
    return [
        run(server, row, repeat, other=other, limit=limit, output_throughput=value)
        for repeat, value in enumerate(values)
    ]


def test_a_row_is_the_median_of_its_repeats() -> None:
    report = Report(ROWS, rates("Forebay", "streams-1", 100.0, 400.0, 310.0))
    assert report.median(ROW["streams-1"], "Forebay") == 310.0
    assert [row.name for row in report.rows] == ["streams-1"]
    assert "| **310** tok/s | - | 1.2x llama.cpp |" in report.markdown()


def test_each_run_has_the_floor_of_its_own_minute() -> None:
    runs = [
        run("Forebay", "streams-1", i, output_throughput=100.0, limit=limit) for i, limit in enumerate((400, 200, 125))
    ]
    report = Report(ROWS, runs)
    assert report.share_of_floor(ROW["streams-1"]) == 0.5
    assert report.limit(ROW["streams-1"]) == 200.0
    assert "| 50 % (read) |" in report.markdown()


def test_the_table_says_what_the_machine_gave() -> None:
    ideal = {"output_throughput": 1.0, "bound_by": "read"}
    peaks = [{"read": rate, "products": 4e11, "products_by": "vnni512"} for rate in (2e10, 3e10)]
    runs = [
        Run(
            server="Forebay",
            row="streams-1",
            repeat=repeat,
            other_cpu_share=0.0,
            result=ideal,
            ideal={**ideal, "peaks": peak},
        )
        for repeat, peak in enumerate(peaks)
    ]
    assert Report(ROWS, runs).markdown().endswith("read 20 to 30 GB/s, and multiplied 400 G/s (vnni512).\n")


def test_only_what_both_ran_is_a_pair_and_their_median_is_the_ratio() -> None:
    runs = rates("Forebay", "streams-1", 100.0, 400.0, 310.0) + rates(PEER, "streams-1", 200.0, 200.0)
    report = Report(ROWS, runs, frozenset({"avx2", "avx512_vnni"}))
    assert report.ratios(ROW["streams-1"], PEER) == [0.5, 2.0]
    assert report.markdown().endswith("| 200 (1.25x, ahead 1/2) | 1.25 of 1.5x llama.cpp |\n")


def test_a_goal_is_against_the_best_format_of_a_peer_by_the_instruction_set() -> None:
    runs = (
        rates("Forebay", "streams-1", 300.0)
        + rates(PEER, "streams-1", 100.0)
        + rates("llama.cpp Q4_0", "streams-1", 150.0)
    )
    assert "| 2.00 of 1.2x llama.cpp |" in Report(ROWS, runs, frozenset({"avx2", "avx_vnni"})).markdown()
    disturbed = rates("llama.cpp Q8_0", "streams-1", 1.0, other=0.5)
    assert "| 1.2x llama.cpp |" in Report(ROWS, runs + disturbed).markdown(), "nobody knows which was the best"
    assert "| 2.00 of 1.5x llama.cpp |" in Report(ROWS, runs, frozenset({"avx512_vnni", "amx_bf16"})).markdown()


def test_a_bound_of_our_own_is_of_the_same_run_and_needs_no_peer() -> None:
    steps = [(30.0, 10.0), (18.0, 12.0), (20.0, 10.0)]
    runs = [
        run("Forebay", "between-tokens", repeat, p99_itl_ms=p99, median_itl_ms=median)
        for repeat, (p99, median) in enumerate(steps)
    ]
    assert "| 2.00 of at most 2x the median step |" in Report(ROWS, runs).markdown()
    start = run("Forebay", "start", 0, first_token_s=1.75, idle_pss_mb=300.0)
    assert "| 1.75 of at most 2 s |" in Report(ROWS, [start]).markdown()
    assert "| 1.75 of at most 1.5 s |" in Report(ROWS, [start], frozenset({"amx_bf16"})).markdown()
    disturbed = run("Forebay", "start", 0, other=0.5, first_token_s=1.75, idle_pss_mb=300.0)
    assert "| at most 2 s |" in Report(ROWS, [disturbed]).markdown()


def test_who_was_disturbed_is_not_beaten() -> None:
    runs = rates("Forebay", "streams-1", 100.0, 100.0) + rates(PEER, "streams-1", 1.0, 1.0, other=2 * NOISE)
    report = Report(ROWS, runs)
    assert report.ratios(ROW["streams-1"], PEER) == []
    assert report.markdown().endswith("| ~1 | 1.2x llama.cpp |\n"), "nor is the goal reached"


def test_the_least_disturbed_run_of_a_repeat_counts_and_quiet_ones_make_the_median() -> None:
    disturbed = [run("Forebay", "streams-1", repeat, other=0.5, output_throughput=1.0) for repeat in (0, 1)]
    report = Report(ROWS, [*disturbed, run("Forebay", "streams-1", 0, output_throughput=100.0)])
    assert report.median(ROW["streams-1"], "Forebay") == 100.0


def test_where_less_is_better_the_lower_is_ahead() -> None:
    row = ROW["start"]
    runs = [run("Forebay", "start", 0, first_token_s=3.0, idle_pss_mb=300.0),
            run(PEER, "start", 0, first_token_s=4.5, idle_pss_mb=200.0)]  # fmt: skip
    report = Report(ROWS, runs)
    assert report.ratios(row, PEER) == [1.5]
    assert report.ratios(ROW["memory"], PEER) == [pytest.approx(2 / 3)], "both rows come from one start"


def test_table_omits_rows_without_runs_and_shows_a_dash_for_missing_figures() -> None:
    report = Report(ROWS, rates("Forebay", "streams-1", 1.0) + rates(PEER, "streams-4", 2.0))
    lines = report.markdown().splitlines()
    assert len(lines) == 4
    assert "| - | 1.2x llama.cpp |" in lines[2]
    assert "| - | - | 2 |" in lines[3]


@pytest.mark.parametrize(
    ("value", "text"), [(1234.6, "1,235"), (99.96, "100"), (15.04, "15"), (1.567, "1.57"), (0.0, "0")]
)
def test_numbers_show_three_figures(value: float, text: str) -> None:
    assert number(value) == text


def test_the_table_replaces_what_stood_between_the_marks(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    begin, end = "<!-- targets-avx2: begin -->", "<!-- targets-avx2: end -->"
    page.write_text(f"before\n{begin}\nold\n{end}\nafter\n")
    put_between_marks(page, "targets-avx2", "new")
    assert page.read_text() == f"before\n{begin}\nnew\n{end}\nafter\n"
    page.write_text("no marks")
    with pytest.raises(ValueError, match="lacks the lines"):
        put_between_marks(page, "targets-native", "new")


def test_the_plot_is_well_formed_and_names_every_server() -> None:
    from xml.etree import ElementTree

    runs = (
        rates("Forebay", "streams-1", 310.0, limit=620.0)
        + rates("Forebay", "streams-64", 9000.0)
        + rates(PEER, "streams-1", 150.0)
    )
    root = ElementTree.fromstring(svg(Report(ROWS, runs), "a caption & more"))
    words = {element.text for element in root.iter() if element.text and element.text.strip()}
    assert {"Forebay", PEER, "floor", "50 %", "a caption & more", ROW["streams-64"].title} <= words


def test_the_plot_of_nothing_is_no_error() -> None:
    assert svg(Report(ROWS, []), "").startswith("<svg")


@pytest.mark.parametrize(("low", "high"), [(27.0, 3000.0), (5.0, 5.0), (1.0, 10.0)])
def test_the_scale_spans_its_values(low: float, high: float) -> None:
    scale = Log(low, high)
    assert 0.0 <= scale(low) <= scale(high) <= 1.0
    assert len(scale.ticks()) >= 2
