"""Threads and weights on machines of several nodes, which need not be this one: who touches what, and who reads it."""

from __future__ import annotations

import json
import os
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from forebay import models
from forebay.base.topology import Topology, parse_cpus, read_topology, usable_cpus
from forebay.families.checkpoint import open_checkpoint
from forebay.families.config.model_config import config_from_folder
from forebay.families.small import small_config
from forebay.models.random_weights import write_random_weights
from forebay.ops.native.ops import NativeOps
from tests.deadlines import wait_until
from tests.formats.coded import FORMATS, random_codes, stored
from tests.models.drive import Driver
from tests.ops.helpers import assert_same_bits, normal

PAGE = 4096
TWO = [*sorted(usable_cpus())[:2], 0, 0][:2]  # CPUs of this machine, of which there may be one alone
NODES = Topology(((TWO[0],), (TWO[1],)))


def ops_on(native: NativeOps, num_threads: int, topology: Topology) -> NativeOps:
    return NativeOps(native.kernels.path, native.kernels.variant, num_threads, native.activation_bits, None, topology)


def fake_sys(folder: Path, *lists: str) -> Path:
    for i, cpus in enumerate(lists):
        node = folder / f"devices/system/node/node{i}"
        node.mkdir(parents=True)
        (node / "cpulist").write_text(f"{cpus}\n")
    return folder


@pytest.mark.parametrize(
    ("lists", "usable", "nodes"),
    [
        (["0-3", "4-7"], range(8), ((0, 1, 2, 3), (4, 5, 6, 7))),
        (["0-1,8-9", "2-3,10-11"], [1, 3, 10], ((1,), (3, 10))),
        (["0-3", "4-7"], [5, 6], ((5, 6),)),
        (["0-3"], [2, 9], ((2, 9),)),  # not all of ours are there
        (["nonsense"], [0, 1], ((0, 1),)),
        ([], [0, 1], ((0, 1),)),
    ],
)
def test_nodes_are_those_whose_cpus_this_process_may_use(
    tmp_path: Path, lists: list[str], usable: list[int], nodes: tuple[tuple[int, ...], ...]
) -> None:
    assert read_topology(fake_sys(tmp_path, *lists), frozenset(usable)).nodes == nodes


def test_threads_are_divided_as_the_cpus_are() -> None:
    topology = Topology((tuple(range(12)), tuple(range(12, 16))))
    assert topology.nodes_of_threads(16) == [0] * 12 + [1] * 4
    assert topology.nodes_of_threads(4) == [0, 0, 0, 1]
    assert topology.nodes_of_threads(1) == [0]
    assert Topology(((3,), (1,))).nodes_of_cpus() == [-1, 1, -1, 0]
    assert parse_cpus("0-2,5") == {0, 1, 2, 5}


@pytest.mark.quick(4)
@pytest.mark.parametrize("num_threads", [2, 3, 8])
@pytest.mark.parametrize(("outputs", "inputs"), [(4096, 4096), (1024, 333), (96, 64)])
def test_pages_of_a_weight_are_divided_among_nodes_as_its_panels_are(
    native: NativeOps, num_threads: int, outputs: int, inputs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And they are touched, in that division, before anything is packed."""
    ops, touched_bytes = ops_on(native, num_threads, NODES), []
    touch = ops.kernels.touch
    monkeypatch.setattr(ops.linear, "_touch", lambda memory: (touch(memory), touched_bytes.append(memory.nbytes)))
    packed = ops.linear.pack(normal((outputs, inputs), torch.float32, seed=1))
    assert touched_bytes == [packed.packed.nbytes]
    num_bytes, panels = packed.packed.nbytes, -(-outputs // 32)
    pages = -(-num_bytes // PAGE)
    touched, read = ops.kernels.shares(pages), ops.kernels.shares(panels)
    assert (touched[0], touched[-1], read[0], read[-1]) == (0, pages, 0, panels)
    per_node = [last - first for first, last in pairwise(touched)]
    threads = NODES.nodes_of_threads(num_threads)
    assert per_node == pytest.approx([pages * threads.count(node) / num_threads for node in (0, 1)], abs=1)
    border_of_pages, border_of_panels = touched[1] * PAGE, read[1] * num_bytes / panels
    # A panel is read by one node, so the border is up to a panel away where threads do not divide the panels.
    assert abs(border_of_pages - border_of_panels) <= PAGE + num_bytes / panels


@pytest.mark.skipif(TWO[0] == TWO[1] or not hasattr(os, "sched_getaffinity"), reason="one CPU")
def test_workers_stay_on_the_cpus_of_their_node(native: NativeOps) -> None:
    before = set(os.listdir("/proc/self/task"))
    ops = ops_on(native, 3, NODES)
    workers = [int(task) for task in set(os.listdir("/proc/self/task")) - before]
    assert ops.num_threads == 3
    ops.linear.apply(normal((1, 512), torch.float32, 1), ops.linear.pack(normal((4096, 512), torch.float32, 2)))
    wait_until(lambda: all(os.sched_getaffinity(worker) != usable_cpus() for worker in workers))  # they have begun
    assert sorted(list(os.sched_getaffinity(worker)) for worker in workers) == sorted([[TWO[0]], [TWO[1]]])
    assert os.sched_getaffinity(0) == usable_cpus(), "the caller's own threads may go on anywhere"


@pytest.mark.parametrize("rows", [1, 5, 300])
@pytest.mark.parametrize("outputs", [32, 70, 1000])
def test_a_machine_of_two_nodes_has_the_bits_of_one(
    native: NativeOps, dtype: torch.dtype, rows: int, outputs: int
) -> None:
    """More rows than one piece of work covers read the same panels again."""
    x = normal((rows, 256), dtype, seed=1)
    weight, codes = normal((outputs, 256), dtype, seed=2), stored(random_codes(FORMATS["Q4_K"], outputs, 256, seed=3))
    one, two = native.linear, ops_on(native, 3, NODES).linear
    assert_same_bits(two.apply(x, two.pack(weight)), one.apply(x, one.pack(weight)))
    assert_same_bits(two.apply(x, two.pack_quantized(codes)), one.apply(x, one.pack_quantized(codes)))


@pytest.mark.quick(1)
def test_a_decoded_token_s_threads_meet_five_times_in_each_layer(native: NativeOps, tmp_path: Path) -> None:
    """Behind q, k and v, attention, its output, the MLP's first matrices, and its last."""
    met = []
    for layers in (1, 3):
        folder = tmp_path / str(layers)
        folder.mkdir()
        fields = small_config("llama", hidden_size=512, num_layers=layers, vocab_size=256)
        (folder / "config.json").write_text(json.dumps(fields))
        write_random_weights(
            config_from_folder(folder), folder / "model.safetensors", dtype="float32", seed=0, progress=lambda *_: None
        )
        ops = ops_on(native, 2, Topology(((TWO[0], TWO[1]),)))
        driver = Driver(models.load(open_checkpoint(folder), ops=ops, dtype=torch.float32), context=256)
        driver.step([(1, [3] * 200)])
        before = ops.kernels.num_barriers
        driver.step([(1, [5])])
        met.append(ops.kernels.num_barriers - before)
    assert (met[1] - met[0]) / 2 == 5
