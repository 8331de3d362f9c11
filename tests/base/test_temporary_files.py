from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

import pytest


def test_what_is_left_in_the_temporary_folder_goes_with_pytests_own(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Whoever is killed leaves what it has there."""
    script = "import os, tempfile; print(tempfile.mkdtemp(), flush=True); os.kill(os.getpid(), 9)"
    killed = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    for made in (tempfile.mkdtemp(), killed.stdout.strip()):
        assert Path(made).is_relative_to(tmp_path_factory.getbasetemp())
