"""Engines whose caches are in the memory of one GPU, which is not there: a file of the host stands for each region."""

from __future__ import annotations

import contextlib
from functools import partial
from types import SimpleNamespace

import pytest
import torch

from forebay.pools.regions import Regions
from forebay.transfer import worker
from forebay.transfer.wire.memory import DeviceMemory, HostMemory
from tests.pools import file_driver
from tests.pools.file_driver import FileDriver
from tests.transfer import pair


class Stream:
    """A stream of a GPU that has done all it was given."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def record_event(self) -> SimpleNamespace:
        return SimpleNamespace(synchronize=lambda: None)


def install_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "stream", contextlib.nullcontext)
    monkeypatch.setattr(DeviceMemory, "staging", HostMemory.staging)  # not pinned


def install(monkeypatch: pytest.MonkeyPatch) -> FileDriver:
    """Let the caches of `pair` be on a GPU of the driver that is returned."""
    driver = FileDriver()
    file_driver.install(monkeypatch, driver)
    install_streams(monkeypatch)
    monkeypatch.setattr(pair, "Regions", partial(Regions, "cuda"))
    monkeypatch.setattr(worker, "memory_of", DeviceMemory.of)
    return driver
