"""Make the site: `python -m scripts.site FOLDER`, or `make docs`. Its first page is FOLDER/html/index.html."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

from scripts.site.pages import DOCS, ROOT, complete, written


def main() -> int:
    out = Path(sys.argv[1]).resolve()
    if out == ROOT:
        sys.exit(f"{out} is where the site is made of: name a folder of its own, as `make docs` does")
    source = out / "source"
    for folder, copy in ((DOCS, source), (ROOT / "deploy", out / "deploy")):  # pages link to files of the latter
        shutil.rmtree(copy, ignore_errors=True)
        shutil.copytree(folder, copy)
    for name, text in written().items():
        (source / name).write_text(complete(text))
    command = [sys.executable, "-m", "sphinx", "-W", "--keep-going", "-q", "-j", "2", str(source), str(out / "html")]
    failed = subprocess.run(command, cwd=ROOT, check=False).returncode
    if not failed:
        print(f"open {out / 'html' / 'index.html'}")
    return failed


if __name__ == "__main__":
    sys.exit(main())
