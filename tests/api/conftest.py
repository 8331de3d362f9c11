from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.server.conftest import Running, start
from tests.server.fake_engine import FakeEngine
from tests.text.tiny_tokenizer import tiny_tokenizer


@pytest.fixture(scope="package")
def server(patience: None) -> Iterator[Running]:
    """A real HTTP server whose engine counts up."""
    running = start(tiny_tokenizer(), lambda: FakeEngine(wants_resume_points=True))
    yield running
    running.close()
