"""What `forebay serve` prints when it is ready."""

from __future__ import annotations

import pytest

from forebay.cli.startup_table import print_startup
from forebay.config.config import SETTINGS
from forebay.config.resolve import resolve
from forebay.engine.frames import Ready
from forebay.engine.loop.start_report import Report

pytestmark = pytest.mark.usefixtures("decides_for_avx2")


@pytest.mark.parametrize(
    ("num_pages", "context", "fits"),
    [
        (6, 96, "no: 1 request of 96 tokens at once, or 6 of 16; `forebay plan` names what helps"),
        (128, 2048, "1 request of 2,048 tokens at once, or 64 of 32"),
    ],
)
def test_print_startup_context_below_2048_is_no_fit(
    num_pages: int, context: int, fits: str, capsys: pytest.CaptureFixture[str]
) -> None:
    ready = Ready(
        max_total_tokens=num_pages * 16, max_running_requests=min(num_pages, 64), max_requests=64,
        context_length=context, page_size=16, vocab_size=8, eos_token_ids=[], load_seconds=1.0, report=[], pid=1,
    )  # fmt: skip
    print_startup(resolve(), ready, "http://localhost", 1.0)
    assert f"  fits       {fits}  (0 B of weights, " in capsys.readouterr().out


REPORT = [
    ("memory", "context length", "1232 tokens", "lowered from 8192"),
    ("model", "kernels", "native", "2 threads"),
    (SETTINGS, "context_length", "1232", "lowered from 8192"),
    (SETTINGS, "kv_cache_bytes", "8.0 MiB", "10 requests of 1232 tokens need no more"),
    (SETTINGS, "max_running_requests", "10", "lowered from 64"),
    (SETTINGS, "max_total_tokens", "1232", "all that is left"),
]


def printed(capsys: pytest.CaptureFixture[str], rows: Report, **flags: object) -> list[list[str]]:
    """Start on a machine whose memory decided `rows`; return the words of each line."""
    ready = Ready(
        max_total_tokens=1232, max_running_requests=10, max_requests=64, context_length=1232, page_size=16,
        vocab_size=8, eos_token_ids=[], load_seconds=1.0, report=rows, pid=1, weight_bytes=3 << 20,
    )  # fmt: skip
    print_startup(resolve(flags), ready, "http://localhost", 1.0)
    return [line.split() for line in capsys.readouterr().out.splitlines()]


def test_print_startup_setting_that_memory_lowers_has_one_value(capsys: pytest.CaptureFixture[str]) -> None:
    lines = printed(capsys, REPORT, max_running_requests=64, report=True)
    assert [line[1] for line in lines if line[:1] == ["context_length"]] == ["1232"]
    assert [line[1:] for line in lines if line[:1] == ["max_running_requests"]] == [["10", "lowered", "from", "64"]]


def test_print_startup_report_names_the_formats_of_answers_and_their_source(
    capsys: pytest.CaptureFixture[str],
) -> None:
    ready = Ready(
        max_total_tokens=1232, max_running_requests=10, max_requests=64, context_length=1232, page_size=16,
        vocab_size=8, eos_token_ids=[], load_seconds=1.0, report=REPORT, pid=1,
    )  # fmt: skip
    answers = [("tool calls", "declared", "the checkpoint declares it (response_template)")]
    print_startup(resolve({"report": True}), ready, "http://localhost", 1.0, answers)
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["tool", "calls", "declared", "the", "checkpoint", "declares", "it", "(response_template)"] in lines


def test_print_startup_is_five_lines_and_report_adds_the_table(capsys: pytest.CaptureFixture[str]) -> None:
    short = printed(capsys, [])
    assert [line[0] for line in short] == ["ready", "API", "model", "fits", "more"]
    assert "--report" in short[-1]
    whole = printed(capsys, REPORT, report=True)
    assert [line[0] for line in whole if len(line) == 1] == ["memory", "model", "settings"]
    assert not any(line[:1] in (["more"], ["lowered"]) for line in whole)


def test_print_startup_without_report_shows_what_memory_lowered(capsys: pytest.CaptureFixture[str]) -> None:
    """A value that nobody wrote is told of only if less than it should be was left."""
    flags = {"max_running_requests": 64, "kv_cache_bytes": 16 << 20}
    changed = [line[1:] for line in printed(capsys, REPORT, **flags) if line[0] == "lowered"]
    assert {line[0]: line[1] for line in changed} == {
        "context_length": "1232",
        "kv_cache_bytes": "8.0",
        "max_running_requests": "10",
    }
    assert changed[0][-3:] == ["lowered", "from", "8192"]
    alone = {line[1] for line in printed(capsys, REPORT) if line[0] == "lowered"}
    assert alone == {"context_length", "max_running_requests"}
