"""The vision encoder's file beside a GGUF model is found by its name."""

from __future__ import annotations

from pathlib import Path

import pytest

from forebay.base.errors import ModelError
from forebay.formats.gguf_parts import is_model
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
        (
            ["mmproj-Qwen3VL-8B-Instruct-F16.gguf"],
            "Qwen3-VL-8B-Instruct-Q4_K_M.gguf",
            "mmproj-Qwen3VL-8B-Instruct-F16.gguf",
        ),
        (
            ["mmproj-google_gemma-3-4b-it-f16.gguf"],
            "google_gemma-3-4b-it-Q4_K_M.gguf",
            "mmproj-google_gemma-3-4b-it-f16.gguf",
        ),
        (["mmproj-model-f16-4B.gguf"], "gemma-3-4b-it-q4_0.gguf", "mmproj-model-f16-4B.gguf"),
        (["A.mmproj-Q8_0.gguf", "A.mmproj-f16.gguf"], "A.i1-Q4_K_M.gguf", "A.mmproj-f16.gguf"),
        (
            ["Qwen2.5-VL-3B-Instruct-mmproj-f16.gguf"],
            "Qwen2.5-VL-3B-Instruct-q4_k_m.gguf",
            "Qwen2.5-VL-3B-Instruct-mmproj-f16.gguf",
        ),
        (["A-mmproj.gguf", "B-mmproj.gguf"], "A-Q4_0.gguf", "A-mmproj.gguf"),
        (["MMPROJ-A-BF16.gguf"], "A-Q4_0.gguf", "MMPROJ-A-BF16.gguf"),
        (["mmproj-A-f16.gguf", "mmproj-A-VL-Q8_0.gguf"], "A-VL-2B-Q4_0.gguf", "mmproj-A-VL-Q8_0.gguf"),
        (["mmproj-A-f16.gguf"], "b-Q4_0.gguf", None),
        (["A-mmproj-f16.gguf"], "b-Q4_0.gguf", None),
        (["Ammproj-f16.gguf", "A-mmprojector.gguf"], "A-Q4_0.gguf", None),
        (["mmproj-F16.txt", "imatrix.gguf", "m.gguf"], "m.gguf", None),
        (["mmproj-F16.gguf", "q4/m.gguf"], "q4/m.gguf", "mmproj-F16.gguf"),
        (["mmproj-F16.gguf", "q4/mmproj-F32.gguf", "q8/mmproj-F16.gguf"], "q4/m.gguf", "q4/mmproj-F32.gguf"),
        (["q8/mmproj-F16.gguf"], "q4/m.gguf", None),
    ],
    ids=str,
)
def test_encoder_is_chosen_by_model_and_then_by_type(names: list[str], model: str, expected: str | None) -> None:
    assert mmproj_of(names, model) == mmproj_of(reversed(names), model) == ([] if expected is None else [expected])
    assert not any(is_model(name) for name in names if expected is not None and "mmproj" in name.lower())


@pytest.mark.parametrize(
    "names",
    [
        ["mmproj-A-f16.gguf", "A-mmproj-f16.gguf"],
        ["mmproj-f16.gguf", "mmproj-model-f16.gguf"],
        ["mmproj-Q4_0.gguf", "mmproj-Q5_1.gguf"],
    ],
    ids=str,
)
def test_encoders_that_fit_equally_are_refused_with_their_names(names: list[str], tmp_path: Path) -> None:
    for name in ("a-Q4_K_M.gguf", *names):
        (tmp_path / name).touch()
    with pytest.raises(ModelError, match="2 files of vision encoders") as refused:
        mmproj_beside(tmp_path / "a-Q4_K_M.gguf")
    assert all(name in refused.value.message for name in (*names, "--mmproj none"))


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
