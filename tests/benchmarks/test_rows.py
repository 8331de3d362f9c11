"""What the rows of the target table ask of a server."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.kinds import PEERS, Kind, forebay
from benchmarks.peers import install
from benchmarks.peers.places import RANDOM_MODELS
from benchmarks.rows import ROWS, Load
from forebay.base.variants import VARIANTS, X86_VARIANTS, Variant


def test_names_are_unique() -> None:
    assert len({row.name for row in ROWS}) == len(ROWS)


def test_flags_leave_out_what_a_load_does_not_ask_for() -> None:
    flags = Load(num_prompts=8, concurrency=2, output_len=1).flags()
    assert flags[:4] == ["--num-prompts", "8", "--max-concurrency", "2"]
    assert "--random-input-max" not in flags
    assert "--request-rate" not in flags


def test_a_shrunk_load_keeps_its_kind() -> None:
    load = Load(num_prompts=128, concurrency=64, input_len=1050, prefix_len=1000, output_len=64)
    assert load.shrunk() == Load(num_prompts=4, concurrency=4, input_len=1050, prefix_len=1000, output_len=8)


def test_a_server_with_slots_is_started_again_only_for_more_streams_than_it_has() -> None:
    command = ("server", "{model}", "--slots", "{slots}", "--context", "{context}")
    divided = Kind(title="divided", version="1", command=command, models={"default": Path("m"), "1b": Path("n")})
    assert divided.words(port=1, streams=1) == divided.words(port=1, streams=16)
    assert divided.words(port=1, streams=64) == ("server", "m", "--slots", "64", "--context", "81920")
    assert divided.words(port=1, streams=1, model="1b")[1] == "n"
    assert divided.words(port=1, streams=2, tokens=8240) == ("server", "m", "--slots", "2", "--context", "16480")
    plain = forebay(None, ["--page-size", "16"])
    assert plain.words(port=1, streams=1) == plain.words(port=1, streams=256)


@pytest.mark.parametrize("name", PEERS)
def test_every_peer_listens_on_the_port_it_is_given(name: str) -> None:
    assert "12345" in PEERS[name](None).words(port=12345, streams=1)


@pytest.mark.parametrize("isa", [variant for variant in X86_VARIANTS if "amx_bf16" not in variant.needs])
def test_all_peers_are_held_to_an_instruction_set(isa: Variant) -> None:
    for name, peer in PEERS.items():
        assert peer(isa) != peer(None), name
    options = install.llama_isa(isa)
    assert "-DGGML_AVX2=ON" in options
    assert ("-DGGML_AVX512_VNNI=ON" in options) == ("avx512_vnni" in isa.needs)
    assert "-DGGML_AMX_TILE=OFF" in options


@pytest.mark.parametrize(("name", "precision"), [("avx512bf16", "bf16"), ("avx512vnni", "f32")])
def test_openvino_computes_in_bfloat16_where_there_is_such(name: str, precision: str) -> None:
    isa = next(variant for variant in VARIANTS if variant.name == name)
    assert PEERS["openvino"](isa).command[-1] == precision
    assert PEERS["openvino-int4"](isa).command[-1] == "f32"


def test_every_model_of_a_row_is_made_and_served() -> None:
    assert {row.model for row in ROWS} == {"default", *RANDOM_MODELS}
    assert {row.model for row in ROWS} <= PEERS["llamacpp"](None).models.keys()
