from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def _one_processor(decides_for_avx2: None) -> None:
    """No number here depends on the machine."""
