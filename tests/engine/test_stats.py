"""The log line of a working engine: rates of the work since the last line."""

from __future__ import annotations

from forebay.engine.loop.stats import Stats
from tests.scheduler.rig import Rig


def fields(line: str) -> dict[str, str]:
    return dict(word.split("=", 1) for word in line.split() if "=" in word)


def test_line_rates_are_of_the_tokens_and_the_work_since_the_last_line() -> None:
    rig, stats = Rig(), Stats(0.0)
    counters = rig.scheduler.counters
    for prompt, generated, busy_s, rates in [(100, 40, 2.0, (50, 20)), (30, 90, 0.5, (60, 180)), (0, 5, 1.0, (0, 5))]:
        counters["computed_prompt_tokens"] += prompt
        counters["generated_tokens"] += generated
        stats.counters["engine.busy_seconds"] += busy_s
        assert stats.worked_s() == busy_s
        line = fields(stats.line(rig.scheduler, 0.0))
        assert (float(line["prefill_tok_s"]), float(line["decode_tok_s"])) == rates
        assert stats.worked_s() == 0.0


def test_line_names_tenants_only_if_several_have_requests() -> None:
    rig, stats = Rig(tenants={"a": 1, "b": 2}), Stats(0.0)
    rig.add(5, tenant="a")
    assert "tenants" not in fields(stats.line(rig.scheduler, 0.0))
    rig.add(5, tenant="b")
    rig.add(5, tenant="b")
    assert fields(stats.line(rig.scheduler, 0.0))["tenants"] == "a:0+1,b:0+2"
