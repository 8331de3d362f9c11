"""One runner for every captured step: padding, capture, replay, and what a padded row may do (C13, C14, C15)."""

from __future__ import annotations

import pytest
import torch

from forebay.backends import make_ops
from forebay.ops import Ops
from forebay.pools.regions import Regions
from forebay.pools.table import Column, Table
from forebay.runtime.graphs.backends import CpuGraphs, CudaGraphs, Eager, GraphBackend, graphs_for
from forebay.runtime.graphs.runner import GraphRunner, default_sizes
from tests.kernels import NATIVE
from tests.runtime.graph_steps import Engine, StepInputs, StepOutputs, poison, random_values

SIZES = [1, 2, 3, 5, 8, 12]
KINDS = {"decode": (1, False), "verify": (4, False), "draft-extend": (3, False), "frozen-kv": (1, True)}
Runner = GraphRunner[StepInputs, StepOutputs]


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def graph_ops(device: str) -> Ops:
    ops = make_ops(NATIVE if device == "cpu" else "triton", 2)
    if device == "cpu" and ops.name == "torch":
        pytest.skip("no native ops on this machine")
    return ops


def writes(engine: Engine) -> list[tuple[Table, str]]:
    return [(table, name) for table in (engine.rows, engine.slots) for name in table.declared]


def runner_of(engine: Engine, device: str, backend: GraphBackend) -> tuple[Runner, StepInputs]:
    inputs = StepInputs(SIZES[-1], device=device, sizes={"W": engine.width})
    runner = GraphRunner(engine.step, inputs, writes=writes(engine), sizes=SIZES, backend=backend)
    return runner, inputs


def assert_same(got: tuple[torch.Tensor, ...], expected: tuple[torch.Tensor, ...]) -> None:
    for one, other in zip(got, expected, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", KINDS)
@torch.inference_mode()
def test_a_replay_equals_the_step_run_bare_for_every_batch_and_kind_of_step(kind, dtype, graph_ops, device):
    """C13, C15: buffers are poisoned before each replay; the bare step has no padding at all. On a GPU it has the same
    rows, since cuBLAS may round differently for another number of them."""
    width, frozen = KINDS[kind]
    graphed, bare = (Engine(graph_ops, dtype, width, frozen=frozen, device=device) for _ in range(2))
    runner, inputs = runner_of(graphed, device, graphs_for(graph_ops, device, Regions(device)))
    padded, _ = runner_of(bare, device, Eager())
    while runner.capture_next():
        pass
    for table, other in ((graphed.rows, bare.rows), (graphed.slots, bare.slots)):
        for name in table.declared:
            table[name].copy_(other[name])
    generator = torch.Generator().manual_seed(3)
    for n in [*range(1, SIZES[-1] + 1), 12, 1, 7]:
        values = random_values(generator, n, width, device)
        exact = StepInputs(n, device=device, sizes={"W": width})
        exact.fill(values, n, n)
        poison(inputs)
        expected = bare.step(exact) if device == "cpu" else padded.run(values, n)
        assert_same(runner.run(values, n), expected)
        for table, other in ((graphed.rows, bare.rows), (graphed.slots, bare.slots)):
            for name in table.declared:
                assert torch.equal(table[name][1:], other[name][1:]), (n, name)


@pytest.mark.long
@pytest.mark.quick(1)
@torch.inference_mode()
def test_nothing_drifts_in_a_thousand_steps_of_random_batches(graph_ops, device):
    """C14: row 0 and slot 0 hold what one padded step leaves there, live rows what they hold without padding."""
    graphed, bare = (Engine(graph_ops, torch.float32, 1, device=device) for _ in range(2))
    runner, _ = runner_of(graphed, device, graphs_for(graph_ops, device, Regions(device)))
    generator = torch.Generator().manual_seed(5)
    n = 4
    for step in range(1000):
        n = min(SIZES[-1], max(1, n + int(torch.randint(-2, 3, (1,), generator=generator))))
        values = random_values(generator, n, 1, device)
        outputs = runner.run(values, n)
        if step % 50 == 0 or step == 999:
            # Tables of the bare run follow the graphed one: what is compared is one step, then the padding rows.
            assert outputs.finite.all()
            assert graphed.rows.lengths[0] <= SIZES[-1]
            assert graphed.slots.state[0].isfinite().all()
            assert graphed.slots.state[0].abs().max() < 1e3
            assert graphed.slots.kv[0].isfinite().all()
        bare.step(_exact(values, n, device))
    for name in graphed.rows.declared:
        assert torch.equal(graphed.rows[name][1:], bare.rows[name][1:]), name
    for name in graphed.slots.declared:
        assert torch.equal(graphed.slots[name][1:], bare.slots[name][1:]), name


def _exact(values: dict[str, torch.Tensor], n: int, device: str) -> StepInputs:
    exact = StepInputs(n, device=device, sizes={"W": 1})
    exact.fill(values, n, n)
    return exact.head(n)


@torch.inference_mode()
def test_without_the_reset_of_the_padding_rows_lengths_drift(graph_ops, device):
    """The test above can fail: the same steps, with nothing declared as written."""
    engine = Engine(graph_ops, torch.float32, 1, device=device)
    inputs = StepInputs(8, device=device, sizes={"W": 1})
    runner = GraphRunner(
        engine.step, inputs, writes=(), sizes=[8], backend=graphs_for(graph_ops, device, Regions(device))
    )
    generator = torch.Generator().manual_seed(5)
    for _ in range(20):
        runner.run(random_values(generator, 5, 1, device), 5)
    assert engine.rows.lengths[0] > 8


@pytest.mark.parametrize("backend", ["eager", "graph"])
@torch.inference_mode()
def test_an_input_without_a_source_is_padded_and_not_left_as_it_was(backend, graph_ops, device):
    engine = Engine(graph_ops, torch.float32, 1, device=device)
    runner, inputs = runner_of(
        engine, device, Eager() if backend == "eager" else graphs_for(graph_ops, device, Regions(device))
    )
    generator = torch.Generator().manual_seed(1)
    values = random_values(generator, 5, 1, device)
    del values["mamba_track_mask"], values["hidden_states"]
    runner.run(values, 5)
    poison(inputs)
    before = engine.slots.state[1:].clone()
    outputs = runner.run(values, 5)
    assert outputs.finite.all()
    assert torch.equal(engine.slots.state[1:], before), "a mask without a source is False for live rows as well"


@torch.inference_mode()
def test_a_padded_row_is_at_least_as_long_as_the_step_is_wide(graph_ops, device):
    """Else `seq_len - width` is negative, and its attention empty or worse."""
    for width in (1, 4):
        engine = Engine(graph_ops, torch.float32, width, device=device)
        runner, inputs = runner_of(engine, device, graphs_for(graph_ops, device, Regions(device)))
        runner.run(random_values(torch.Generator().manual_seed(1), 6, width, device), 6)
        assert (inputs.seq_lens[6:8] == width).all()


@torch.inference_mode()
def test_a_capture_advances_no_live_row(graph_ops, device):
    """A size may be captured in the middle of the work: the step then runs more than once, on padding."""
    once, twice = (Engine(graph_ops, torch.float32, 1, device=device) for _ in range(2))
    generator = torch.Generator().manual_seed(2)
    eager, _ = runner_of(once, device, Eager())
    captured, _ = runner_of(twice, device, graphs_for(graph_ops, device, Regions(device)))
    while eager.capture_next():
        pass
    for n in (3, 6, 1):  # each of a size of its own, whose inputs hold the values of the step before
        values = random_values(generator, n, 1, device)
        assert_same(captured.run(values, n), eager.run(values, n))
        assert torch.equal(once.slots.state[1:], twice.slots.state[1:])
        assert torch.equal(once.rows.lengths[1:], twice.rows.lengths[1:])


def test_sizes_are_captured_largest_first_until_none_is_left(graph_ops, device):
    engine = Engine(graph_ops, torch.float32, 1, device=device)
    inputs = StepInputs(SIZES[-1], device=device, sizes={"W": 1})
    seen: list[int] = []

    def step(inputs: StepInputs) -> StepOutputs:
        seen.append(inputs.num_rows)
        return engine.step(inputs)

    runner = GraphRunner(step, inputs, writes=(), sizes=SIZES, backend=graphs_for(graph_ops, device, Regions(device)))
    with torch.inference_mode():
        while runner.capture_next():
            pass
    assert list(dict.fromkeys(seen)) == SIZES[::-1]
    assert len(runner.graphs) == len(SIZES)


def test_graphs_of_one_backend_share_their_memory():
    ops = make_ops(NATIVE, 2)
    backend = graphs_for(ops, "cpu", Regions())
    if not isinstance(backend, CpuGraphs):
        pytest.skip("no native ops on this machine")
    engine = Engine(ops, torch.float32, 1)
    runner, _ = runner_of(engine, "cpu", backend)
    with torch.inference_mode():
        runner.capture_next()
        taken = backend.arena.num_bytes
        while runner.capture_next():
            pass
    assert backend.arena.num_bytes == taken


@pytest.mark.parametrize(
    "look",
    [
        lambda x: int(x[0]),
        lambda x: x.sum().item(),
        lambda x: x.tolist()[0],
        lambda x: int(x.numpy()[0]),
        lambda x: 1 if x[0] > 5 else 2,
        lambda x: len(x.nonzero()),
        lambda x: len(x[x > 5]),
        lambda x: len(torch.repeat_interleave(x)),
    ],
    ids=["int", "item", "tolist", "numpy", "bool", "nonzero", "mask", "repeats"],
)
def test_a_step_that_reads_values_on_the_host_runs_by_its_python(look, graph_ops, device, caplog):
    if device == "cuda":
        pytest.skip("a CUDA capture refuses it by itself")
    engine = Engine(graph_ops, torch.float32, 1)
    inputs = StepInputs(4, sizes={"W": 1})

    def step(inputs: StepInputs) -> StepOutputs:
        seen = look(inputs.seq_lens)
        outputs = engine.step(inputs)
        return outputs._replace(hidden=torch.full_like(outputs.hidden, seen))

    runner = GraphRunner(step, inputs, writes=(), sizes=[4], backend=graphs_for(graph_ops, "cpu", Regions()))
    values = random_values(torch.Generator().manual_seed(2), 4, 1)
    with torch.inference_mode(), caplog.at_level("WARNING"):
        for lengths in ([1, 2, 3, 4], [9, 7, 8, 0]):
            values["seq_lens"] = torch.tensor(lengths, dtype=torch.int32)
            assert (runner.run(values, 4).hidden == look(values["seq_lens"])).all()
    assert caplog.text.count("capture_failed") == 1


def test_a_capture_that_fails_costs_speed_and_no_request(graph_ops, device, caplog):
    engine = Engine(graph_ops, torch.float32, 1, device=device)
    inputs = StepInputs(4, device=device, sizes={"W": 1})
    tries: list[int] = []

    class Failing:
        name, captures_quickly = "failing", True

        def capture(self, step):
            tries.append(1)
            step()
            raise MemoryError("no memory left on the device")

    runner = GraphRunner(engine.step, inputs, writes=writes(engine)[:2], sizes=[2, 4], backend=Failing())
    generator = torch.Generator().manual_seed(2)
    with torch.inference_mode(), caplog.at_level("WARNING"):
        for n in (1, 4, 2, 3):
            assert runner.run(random_values(generator, n, 1, device), n).finite.all()
        assert not runner.capture_next()
    assert len(tries) == 1
    assert "no memory left" in caplog.text


def test_every_column_of_a_graph_declares_its_pad():
    with pytest.raises(TypeError, match="pad"):

        class Forgotten(Table):
            seeds = Column(torch.int64)


def test_sizes_that_the_inputs_cannot_hold_are_refused():
    engine = Engine(make_ops("torch", 1), torch.float32, 1)
    for sizes in ([], [0], [9]):
        with pytest.raises(ValueError, match="sizes"):
            GraphRunner(engine.step, StepInputs(8, sizes={"W": 1}), writes=(), sizes=sizes, backend=Eager())


@pytest.mark.parametrize("quickly", [True, False])
@pytest.mark.parametrize("most", [1, 3, 48, 200, 513])
def test_default_sizes_end_with_the_most_and_waste_little(most, quickly):
    sizes = default_sizes(most, quickly=quickly)
    assert sizes[0] == 1
    assert sizes[-1] == most
    assert sizes == sorted(set(sizes))
    waste = max((following - size - 1) / following for size, following in zip([0, *sizes], sizes, strict=False))
    assert waste <= 0.5


@pytest.mark.gpu
def test_cuda_graphs_are_what_a_gpu_gets():
    assert isinstance(graphs_for(make_ops("triton", 1), "cuda", Regions("cuda")), CudaGraphs)


@torch.inference_mode()
def test_runner_says_whether_its_latest_run_was_a_replay_and_was_padded(graph_ops, device):
    engine = Engine(graph_ops, torch.float32, 1, frozen=False, device=device)
    for backend, replayed in ((graphs_for(graph_ops, device, Regions(device)), True), (Eager(), False)):
        runner, _ = runner_of(engine, device, backend)
        while runner.capture_next():
            pass
        for n, padded in ((4, True), (5, False)):  # of sizes 3, 5
            runner.run(random_values(torch.Generator().manual_seed(3), n, 1, device), n)
            assert (runner.replayed, runner.padded) == (replayed, padded)
