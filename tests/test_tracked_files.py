"""The repository holds sources: no file above 1 MB, and no archive of a package, is tracked."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
MOST_BYTES = 1_000_000
ARCHIVES = (".whl", ".tar.gz", ".tgz", ".tar", ".zip", ".gguf", ".safetensors")
# Each file reviewed, with the reason. A clone downloads every version of each.
LISTED: frozenset[str] = frozenset()


def refused(sizes: Mapping[str, int], listed: frozenset[str] = LISTED) -> Iterator[str]:
    """Yield a line for each tracked file that is too large or an archive, and for each listed file that is gone."""
    for name, num_bytes in sizes.items():
        if name in listed:
            continue
        if num_bytes > MOST_BYTES:
            yield f"{name} has {num_bytes:,} bytes, at most {MOST_BYTES:,} are tracked: git rm --cached it, or list it"
        elif name.endswith(ARCHIVES):
            yield f"{name} is an archive: git rm --cached it, and name the package in requirements"
    yield from (f"{name} is listed but not tracked: remove it from LISTED" for name in listed - sizes.keys())


def tracked_sizes(root: Path) -> dict[str, int]:
    """Return the size in bytes of each file in git's index. A file that the index names twice counts once."""
    if shutil.which("git") is None or not (root / ".git").exists():
        pytest.skip("not a clone: there is no git index")
    listing = subprocess.run(["git", "ls-files", "-z"], cwd=root, capture_output=True, text=True, check=True).stdout
    paths = {name: root / name for name in listing.split("\0") if name}
    return {name: path.lstat().st_size for name, path in paths.items() if path.is_symlink() or path.is_file()}


def test_repository_tracked_files_are_small_sources() -> None:
    assert not list(refused(tracked_sizes(ROOT)))


@pytest.mark.parametrize(
    ("sizes", "listed", "says"),
    [
        ({"a.bin": MOST_BYTES}, frozenset(), None),
        ({"a.bin": MOST_BYTES + 1}, frozenset(), "1,000,001 bytes"),
        ({"a.bin": MOST_BYTES + 1}, frozenset({"a.bin"}), None),
        ({"numpy-2.4.6-cp311.whl": 10}, frozenset(), "is an archive"),
        ({"llama-0.3.tar.gz": 10}, frozenset(), "is an archive"),
        ({}, frozenset({"a.bin"}), "is listed but not tracked"),
    ],
)
def test_refused_names_large_files_archives_and_old_lines(
    sizes: dict[str, int], listed: frozenset[str], says: str | None
) -> None:
    found = list(refused(sizes, listed))
    assert not found if says is None else says in found[0]


@pytest.mark.parametrize(
    "name", ["numpy-2.4.6-cp311-cp311-manylinux_2_28_x86_64.whl", "llama_cpp_python-0.3.36.tar.gz"]
)
def test_gitignore_ignores_downloaded_archives(name: str) -> None:
    tracked_sizes(ROOT)  # skips without git
    assert subprocess.run(["git", "check-ignore", "-q", name], cwd=ROOT, check=False).returncode == 0
