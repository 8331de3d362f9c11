from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest

from forebay.families.checkpoint import Checkpoint, open_checkpoint


@pytest.fixture(autouse=True)
def _one_processor(decides_for_avx2: None) -> None:
    """No number here depends on the machine."""


@pytest.fixture(autouse=True)
def _vocabularies_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GGUF model is opened once for all decisions, whose tests have hundreds: its vocabulary takes 50 ms."""
    monkeypatch.setattr("forebay.config.resolve.open_checkpoint", _open_once)


def _open_once(path: Path | str, **how: Any) -> Checkpoint:
    path = Path(path)
    if path.suffix != ".gguf" or any(how.values()):
        return open_checkpoint(path, **how)
    state = path.stat()
    return _opened(path, state.st_mtime_ns, state.st_size)


@lru_cache(maxsize=4)
def _opened(path: Path, *state: int) -> Checkpoint:
    return open_checkpoint(path)
