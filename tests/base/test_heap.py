"""What counts as out of memory, and the reserve for the recovery from it."""

from __future__ import annotations

import errno
import mmap

import pytest
import torch

from forebay.base.heap import Reserve, is_out_of_memory


def raised_by(size: int, allocate: object) -> BaseException:
    assert callable(allocate)
    with pytest.raises((MemoryError, OSError, RuntimeError)) as caught:
        allocate(size)
    return caught.value


@pytest.mark.parametrize(
    "allocate",
    [bytearray, lambda size: mmap.mmap(-1, size), lambda size: torch.empty(size, dtype=torch.uint8)],
    ids=["python", "system", "torch"],
)
def test_is_out_of_memory_true_for_each_allocator(allocate: object) -> None:
    assert is_out_of_memory(raised_by(1 << 55, allocate))


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."),
        RuntimeError("CUDA error: out of memory"),
        RuntimeError("Triton Error [CUDA]: out of memory"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    ],
)
def test_is_out_of_memory_true_for_libraries_of_a_gpu(error: RuntimeError) -> None:
    assert is_out_of_memory(error)


@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "no space"), RuntimeError("shapes"), ValueError("memory")])
def test_is_out_of_memory_false_for_other_errors(error: Exception) -> None:
    assert not is_out_of_memory(error)


def test_reserve_is_free_inside_and_taken_again_after_an_error() -> None:
    reserve = Reserve(1 << 20)
    assert reserve.is_there
    inside: list[bool] = []

    def fail() -> None:
        with reserve.spent():
            inside.append(reserve.is_there)
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert (inside, reserve.is_there) == ([False], True)


def test_reserve_that_cannot_be_taken_is_taken_later(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as short:
        short.setattr(mmap, "mmap", lambda *args: raised_by_system())
        reserve = Reserve(1 << 20)
        with reserve.spent():
            assert not reserve.is_there
        assert not reserve.is_there
    with reserve.spent():
        pass
    assert reserve.is_there


def raised_by_system() -> None:
    raise OSError(errno.ENOMEM, "Cannot allocate memory")
