"""How far a step goes through the scheduler: functions and files, which may only become fewer.

`python scripts/trace_step.py` prints the path.
"""

from __future__ import annotations

import pytest

from forebay.base.units import human_bytes, parse_bytes
from scripts.trace_step import Trace, steps

# (hybrid, which step): the most functions and files.
MOST = {
    (False, "prefill"): (82, 19),
    (False, "decode"): (24, 14),
    (True, "prefill"): (137, 29),
    (True, "decode"): (31, 17),
}


def test_functions_are_counted_once_with_their_depth_and_comprehensions_not_at_all() -> None:
    trace = Trace()
    with trace.recording():
        human_bytes(1)
        [human_bytes(n) for n in (1, 2)]
        parse_bytes("1KiB")
    assert [(call.depth, call.function, call.times) for call in trace.calls[:2]] == [
        (0, "human_bytes", 3),
        (0, "parse_bytes", 1),
    ]
    assert trace.files == {"base/units.py"}


@pytest.mark.parametrize("hybrid", [False, True])
def test_a_step_goes_through_no_more_functions_and_files_than_before(hybrid: bool) -> None:
    for name, trace in zip(("prefill", "decode"), steps(hybrid=hybrid), strict=True):
        functions, files = MOST[hybrid, name]
        path = "\n".join(map(str, trace.calls))
        assert len(trace.functions) <= functions, path
        assert len(trace.files) <= files, path
