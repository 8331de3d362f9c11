"""The table that `forebay serve` prints when it is ready."""

from __future__ import annotations

import pytest

from forebay.cli.startup_table import print_startup
from forebay.config.config import SETTINGS
from forebay.config.resolve import resolve
from forebay.engine.frames import Ready

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
    assert f"  fits       {fits}\n" in capsys.readouterr().out


def test_print_startup_setting_that_memory_lowers_has_one_value(capsys: pytest.CaptureFixture[str]) -> None:
    report = [
        ("memory", "context length", "1232 tokens", "lowered from 8192"),
        (SETTINGS, "context_length", "1232", "lowered from 8192"),
        (SETTINGS, "max_running_requests", "10", "lowered from 64"),
    ]
    ready = Ready(
        max_total_tokens=1232, max_running_requests=10, max_requests=64, context_length=1232, page_size=16,
        vocab_size=8, eos_token_ids=[], load_seconds=1.0, report=report, pid=1,
    )  # fmt: skip
    print_startup(resolve({"max_running_requests": 64}), ready, "http://localhost", 1.0)
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert [line[1] for line in lines if line[:1] == ["context_length"]] == ["1232"]
    assert [line[1:] for line in lines if line[:1] == ["max_running_requests"]] == [["10", "lowered", "from", "64"]]
