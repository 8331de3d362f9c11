"""Starts from the weights cache: the tokens of a start without it, or the file is ignored and written again."""

from __future__ import annotations

import logging
import os
import select
import shutil
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from forebay.base import fault
from forebay.base.errors import ModelError
from forebay.engine.lifecycle import packed_cache
from forebay.engine.loop.core import EngineCore
from forebay.formats import weights_cache
from forebay.formats.quantization import Quantization
from forebay.formats.quantized import GroupQuantized
from forebay.ops.native.linear import NativeLinear
from forebay.requests.updates import FinishReason, Update
from tests.engine.starts import PROMPTS, start, tokens_of
from tests.engine.test_sleep import other_weights, poison
from tests.models.tiny import make_oracle

SIZES: dict[str, dict[str, Any]] = {
    "llama": {},
    "deepseek_v3": {"moe_intermediate_size": 32},
    "qwen3_moe": {"moe_intermediate_size": 32},
    "gpt_oss": {},
    "mamba2": {"num_heads": 8, "head_dim": 16},
}


@cache
def _made(case: str, folder: Path) -> Path:
    oracle = make_oracle(case, hidden_size=64, intermediate_size=96, **SIZES[case])
    oracle.save_pretrained(folder / case)
    return folder / case


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    folder = tmp_path_factory.mktemp("models")
    return lambda case: _made(case, folder)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The cache, in which checkpoints of any size are kept."""
    found = tmp_path / "weights"
    monkeypatch.setattr(packed_cache, "cache_of_weights", lambda: found)
    monkeypatch.setattr(packed_cache, "LEAST_BYTES", dict.fromkeys(Quantization, 0))
    return found


@pytest.fixture
def computed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The bits of each piece that is quantized."""
    found: list[int] = []

    def quantize_into(ops: NativeLinear, values: Any, out: GroupQuantized, first: int) -> None:
        found.append(out.format.bits)
        original(ops, values, out, first)

    original = NativeLinear.quantize_into
    monkeypatch.setattr(NativeLinear, "quantize_into", quantize_into)
    return found


def plain(path: Path, **flags: Any) -> list[list[int]]:
    core, outcome = start(path, weights_cache_bytes=0, **flags)
    assert outcome == "not used: --weights-cache-bytes 0"
    return tokens_of(core, PROMPTS)


def only_file(folder: Path) -> Path:
    (path,) = folder.iterdir()
    return path


@pytest.mark.quick(1)
@pytest.mark.parametrize("quantization", ["int4", "int8"])
@pytest.mark.parametrize("case", SIZES)
def test_second_start_maps_the_file_and_gives_the_same_tokens(
    case: str, quantization: str, models: Callable[[str], Path], folder: Path, computed: list[int]
) -> None:
    right = plain(models(case), quantization=quantization)
    assert not folder.exists()
    core, outcome = start(models(case), quantization=quantization)
    assert outcome.startswith("written ")
    assert tokens_of(core, PROMPTS) == right
    assert computed
    computed.clear()
    core, outcome = start(models(case), quantization=quantization)
    assert outcome.startswith("mapped ")
    assert tokens_of(core, PROMPTS) == right
    assert computed == []


@pytest.mark.slow
def test_second_start_bfloat16_gives_the_same_tokens(models: Callable[[str], Path], folder: Path) -> None:
    right = plain(models("llama"), dtype="bfloat16", activation_bits=8)
    for word in ("written", "mapped"):
        core, outcome = start(models("llama"), dtype="bfloat16", activation_bits=8)
        assert outcome.startswith(word)
        assert tokens_of(core, PROMPTS) == right


def test_start_of_a_copy_elsewhere_maps_the_same_file(
    models: Callable[[str], Path], folder: Path, tmp_path: Path
) -> None:
    start(models("llama"))
    copy = shutil.copytree(models("llama"), tmp_path / "copy")  # with its modification times
    assert start(copy)[1].startswith("mapped ")


@pytest.mark.quick(1)
@pytest.mark.parametrize(
    "flags",
    [{"quantization": "int8"}, {"dtype": "bfloat16"}, {"activation_bits": 8}],
    ids=lambda flags: next(iter(flags)),
)
def test_start_with_other_settings_does_not_map_the_file(
    flags: dict[str, Any], models: Callable[[str], Path], folder: Path
) -> None:
    start(models("llama"))
    core, outcome = start(models("llama"), **flags)
    assert outcome.startswith("written ")
    assert tokens_of(core, PROMPTS) == plain(models("llama"), **flags)


def test_start_after_the_program_changed_does_not_map_the_file(
    models: Callable[[str], Path], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    start(models("llama"))
    monkeypatch.setattr(packed_cache, "_program_digest", lambda: "another")
    assert start(models("llama"))[1].startswith("written ")


@pytest.mark.parametrize("times", ["new", "old"])
def test_start_after_the_checkpoint_changed_uses_its_weights(
    times: str, models: Callable[[str], Path], folder: Path, tmp_path: Path
) -> None:
    mine = other_weights(models("llama"), tmp_path / "mine")  # both written by one program, and of one size
    core, _ = start(mine)
    before = tokens_of(core, PROMPTS)
    changed = other_weights(mine, tmp_path / "changed")
    for file in changed.glob("*.safetensors"):
        status = (mine / file.name).stat()
        assert file.stat().st_size == status.st_size
        shutil.copy(file, mine / file.name)
        if times == "old":
            os.utime(mine / file.name, ns=(status.st_atime_ns, status.st_mtime_ns))
    core, outcome = start(mine)
    assert outcome.startswith("written ")
    assert tokens_of(core, PROMPTS) == plain(changed) != before


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 4096)


def empty(path: Path) -> None:
    path.write_bytes(b"")


def foreign(path: Path) -> None:
    path.write_bytes(b"GGUF" + bytes(path.stat().st_size - 4))


def damage_header(path: Path) -> None:
    whole = bytearray(path.read_bytes())
    whole[100] ^= 1
    path.write_bytes(whole)


def writable(path: Path) -> None:
    path.chmod(0o666)


@pytest.mark.quick(1)
@pytest.mark.parametrize("change", [truncate, empty, foreign, damage_header, writable])
def test_start_with_an_unusable_file_logs_one_line_and_writes_it_again(
    change: Callable[[Path], None], models: Callable[[str], Path], folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    core, _ = start(models("llama"))
    right = tokens_of(core, PROMPTS)
    whole = only_file(folder).read_bytes()
    change(only_file(folder))
    caplog.clear()
    with caplog.at_level(logging.WARNING, logger="forebay"):
        core, outcome = start(models("llama"))
    assert ["weights_cache_ignored" in line for line in lines_about_the_cache(caplog)] == [True]
    assert outcome.startswith("written ")
    assert tokens_of(core, PROMPTS) == right
    assert only_file(folder).read_bytes() == whole
    assert start(models("llama"))[1].startswith("mapped ")


def lines_about_the_cache(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Return the warnings about the cache. A busy machine may log others, and a test before this one may have set the
    level at which progress is logged too."""
    warnings = (record for record in caplog.records if record.levelno >= logging.WARNING)
    return [record.message for record in warnings if "weights_cache" in record.message]


def test_start_with_the_file_of_another_machine_ignores_it(
    models: Callable[[str], Path], folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    path_of = weights_cache.path_of

    def blind(place: Path, key: weights_cache.Key) -> Path:
        return path_of(place, {**key, "kernels": ""})

    monkeypatch.setattr(weights_cache, "path_of", blind)
    core, _ = start(models("llama"))
    right = tokens_of(core, PROMPTS)
    path = only_file(folder)
    path.write_bytes(_with_other_kernels(path.read_bytes()))
    with caplog.at_level(logging.WARNING, logger="forebay"):
        core, outcome = start(models("llama"))
    assert ["kernels differ" in line for line in lines_about_the_cache(caplog)] == [True]
    assert outcome.startswith("written ")
    assert tokens_of(core, PROMPTS) == right


def _with_other_kernels(whole: bytes) -> bytes:
    """The file with another variant in its key, and the right digest."""
    magic, _, length = weights_cache._FIXED.unpack(whole[:40])
    text = whole[40 : 40 + length].replace(b'"kernels":"native', b'"kernels":"Native')
    assert text != whole[40 : 40 + length]
    return weights_cache._FIXED.pack(magic, weights_cache._digest(text), length) + text + whole[40 + length :]


def damage_content(path: Path) -> None:
    whole = bytearray(path.read_bytes())
    whole[-4096:] = bytes(byte ^ 0x55 for byte in whole[-4096:])
    path.write_bytes(whole)


def test_start_verify_weights_cache_finds_damaged_contents(
    models: Callable[[str], Path], folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    core, _ = start(models("llama"))
    right = tokens_of(core, PROMPTS)
    damage_content(only_file(folder))
    with caplog.at_level(logging.WARNING, logger="forebay"):
        core, outcome = start(models("llama"), verify_weights_cache=True)
    assert ["its checksum differs" in line for line in lines_about_the_cache(caplog)] == [True]
    assert outcome.startswith("written ")
    assert tokens_of(core, PROMPTS) == right
    core, outcome = start(models("llama"), verify_weights_cache=True)
    assert outcome.endswith("its contents checked")
    assert tokens_of(core, PROMPTS) == right


@pytest.mark.quick(1)
@pytest.mark.parametrize("wrong", ["fewer", "more", "sizes", "headers"])
def test_start_with_a_file_of_other_pieces_computes_the_weights(
    wrong: str, models: Callable[[str], Path], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As if the key had left out a setting on which the pieces depend."""
    core, _ = start(models("llama"))
    right = tokens_of(core, PROMPTS)
    write = weights_cache.write

    def other(place: Path, key: weights_cache.Key, pieces: list[memoryview], **others: Any) -> Path:
        changed = {
            "fewer": pieces[:-1],
            "more": [*pieces, pieces[0]],
            "sizes": [pieces[0][:-1], *pieces[1:]],
            "headers": [memoryview(bytes(len(piece))) for piece in pieces],
        }
        return write(place, key, changed[wrong], **others)

    only_file(folder).unlink()
    with monkeypatch.context() as patch:
        patch.setattr(weights_cache, "write", other)
        start(models("llama"))
    core, outcome = start(models("llama"))
    assert outcome.startswith("written ")
    assert tokens_of(core, PROMPTS) == right
    core.sleeper.sleep()
    core.sleeper.wake()
    assert tokens_of(core, PROMPTS) == right


def test_start_without_room_on_disk_serves_and_logs_one_line(
    models: Callable[[str], Path], folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    fault.arm("weights_cache.write", "os", at=3)
    try:
        with caplog.at_level(logging.WARNING, logger="forebay"):
            core, outcome = start(models("llama"))
    finally:
        fault.disarm()
    assert ["weights_cache_not_written" in line for line in lines_about_the_cache(caplog)] == [True]
    assert outcome.startswith("not written")
    assert list(folder.iterdir()) == []
    assert tokens_of(core, PROMPTS) == plain(models("llama"))


def test_start_smaller_limit_than_the_weights_serves_without_a_file(
    models: Callable[[str], Path], folder: Path
) -> None:
    assert "--weights-cache-bytes allows" in start(models("llama"), weights_cache_bytes="4KiB")[1]
    assert not folder.exists()


@pytest.mark.slow
def test_start_small_or_unquantized_checkpoint_needs_no_file(
    models: Callable[[str], Path], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert (
        start(models("llama"), quantization="none")[1]
        == "not used: weights in float32 are used as the checkpoint has them"
    )
    monkeypatch.setattr(packed_cache, "LEAST_BYTES", dict.fromkeys(Quantization, 1 << 30))
    assert start(models("llama"))[1].endswith("is loaded about as fast without")
    assert start(models("llama"), kernels="torch")[1].endswith("pack weights in memory of their own")
    assert not folder.exists()


@pytest.fixture
def mapped(models: Callable[[str], Path], folder: Path) -> Iterator[EngineCore]:
    """An engine whose weights are those of a file, which must be the same in the end."""
    start(models("llama"))
    before = only_file(folder).read_bytes()
    core, outcome = start(models("llama"))
    assert outcome.startswith("mapped ")
    yield core
    assert only_file(folder).read_bytes() == before


def test_sleep_of_mapped_weights_wakes_with_the_same_tokens_and_computes_nothing(
    mapped: EngineCore, computed: list[int]
) -> None:
    right = tokens_of(mapped, PROMPTS)
    for _ in range(2):
        mapped.sleeper.sleep()
        poison(mapped)
        mapped.sleeper.wake()
        assert tokens_of(mapped, PROMPTS) == right
    assert computed == []


def test_update_of_mapped_weights_leaves_the_file_as_it_is(
    mapped: EngineCore, models: Callable[[str], Path], folder: Path, tmp_path: Path
) -> None:
    before = tokens_of(mapped, PROMPTS)
    other = other_weights(models("llama"), tmp_path / "other")
    right = plain(other)
    assert right != before
    mapped.sleeper.update(str(other), {})
    assert tokens_of(mapped, PROMPTS) == right
    mapped.sleeper.sleep()
    mapped.sleeper.wake()
    assert tokens_of(mapped, PROMPTS) == right
    mapped.sleeper.update(str(models("llama")), {})
    assert tokens_of(mapped, PROMPTS) == before
    assert start(models("llama"))[1].startswith("mapped ")


@pytest.mark.long
def test_update_of_mapped_weights_that_fails_restores_the_old_ones(
    mapped: EngineCore, models: Callable[[str], Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    before = tokens_of(mapped, PROMPTS)
    other = other_weights(models("llama"), tmp_path / "other")
    fault.arm("engine.load_again", "runtime", at=9)
    try:
        with pytest.raises(Exception, match="load_again"):
            mapped.sleeper.update(str(other), {})
    finally:
        fault.disarm()
    (failed,) = [line for line in caplog.messages if line.startswith("update_failed ")]
    assert "load_again" in failed
    mapped.sleeper.update(str(models("llama")), {})
    assert tokens_of(mapped, PROMPTS) == before


def damaged(folder: Path) -> Path:
    """Change a byte of the last piece of the only file."""
    path = only_file(folder)
    with path.open("r+b") as file:
        file.seek(-weights_cache.LINE, os.SEEK_END)
        byte = file.read(1)
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte[0] ^ 0x7F]))
    return path


def test_damaged_contents_end_the_engine_behind_the_first_answer(models: Callable[[str], Path], folder: Path) -> None:
    start(models("llama"))
    path = damaged(folder)
    core, outcome = start(models("llama"))
    assert "its contents behind the first answer" in outcome
    check = core.sleeper.contents
    assert check is not None
    check.note([Update(1, [5])])  # no answer has ended
    check.wait()
    assert path.exists()
    check.note([Update(1, [5], finish=FinishReason.LENGTH)])
    check.wait()
    assert select.select([check], [], [], 0)[0]
    with pytest.raises(ModelError, match=r"not as it was written .*piece .* is damaged.*it was removed; start again"):
        check.note([])
    assert not path.exists()
    assert start(models("llama"))[1].startswith("written ")


def test_sound_contents_are_checked_once_and_kept(models: Callable[[str], Path], folder: Path) -> None:
    start(models("llama"))
    core, _ = start(models("llama"))
    check = core.sleeper.contents
    assert check is not None
    check.note([Update(1, [5], finish=FinishReason.LENGTH)])
    check.wait()
    check.note([])
    assert only_file(folder).exists()


def test_start_that_verified_the_contents_does_not_check_them_again(
    models: Callable[[str], Path], folder: Path
) -> None:
    start(models("llama"))
    core, outcome = start(models("llama"), verify_weights_cache=True)
    assert "and its contents checked" in outcome
    assert core.sleeper.contents is None
