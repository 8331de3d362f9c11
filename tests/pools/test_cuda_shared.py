"""Memory of a GPU in files that another process maps: of a driver that is not there, and of a GPU (C21, C22)."""

from __future__ import annotations

import gc
import os
import socket
import subprocess
import sys

import pytest
import torch

from forebay.base.errors import ConfigError
from forebay.pools.cuda_shared import map_shared, shares_memory, take_shared
from forebay.pools.regions import Regions, Tag
from tests.pools.file_driver import PIECE, FileDriver, install

GPU = torch.device("cuda", 0)


def test_c22_a_file_of_a_gpu_s_memory_is_the_same_bytes_and_outlives_its_maker_s_handle(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    driver = FileDriver()
    install(monkeypatch, driver)
    ours, fd = take_shared(PIECE + 8, GPU)
    assert not ours.any()
    theirs = map_shared(fd, PIECE + 8, GPU)
    theirs[PIECE:] = 7
    assert ours[PIECE:].tolist() == [7] * 8
    assert [*driver.mapped.values()] == [2 * PIECE, 2 * PIECE]
    os.close(fd)
    theirs[0] = 9
    assert ours[0] == 9


def test_c22_a_mapped_file_is_unmapped_with_its_last_view(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = FileDriver()
    install(monkeypatch, driver)
    ours, fd = take_shared(PIECE, GPU)
    view = map_shared(fd, PIECE, GPU)[16:].view(-1, 16)
    gc.collect()
    assert len(driver.mapped) == 2
    view[0] = 3
    del view
    gc.collect()
    assert [*driver.mapped] == [ours.data_ptr()]
    assert driver.reserved == {ours.data_ptr()}
    assert len(driver.open) == 1, "the taker's own handle"
    os.close(fd)


@pytest.mark.parametrize("num_bytes", [PIECE + 1, 1 << 60], ids=["a piece too many", "no GPU has it"])
def test_c33_a_file_with_fewer_bytes_than_a_peer_says_is_not_mapped(
    monkeypatch: pytest.MonkeyPatch, num_bytes: int
) -> None:
    driver = FileDriver()
    install(monkeypatch, driver)
    ours, fd = take_shared(PIECE, GPU)
    with pytest.raises(OSError, match=r"CUDA error 1\)|is said to have"):
        map_shared(fd, num_bytes, GPU)
    assert [*driver.mapped] == [ours.data_ptr()]
    assert driver.reserved == {ours.data_ptr()}
    assert len(driver.open) == 1
    os.close(fd)


@pytest.mark.parametrize("name", ["create", "export", "map", "access"])
def test_take_shared_that_the_driver_refuses_is_one_line_with_a_remedy(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    install(monkeypatch, FileDriver(name))
    with pytest.raises(ConfigError, match=r"transfer-backend: .* \(CUDA error 801\): use tcp"):
        take_shared(PIECE, GPU)


def test_take_shared_without_memory_names_the_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, FileDriver("create", error=2))
    with pytest.raises(MemoryError, match=r"out of memory: 64.0 KiB of KV on the GPU"):
        take_shared(PIECE, GPU)


@pytest.mark.parametrize(
    ("driver", "shares"),
    [(FileDriver(), True), (FileDriver(capable=0), False), (FileDriver("attribute"), False)],
    ids=["capable", "not capable", "unknown attribute"],
)
def test_shares_memory_is_the_driver_s_word(driver: FileDriver, shares: bool) -> None:
    assert shares_memory(GPU, driver) is shares


def test_regions_of_a_gpu_find_the_file_and_offset_of_an_address(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, FileDriver())
    regions = Regions("cuda", shared=(Tag.KV_CACHE,))
    first, second = (regions.take(Tag.KV_CACHE, size) for size in (100, PIECE + 1))
    files = [regions.place(address) for address in (first.data_ptr(), second.data_ptr() + PIECE)]
    assert [offset for _, offset in files] == [0, PIECE]
    assert len({fd for fd, _ in files}) == 2
    with pytest.raises(KeyError, match="kv_cache"):
        regions.place(first.data_ptr() + 100)
    fds = [fd for fd, _ in files]
    del regions
    for fd in fds:
        with pytest.raises(OSError, match="Bad file"):
            os.fstat(fd)


_WRITER = """
import socket, sys, torch
from forebay.pools.cuda_shared import map_shared
with socket.socket(fileno=int(sys.argv[1])) as sock:
    _, [fd], _, _ = socket.recv_fds(sock, 1, 1)
    memory = map_shared(fd, 1 << 20, torch.device("cuda", 0))
    memory[4096:] = memory[:-4096] + 1
    torch.cuda.synchronize()
    sock.send(b"w")
    sock.recv(1)
"""


@pytest.mark.gpu
def test_c22_another_process_writes_to_a_gpu_s_memory_and_neither_harms_the_other_by_ending() -> None:
    assert shares_memory(GPU)
    ours, fd = take_shared(1 << 20, GPU)
    ours[:4096] = 4
    torch.cuda.synchronize()
    here, there = socket.socketpair()
    with here, there:
        child = subprocess.Popen([sys.executable, "-c", _WRITER, str(there.fileno())], pass_fds=[there.fileno()])
        there.close()
        socket.send_fds(here, [b"f"], [fd])
        assert here.recv(1) == b"w"
        assert ours[:4096].eq(4).all()
        assert ours[4096:8192].eq(5).all()
        child.kill()
        child.wait()
    ours[4096:] += 1  # still there
    assert ours[4096:8192].eq(6).all()
    os.close(fd)
