"""Files that torch.save wrote are read without running them (C33)."""

from __future__ import annotations

import contextlib
import io
import os
import random
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from forebay.base.errors import ModelError
from forebay.formats.stored_tensor import read_tensor
from forebay.formats.torch_file import read_torch_file


def saved(path: Path, what: Any) -> Path:
    torch.save(what, path)
    return path


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_torch_file_of_a_layer_has_its_tensors(tmp_path: Path, dtype: torch.dtype) -> None:
    layer = torch.nn.Linear(5, 3).to(dtype)
    found = read_torch_file(saved(tmp_path / "a.pt", layer.state_dict()))
    assert {name: tensor.shape for name, tensor in found.items()} == {"weight": (3, 5), "bias": (3,)}
    for name, tensor in layer.state_dict().items():
        np.testing.assert_array_equal(read_tensor(found[name]), tensor.float().numpy())


def test_torch_file_of_views_of_one_storage_has_each(tmp_path: Path) -> None:
    whole = torch.arange(12.0)
    found = read_torch_file(saved(tmp_path / "a.pt", {"a": whole[:4].view(2, 2), "b": whole[6:9]}))
    np.testing.assert_array_equal(read_tensor(found["a"]), [[0, 1], [2, 3]])
    np.testing.assert_array_equal(read_tensor(found["b"]), [6, 7, 8])


class Evil:
    def __reduce__(self) -> Any:
        return os.system, ("touch /tmp/forebay-was-here",)


@pytest.mark.parametrize(
    ("what", "why"),
    [
        (Evil(), "system"),
        ({"weight": Evil()}, "system"),
        (torch.nn.Linear(2, 2), "names"),
        ({"weight": torch.arange(6.0).view(2, 3).T}, "row by row"),
        ({"weight": torch.zeros(2, dtype=torch.int64)}, "LongStorage"),
        ({"weight": [1.0]}, "instruction"),
        ({"weight": 3}, "something else"),
        (torch.zeros(2), "something else"),
    ],
    ids=["call", "inside", "module", "turned", "integers", "list", "number", "tensor"],
)
def test_c33_torch_file_with_anything_but_tensors_is_refused_and_never_run(tmp_path: Path, what: Any, why: str) -> None:
    with pytest.raises(ModelError, match=why):
        read_torch_file(saved(tmp_path / "a.pt", what))
    assert not Path("/tmp/forebay-was-here").exists()


def rezipped(path: Path, change: Any, kind: int = zipfile.ZIP_STORED) -> Path:
    with zipfile.ZipFile(path) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(path, "w", kind) as archive:
        for name, data in change(members).items():
            archive.writestr(name, data)
    return path


@pytest.mark.parametrize(
    "change",
    [
        lambda members: {name: b"" if name.endswith("data/0") else data for name, data in members.items()},
        lambda members: {name: data for name, data in members.items() if not name.endswith("data/0")},
        lambda members: {name: data for name, data in members.items() if not name.endswith("data.pkl")},
        lambda members: {"a/data.pkl": b"\x80\x02", "b/data.pkl": b"."},
        lambda members: {"a/data.pkl": b"\x80\x02."},
        lambda members: {"a/data.pkl": b"\x80\x02" + b"(" * 60_000},
        lambda members: {"a/data.pkl": b"0" * 70_000},
    ],
    ids=["empty", "missing", "without", "two", "short", "marks", "long"],
)
def test_c33_torch_file_with_a_broken_member_is_refused(tmp_path: Path, change: Any) -> None:
    path = saved(tmp_path / "a.pt", {"weight": torch.ones(2, 2)})
    with pytest.raises(ModelError, match=r"a\.pt"):
        read_torch_file(rezipped(path, change))


def test_c33_torch_file_that_is_compressed_is_refused(tmp_path: Path) -> None:
    path = saved(tmp_path / "a.pt", {"weight": torch.zeros(1 << 16)})
    with pytest.raises(ModelError, match="compressed"):
        read_torch_file(rezipped(path, dict, zipfile.ZIP_DEFLATED))


@pytest.mark.parametrize("seed", range(3))
def test_c33_torch_file_with_changed_bytes_is_read_or_refused(tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    buffer = io.BytesIO()
    torch.save(torch.nn.Linear(4, 3).state_dict(), buffer)
    for _ in range(60):
        data = bytearray(buffer.getvalue())
        for _ in range(rng.randrange(1, 6)):
            data[rng.randrange(len(data))] = rng.randrange(256)
        (tmp_path / "a.pt").write_bytes(data[: rng.randrange(len(data))] if rng.random() < 0.2 else data)
        with contextlib.suppress(ModelError):
            assert all(read_tensor(tensor).ndim <= 4 for tensor in read_torch_file(tmp_path / "a.pt").values())
