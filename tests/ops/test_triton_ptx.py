"""What a GPU's compiler makes of the kernels: wide loads, matrix units, no spills. Found without a GPU."""

from __future__ import annotations

import pytest

pytest.importorskip("triton", reason="Triton is not installed: scripts/bootstrap.py --dev brings it under Linux")
from tests.ops.ptx import CASES, SCANS, Code, Sass, compiled, widths

PRODUCTS = [name for name, case in CASES.items() if case.kernel == "_product" and name != "every tile"]
IN_BFLOAT16 = [name for name in PRODUCTS if not name.startswith("FP8 by FP8")]
SOME_PRODUCTS = [
    "dense, 300 rows",
    "int4 by 128, 1 rows",
    "int4 by 128, 300 rows",
    "MXFP4, 64 rows",
    "experts, 1 tokens",
]

KV = [name for name in CASES if name.startswith("KV in")]
# Compressed attention, residual streams, the hot buffers of HiSparse, and an encoder's attention.
NEWER = ("_compress", "_attend_entries", "_stream_sums", "_weights_of_streams", "_mix", "_place", "_load_tokens")
WITH_FEW_NUMBERS = ("_weights_of_streams", "_load_tokens")  # of a token, and of a row's scale
IN_FP8 = [name for name in PRODUCTS if name.startswith("FP8 by FP8")]
SOME_KV = ["KV in int8, 2 tokens", "KV in int8, 9 tokens"]
SOME_SCANS = ["Mamba 2", "delta rule", "delta rule, chunks"]
# Loads of 16 bytes: of a state of 128 x 16 entries among 128 threads, and of the chunk's tokens.
_WIDE_LOADS = {"Mamba 1": 4, "Mamba 2, wide states": 24, "delta rule, chunks": 12}


def _assert_wide(name: str, code: Code) -> None:
    """Weights come in pieces of 16 bytes, numbers of groups once: before the first step, and one step ahead."""
    narrow = sum(count for size, count in code.loads.items() if size < 8)
    assert code.loads[16] >= 8, (name, code.loads)
    # Of two levels there are twice as many; of experts the numbers of rows are loaded, too.
    assert narrow <= (12 if "_K" in name or "experts" in name else 4), (name, code.loads)


def _assert_in_fp8(code: Code) -> None:
    """Each instruction of a matrix unit multiplies FP8 by FP8, and codes come in pieces of 16 bytes."""
    assert code.fp8_units == sum(code.matrix_units.values()) > 0, code
    assert code.loads[16] >= 8, code
    assert code.local_bytes == 0, code


def _assert_ordered(code: Code) -> None:
    """All threads have stored a part before one of them counts it, with the release of the system. They load parts
    behind a barrier after one of them has seen the count of each of two ranks, with its acquire."""
    store, count = ["ld.global", "st.global", "bar.sync"], ["atom.global.sys.release", "bar.sync"]
    seen = ["ld.global.sys.acquire", "bar.sync"]
    assert code.memory_order == [*store, *count, *seen, *seen, "ld.global", "st.global", "ld.global", "st.global"]
    assert code.loads[16] >= 8, code.loads


def _assert_no_spills(name: str, code: Code, *, addresses: int) -> None:
    """Registers hold all that loops use. Before them a thread may keep a few addresses, of 8 bytes each, for after."""
    assert code.local_in_loops == 0, (name, code)
    assert code.local_bytes <= 8 * addresses, (name, code.local_bytes)


def _assert_one_order(codes: list[Code]) -> None:
    """The same inputs are in one instruction of every variant, and keys and values come in pieces of 16 bytes."""
    assert all(code.k_orders == ["kWidth = 2"] for code in codes), codes
    assert all(code.loads[16] >= 16 for code in codes), codes


def _assert_scan(name: str, code: Code) -> None:
    """States and rows of keys come in pieces of 16 bytes; only one number of a token may have fewer than 4."""
    assert code.loads[16] >= _WIDE_LOADS.get(name, 8), (name, code.loads)
    assert sum(count for size, count in code.loads.items() if size < 4) <= 4, (name, code.loads)
    in_chunks = code.kernel not in ("_mamba1", "keep_recent") and name != "delta rule by channel, chunks"
    assert bool(code.matrix_units) == in_chunks, (name, code.matrix_units)


def test_widths_of_loads_are_those_of_one_thread() -> None:
    text = """
        @%p1 ld.global.b8 { %rs1 }, [ %rd1 + 0 ];
        ld.global.L1::evict_last.v4.b32 { %r1, %r2, %r3, %r4 }, [ %rd2 + 0 ];
        cp.async.cg.shared.global [ %r1 + 0 ], [ %rd3 + 0 ], 0x10, %r2;
        ld.global.v2.b64 { %rd1, %rd2 }, [ %rd3 ];
        ld.shared.b8 %rs1, [%r1];
    """
    assert widths(text) == {1: 1, 16: 3}


def test_sass_counts_what_loops_spill_and_skip_and_not_what_lies_around_them() -> None:
    text = """
        /*0010*/ STL [R1], R2 ;
        /*0020*/ LDL R3, [R1] ;
        /*0030*/ LDG.E.128 R4, desc[UR4][R2.64] ;
        /*0040*/ SYNCS.PHASECHK.TRANS64.TRYWAIT P1, [R4], R5 ;
        /*0050*/ @!P1 BRA 0x40 ;
        /*0058*/ @!P3 BRA 0x70 ;
        /*0060*/ LDL R6, [R1+0x4] ;
        /*0070*/ @P0 BRA 0x30 ;
        /*0080*/ @P2 BRA 0x20 ;
        /*0088*/ @P2 BRA 0xc0 ;
        /*0090*/ EXIT ;
        /*00a0*/ SYNCS.PHASECHK.TRANS64.TRYWAIT P1, [R4], R5 ;
        /*00b0*/ @P1 BRA 0x10 ;
        /*00c0*/ BRA 0xc0 ;
    """
    sass = Sass.of(text)
    assert (sass.local_in(sass.inner_loops()), sass.local_in(sass.loops()), sass.skipped_in_loops()) == (1, 2, 1)
    other = Sass.of(text.replace("/*0060*/ LDL", "/*0060*/ LDS").replace("@!P3 BRA 0x70", "@!P3 BRA 0x80"))
    assert (other.local_in(other.inner_loops()), other.local_in(other.loops()), other.skipped_in_loops()) == (0, 1, 0)


@pytest.mark.long
def test_kernels_load_wide_pieces_and_products_fill_matrix_units_without_spills() -> None:
    found = compiled(90, *SOME_PRODUCTS, *SOME_SCANS, *SOME_KV, IN_FP8[1], "exchange", "bytewise")
    _assert_ordered(found.pop("exchange"))
    _assert_in_fp8(found.pop(IN_FP8[1]))
    _assert_one_order([found.pop(name) for name in SOME_KV])
    with pytest.raises(AssertionError):
        _assert_wide("bytewise", found.pop("bytewise"))
    for name, code in found.items():
        if name in SCANS:
            _assert_scan(name, code)
        else:
            _assert_wide(name, code)
            assert code.matrix_units.keys() == {"wgmma.mma_async"}, name
        assert code.local_bytes == 0, name


@pytest.mark.slow
@pytest.mark.parametrize("arch", [89, 90, 100])
def test_products_of_fp8_by_fp8_fill_the_units_for_it_in_every_tile(arch: int) -> None:
    for code in compiled(arch, *IN_FP8).values():
        _assert_in_fp8(code)


@pytest.mark.slow
@pytest.mark.parametrize("arch", [80, 90, 100])
def test_decodes_and_prompts_add_up_a_matrix_unit_s_inputs_in_one_order_for_every_type_of_kv(arch: int) -> None:
    found = compiled(arch, *KV)
    for name, code in found.items():
        _assert_no_spills(name, code, addresses=3 if arch == 90 else 0)
        assert code.local_in_any_loop == 0, (name, code)
        # The mask of 8 scores of a thread, or of 16 or 32: of each a comparison and a choice, and positions.
        assert code.skipped_in_loops >= 24, (name, code.skipped_in_loops)
    if arch != 90:  # whose unit of 64 rows had the bits of that of 16 on an H100; of others only one is used
        assert {unit for code in found.values() for unit in code.matrix_units} == {"mma.sync"}
    for name in KV:
        _assert_one_order([code for other, code in found.items() if other.split(",")[0] == name.split(",")[0]])


@pytest.mark.slow
def test_a_first_product_compiles_each_tile_ahead_and_others_nothing() -> None:
    assert compiled(90, "every tile")["every tile"].variants == 4


@pytest.mark.slow
@pytest.mark.parametrize("arch", [80, 90, 100])
def test_products_of_every_format_and_tile_fit_a_chip(arch: int) -> None:
    found = compiled(arch, *IN_BFLOAT16)
    units = {80: "mma.sync", 90: "wgmma.mma_async", 100: "tcgen05.mma"}[arch]
    for name, code in found.items():
        _assert_wide(name, code)
        assert code.matrix_units.keys() == {units}, name
        _assert_no_spills(name, code, addresses=2 if arch == 100 else 0)
    # In one order of inputs for all rows of a weight: it is a part of what their bits are.
    for form in {name.split(", ")[0] for name in found}:
        assert len({tuple(code.k_orders) for name, code in found.items() if name.startswith(f"{form},")}) == 1, form


@pytest.mark.slow
@pytest.mark.parametrize("arch", [80, 90, 100])
def test_scans_fit_the_registers_of_a_chip(arch: int) -> None:
    for name, code in compiled(arch, *SCANS).items():
        _assert_scan(name, code)
        _assert_no_spills(name, code, addresses=1)


@pytest.mark.slow
@pytest.mark.parametrize("arch", [80, 90, 100])
def test_kernels_of_compressed_attention_streams_tiers_and_encoders_load_wide_pieces(arch: int) -> None:
    found = compiled(arch, *NEWER, "segments")
    for name, code in found.items():
        assert name in WITH_FEW_NUMBERS or code.loads[16] >= 4, (name, code.loads)
        assert sum(count for size, count in code.loads.items() if size < 4) <= 3, (name, code.loads)
        _assert_no_spills(name, code, addresses=4)
    with_products = {name for name, code in found.items() if code.matrix_units}
    assert with_products == {"_attend_entries", "_stream_sums", "segments"}


@pytest.mark.slow
@pytest.mark.parametrize("arch", [80, 90, 100])
def test_exchange_of_ranks_releases_and_acquires_parts_in_order_on_every_chip(arch: int) -> None:
    _assert_ordered(compiled(arch, "exchange")["exchange"])
