"""What the engine's loop counts, reports and passes on: each number in its own place, with parts that only note."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from forebay.base.errors import ConfigError
from forebay.base.units import human_bytes
from forebay.config.engine_config import DisaggregationMode, EngineConfig, HisparseOptions, RankOptions
from forebay.engine.frames import CheckTransfers, GetTree
from forebay.engine.loop import process, roles, start_report, surveys
from forebay.engine.loop.checks import MOST_BYTES, Checks
from forebay.engine.loop.mixed import MixedChunks
from forebay.engine.loop.stats import Stats
from forebay.memory.radix_node import Branch
from forebay.pools.regions import Tag
from forebay.requests.transfers import CHECK, Arrived, Closed, Offer, Offered, Renewed, Send, Tail, Ticket, Withdraw
from forebay.requests.updates import Failure
from forebay.scheduler.decode_role import DecodeRole
from forebay.scheduler.handoff import Handoff
from forebay.scheduler.prefill_role import PrefillRole
from forebay.scheduler.scheduler import NO_LIMIT, Scheduler
from tests.engine.test_stats import fields
from tests.scheduler.rig import Rig, config
from tests.transfer.pair import OPTIONS

# -- the chunk of a mixed step ----------------------------------------------------------------------------------------


def test_mixed_chunk_is_what_the_rest_of_the_step_has_room_for() -> None:
    chunks = MixedChunks(0.1, page_size=16)
    chunks.decoded(4, 0.01)
    chunks.mixed(4, 100, 0, 0.11)  # 1 ms for a token
    assert chunks.limit(4, 4, 0) == 90
    assert MixedChunks(0.1, page_size=16).limit(4, 4, 0) == NO_LIMIT
    free = MixedChunks(1e12, page_size=16)
    free.decoded(1, 1e-9)
    free.mixed(1, 1, 0, 2e-9)
    assert free.limit(1, 1, 0) == NO_LIMIT


@pytest.mark.parametrize(("context", "same"), [(1023, True), (1024, False), (2047, False), (2048, False)])
def test_mixed_chunk_has_a_class_of_context_for_each_doubling(context: int, same: bool) -> None:
    chunks = MixedChunks(0.1, page_size=16)
    chunks.decoded(4, 0.0)
    chunks.mixed(4, 100, 0, 0.1)
    chunks.mixed(4, 100, 1024, 0.2)
    chunks.mixed(4, 100, 2048, 0.4)
    assert chunks.limit(4, 4, context) == {1023: 100, 1024: 50, 2047: 50, 2048: 25}[context]
    assert (chunks.limit(4, 4, context) == chunks.limit(4, 4, 0)) is same


@pytest.mark.parametrize(("number", "measured_as"), [(7, 7), (8, 8), (9, 8), (10, 10), (15, 14), (16, 16), (19, 16)])
def test_steps_are_measured_by_their_number_and_few_classes_of_a_doubling(number: int, measured_as: int) -> None:
    chunks = MixedChunks(None, page_size=16)
    chunks.decoded(number, 0.5)
    assert chunks._decodes.nearest(number) == (measured_as, 0.5)


def test_step_without_a_measure_is_a_row_a_token_from_the_nearest_and_half_at_least() -> None:
    chunks = MixedChunks(None, page_size=16)
    chunks.decoded(4, 0.01)
    assert chunks._decode_s(6) == 0.01  # nobody knows what a row costs
    chunks.mixed(4, 10, 0, 0.02)
    assert chunks._decode_s(6) == pytest.approx(0.012)
    assert chunks._decode_s(2) == pytest.approx(0.008)
    chunks.decoded(40, 0.01)
    assert chunks._decode_s(24) == 0.005
    noisy = MixedChunks(None, page_size=16)
    noisy.decoded(2, 0.02)
    noisy.mixed(2, 6, 0, 0.016)  # shorter than without a prompt: a quarter of its share at least
    assert noisy._tokens.nearest(0) == (0, pytest.approx(0.016 * 6 / 8 / 4 / 6))


# -- surveys, counters and their line ---------------------------------------------------------------------------------


def test_survey_is_of_its_cache_with_a_secret_and_shows_placeholders(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[Any, ...]] = []
    branch = Branch(*range(len(Branch._fields)))._replace(tokens=np.array([5, -7], dtype=np.int32).tobytes())

    def survey(*arguments: Any) -> Iterator[Branch | None]:
        asked.append(arguments)
        yield from (None, branch)

    monkeypatch.setattr(surveys, "survey", survey)
    cache: Any = SimpleNamespace(
        clock=1, index=SimpleNamespace(), kinds=[SimpleNamespace(name="kv"), SimpleNamespace(name="state")]
    )
    pictures: Any = SimpleNamespace(as_tokens=lambda tokens: np.where(tokens < 0, 9, tokens).astype(np.int32))
    for shown, tokens in ((None, [5, -7]), (pictures, [5, 9])):
        part = surveys.Surveys(cache, shown).part(GetTree(serial=3, begin=True), 0.0)
        [found] = part.branches
        assert np.frombuffer(found.tokens, dtype=np.int32).tolist() == tokens
        assert (part.answers, part.kinds, part.more, part.is_cut) == (3, ["kv", "state"], False, False)
    assert [arguments[0] for arguments in asked] == [cache.index] * 2
    assert {len(arguments[1]) for arguments in asked} == {32}
    assert asked[0][1] != asked[1][1]
    again = surveys.Surveys(cache)
    assert again.part(GetTree(serial=4, begin=False), 0.0).branches == []  # nothing was begun


def test_state_frame_has_the_counters_and_ages_of_both(monkeypatch: pytest.MonkeyPatch) -> None:
    rig, widths = Rig(), SimpleNamespace(current=3, recent=None)
    exchange: Any = SimpleNamespace(state=lambda: None)
    stats = Stats(5.0)
    stats.counters["engine.busy_seconds"] = 2.5
    idle = stats.frame(rig.scheduler, 9.0)
    assert (idle.last_step_age_s, idle.answers, idle.speculation, idle.transfers) == (0.0, 0, None, None)
    assert idle.counters["engine.busy_seconds"] == 2.5
    assert idle.counters["prompt_tokens"] == 0
    rig.add(5)
    waiting = stats.frame(rig.scheduler, 9.0, answers=7)
    assert (waiting.last_step_age_s, waiting.answers, waiting.num_waiting) == (4.0, 7, 1)
    guessing: Any = widths
    monkeypatch.setattr("forebay.engine.loop.stats.Speculating", lambda **fields: fields)
    monkeypatch.setattr("forebay.engine.loop.stats.State", lambda **fields: fields)
    told: Any = Stats(0.0, guessing, exchange).frame(rig.scheduler, 0.0)
    assert told["speculation"] == {"width": 3, "recent": None}


def test_line_has_shares_of_the_pool_and_of_prompts_and_what_else_there_is(monkeypatch: pytest.MonkeyPatch) -> None:
    tenant = SimpleNamespace(name="", num_running=0, num_waiting=0)
    tenants = [SimpleNamespace(name=f"t{i}", num_running=1, num_waiting=i) for i in range(10)]
    counters = {"computed_prompt_tokens": 0, "generated_tokens": 0, "cached_tokens": 3, "prompt_tokens": 4}
    pools = [SimpleNamespace(running=1, cached=2, total=10)]
    state = SimpleNamespace(num_running=6, num_waiting=7, counters=counters, pools=pools, tenants=[tenant, *tenants])
    scheduler: Any = SimpleNamespace(state=lambda now: state)
    widths: Any = SimpleNamespace(recent=SimpleNamespace(net_speedup=1.5))
    found = fields(Stats(0.0, widths).line(scheduler, 0.0))
    assert (found["running"], found["waiting"], found["kv_used"], found["hit_rate"]) == ("6", "7", "30%", "75%")
    assert found["spec_net_speedup"] == "1.5"
    assert found["tenants"] == ",".join(f"t{i}:1+{i}" for i in range(8))
    counters["prompt_tokens"] = counters["cached_tokens"] = 0
    state.tenants = [tenant, SimpleNamespace(name="", num_running=0, num_waiting=1), tenants[0]]
    bare = fields(Stats(0.0).line(scheduler, 0.0))
    assert (bare["hit_rate"], bare["tenants"], "spec_net_speedup" in bare) == ("0%", "-:0+1,t0:1+0", False)


# -- roles ------------------------------------------------------------------------------------------------------------


def in_role(mode: DisaggregationMode, **changes: Any) -> Any:
    return SimpleNamespace(
        disaggregation=replace(OPTIONS, mode=mode, **changes),
        device="cpu",
        enable_memory_saver=False,
        hisparse=HisparseOptions(),
    )


@pytest.mark.parametrize("mode", DisaggregationMode)
@pytest.mark.parametrize("maps", [True, False])
@pytest.mark.parametrize("platform", ["linux", "darwin"])
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_decode_alone_shares_its_caches_where_its_transport_maps_them(
    mode: DisaggregationMode, maps: bool, platform: str, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    its = in_role(mode)
    its.device = device
    monkeypatch.setattr(roles.sys, "platform", platform)
    monkeypatch.setattr(roles, "shares_memory", lambda device: True)
    monkeypatch.setattr("forebay.transfer.transports.maps_caches", lambda backend: maps)
    shares = (mode, maps, platform) == (DisaggregationMode.DECODE, True, "linux")
    assert roles.shared_caches(its) == ((Tag.KV_CACHE,) if shares else ())


@pytest.mark.parametrize("reason", ["enable_memory_saver", "hisparse", "driver"])
def test_c25_gpu_s_caches_that_can_be_released_or_have_two_tiers_are_not_shared(
    reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    its = in_role(DisaggregationMode.DECODE)
    monkeypatch.setattr(roles, "shares_memory", lambda device: reason != "driver")
    changes = {"enable_memory_saver": True, "hisparse": HisparseOptions(device_buffer_size=64), "driver": None}
    setattr(its, reason, changes[reason])
    assert roles.shared_caches(its) == (Tag.KV_CACHE,)
    its.device = "cuda"
    assert roles.shared_caches(its) == ()


def test_transfers_are_made_for_a_role_with_what_both_sides_compare(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Any] = []
    monkeypatch.setattr("forebay.transfer.worker.make_transfers", lambda *of, **how: made.append((of, how)) or "made")
    regions: Any = SimpleNamespace(place="place")
    cache: Any = "cache"
    assert roles.transfers_for(in_role(DisaggregationMode.NULL), cache, 7, "avx2", regions) is None
    for shared, place in (((), None), ((Tag.KV_CACHE,), "place")):
        monkeypatch.setattr(roles, "shared_caches", lambda config, shared=shared: shared)
        its = in_role(DisaggregationMode.DECODE)
        found: Any = roles.transfers_for(its, cache, 7, "avx2", regions)
        assert found == "made"
        assert made.pop() == ((its, "cache"), {"vocab_size": 7, "kernels": "avx2", "place": place})

    def taken(*_: Any, **__: Any) -> Any:
        raise OSError(98, "Address already in use")

    monkeypatch.setattr("forebay.transfer.worker.make_transfers", taken)
    with pytest.raises(ConfigError, match=r"h:7 cannot be used \(Address already in use\)"):
        roles.transfers_for(in_role(DisaggregationMode.PREFILL, host="h", bootstrap_port=7), cache, 7, "", regions)


def test_role_of_an_engine_is_that_of_its_options() -> None:
    transfers: Any = SimpleNamespace(instance="me", port=0)
    assert type(roles.role_of(OPTIONS, None)) is Handoff
    decode = roles.role_of(replace(OPTIONS, mode=DisaggregationMode.DECODE), transfers)
    assert isinstance(decode, DecodeRole)
    assert isinstance(roles.role_of(replace(OPTIONS, mode=DisaggregationMode.PREFILL), transfers), PrefillRole)


# -- checks of two engines --------------------------------------------------------------------------------------------


class Patterned:
    """Transfers that note orders and patterns."""

    instance, layout = "me", {"a": 1}

    def __init__(self, token_bytes: int) -> None:
        self.token_bytes, self.orders, self.events = token_bytes, list[Any](), list[str]()
        self.sizes: list[int] = []

    def submit(self, order: Any) -> None:
        self.orders.append(order)

    def pattern(self, spans: Any, num_tokens: int) -> Any:
        self.sizes.append(num_tokens)
        return SimpleNamespace(
            num_bytes=num_tokens * self.token_bytes,
            write=lambda: self.events.append("write"),
            clear=lambda: self.events.append("clear"),
            wrong=lambda: ["wrong"],
        )

    def transport(self, host: str, port: int) -> str:
        return f"{host}-{port}"


def checks(mode: DisaggregationMode, token_bytes: int = 1024) -> tuple[Checks, Patterned, Scheduler]:
    options, transfers = replace(OPTIONS, mode=mode), Patterned(token_bytes)
    role = DecodeRole(options, "me") if options.is_decode else PrefillRole(options)
    scheduler = Scheduler(config(num_pages=64, page_size=4, context_length=200, disaggregation=options), None, role)
    noting: Any = transfers
    return Checks(scheduler, noting), transfers, scheduler


@pytest.mark.parametrize(("token_bytes", "most"), [(1024, None), (MOST_BYTES // 3, 3), (MOST_BYTES + 1, 1), (0, None)])
def test_check_asks_for_a_quarter_of_what_can_be_had_and_64_mib_at_most(token_bytes: int, most: int | None) -> None:
    assert MOST_BYTES == 64 << 20
    made, transfers, scheduler = checks(DisaggregationMode.DECODE, token_bytes)
    role: Any = scheduler.handoff
    quarter = role.spare.most_tokens // 4
    made.begin(CheckTransfers(serial=7, host="h", port=8), 1.0)
    [offer] = transfers.orders
    assert isinstance(offer, Offer)
    assert (offer.host, offer.port, offer.digest, offer.start) == ("h", 8, CHECK, 0)
    assert offer.num_tokens == transfers.sizes[0] == (most or quarter)
    assert transfers.events == ["clear"]
    assert (offer.ticket.peer, offer.ticket.room, len(offer.ticket.nonce)) == ("me", 0, 16)


def test_check_that_is_renewed_has_its_time_again_and_what_arrived_is_its_answer() -> None:
    made, transfers, _ = checks(DisaggregationMode.DECODE)
    lease_s = OPTIONS.lease_s
    made.begin(CheckTransfers(serial=7, host="h", port=8), 0.0)
    ticket = transfers.orders[0].ticket
    assert not made.take(Renewed(replace_room(ticket)), 0.0)  # another's
    assert made.take(Renewed(ticket), lease_s)
    made.expire(2 * lease_s)
    assert made.take_answers() == []
    arrived = Arrived(ticket, Tail(num_tokens=transfers.sizes[0], token_id=0), bytes_per_s=12.5)
    assert made.take(arrived, 2 * lease_s)
    assert made.take(Closed(ticket), 2 * lease_s)
    [(serial, checked)] = made.take_answers()
    assert (serial, checked.wrong, checked.transport, checked.layout) == (7, ["wrong"], "h-8", {"a": 1})
    assert (checked.num_bytes, checked.bytes_per_s) == (transfers.sizes[0] * 1024, arrived.bytes_per_s)
    assert made.take_answers() == []
    assert not made.take(Renewed(ticket), 0.0)


def replace_room(ticket: Ticket) -> Ticket:
    return Ticket(ticket.peer, ticket.room + 1, ticket.nonce)


def test_prefill_refuses_a_check_above_64_mib_and_sends_what_it_has_written() -> None:
    made, transfers, _ = checks(DisaggregationMode.PREFILL, MOST_BYTES // 4)
    assert made.take(Offered(Ticket("other", 0, bytes(16)), 5, CHECK, 0), 0.0)
    [refused] = transfers.orders
    assert isinstance(refused, Withdraw)
    assert isinstance(refused.failure, Failure)
    assert (refused.failure.code, f"at most {MOST_BYTES}" in refused.failure.message) == ("no_room", True)
    ticket = Ticket("other", 1, bytes(16))
    assert made.take(Offered(ticket, 4, CHECK, 0), 0.0)
    sent = transfers.orders[-1]
    assert isinstance(sent, Send)
    assert (sent.ticket, sent.tail.num_tokens, sent.tail.token_id) == (ticket, 4, 0)
    assert transfers.events == ["write"]
    assert made.take(Closed(ticket), 0.0)
    assert made.take_answers() == []  # prefill has not asked


# -- the process and its report ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(("platform", "asked"), [("linux", [(1, signal.SIGKILL, 0, 0, 0)]), ("darwin", [])])
def test_engine_dies_with_its_parent_where_the_kernel_can(
    platform: str, asked: list[tuple[int, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[tuple[int, ...]] = []
    monkeypatch.setattr(process.sys, "platform", platform)
    monkeypatch.setattr(process.ctypes, "CDLL", lambda name: SimpleNamespace(prctl=lambda *words: calls.append(words)))
    monkeypatch.setattr(process.socket, "socket", lambda fileno: ("socket", fileno))
    assert process.our_end(["5", str(os.getppid())]) == ("socket", 5)
    assert calls == asked
    assert process.our_end(["5", "0"]) == ("socket", 5)  # a parent that is not named
    assert calls == asked

    def ended(code: int) -> None:
        raise SystemExit(code)

    monkeypatch.setattr(process.os, "_exit", ended)
    with pytest.raises(SystemExit) as gone:
        process.our_end(["5", str(os.getppid() + 1)])
    assert gone.value.code == 1


def test_process_s_row_is_its_resident_memory_or_the_most_it_had(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = SimpleNamespace(RUSAGE_SELF=0, getrusage=lambda whose: SimpleNamespace(ru_maxrss=3000 + whose))
    monkeypatch.setattr(start_report, "resource", usage)
    (tmp_path / "self").mkdir()
    (tmp_path / "self" / "statm").write_text("900 300 7\n")
    size = human_bytes(300 * os.sysconf("SC_PAGE_SIZE"))
    assert start_report.of_process(tmp_path) == ("memory", "process", size, "resident after warm-up")
    section, item, found, why = start_report.of_process(tmp_path / "none")
    assert (section, item, found) == ("memory", "process", human_bytes(3000 << 10))
    assert why == f"the most resident so far: {tmp_path / 'none'} is not mounted"


def report_config(**changes: Any) -> Any:
    return SimpleNamespace(**{
        "device": "cpu", "kernels": "auto", "num_threads": 3, "weights_cpu_backup": False, "enable_memory_saver": True,
        "adapters": SimpleNamespace(max_loras=2, max_lora_rank=8, lora_modules=("a", "b", "c")),
        "pictures": SimpleNamespace(mm_cache_bytes=2 << 20), "ranks": SimpleNamespace(size=1), **changes,
    })  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "row"),
    [
        ({}, ("on", "always on a CPU; weights are read again, so that nothing is kept twice")),
        ({"device": "cuda"}, ("on", "weights stay: no --weights-cpu-backup")),
        ({"device": "cuda", "weights_cpu_backup": True}, ("on", "weights in host memory meanwhile")),
        ({"device": "cuda", "enable_memory_saver": False}, ("off", "without --enable-memory-saver")),
    ],
)
def test_report_says_what_sleep_does_with_weights(changes: dict[str, Any], row: tuple[str, str]) -> None:
    assert start_report._of_memory_saver(report_config(**changes)) == ("memory", "memory saver", *row)


@pytest.mark.parametrize(("size", "rows"), [(1, 0), (3, 2)])
def test_start_report_has_the_bytes_of_rank_0_if_there_are_several(size: int, rows: int) -> None:
    found = start_report._of_ranks(report_config(ranks=RankOptions(size=size)), 3 << 20, 1 << 20)
    what = "rank 0 has 3.0 MiB of weights and 1.0 MiB of caches; this table is about rank 0"
    told = [("model", "ranks", str(size), what), ("model", "exchange of ranks", "shm", "on this machine's CPU")]
    assert found == told[:rows]


def test_start_report_names_the_product_of_each_shape_and_its_reason() -> None:
    ops: Any = SimpleNamespace(product_choices={})
    assert start_report._of_products(ops) == []
    ops.product_choices = {"bfloat16 9 x 40": SimpleNamespace(name="triton", why="cuBLASLt's bits differ")}
    assert start_report._of_products(ops) == [
        ("model", "products, bfloat16 9 x 40", "triton", "cuBLASLt's bits differ")
    ]


def test_report_says_why_kernels_are_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu = SimpleNamespace(lacks="no AMX", simulated="")
    topology = SimpleNamespace(nodes=((0,),))
    monkeypatch.setattr(start_report, "this_cpu", lambda: cpu)
    monkeypatch.setattr(start_report, "this_topology", lambda: topology)
    plain: Any = SimpleNamespace(activation_bits=0, fp8_inputs=False)
    assert start_report._why_kernels(report_config(), plain) == "auto asked, 3 threads; no AMX"
    assert start_report._why_kernels(report_config(device="cuda"), plain) == "auto asked, 3 threads"
    cpu.simulated, topology.nodes = "avx2", ((0,), (1,))
    rounding: Any = SimpleNamespace(activation_bits=8, fp8_inputs=True)
    assert start_report._why_kernels(report_config(), rounding) == (
        "auto asked, 3 threads on 2 nodes; inputs of codes rounded to 8 bits; "
        "inputs of weights in FP8 rounded to FP8, by groups of 128; "
        f"{start_report.CPU_VARIABLE}=avx2 simulates this CPU; no AMX"
    )
    assert " on 2 nodes" not in start_report._why_kernels(report_config(device="cuda"), rounding)


def test_report_has_a_row_for_each_part_that_there_is(monkeypatch: pytest.MonkeyPatch) -> None:
    held = {"4 bits": 2 << 20, "bfloat16": 1 << 20}
    model: Any = SimpleNamespace(adapters=None, weight_bytes=3 << 20, held_bytes=held, cache_specs=lambda: "specs")
    bare: Any = SimpleNamespace(encodings=None, proposer=None)
    its = report_config(types="types")
    assert start_report._of_adapters(its, model) == start_report._of_encoder(bare) == []
    assert start_report._of_pictures(its, bare) == start_report._of_draft_model(its, bare) == []
    model.adapters = SimpleNamespace(num_bytes=5 << 20)
    assert start_report._of_adapters(its, model) == [
        ("model", "adapters", human_bytes(5 << 20), "2 slots of rank 8, 3 loaded at the start")
    ]
    encoder = SimpleNamespace(num_layers=4, weight_bytes=6 << 20)
    full: Any = SimpleNamespace(
        encodings=SimpleNamespace(encoder=encoder), decode=SimpleNamespace(captured=SimpleNamespace(sizes=(1, 2, 8)))
    )
    assert start_report._of_encoder(full) == [
        ("model", "encoder", human_bytes(6 << 20), "4 layers of the images' encoder")
    ]
    for device, when in (("cpu", "which take memory as they come"), ("cuda", "whose half is taken at the start")):
        why = f"--mm-cache-bytes: half for pixels, half for encodings, {when}"
        its.device = device
        assert start_report._of_pictures(its, full) == [("memory", "images", human_bytes(2 << 20), why)]
    assert start_report._sizes_of_graphs(full) == "3 batch sizes up to 8, captured when needed or idle"
    assert start_report._forms(model) == f"{human_bytes(2 << 20)} in 4 bits, {human_bytes(1 << 20)} in bfloat16"
    monkeypatch.setattr(start_report, "DraftModel", SimpleNamespace)
    monkeypatch.setattr(start_report, "cache_sizes", lambda *of: SimpleNamespace(kv_bytes_per_token=len(of) << 10))
    guessing: Any = SimpleNamespace(proposer=SimpleNamespace(drafting=SimpleNamespace(model=model)))
    [(section, item, size, why)] = start_report._of_draft_model(its, guessing)
    assert (section, item, size) == ("model", "draft model", human_bytes(3 << 20))
    assert why == f"{start_report._forms(model)}; {human_bytes(2 << 10)} of KV per token"


def test_report_of_a_start_is_planned_beside_allocated(monkeypatch: pytest.MonkeyPatch) -> None:
    model: Any = SimpleNamespace(adapters=None, weight_bytes=7, held_bytes={"float32": 7})
    cache = SimpleNamespace(num_bytes={"kv": 9, "state": 0})
    graphs = SimpleNamespace(sizes=(1,), backend=SimpleNamespace(name="eager"))
    runner: Any = SimpleNamespace(encodings=None, proposer=None, cache=cache, decode=SimpleNamespace(captured=graphs))
    line = SimpleNamespace(item="an item", value="a value", reason="a reason")
    budget: Any = SimpleNamespace(lines=[line], num_bytes={"kv": 8, "state": 0})
    packed: Any = SimpleNamespace(outcome=("hit", "why"))
    fallbacks = {"attention.store_kv": "_store_kv: OutOfResources: shared memory"}
    ops: Any = SimpleNamespace(
        name="avx2", activation_bits=0, fp8_inputs=False, product_choices={}, fallbacks=fallbacks
    )
    its: EngineConfig = report_config()
    rows = start_report.start_report(its, budget, model, runner, ops, (2.0, packed))
    assert [(section, item, value) for section, item, value, _ in rows[:-1]] == [
        ("model", "weights", "7 B"),
        ("model", "kernels", "avx2"),
        ("model", "op attention.store_kv", "torch"),
        ("model", "decode graphs", "eager"),
        ("model", "load time", start_report.human_seconds(2.0)),
        ("model", "weights cache", "hit"),
        ("memory", "an item", "a value"),
        ("memory", "kv cache allocated", "9 B"),
        ("memory", "memory saver", "on"),
    ]
    assert rows[0][3] == "7 B in float32 on cpu"
    assert rows[2][3] == "no kernel compiles: _store_kv: OutOfResources: shared memory"
    assert rows[6][3] == "a reason"
    assert rows[7][3] == "8 B planned"
    assert rows[-1][1] == "process"
