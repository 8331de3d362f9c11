"""Which tests a change of a folder can reach."""

from __future__ import annotations

import pytest

from tests import reached
from tests.imports import PACKAGE

SOURCES = {
    "forebay.base.log": "",
    "forebay.scheduler.queue": "def f():\n    from forebay.base import log",
    "forebay.cli.main": "import forebay.scheduler.queue",
    "tests.rig": "from forebay.scheduler.queue import Queue",
    "tests.test_rig": "from tests.rig import Rig",
    "tests.test_command": "run([python, '-m', 'forebay.cli.main'])",
    "tests.test_log": "import forebay.base.log; logger = 'forebay'",
    "forebay.__main__": "from forebay.cli.main import main",
    "tests.test_module": "run([python, '-m', 'forebay', 'serve'])",
}


def test_reached_follows_imports_of_support_code_and_names_in_commands() -> None:
    imported_by = reached.importers(SOURCES)
    assert reached.reached(["forebay.scheduler.queue"], imported_by) == {*SOURCES} - {
        "forebay.base.log",
        "tests.test_log",
    }
    assert reached.reached(["forebay.base.log"], imported_by) == {*SOURCES}
    assert reached.reached(["forebay.cli.main"], imported_by) == {
        "forebay.cli.main",
        "forebay.__main__",
        "tests.test_command",
        "tests.test_module",
    }


@pytest.mark.slow
def test_tests_of_a_folder_have_its_own_and_the_gates_and_not_all() -> None:
    names = {f"{path.parent.name}/{path.name}" for path in reached.tests_of("cluster")}
    assert {"cluster/test_group.py", "tests/test_sizes.py"} <= names
    assert not {"ops/test_kv.py", "memory/test_slots.py"} & names
    assert {"scheduler/test_fairness.py", "simulation/test_seeds.py"} <= {
        f"{path.parent.name}/{path.name}" for path in reached.tests_of("scheduler")
    }
    assert reached.tests_of("scheduler/scheduler") == reached.tests_of("scheduler/scheduler.py")


def test_area_that_is_not_there_is_refused() -> None:
    assert not (PACKAGE / "schedulers").exists()
    with pytest.raises(SystemExit, match="AREA=schedulers: there is no forebay/schedulers"):
        reached.tests_of("schedulers")
