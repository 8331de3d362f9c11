"""A new column of a plan is one declaration and one reader: everything between them is derived."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
DECLARATION = '    levels: Annotated[I64, Column("S", "columns", device=np.int32, pad=3)] = NO_IDS\n'
READER = '        self.seen = inputs["levels"].tolist()\n'

USED = """
import numpy as np
import pytest

from forebay.backends import make_ops
from forebay.requests.step_plan import StepPlan
from forebay.runtime.host.bounds import IndexOutOfPool
from tests.plans import changed
from tests.runtime.fake_model import PAGES_PER_ROW, fake_runner, planner
from tests.runtime.plans import ids

runner = fake_runner(ops=make_ops("torch", 1))
runner.warm_up()
assert set(runner.decode.captured._step.seen) == {3}, "a warm-up is padding"

runner.decode.captured.sizes = [5]
plans = planner(runner)
for row in (1, 2, 4):
    plans.admit(row, [row, 5, 6])
runner.launch(changed(plans.plan(extends=[(row, 3) for row in (1, 2, 4)]), levels=ids([0, 0, 0]))).result()
plan = changed(plans.plan(decodes=[4, 1, 2]), levels=ids([6, 0, 5]))

for levels in ([6, 0], [], [6, 0, -1], [6, PAGES_PER_ROW, 0]):
    with pytest.raises(IndexOutOfPool, match="levels"):
        runner.launch(changed(plan, levels=ids(levels)))

arrived = StepPlan.decode(plan.encode())
assert arrived == plan != changed(plan, levels=ids([6, 0, 4]))
assert arrived.levels.tolist() == [6, 0, 5] and not arrived.levels.flags.writeable

runner.launch(arrived).result()
assert runner.decode.captured._step.seen == [6, 0, 5, 3, 3], "it is where the model runs, and padded rows have its pad"
"""


def insert(file: Path, line: str, *, behind: str) -> None:
    text = file.read_text()
    assert text.count(behind) == 1
    file.write_text(text.replace(behind, behind + line))


@pytest.mark.slow
def test_a_column_is_one_declaration_and_one_reader(tmp_path):
    """Bounds, encoding, the copy to the device, padding and warm-up come with the declaration (C10, C13)."""
    shutil.copytree(REPOSITORY / "forebay", tmp_path / "forebay")
    insert(
        tmp_path / "forebay/requests/step_plan.py",
        DECLARATION,
        behind='    sample_mask: Annotated[Mask, Column("S")]\n',
    )
    insert(tmp_path / "forebay/runtime/steps/decode.py", READER, behind="        n = inputs.num_rows\n")
    path = os.pathsep.join([str(tmp_path), str(REPOSITORY)])
    done = subprocess.run([sys.executable, "-c", USED], cwd=tmp_path, env={**os.environ, "PYTHONPATH": path})
    assert done.returncode == 0
