"""Which product computes a dense weight on a GPU: by bits and times, which a file keeps. Both are faked here."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from forebay.backends import triton as backend
from forebay.backends.backend import OpsOptions
from tests.ops.helpers import assert_same_bits, normal

pytest.importorskip("triton", reason="Triton is not installed: scripts/bootstrap.py --dev brings it under Linux")
from forebay.ops.triton import TritonOps, linear
from forebay.ops.triton.choices import (
    ALL_ROWS,
    FEW_ROWS,
    PROBED_ROWS,
    Choice,
    Choices,
    Product,
    choose,
    fastest,
    rows_agree,
)

ROWS = normal((PROBED_ROWS[-1], 3), torch.float32, seed=1)


def exact(x: Tensor) -> Tensor:
    return x.double().cumsum(dim=1)


def differing(num_rows: int, row: int = 0) -> Product:
    """Other bits in one row, if there are so many."""

    def product(x: Tensor) -> Tensor:
        out = exact(x)
        if len(x) == num_rows:
            out[row] += 1e-9
        return out

    return product


def chosen(their: Product, our: Product, their_us: float = 10.0, our_us: float = 5.0) -> Choice:
    def time_us(product: Product, rows: Tensor) -> float:
        assert len(rows) <= FEW_ROWS
        return their_us if product is their else our_us

    return choose([their, exact], [our, exact], ROWS, time_us)


@pytest.mark.parametrize(("num_rows", "row"), [(1, 0), (17, 0), (64, -1), (2048, 0)])
def test_c31_a_product_whose_bits_depend_on_the_number_of_rows_is_found(num_rows: int, row: int) -> None:
    assert rows_agree(exact, ROWS)
    assert not rows_agree(differing(num_rows, row), ROWS)
    assert chosen(differing(num_rows, row), exact).own_rows == ALL_ROWS
    # The sums in float32 have kernels of their own.
    assert choose([exact, differing(num_rows, row)], [exact] * 2, ROWS, lambda *_: 1.0).own_rows == ALL_ROWS


@pytest.mark.parametrize(
    ("few_us", "many_us", "own_rows", "name"),
    [
        (11.0, 1.0, 0, "cublas"),
        (9.0, 99.0, FEW_ROWS, f"triton up to {FEW_ROWS} rows, cublas"),
        (9.0, 9.0, ALL_ROWS, "triton"),
    ],
)
def test_fastest_takes_the_faster_product_for_few_and_many_rows_whatever_their_bits(
    few_us: float, many_us: float, own_rows: int, name: str
) -> None:
    their, our = differing(17), differing(64)

    def time_us(product: Product, rows: Tensor) -> float:
        return 10.0 if product is their else few_us if len(rows) <= FEW_ROWS else many_us

    choice = fastest([their, exact], [our, exact], ROWS, time_us)
    assert (choice.own_rows, choice.name) == (own_rows, name)
    assert choice.why.startswith(
        f"bits are not compared (--exact off): {few_us:,.0f} us of Triton's for 64 rows, 10 of"
    )


def test_c31_triton_computes_few_rows_if_it_is_faster_and_has_the_same_bits() -> None:
    def ours(x: Tensor) -> Tensor:
        return exact(x)

    assert chosen(exact, ours) == Choice(
        FEW_ROWS,
        "cuBLASLt's bits are equal for up to 2,048 rows and Triton's: 15 us of Triton's for 1, 16, 64 rows, "
        "30 of cuBLASLt's",
    )
    assert chosen(exact, ours, our_us=9.9).own_rows == 0
    for num_rows in (1, 16, 64):
        assert chosen(exact, differing(num_rows, -1)).own_rows == 0
    assert "others than Triton's" in chosen(exact, differing(16)).why


def counted(choice: Choice) -> tuple[list[tuple[int, ...]], Callable[[Tensor], Choice]]:
    probed: list[tuple[int, ...]] = []

    def probe(weight: Tensor) -> Choice:
        probed.append(tuple(weight.shape))
        return choice

    return probed, probe


def test_choices_are_probed_once_for_each_shape_and_machine_and_kept(tmp_path: Path) -> None:
    file, weight = tmp_path / "products" / "choices.json", torch.zeros(4, 8)
    for machine, expected in (("one", 2), ("one", 0), ("another", 2), ("one", 0)):
        probed, probe = counted(Choice(FEW_ROWS, "faster"))
        choices = Choices(probe, file, machine)
        for each in (weight, weight, weight.bfloat16()):
            assert choices.of(each).own_rows == FEW_ROWS
        assert len(probed) == expected
        assert list(choices.found) == ["float32 4 x 8", "bfloat16 4 x 8"]
    assert choices.found["float32 4 x 8"] == Choice(FEW_ROWS, "faster (kept)")
    assert choices.found["float32 4 x 8"].name == "triton up to 64 rows, cublas"


@pytest.mark.parametrize(
    "text", ["", "{", "[1]", '{"one": 3}', '{"one": {"float32 4 x 8": [7, "x"]}}', '{"one": {"float32 4 x 8": 0}}']
)
def test_a_damaged_file_of_choices_is_probed_anew_and_replaced(tmp_path: Path, text: str) -> None:
    file = tmp_path / "choices.json"
    file.write_text(text)
    probed, probe = counted(Choice(ALL_ROWS, "bits"))
    assert Choices(probe, file, "one").of(torch.zeros(4, 8)).own_rows == ALL_ROWS
    assert len(probed) == 1
    assert json.loads(file.read_text())["one"] == {"float32 4 x 8": [ALL_ROWS, "bits"]}


def test_a_folder_that_cannot_be_written_keeps_no_choices(tmp_path: Path) -> None:
    (tmp_path / "products").write_text("")
    _, probe = counted(Choice(0, "bits"))
    assert Choices(probe, tmp_path / "products" / "choices.json", "one").of(torch.zeros(4, 8)).own_rows == 0


def test_packed_weights_have_the_choice_and_the_start_up_table_names_it() -> None:
    weight, x = normal((9, 40), torch.float32, seed=1), normal((70, 40), torch.float32, seed=2)
    for own_rows in (0, FEW_ROWS, ALL_ROWS):
        ops = TritonOps("cpu", 1, Choices(lambda _, n=own_rows: Choice(n, "tried")))
        packed = ops.linear.pack(weight)
        assert (packed.own_rows, ops.linear.pack(weight, weight[:, 0]).own_rows) == (
            own_rows,
            own_rows // ALL_ROWS * ALL_ROWS,
        )
        assert {shape: choice.why for shape, choice in ops.product_choices.items()} == {"float32 9 x 40": "tried"}
        library = torch.nn.functional.linear(x, weight)
        if not own_rows:
            assert_same_bits(ops.linear.apply(x, packed), library)
        torch.testing.assert_close(ops.linear.apply(x, packed), library)


def made_on_an_h100(options: OpsOptions, monkeypatch: pytest.MonkeyPatch) -> tuple[Any, list[str], dict[str, str]]:
    """The kernels, the libraries that were preferred for products, and the variables that were set."""
    libraries: list[str] = []
    environ: dict[str, str] = {}
    monkeypatch.setattr(backend, "_machine", lambda: "an H100")
    monkeypatch.setattr(backend, "try_compiler", lambda machine: None)
    monkeypatch.setattr(backend, "os", SimpleNamespace(environ=environ))
    monkeypatch.setattr(torch.backends.cuda, "preferred_blas_library", libraries.append)
    [declared] = backend.BACKENDS
    return declared.make(options), libraries, environ


def test_c31_products_of_ranks_are_the_kernel_s_whose_bits_depend_on_no_number_of_outputs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ops, libraries, environ = made_on_an_h100(OpsOptions(1, of_ranks=True), monkeypatch)
    assert ops.linear._choices.of(torch.zeros(3, 4)).own_rows == ALL_ROWS
    assert (libraries, environ["CUBLASLT_WORKSPACE_SIZE"]) == (["cublaslt"], "1")  # for what is no layer's weight


@pytest.mark.parametrize("exact", [True, False])
def test_c31_bits_are_compared_and_workspaces_left_out_unless_exact_is_off(
    exact: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    ops, libraries, environ = made_on_an_h100(OpsOptions(1, exact=exact, most_rows=8192), monkeypatch)
    assert libraries == (["cublaslt"] if exact else [])
    assert environ.get("CUBLASLT_WORKSPACE_SIZE") == ("1" if exact else None)
    choices = ops.linear._choices
    assert choices._probe.func is (linear.probe if exact else linear.probe_times)
    assert choices._probe.keywords == {"most_rows": 8192}
    assert choices._machine == ("an H100, 8,192 rows" if exact else "an H100, 8,192 rows, any bits")


@pytest.mark.parametrize(("room_bytes", "most_rows"), [(1 << 30, 300), (4 * 9 * 70, 70), (1, 1)])
def test_c31_probe_compares_a_shape_with_the_most_rows_of_a_step_within_its_memory(
    room_bytes: int, most_rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    compared: list[int] = []

    def chooses(theirs: list[Product], ours: list[Product], rows: Tensor, time_us: object) -> Choice:
        compared.append(len(rows))
        assert [product(rows[:1]).dtype for product in (*theirs, *ours)] == [torch.bfloat16, torch.float32] * 2
        return Choice(0, "tried")

    monkeypatch.setattr(linear, "_PROBE_BYTES", room_bytes)
    linear.probe(normal((9, 40), torch.bfloat16, seed=1), 300, chooses)
    assert compared == [most_rows]


def test_c31_a_product_whose_bits_differ_only_among_the_most_rows_of_a_step_is_not_taken() -> None:
    rows = torch.cat([ROWS, ROWS])
    assert rows_agree(exact, rows)
    assert not rows_agree(differing(len(rows)), rows)
