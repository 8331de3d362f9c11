"""A prefix cache in files: the next engine has it again, and its tokens are those of a cold one (C19, C31, C34)."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from forebay.engine.loop.core import close
from forebay.formats import prefix_files
from forebay.formats.prefix_files import Record
from forebay.memory.retention import RetentionRequest
from forebay.requests.sampling_params import SamplingParams
from forebay.runtime.host.disk_store import DiskStore
from tests.integration.rig import Engine, Result, Rig
from tests.kernels import NATIVE
from tests.models.adapters import adapted
from tests.models.tiny import CASE_OF, by_tier, random_ids, shared_tiny

PARAMS = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True)
PROMPT = random_ids(50, seed=1)
REUSED = 48
SIZES: dict[str, Any] = {"num_tokens": 160, "radix_cache": True, "max_running_requests": 2, "cached_states": 2}
CASES = by_tier([*CASE_OF.values()])
IDENTITY = {"weights": "a"}


def rig_of(case: str) -> Rig:
    path = shared_tiny(case).path
    return Rig(path, dtype=torch.float32, kernels=NATIVE, num_threads=1, context_length=128)


@pytest.fixture(scope="module")
def llama() -> Rig:
    return rig_of("llama")


@pytest.fixture
def engines(tmp_path: Path) -> Iterator[Any]:
    """Make engines over one folder, each after the end of the one before."""
    made: list[Engine] = []

    def make(rig: Rig, folder: Path = tmp_path, **changes: Any) -> Engine:
        end()
        made.append(rig.engine(**{**SIZES, "page_size": 4, **changes}, disk=(folder, IDENTITY)))
        return made[-1]

    def end() -> None:
        while made:
            close(made.pop().core)

    make.end = end
    yield make
    end()


def run(engine: Engine, prompt: list[int] = PROMPT) -> Result:
    (result,) = engine.run([prompt], PARAMS)
    return result


@pytest.mark.parametrize("case", CASES)
def test_c19_restart_has_the_prefix_again_and_gives_the_bits_of_a_cold_engine(case: str, engines: Any) -> None:
    rig = rig_of(case)
    first = run(engines(rig))
    longer = PROMPT + first.token_ids + random_ids(5, seed=2)
    cold = run(rig.engine(**SIZES, page_size=4), longer)
    again = run(engines(rig), longer)
    assert again.tiers.get("disk", 0) >= REUSED // 2, f"{again.tiers} of {again.cached_tokens}, {again.miss_reason}"
    assert again.token_ids == cold.token_ids


@pytest.mark.parametrize(
    ("case", "page_size", "kv_dtype"),
    [("falcon_h1", 1, None), ("gpt_oss", 16, None), ("llama", 128, None), ("gpt_oss", 4, torch.int8)],
)
def test_c19_restart_with_any_page_and_8_bit_kv_gives_the_bits_of_a_cold_engine(
    case: str, page_size: int, kv_dtype: torch.dtype | None, engines: Any
) -> None:
    path, prompt = shared_tiny(case).path, random_ids(140, seed=1)
    rig = Rig(path, dtype=torch.float32, kernels=NATIVE, num_threads=1, context_length=256, kv_dtype=kv_dtype)
    sizes = {"num_tokens": 512, "page_size": page_size}
    cold = run(engines(rig, **sizes), prompt)
    again = run(engines(rig, **sizes), prompt)
    assert again.tiers.get("disk", 0) >= 139 // page_size * page_size - page_size * (case != "llama")
    assert again.token_ids == cold.token_ids


def test_restart_many_times_finds_each_prefix(llama: Rig, engines: Any) -> None:
    prompts = [random_ids(40, seed=seed) for seed in range(4)]
    cold = [run(llama.engine(**SIZES, page_size=4), prompt).token_ids for prompt in prompts]
    for number, prompt in enumerate(prompts):
        engine = engines(llama)
        for known in prompts[:number]:
            assert run(engine, known).tiers == {"disk": 36}
        assert run(engine, prompt).tiers == {}
    engine = engines(llama)
    assert [run(engine, prompt).token_ids for prompt in prompts] == cold


@pytest.mark.parametrize("position", ["first", "middle", "last"])
def test_c30_flipped_byte_of_a_row_is_found_and_computed_again(llama: Rig, engines: Any, position: str) -> None:
    expected = run(engines(llama))
    engines.end()
    (path,) = prefix_files.paths(Path(engines(llama).folder))
    engines.end()
    segment, _ = prefix_files.open_segment(path)
    rows, record = next(segment.records())
    at = {"first": rows, "middle": rows + record.num_bytes // 2, "last": rows + record.num_bytes - 1}[position]
    flip(path, at)
    engine = engines(llama)
    again = run(engine)
    assert again.token_ids == expected.token_ids
    assert again.cached_tokens < REUSED
    assert engine.count("tier_lost_loads") == 1


def flip(path: Path, at: int) -> None:
    with path.open("r+b") as file:
        file.seek(at)
        (byte,) = file.read(1)
        file.seek(at)
        file.write(bytes([byte ^ 64]))


def test_truncated_segment_has_what_was_whole(llama: Rig, engines: Any) -> None:
    """As a writer leaves it that is killed at this byte."""
    expected = run(engines(llama))
    second = random_ids(40, seed=7)
    run(engines(llama), second)
    folder = Path(engines(llama).folder)
    engines.end()
    kept = {path: path.read_bytes() for path in prefix_files.paths(folder)}
    path, data = next(iter(kept.items()))
    segment, _ = prefix_files.open_segment(path)
    rows, record = next(segment.records())
    places = [0, 7, segment.first - 1, segment.first + 3, rows - 1, rows, rows + 9, rows + record.num_bytes - 1]
    for length in places:
        path.write_bytes(data[:length])
        engine = engines(llama)
        assert run(engine).token_ids == expected.token_ids
        engines.end()
        for other in prefix_files.paths(folder):
            other.unlink()
        for other, whole in kept.items():
            other.write_bytes(whole)


def test_c31_other_identity_is_ignored_and_both_values_are_logged(
    llama: Rig, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for weights, expected in (("a", {}), ("b", {}), ("b", {"disk": REUSED}), ("a", {"disk": REUSED})):
        engine = llama.engine(**SIZES, page_size=4, disk=(tmp_path, {"weights": weights}))
        assert run(engine).tiers == expected
        close(engine.core)
    assert "weights: the file has 'a', this engine 'b'" in caplog.text


def test_second_engine_reads_and_does_not_write(llama: Rig, tmp_path: Path) -> None:
    first = llama.engine(**SIZES, page_size=4, disk=(tmp_path, IDENTITY))
    expected = run(first)
    first.core.files.save()
    second = llama.engine(**SIZES, page_size=4, disk=(tmp_path, IDENTITY))
    num_bytes = sum(path.stat().st_size for path in prefix_files.paths(tmp_path))
    assert run(second).token_ids == expected.token_ids
    run(second, random_ids(40, seed=9))
    close(second.core)
    assert sum(path.stat().st_size for path in prefix_files.paths(tmp_path)) == num_bytes
    close(first.core)


@pytest.mark.parametrize("fails", ["write", "open"])
def test_disk_that_is_full_turns_the_tier_off_with_one_line(
    llama: Rig, engines: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, fails: str
) -> None:
    expected = [run(llama.engine(**SIZES, page_size=4), random_ids(40, seed=seed)).token_ids for seed in range(3)]
    engine = engines(llama)
    monkeypatch.setattr(prefix_files.os, fails, {"write": full_disk, "open": no_new_file}[fails])
    assert [run(engine, random_ids(40, seed=seed)).token_ids for seed in range(3)] == expected
    engine.core.files.save()
    copied = [engine.count("tier_stored_tokens"), engine.count("tier_lost_stores")]
    run(engine, random_ids(40, seed=3))
    assert [engine.count("tier_stored_tokens"), engine.count("tier_lost_stores")] == copied
    close(engine.core)
    assert caplog.text.count("prefix_cache_write_failed") == 1
    assert "No space left" in caplog.text


OPEN = os.open


def no_new_file(path: Path, flags: int, mode: int = 0o777) -> int:
    return full_disk(-1, memoryview(b"")) if flags & os.O_CREAT else OPEN(path, flags, mode)


def full_disk(descriptor: int, data: memoryview) -> int:
    raise OSError(28, os.strerror(28))


def test_oldest_segment_goes_first(llama: Rig, engines: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefix_files, "SEGMENT_BYTES", 1)
    engine = engines(llama)
    for seed in range(6):
        run(engine, random_ids(40, seed=seed))
    engine.core.files.save()
    (store,) = (store for store in engine.stores.values() if isinstance(store, DiskStore))
    before = prefix_files.paths(Path(engine.folder))
    store._limit_bytes = sum(path.stat().st_size for path in before) // 2
    run(engine, random_ids(40, seed=6))
    engine.core.files.save()
    left = prefix_files.paths(Path(engine.folder))
    assert before[0] not in left
    assert sum(path.stat().st_size for path in left) <= store._limit_bytes
    assert left[-1] not in before


@pytest.mark.parametrize("case", ["llama", "falcon_h1"])
def test_kept_prefix_of_the_oldest_segment_is_written_again(
    case: str, engines: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its second part is then in front of the first one in the files."""
    monkeypatch.setattr(prefix_files, "SEGMENT_BYTES", 1)
    rig = rig_of(case)
    engine = engines(rig)
    expected = ask(engine, PROMPT, 300.0)
    longer = PROMPT + expected.token_ids + random_ids(20, seed=2)
    fill(engine, 2)
    expected_longer = ask(engine, longer, 300.0)
    engine.core.files.save()
    (store,) = (store for store in engine.stores.values() if isinstance(store, DiskStore))
    store._limit_bytes = 2 * store._num_bytes
    for seed in range(3, 20):
        if not prefix_files.paths(Path(engine.folder))[0].name.startswith("000001"):
            break
        fill(engine, 1, seed)
    assert (Path(engine.folder) / "000004.prefixes").exists()
    for restarted in (engine, engines(rig)):
        restarted.core.scheduler.pools.cache.flush()
        again = run(restarted, longer)
        assert again.tiers.get("disk", 0) >= len(longer) // 4 * 4 - 4
        assert again.token_ids == expected_longer.token_ids


def fill(engine: Engine, count: int, first: int = 0) -> None:
    """Run prompts that nobody wants kept, each of which is in a segment of its own."""
    for seed in range(first, first + count):
        run(engine, random_ids(60, seed=100 + seed))
    engine.core.files.save()


def ask(engine: Engine, prompt: list[int], ttl_s: float) -> Result:
    """Run a prompt that its client wants kept."""
    (result,) = engine.run([prompt], PARAMS, retentions=[RetentionRequest(len(prompt), ttl_s)])
    return result


def test_c29_secret_is_made_once_and_must_be_this_users_alone(tmp_path: Path) -> None:
    folder = tmp_path / "cache"
    secret = prefix_files.folder_secret(folder)
    assert len(secret) == 32
    assert prefix_files.folder_secret(folder) == secret
    assert (folder / "secret").stat().st_mode & 0o777 == 0o600
    (folder / "secret").chmod(0o640)
    assert prefix_files.usable_secret(str(folder)) is None
    assert prefix_files.usable_secret("") is None


def test_record_without_rows_of_a_kind_is_read_back(tmp_path: Path) -> None:
    record = Record(
        "/n", "t", b"\0" * 16, 0, {"kv": prefix_files.Rows([1], 4, [5]), "state": prefix_files.Rows([], 8, [])}
    )
    writer = prefix_files.Writer(tmp_path, IDENTITY)
    segment, begin = writer.append(record, [memoryview(b"abcd"), memoryview(b"")])
    writer.close()
    again, identity = prefix_files.open_segment(segment.path)
    assert identity == IDENTITY
    assert list(again.records()) == [(begin, record)]


def test_c34_files_of_an_adapter_are_found_by_its_digest_under_any_name(tmp_path: Path) -> None:
    """A restart may load it under another name; another adapter of that name finds nothing."""
    mixed, other = adapted("llama", "mixed"), adapted("llama", "rank-16")
    expected: dict[str, list[int]] = {}
    for name, adapter, reused in (("a", mixed, {}), ("b", mixed, {"disk": REUSED}), ("b", other, {})):
        rig = Rig(
            mixed.tiny.path,
            dtype=torch.float32,
            kernels=NATIVE,
            num_threads=1,
            context_length=128,
            adapters={name: adapter.folder},
        )
        engine = rig.engine(**SIZES, page_size=4, disk=(tmp_path, IDENTITY))
        (result,) = engine.run([PROMPT], PARAMS, adapters=[name])
        close(engine.core)
        assert result.tiers == reused
        assert expected.setdefault(str(adapter.folder), result.token_ids) == result.token_ids
