import logging
from pathlib import Path

import pytest

from forebay.base import errors, fault, log
from forebay.base.errors import ConfigError
from forebay.base.units import ceil_div, human_bytes, human_seconds, parse_bytes, parse_count


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("4GiB", 4 << 30),
        ("512M", 512 << 20),
        ("1.5g", 3 << 29),
        ("2GB", 2 * 10**9),
        ("7", 7),
        ("7b", 7),
        ("1 kib", 1024),
    ],
)
def test_sizes_are_read_as_people_write_them(text, expected):
    assert parse_bytes(text) == expected


@pytest.mark.parametrize("text", ["", "x", "-1", "1e9", "4 apples", "nan"])
def test_what_is_no_size_is_an_error_that_shows_it(text):
    with pytest.raises(ConfigError, match="is not a size"):
        parse_bytes(text)


@pytest.mark.parametrize(("text", "expected"), [("8192", 8192), ("32k", 32768), ("1M", 1 << 20), ("1.5k", 1536)])
def test_counts_are_binary_as_context_lengths_are(text, expected):
    assert parse_count(text) == expected


@pytest.mark.parametrize("text", ["", "1.5", "-3", "many"])
def test_what_is_no_count_is_an_error(text):
    with pytest.raises(ConfigError, match="is not a whole number"):
        parse_count(text)


def test_numbers_are_shown_with_units():
    assert [human_bytes(n) for n in (5, 1536, 3 << 20, 5 << 30, 2 << 40)] == [
        "5 B",
        "1.5 KiB",
        "3.0 MiB",
        "5.0 GiB",
        "2.0 TiB",
    ]
    assert [human_seconds(s) for s in (5e-6, 0.0123, 3.0, 300.0)] == ["5 us", "12.3 ms", "3.00 s", "5.0 min"]
    assert ceil_div(7, 3) == 3


def test_a_log_event_is_one_line_whatever_the_values_hold():
    line = log.event("finished", id=3, ttft_ms=12.51234, why="two words\nand a line", long="x" * 500)
    assert line.startswith('finished id=3 ttft_ms=12.51 why="two words?and a line" long=x')
    assert "\n" not in line
    assert len(line) < 300


def test_an_error_survives_the_way_between_processes():
    for kind in (errors.Overloaded, errors.RequestTooLarge, errors.NumericalError):
        again = errors.from_code(kind.__name__, "why", kind.default_code)
        assert (type(again), again.message, again.code) == (kind, "why", kind.default_code)
    assert type(errors.from_code("Unheard", "why", "x")) is errors.EngineError


def test_an_armed_fault_fires_at_its_turn_only():
    fault.arm("here", "memory", at=2)
    try:
        fault.point("here")
        fault.point("elsewhere")
        with pytest.raises(MemoryError, match="injected fault at here"):
            fault.point("here")
        fault.point("here")
    finally:
        fault.disarm()
    fault.arm("here")
    fault.disarm("here")
    fault.point("here")
    with pytest.raises(ConfigError, match="fault kind"):
        fault.arm("here", "nonsense")


def test_faults_from_the_environment_need_a_second_word(monkeypatch):
    fault.arm_from_environment()
    monkeypatch.setenv("FOREBAY_FAULTS", "a=os@2,b")
    with pytest.raises(ConfigError, match="for tests only"):
        fault.arm_from_environment()
    monkeypatch.setenv("FOREBAY_TEST_FAULTS", "1")
    try:
        fault.arm_from_environment()
        with pytest.raises(RuntimeError):
            fault.point("b")
        fault.point("a")
        with pytest.raises(OSError, match="fault at a"):
            fault.point("a")
    finally:
        fault.disarm()


def test_logging_set_up_by_one_test_is_undone_for_the_next(pytestconfig):
    log.setup_logging("error", process="test")
    conftest = pytestconfig.pluginmanager.get_plugin(str(Path(__file__).parents[1] / "conftest.py"))
    conftest._restore_logging()
    root = logging.getLogger("forebay")
    assert (root.handlers, root.level, root.propagate) == ([], logging.NOTSET, True)
