"""C22: frames that were altered, repeated, reordered or made without the key are refused before they are looked at."""

from __future__ import annotations

import contextlib

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forebay.base.errors import WireError
from forebay.transfer.wire.frames import Beat, Fenced, Hello, ToDecode
from forebay.transfer.wire.framing import MAX_FRAME_BYTES, MAX_GREETING_BYTES, FrameDecoder, FrameEncoder, Keys
from tests.transfer.pair import KEY

FRAMES = [Beat(), Fenced(b"n" * 16), Beat([b"n" * 16])]


def decoder(key: bytes = KEY, epoch: int = 3) -> FrameDecoder:
    return FrameDecoder(ToDecode, key, epoch)


def opened(data: bytes, by: FrameDecoder | None = None) -> list[msgspec.Struct]:
    by = by or decoder()
    by.feed(data)
    found = []
    while (frame := by.take()) is not None:
        found.append(frame)
    return found


def sealed(key: bytes = KEY, epoch: int = 3) -> bytes:
    encoder = FrameEncoder(key, epoch)
    return b"".join(map(encoder.encode, FRAMES))


@given(st.lists(st.integers(0, len(sealed())), max_size=6).map(sorted))
def test_frames_come_whole_however_the_bytes_are_cut(cuts: list[int]) -> None:
    data, by = sealed(), decoder()
    parts = [data[i:j] for i, j in zip([0, *cuts], [*cuts, len(data)], strict=True)]
    assert [frame for part in parts for frame in opened(part, by)] == FRAMES


@settings(max_examples=300)
@given(st.integers(0, 8 * len(sealed()) - 1))
def test_one_altered_bit_is_found(bit: int) -> None:
    """G-5: in whichever frame; what came before it is delivered, and nothing after."""
    data = bytearray(sealed())
    data[bit // 8] ^= 1 << bit % 8
    by = decoder()
    by.feed(data)
    found: list[msgspec.Struct | None] = []
    with contextlib.suppress(WireError):
        while None not in found:  # where the length grew, the rest is awaited
            found.append(by.take())
    whole = [frame for frame in found if frame is not None]
    assert whole == FRAMES[: len(whole)] != FRAMES


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (sealed(b"another key"), "seal"),
        (sealed(epoch=2), "session 2"),
        (FrameEncoder(KEY, 3).encode(FRAMES[0]) * 2, "frame 0 where 1"),
        (sealed()[len(FrameEncoder(KEY, 3).encode(FRAMES[0])) :], "frame 1 where 0"),
        (FrameEncoder(KEY, 3).encode(Hello(protocol=1, instance="i", epoch=1, nonce=b"")), "none of the expected"),
        ((MAX_FRAME_BYTES + 1).to_bytes(4, "little") + bytes(80), "the cap"),
    ],
    ids=["key", "epoch", "doubled", "lost", "type", "size"],
)
def test_what_is_no_frame_of_this_session_is_refused_for_good(data: bytes, reason: str) -> None:
    by = decoder()
    with pytest.raises(WireError, match=reason):
        opened(data, by)
    with pytest.raises(WireError, match=reason):
        opened(sealed(), by)


@settings(max_examples=200)
@given(st.binary(max_size=300))
def test_a_stranger_s_bytes_open_nothing_and_are_not_kept(data: bytes) -> None:
    """G-8"""
    by = FrameDecoder(Hello, KEY, 0, cap=MAX_GREETING_BYTES)
    try:
        assert opened(data, by) == []
    except WireError:
        pass
    else:
        assert by.missing() > 0


def test_decoder_cap_bounds_the_first_frame_alone() -> None:
    small, large = Beat(), Beat([b"n" * 16] * 100)
    encoder = FrameEncoder(KEY, 3)
    assert opened(encoder.encode(small) + encoder.encode(large), FrameDecoder(ToDecode, KEY, 3, cap=100)) == [
        small,
        large,
    ]
    with pytest.raises(WireError, match="the cap is 100"):
        opened(FrameEncoder(KEY, 3).encode(large), FrameDecoder(ToDecode, KEY, 3, cap=100))


def test_sessions_and_directions_have_keys_of_their_own() -> None:
    keys = [Keys(KEY), Keys(KEY, b"a", b"b"), Keys(KEY, b"a", b"c"), Keys(b"", b"a", b"b")]
    assert len({key for pair in keys for key in (pair.to_decode, pair.to_prefill)}) == 8
