"""Changes that the generator draws: which there are, what they leave alone, and that a seed repeats them."""

import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.mutants.__main__ import chosen, main
from tests.mutants.covered import Covered, covered, statement_lines
from tests.mutants.draw import AREAS, draw, outcome
from tests.mutants.mutant import REPOSITORY, Hangs, Overlay, Stale, tried
from tests.mutants.sites import sites


@pytest.fixture
def bare(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have pytest in another process load no plugin that is installed, which takes most of its time."""
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")


@pytest.mark.parametrize(
    ("source", "changed"),
    [
        ("if a <= b: pass", {"if (a < b): pass", "if (not (a <= b)): pass"}),
        ("x = a and b", {"x = (a or b)", "x = (a)"}),
        ("x = not a", {"x = (a)"}),
        ("x += 2", {"pass", "x -= 2", "x += 3"}),
        ("x = min(a, b)", {"x = max(a, b)"}),
        ("raise ValueError(1)", {"pass"}),
        ("self.x = True", {"pass", "self.x = False"}),
        ("logger.info('%d', x + 1)", {"pass"}),
        ("f(a=1.5, b=c)", {"pass", "f(a=c, b=1.5)", "f(a=6.0, b=c)"}),
        ("x = {'s': a, 'ms': b}", {"x = {'s': b, 'ms': a}"}),
        ("for x in y:\n    continue", {"for x in y:\n    pass"}),
        ("ä = 'ß', a", {"ä = a, 'ß'"}),  # places are bytes
    ],
)
def test_sites_of_a_statement_are_all_its_changes(source: str, changed: set[str]) -> None:
    assert {site.apply(source) for site in sites(source)} == changed


def test_sites_leave_alone_texts_annotations_and_assertions() -> None:
    body = '    """1 < 2"""\n    assert a < 2, 1\n    x: "1 + 1" = f"{a + 1}"\n'
    source = f'"""A + B."""\ndef f(a: "1 + 2") -> "1 + 2":\n{body}'
    assert sites(source) == []


def test_sites_leave_alone_the_order_of_tuples_that_are_sets() -> None:
    for source in (
        "x = a in (b, c)",
        "try: x = a\nexcept (A, B): x = b",
        "x = isinstance(a, (b, c))",
        "T = TypeVar('T', a, b)",
    ):
        assert not [site for site in sites(source) if site.operator == "places exchanged"]
    assert sites("x = isinstance(a, (b, c))")[0].operator == "arguments exchanged"


def test_area_runs_tests_named_like_the_module_first_then_those_that_import_it() -> None:
    named, importing, others = AREAS["scheduler"].tests_of("scheduler/halt.py")
    assert named == ["tests/scheduler/test_halt.py"]
    assert all("forebay.scheduler.halt" in (REPOSITORY / test).read_text() for test in importing)
    assert not any("forebay.scheduler.halt" in (REPOSITORY / test).read_text() for test in others)


@pytest.mark.quick(1)
@pytest.mark.parametrize("area", AREAS)
def test_draw_is_even_by_file_repeats_with_its_seed_and_is_python(area: str) -> None:
    files = AREAS[area].files()
    drawn = draw(files, len(files) + 1, seed=5)
    assert drawn == draw(files, len(files) + 1, seed=5) != draw(files, len(files) + 1, seed=6)
    assert {change.file for change in drawn} >= {
        file for file in files if sites((REPOSITORY / "forebay" / file).read_text())
    }
    for change in drawn:
        source = (REPOSITORY / "forebay" / change.file).read_text()
        assert change.site.apply(source) != source
    assert AREAS[area].tests_of(files[0])


def test_command_line_refuses_an_option_that_it_lacks_and_words_of_no_rule(
    capsys: pytest.CaptureFixture[str],
) -> None:
    for arguments, why in ((["halt", "--jbos", "1"], "--jbos"), (["xyzzy"], "no rule has one of these words: xyzzy")):
        with pytest.raises(SystemExit) as ended:
            main(arguments)
        assert ended.value.code == 2
        assert why in capsys.readouterr().err


def test_command_line_words_choose_by_file_or_rule() -> None:
    found = chosen(["halt.py", "C5 "])
    assert 0 < len(found) < len(chosen([]))
    assert all("halt.py" in mutant.file or "C5 " in mutant.rule for mutant in found)


@pytest.mark.parametrize("jobs", [1, 3])
def test_tried_yields_outcomes_in_order_with_as_many_copies_as_jobs(jobs: int, monkeypatch: pytest.MonkeyPatch) -> None:
    copies: set[str] = set()

    class Copy:
        def __init__(self, root: Path) -> None:
            self.root = root
            copies.add(root.name)

    monkeypatch.setattr("tests.mutants.mutant.Overlay", Copy)
    assert list(tried(range(7), lambda _, number: 2 * number, jobs)) == [(number, 2 * number) for number in range(7)]
    assert len(copies) == jobs


@pytest.mark.parametrize(
    ("first", "again", "result"),
    [
        ("", "", "SURVIVED, no test runs it"),
        ("tests/a.py::test_x", "", "found"),
        ("tests/a.py::test_x", "tests/a.py::test_x", "UNSURE tests/a.py::test_x fails without the change, too"),
        (Stale("no pytest"), "", "UNSURE no pytest"),
        (Hangs("it hangs"), "", "found"),
    ],
)
def test_change_is_found_by_a_test_that_passes_without_it(first: str | Stale, again: str, result: str) -> None:
    changed: list[bool] = []

    class Copy:
        root = REPOSITORY

        @contextmanager
        def changed(self, file: str, change: object) -> Iterator[None]:
            changed.append(True)
            yield
            changed.pop()

        def first_failure(self, tests: list[str], limit_s: float = 0.0) -> str:
            if not changed:
                assert tests == [first]
                return again
            if tests == ["tests/scheduler/test_halt.py"]:
                return ""  # a test of another file finds it
            if isinstance(first, Stale):
                raise first
            return first

    [change] = draw(["scheduler/halt.py"], 1, seed=1)
    unknown = Covered(tests={}, seconds={})
    assert outcome(Copy(), AREAS["scheduler"], change, unknown) == result  # type: ignore[arg-type]


@pytest.mark.slow
@pytest.mark.usefixtures("bare")
def test_first_failure_is_named_without_its_parameters(tmp_path: Path) -> None:
    overlay = object.__new__(Overlay)
    overlay.root = tmp_path
    (tmp_path / "tests").mkdir()
    text = "import pytest\n@pytest.mark.parametrize('a', ['b - c'])\ndef test_x(a): assert not a\n"
    (tmp_path / "tests" / "test_y.py").write_text(text)
    (tmp_path / "pyproject.toml").write_text("[tool.pytest.ini_options]\nmarkers = ['slow']\n")
    assert overlay.first_failure(["tests/test_y.py"]) == "tests/test_y.py::test_x"


@pytest.mark.quick(1)
@pytest.mark.usefixtures("bare")
@pytest.mark.parametrize(
    ("file", "text"),
    [("conftest.py", "import nothing_like_it"), ("test_y.py", "import os\nos.kill(os.getpid(), 9)")],
)
def test_first_failure_that_ends_pytest_itself_is_of_the_first_test(file: str, text: str, tmp_path: Path) -> None:
    overlay = object.__new__(Overlay)
    overlay.root = tmp_path
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "test_y.py").write_text("def test_x(): pass\n")
    (tmp_path / "tests" / file).write_text(text)
    (tmp_path / "pyproject.toml").write_text("[tool.pytest.ini_options]\nmarkers = ['slow']\n")
    assert overlay.first_failure(["tests/test_y.py::test_x"]) == "tests/test_y.py::test_x"


@pytest.mark.slow
@pytest.mark.usefixtures("bare")
def test_first_failure_of_tests_that_are_not_there_is_none_of_the_change(tmp_path: Path) -> None:
    overlay = object.__new__(Overlay)
    overlay.root = tmp_path
    with pytest.raises(Stale, match="not found"):
        overlay.first_failure(["tests/test_y.py"])


def test_change_of_a_file_that_was_edited_meanwhile_is_unsure(tmp_path: Path) -> None:
    [change] = draw(["scheduler/halt.py"], 1, seed=1)
    (tmp_path / "forebay" / "scheduler").mkdir(parents=True)
    (tmp_path / "forebay" / change.file).write_text("# another text\n" * 200)
    overlay = object.__new__(Overlay)
    overlay.root = tmp_path
    unknown = Covered(tests={}, seconds={})
    assert outcome(overlay, AREAS["scheduler"], change, unknown) == (
        "UNSURE scheduler/halt.py was edited during the draw"
    )


def test_change_hanging_tests_are_killed_with_their_processes(tmp_path: Path) -> None:
    overlay = object.__new__(Overlay)
    overlay.root = tmp_path
    code = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'import time; time.sleep(3600)'])"
    with pytest.raises(subprocess.TimeoutExpired):  # the child holds the pipe: reading would not end before it does
        overlay.python(["-c", code], {}, limit_s=0.3)


@pytest.mark.parametrize(
    ("line", "last", "lines"),
    [
        (1, 1, None),  # importing runs it
        (3, 3, None),  # so it does the head of a function
        (4, 4, range(4, 5)),
        (5, 5, range(4, 6)),  # in the middle of a statement
        (7, 7, range(6, 8)),  # a condition in the middle
        (8, 8, range(8, 9)),  # inside its block
        (9, 9, range(9, 10)),
    ],
)
def test_statement_lines_are_those_that_run_with_a_line(line: int, last: int, lines: range | None) -> None:
    source = "x = 1\nclass C:\n    def f(a=1):\n        b = (1,\n             2)\n"
    source += "        if (b or\n                a):\n            return b\n        return 3\n"
    assert statement_lines(source, line, last) == lines


def test_covered_tests_of_a_line_keep_their_groups_and_short_ones_come_first() -> None:
    seconds = {"tests/a.py::long": 3.0, "tests/a.py::short": 1.0, "tests/b.py::x": 2.0, "tests/c.py::y": 0.5}
    tests = {"f.py": {1: ["tests/a.py::long"], 2: ["tests/a.py::short", "tests/b.py", "tests/b.py::x"], 3: []}}
    found = Covered(tests=tests, seconds=seconds)
    groups = [["tests/c.py"], ["tests/a.py", "tests/b.py"]]
    assert found.of(groups, "f.py", [1, 2]) == [["tests/b.py", "tests/a.py::short", "tests/a.py::long"]]
    assert found.of(groups, "f.py", [3, 4]) == found.of(groups, "g.py", [1]) == []
    assert found.seconds_of(["tests/a.py", "tests/b.py::x"]) == 6.0


@pytest.mark.slow
def test_covered_records_tests_fixtures_and_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = {
        "forebay/__init__.py": "",
        "forebay/f.py": "import sys\ndef f(x):\n    if x:\n        return 1\n    if sys.argv[1:] == ['child']:\n"
        "        return 2\n    return 3\nif __name__ == '__main__':\n    f(0)\n",
        "pyproject.toml": "[tool.pytest.ini_options]\nmarkers = ['slow']\n",
        "tests/test_f.py": "import pytest, subprocess, sys\nfrom forebay.f import f\n"
        "@pytest.fixture(scope='module')\ndef one(): return f(1)\n"
        "def test_one(one): pass\ndef test_three(): f(0)\ndef test_red(): f(1 / 0)\n"
        "def test_child(): subprocess.run([sys.executable, '-m', 'forebay.f', 'child'], check=True)\n",
        "tests/mutants/recorder.py": (REPOSITORY / "tests/mutants/recorder.py").read_text(),
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.setattr("tests.mutants.covered.REPOSITORY", tmp_path)
    monkeypatch.setattr("tests.mutants.covered._KEPT", tmp_path / "kept")
    overlay = object.__new__(Overlay)
    overlay.root = tmp_path
    (tmp_path / ".covered").mkdir()
    (tmp_path / ".covered" / "data.of-a-process-that-was-killed").write_text("")
    for _ in range(2):  # the second time it is read
        found = covered(overlay, ["f.py"], ["test_f.py"])
        assert [found.by("f.py", [line]) for line in (4, 6, 7)] == [
            {"tests/test_f.py"},
            {"tests/test_f.py"},
            {"tests/test_f.py::test_three"},
        ]
        assert found.seconds.keys() == {f"tests/test_f.py::test_{name}" for name in ("one", "three", "child", "red")}
        assert found.failed == ["tests/test_f.py::test_red"]
    (tmp_path / "tests/test_g.py").write_text("from forebay.f import f\ndef test_one(): f(1)\n")
    (tmp_path / "tests/test_f.py").write_text("from forebay.f import f\ndef test_three(): f(0)\n")
    found = covered(overlay, ["f.py"], ["test_f.py", "test_g.py"])
    assert [found.by("f.py", [line]) for line in (4, 7)] == [
        {"tests/test_g.py::test_one"},
        {"tests/test_f.py::test_three"},
    ]
    assert (found.failed, len([*(tmp_path / "kept").rglob("*.json")])) == ([], 3)


def test_covered_records_only_files_of_tests_that_have_changed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recorded: list[list[str]] = []

    def record(overlay: Overlay, sources: Sequence[str], tests: Sequence[str]) -> dict[str, Any]:
        recorded.append([*tests])
        ids = [f"tests/{name}::test_{(tmp_path / 'tests' / name).read_text()}" for name in tests]
        files = [f"tests/{name}" for name in tests]
        return {"tests": {"f.py": {"4": ids, "5": files}}, "seconds": dict.fromkeys(ids, 1.0), "failed": ids[:1]}

    monkeypatch.setattr("tests.mutants.covered.REPOSITORY", tmp_path)
    monkeypatch.setattr("tests.mutants.covered._KEPT", tmp_path / "kept")
    monkeypatch.setattr("tests.mutants.covered._record", record)
    for name, text in (("forebay/f.py", "1"), ("tests/test_a.py", "a"), ("tests/test_b.py", "a")):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    overlay, tests = object.__new__(Overlay), ["test_a.py", "test_b.py"]
    covered(overlay, ["f.py"], tests)
    (tmp_path / "tests/test_b.py").write_text("c")
    found = covered(overlay, ["f.py"], tests)
    assert recorded == [tests, ["test_b.py"]]
    assert found.tests == {
        "f.py": {4: ["tests/test_a.py::test_a", "tests/test_b.py::test_c"], 5: ["tests/test_a.py", "tests/test_b.py"]}
    }
    assert found.seconds == {"tests/test_a.py::test_a": 1.0, "tests/test_b.py::test_c": 1.0}
    assert found.failed == ["tests/test_a.py::test_a", "tests/test_b.py::test_c"]
    (tmp_path / "forebay/f.py").write_text("2")
    covered(overlay, ["f.py"], tests)
    assert recorded[2:] == [tests], "other sources have other lines"
