"""A server whose file of the weights cache is damaged answers once, then ends with one line and the code of a model
that cannot be served."""

from __future__ import annotations

from pathlib import Path

import pytest

from forebay.base.paths import cache_folder
from forebay.formats.weights_cache import LINE
from tests.deadlines import HANGS_S
from tests.engine.conftest import make_chat_model
from tests.integration.tree import Tree, serving

# In the engine alone: checkpoints of any size are cached.
_ANY_SIZE = """
import sys
if "forebay.engine.loop.process" in sys.orig_argv:
    from forebay.engine.lifecycle import packed_cache
    packed_cache.LEAST_BYTES = dict.fromkeys(packed_cache.LEAST_BYTES, 0)
"""
_FLAGS = ("--dtype=float32", "--num-threads=1", "--kv-cache-bytes=4MiB", "--quantization=int8")


@pytest.mark.slow  # of an engine alone, every time: tests/engine/test_weights_cache.py
def test_server_ends_with_one_line_behind_the_first_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_chat_model(tmp_path / "model", context_length=64).path
    (tmp_path / "sitecustomize.py").write_text(_ANY_SIZE)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    kernels = cache_folder("ops")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    cache_folder("ops").parent.mkdir(parents=True)
    cache_folder("ops").symlink_to(kernels)

    def answer(tree: Tree) -> None:
        with tree.client() as client:
            body = {"prompt": "a", "max_tokens": 4, "ignore_eos": True}
            assert client.post("/v1/completions", json=body).status_code == 200

    with serving(tmp_path / "first", model, *_FLAGS) as tree:
        answer(tree)
    (file,) = cache_folder("weights").glob("*.weights")
    whole = bytearray(file.read_bytes())
    whole[-LINE] ^= 0x7F  # of the last piece
    file.write_bytes(whole)
    with serving(tmp_path / "second", model, *_FLAGS) as tree:
        answer(tree)
        assert tree.server.wait(HANGS_S) == 2
        output = tree.output
    (line,) = (each for each in output.splitlines() if each.startswith("forebay: error: "))
    assert f"the file of the weights cache {file} is not as it was written (piece " in line
    assert "start again, and the weights are computed from the checkpoint" in line
    assert "Traceback" not in output
    assert not file.exists()
