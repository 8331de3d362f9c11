"""The version, and the folder that contains the package."""

from __future__ import annotations

from pathlib import Path

__version__ = "0.3.0"

ROOT = Path(__file__).parent.parent.parent  # what is on `sys.path` for this package to be found
