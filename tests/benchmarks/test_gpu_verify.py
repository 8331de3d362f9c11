"""`forebay verify` in Triton's interpreter, by a program that makes the models."""

from __future__ import annotations

import pytest

from benchmarks import gpu_verify
from forebay.verify.run import Outcome
from forebay.verify.verdict import Verdict

pytest.importorskip("triton", reason="Triton is not installed: scripts/bootstrap.py --dev brings it under Linux")


def test_gpu_verify_equal_tokens_with_other_log_probabilities_are_a_difference() -> None:
    outcome = Outcome("all at once, from graphs", Verdict.SAME, "up to 3 decoded at once")
    assert gpu_verify.verdict_of(outcome) == "same"
    outcome.findings.largest_logprob_gap = 1e-9
    assert gpu_verify.verdict_of(outcome) == "different: log-probabilities by 1e-09"


@pytest.mark.slow
def test_gpu_verify_llama_from_graphs_is_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    assert gpu_verify.main(["llama", "--only", "graphs", "--prompts", "2"]) == 0
    alone, row = capsys.readouterr().out.splitlines()[2:]
    assert alone.startswith("| llama | alone | asked |")
    assert row.startswith("| llama | all at once, from graphs | same |")
    assert row.endswith("steps from graphs |")
