"""The numbers of the README, counted: `python -m scripts.site.readme` writes them."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Final

from forebay.families import TYPES
from forebay.families.config.vision import TYPES as WITH_IMAGES
from scripts.site.pages import ROOT

README: Final = ROOT / "README.md"
NUMBERS: Final[Mapping[str, Callable[[], int]]] = {
    r"(?<=runs )\d+(?= model types)": lambda: len(TYPES),
    r"(?<=\[)\d+(?= types\])": lambda: len(TYPES),
    r"(?<=\*\* of )\d+(?= model types, cached)": lambda: len(WITH_IMAGES),
}


def filled(text: str) -> str:
    """Return the text with the numbers as counted now. Raises ValueError unless the text has each exactly once."""
    for pattern, count in NUMBERS.items():
        text, found = re.subn(pattern, str(count()), text)
        if found != 1:
            raise ValueError(f"{pattern!r} occurs {found} times in the README: it must occur once")
    return text


if __name__ == "__main__":
    README.write_text(filled(README.read_text()))
