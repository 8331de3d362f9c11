from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from forebay.base.paths import cache_folder


@pytest.fixture
def home(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home of one's own: Ray writes `~/.ray/auth_token`, and a cluster has its keys and logs there. Compiled kernels
    are those of the suite."""
    kernels, folder = cache_folder("ops"), tmp_path_factory.mktemp("home")
    monkeypatch.setenv("HOME", str(folder))
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    (folder / ".cache" / "forebay").mkdir(parents=True)
    os.symlink(kernels, folder / ".cache" / "forebay" / "ops")
    return folder


@pytest.fixture
def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port: int = probe.getsockname()[1]
    return port
