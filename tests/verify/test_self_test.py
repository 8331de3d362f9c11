"""C28: the verification finds faults that are planted in its engines, and calls none found that it did not find."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from forebay.base import fault
from forebay.base.errors import ConfigError
from forebay.cli import verify_engine
from forebay.cli.main import main
from forebay.cli.verify_self_test import exit_code
from forebay.engine.loop.planted import PLANTS, plant_armed
from forebay.verify.circumstances import Circumstance
from forebay.verify.pictures import PICTURES
from forebay.verify.run import Baseline, Outcome, Verification
from forebay.verify.self_test import FAULTS, Detection, Found, self_test
from forebay.verify.verdict import Verdict
from tests.verify.test_verify import small_model, tokenizer

__all__ = ["small_model", "tokenizer"]  # fixtures


def test_each_planted_fault_replaces_a_method_and_has_a_circumstance_that_finds_it(
    small_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert {one.name for one in FAULTS} == PLANTS.keys()
    verification = Verification({"model_path": str(small_model)}, num=2, max_tokens=8, seed=0)
    known = {one.name: one for one in verification.circumstances}
    assert {one.circumstance for one in FAULTS if one.needs != PICTURES} <= known.keys()
    for name, make in PLANTS.items():
        planted = make()
        assert planted.faulty is not getattr(planted.owner, planted.name), name
        with pytest.MonkeyPatch.context() as patch, fault.plants(name):
            patch.setattr(planted.owner, planted.name, getattr(planted.owner, planted.name))  # undone with the block
            fault.arm_from_environment()
            plant_armed()
            assert getattr(planted.owner, planted.name).__code__ is planted.faulty.__code__
            fault.disarm()
    assert not fault.is_armed()


def test_fault_that_does_not_exist_is_refused() -> None:
    fault.arm("nothing", "plant")
    try:
        with pytest.raises(ConfigError, match="fault 'nothing': there are page_of_another, "):
            plant_armed()
    finally:
        fault.disarm()


KINDS = frozenset({"kv", "state", PICTURES})


class FakeVerification(Verification):
    """Circumstances with given verdicts, without a fault and by the fault that is armed."""

    def __init__(self, clean: Verdict, by_fault: dict[str, Verdict], kinds: frozenset[str] = frozenset({"kv"})) -> None:
        self.clean, self.by_fault, self.baseline = clean, by_fault, Baseline(kinds=kinds)
        names = dict.fromkeys(one.circumstance for one in FAULTS)
        self.circumstances = [Circumstance(name, {}, *[None] * 3) for name in names]  # type: ignore[list-item]
        self.num_clean = 0

    async def outcome(self, circumstance: Circumstance) -> Outcome:
        assert not fault.is_armed()
        self.num_clean += 1
        return Outcome(circumstance.name, self.clean, "why")

    async def first_difference(self, circumstance: Circumstance, most_rounds: int = 8) -> Outcome:
        fault.arm_from_environment()
        (name,) = fault.planted()
        fault.disarm()
        return Outcome(circumstance.name, self.by_fault.get(name, Verdict.SAME), "what")


async def found_of(verification: FakeVerification) -> dict[str, Found]:
    return {one.fault.name: one.found async for one in self_test(verification)}


async def test_self_test_detects_what_differs_or_fails_and_misses_what_is_the_same() -> None:
    verification = FakeVerification(
        Verdict.SAME, {"page_of_another": Verdict.DIFFERENT, "state_late": Verdict.FAILED}, KINDS
    )
    found = await found_of(verification)
    assert {name for name, result in found.items() if result is Found.DETECTED} == {"page_of_another", "state_late"}
    assert set(found.values()) == {Found.DETECTED, Found.MISSED}
    assert verification.num_clean == len({one.circumstance for one in FAULTS}), "each runs once without a fault"


@pytest.mark.parametrize(
    ("clean", "result"), [(Verdict.DIFFERENT, Found.NOT_SHOWN), (Verdict.LEFT_OUT, Found.LEFT_OUT)]
)
async def test_self_test_does_not_count_a_circumstance_that_differs_or_is_left_out_without_a_fault(
    clean: Verdict, result: Found
) -> None:
    everything = dict.fromkeys(PLANTS, Verdict.DIFFERENT)
    assert set((await found_of(FakeVerification(clean, everything, KINDS))).values()) == {result}


async def test_self_test_leaves_faults_of_states_out_where_a_model_has_none() -> None:
    found = await found_of(FakeVerification(Verdict.SAME, dict.fromkeys(PLANTS, Verdict.DIFFERENT)))
    left_out = {name for name, result in found.items() if result is Found.LEFT_OUT}
    assert left_out == {"state_late", "uncleared_slot", "delta_of_previous"}


@pytest.mark.parametrize(
    ("found", "code"),
    [
        ([Found.DETECTED, Found.LEFT_OUT], 0),
        ([Found.DETECTED, Found.NOT_SHOWN], 2),
        ([Found.LEFT_OUT], 2),
        ([Found.DETECTED, Found.MISSED, Found.NOT_SHOWN], 1),
    ],
)
def test_self_test_exit_code_is_0_only_if_every_fault_that_may_be_is_detected(found: list[Found], code: int) -> None:
    assert exit_code([Detection(FAULTS[0], one, "") for one in found]) == code


@pytest.mark.parametrize(
    ("asked", "asks"), [((8, 32), (18, 32)), ((20, 8), (20, 24)), ((18, 24), (18, 24)), ((24, 32), (24, 32))]
)
def test_self_test_asks_as_many_questions_and_tokens_as_it_needs(
    asked: tuple[int, int],
    asks: tuple[int, int],
    small_model: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    found = list[tuple[int, int]]()

    async def count(verification: Verification, word: str, console: Any) -> int:
        found.append((len(verification.questions), verification.max_tokens))
        return 0

    monkeypatch.setattr(verify_engine, "run_self_test", count)
    words = [f"--requests={asked[0]}", f"--max-tokens={asked[1]}"]
    assert main(["verify", str(small_model), "--self-test", *words]) == 0
    assert found == [asks]
    said = f"{asks[0]} requests of {asks[1]} tokens, not {asked[0]} of {asked[1]} tokens: with fewer"
    assert (said in capsys.readouterr().out) is (asked != asks)


def test_help_of_verify_says_which_ways_and_circumstances_are_not_required(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit, match="0"):
        main(["verify", "--help"])
    text = " ".join(capsys.readouterr().out.split())
    assert "but for ways that only questions made of answers have (a bad word, a least length)" in text
    assert "left out, and not required" in text


@pytest.mark.slow
@pytest.mark.parametrize(
    ("like", "missing"),
    [
        ("llama", {"state_late", "uncleared_slot", "delta_of_previous"}),
        ("gpt_oss", {"state_late", "uncleared_slot", "delta_of_previous"}),
        ("gemma4", {"state_late", "uncleared_slot", "delta_of_previous"}),
        ("deepseek_v3", {"state_late", "uncleared_slot", "delta_of_previous"}),
        ("falcon_h1", {"delta_of_previous"}),
        ("qwen3_next", {"delta_of_previous"}),
        ("kimi_linear", {"delta_of_previous"}),
        ("jamba", {"delta_of_previous"}),
        ("lfm2", {"delta_of_previous"}),
        ("lfm3", {"delta_of_previous"}),
        ("qwen4_exp_text", {"delta_of_previous"}),
        ("bailing_hybrid", {"delta_of_previous"}),
        ("glm_moe_dsa", {"state_late", "uncleared_slot", "delta_of_previous"}),
        ("deepseek_v4", {"state_late", "uncleared_slot", "delta_of_previous"}),
        ("mamba2", {"page_of_another", "unpadded_tail", "delta_of_previous"}),
        ("falcon_mamba", {"page_of_another", "unpadded_tail", "delta_of_previous"}),
        ("qwen3_5", set()),
    ],
)
def test_self_test_every_fault_is_detected_on_each_mixer(
    like: str, missing: set[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = str(tmp_path / like)
    assert main(["models", "make", "--like", like, "--out", path, "--hidden-size", "64"]) == 0
    capsys.readouterr()
    assert main(["verify", path, "--self-test", "--json"]) == 0
    results: list[dict[str, Any]] = json.loads(capsys.readouterr().out)
    found = {one["fault"]["name"]: one["found"] for one in results}
    assert found == {name: "left out" if name in missing else "detected" for name in PLANTS}, results
