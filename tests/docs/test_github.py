"""The workflow and the templates in `.github/` agree with the repository: versions, targets and paths."""

from __future__ import annotations

import os
import re
import tomllib
from pathlib import Path
from typing import Any

import yaml

from scripts.site.pages import ROOT

GITHUB = ROOT / ".github"
MAKEFILE = (ROOT / "Makefile").read_text()
WORKFLOW: dict[Any, Any] = yaml.safe_load((GITHUB / "workflows" / "tests.yml").read_text())
JOBS = WORKFLOW["jobs"]


def command(job: str) -> str:
    """Return the one command of a job that runs something of the repository."""
    (found,) = (step["run"] for step in JOBS[job]["steps"] if ".ci/run" in step.get("run", ""))
    return str(found)


def test_workflow_runs_every_supported_python_on_x86_and_arm() -> None:
    lowest = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["requires-python"]
    makes = re.findall(r"python(3\.\d+)", MAKEFILE.splitlines()[2])
    matrix = JOBS["short"]["strategy"]["matrix"]
    assert matrix["python"] == makes[::-1]
    assert lowest == f">={matrix['python'][0]}"
    assert {"arm" in runner for runner in matrix["runner"]} == {True, False}


def test_workflow_runs_the_long_tier_by_night() -> None:
    triggers = WORKFLOW[True]  # YAML 1.1 reads `on` as true
    assert triggers["schedule"]
    assert "!= 'schedule'" in JOBS["short"]["if"]
    assert "== 'schedule'" in JOBS["long"]["if"]
    assert 'test-all ARGS="-m slow"' in command("long")


def test_workflow_and_its_script_name_targets_of_the_makefile() -> None:
    script = (ROOT / ".ci" / "run").read_text()
    targets = set(re.findall(r"(?m)^([a-z-]+):", MAKEFILE))
    named = {*re.findall(r"'(test[a-z-]*)", command("short")), *re.findall(r"\$\{@:-([a-z-]+)\}", script)}
    assert named == {"test", "test-all"}
    assert named <= targets
    assert os.access(ROOT / ".ci" / "run", os.X_OK)


def test_workflow_reads_the_whole_history_for_commit_subjects() -> None:
    for job in JOBS.values():
        (checkout,) = (step for step in job["steps"] if step.get("uses", "").startswith("actions/checkout@"))
        assert checkout["with"]["fetch-depth"] == 0


def test_issue_forms_have_what_github_requires() -> None:
    for path in sorted((GITHUB / "ISSUE_TEMPLATE").glob("*.yml")):
        form = yaml.safe_load(path.read_text())
        if path.name == "config.yml":
            continue
        assert {"name", "description", "body"} <= form.keys(), path
        fields = [field for field in form["body"] if field["type"] != "markdown"]
        assert len({field["id"] for field in fields}) == len(fields) > 0
        assert all(field["attributes"]["label"] for field in fields)
        assert any(field.get("validations", {}).get("required") for field in fields)


def test_templates_name_files_that_are_there() -> None:
    texts = [path.read_text() for path in GITHUB.rglob("*") if path.is_file()]
    named = {name for text in texts for name in re.findall(r"`?((?:docs|scripts|tests)/[\w./-]+\w)", text)}
    assert named
    assert not [name for name in named if not Path(ROOT / name).exists()]
