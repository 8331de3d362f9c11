"""torch-memory-saver, if it was requested: GPU memory that can be released and mapped again at its addresses."""

from __future__ import annotations

from torch_memory_saver import torch_memory_saver

from forebay.pools.regions import Saver


def make_saver() -> Saver:
    """Make the saver of this process. It takes the place of torch's allocator inside its regions alone, without
    LD_PRELOAD."""
    torch_memory_saver.hook_mode = "torch"
    saver: Saver = torch_memory_saver
    return saver
