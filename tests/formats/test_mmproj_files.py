"""The vision encoder's file beside a GGUF model is found by its name."""

from __future__ import annotations

from pathlib import Path

import pytest

from forebay.formats.mmproj_files import mmproj_beside, mmproj_of


@pytest.mark.parametrize(
    ("names", "model", "expected"),
    [
        (["mmproj-F32.gguf", "mmproj-F16.gguf", "mmproj-Q8_0.gguf"], "m-Q4_K_M.gguf", "mmproj-F16.gguf"),
        (["mmproj-F32.gguf", "mmproj-Q8_0.gguf"], "m-Q4_K_M.gguf", "mmproj-Q8_0.gguf"),
        (["mmproj-BF16.gguf", "mmproj-Q8_0.gguf"], "m-Q4_K_M.gguf", "mmproj-BF16.gguf"),
        (["mmproj-F32.gguf", "mmproj-Q4_0.gguf"], "m.gguf", "mmproj-F32.gguf"),
        (["mmproj-model-f16.gguf"], "gemma-3-4b-it-Q4_K_M.gguf", "mmproj-model-f16.gguf"),
        (["mmproj.gguf"], "m.gguf", "mmproj.gguf"),
        (["mmproj-A-f16.gguf", "mmproj-B-f16.gguf"], "b-Q4_0.gguf", "mmproj-B-f16.gguf"),
        (["mmproj-A-Q8_0.gguf", "mmproj-F16.gguf"], "A-Q4_0.gguf", "mmproj-A-Q8_0.gguf"),
        (["mmproj-gemma-4-12b-it-q4_0.gguf"], "gemma-4-12b-it-q4_0.gguf", "mmproj-gemma-4-12b-it-q4_0.gguf"),
        (["mmproj-InternVL3-2B-F16.gguf"], "InternVL3-2B-Instruct-Q4_K_M.gguf", "mmproj-InternVL3-2B-F16.gguf"),
        (["mmproj-A-f16.gguf"], "b-Q4_0.gguf", None),
        (["mmproj-F16.txt", "imatrix.gguf", "m.gguf"], "m.gguf", None),
        (["mmproj-F16.gguf", "q4/m.gguf"], "q4/m.gguf", "mmproj-F16.gguf"),
    ],
    ids=str,
)
def test_encoder_is_chosen_by_model_and_then_by_type(names: list[str], model: str, expected: str | None) -> None:
    assert mmproj_of(names, model) == mmproj_of(reversed(names), model) == expected


def test_encoder_is_found_in_the_folder_and_in_that_of_the_revision(tmp_path: Path) -> None:
    revision = tmp_path / "models--a--b" / "snapshots" / "0123"
    (revision / "q4").mkdir(parents=True)
    for path in (tmp_path / "mmproj-F16.gguf", tmp_path / "m.gguf", revision / "q4" / "m.gguf"):
        path.touch()
    assert mmproj_beside(tmp_path / "m.gguf") == tmp_path / "mmproj-F16.gguf"
    assert mmproj_beside(tmp_path) is None
    assert mmproj_beside(revision / "q4" / "m.gguf") is None  # what is outside of the cache is another's
    (revision / "mmproj-m-F32.gguf").touch()
    assert mmproj_beside(revision / "q4" / "m.gguf") == revision / "mmproj-m-F32.gguf"
