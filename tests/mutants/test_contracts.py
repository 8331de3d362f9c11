"""Each contract that is built has a test that fails without it, and the page and the site are made of both."""

from functools import cache
from pathlib import Path

import pytest

from tests.mutants import MUTANTS
from tests.mutants.contracts import CONTRACTS, PAGE, page, rules
from tests.mutants.mutant import REPOSITORY, Mutant
from tests.mutants.named import missing, uncollected


def test_contracts_page_is_the_one_written_from_the_contracts() -> None:
    assert PAGE.read_text() == page(), "run `python -m tests.mutants --write`"


def test_rules_of_the_site_have_every_mutant_by_its_contracts() -> None:
    text = rules(MUTANTS)
    assert text.count("\n| ") == sum(len(mutant.contracts) for mutant in MUTANTS) + text.count("| rule |")


@pytest.mark.whole
@pytest.mark.parametrize("number", CONTRACTS)
def test_what_is_built_has_a_mutant_and_what_is_not_says_so(number: str) -> None:
    contract = CONTRACTS[number]
    assert any(number in mutant.contracts for mutant in MUTANTS) == bool(contract.kept_in)
    assert contract.kept_in or contract.not_built


def test_no_rule_stands_twice_and_each_is_of_a_contract_that_exists() -> None:
    assert len({mutant.id for mutant in MUTANTS}) == len(MUTANTS)
    for mutant in MUTANTS:
        assert set(mutant.contracts) <= CONTRACTS.keys(), mutant.rule
        assert mutant.contracts, mutant.rule


def test_each_rule_stands_in_the_code_as_its_mutant_has_it() -> None:
    read = cache(Path.read_text)
    for mutant in MUTANTS:
        mutant.text(read(REPOSITORY / "forebay" / mutant.file))


def test_text_of_a_mutant_that_is_no_python_is_refused_wherever_it_stands() -> None:
    source = 'a = 1\n\n\ndef f():\n    x = 2\n\n\nb = """3\n\n\n4\n\n\n5"""\n'
    for old, new in (("1", "7"), ("x = 2", "return"), ("3", "7"), ("4", "7"), ("5", "7")):
        assert Mutant("", "f.py", old, new, "").text(source) == source.replace(old, new)
    for old in ("1", "x = 2", '5"""'):
        with pytest.raises(SyntaxError):
            Mutant("", "f.py", old, "(", "").text(source)


def test_each_test_that_holds_a_rule_is_there() -> None:
    found = {mutant.rule: missing(mutant.test) for mutant in MUTANTS}
    assert {rule: why for rule, why in found.items() if why} == {}


HERE = "mutants/test_contracts.py"


@pytest.mark.whole
@pytest.mark.parametrize(
    ("test", "why"),
    [
        ("mutants/test_nothing.py::test_a", "does not exist"),
        (f"{HERE}::test_nothing", "has no test test_nothing"),
        (f"{HERE}::test_each_test", "has no test test_each_test"),
        (f"{HERE}::missing", "is no file, test and case"),
        (f"{HERE}::test_each_test_that_holds_a_rule_is_there[C1]", "has no parameters"),
        (f"{HERE}::test_what_is_built_has_a_mutant_and_what_is_not_says_so[C1", "is no file, test and case"),
        (HERE, "is no file, test and case"),
    ],
)
def test_test_of_a_mutant_that_does_not_exist_is_refused(test: str, why: str) -> None:
    assert why in missing(test)


def test_test_and_case_of_a_mutant_that_exist_are_accepted() -> None:
    for case in ("", "[C1]"):
        assert missing(f"{HERE}::test_what_is_built_has_a_mutant_and_what_is_not_says_so{case}") == ""


@pytest.mark.slow
def test_each_case_that_holds_a_rule_is_collected() -> None:
    assert uncollected(mutant.test for mutant in MUTANTS if "[" in mutant.test) == set()


@pytest.mark.slow
def test_case_of_a_mutant_that_pytest_does_not_collect_is_refused() -> None:
    test = f"{HERE}::test_what_is_built_has_a_mutant_and_what_is_not_says_so"
    assert uncollected([test, f"{test}[C1]", f"{test}[C999]"]) == {f"tests/{test}[C999]"}
