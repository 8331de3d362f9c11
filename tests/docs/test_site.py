"""The site is built without a warning, and its pages load nothing from another host."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from scripts.site.pages import ROOT, from_notebook


@pytest.mark.slow
def test_the_site_is_whole_and_asks_no_other_host(tmp_path: Path) -> None:
    built = subprocess.run(
        [sys.executable, "-m", "scripts.site", tmp_path], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert built.returncode == 0, built.stderr
    pages = list((tmp_path / "html").rglob("*.html"))
    assert len(pages) > 80
    loaded = r'<(?:script|img|iframe|link)\b[^>]*?(?:src|href)="(?:https?:)?//[^"]*"'
    assert [found for page in pages for found in re.findall(loaded, page.read_text())] == []
    styles = "".join(path.read_text() for path in (tmp_path / "html").rglob("*.css"))
    assert re.findall(r"(?:@import|url\()[\s\"']*(?:https?:)?//", styles) == []


def test_a_notebook_becomes_a_page_with_what_it_has_said() -> None:
    cells = [
        {"cell_type": "markdown", "source": ["# A title\n", "and a text"]},
        {
            "cell_type": "code",
            "source": ["print(1)\n", "2"],
            "outputs": [{"text": ["1\n"]}, {"data": {"text/plain": ["2"]}}, {"data": {"image/png": "..."}}],
        },
    ]
    page = from_notebook({"cells": cells})
    assert page == "# A title\nand a text\n\n```python\nprint(1)\n2\n```\n\n```text\n1\n```\n\n```text\n2\n```"
