"""What all of the package may know of it: its version and its place."""

from __future__ import annotations

from pathlib import Path

__version__ = "0.1.0"

ROOT = Path(__file__).parent.parent.parent  # what is on `sys.path` for this package to be found
