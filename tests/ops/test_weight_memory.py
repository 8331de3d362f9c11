import weakref

import pytest

from forebay.ops import weight_memory
from forebay.ops.weight_memory import WeightMemory


@pytest.mark.parametrize("sizes", [(1, 63, 64, 65), (0, 4096, 0), (100 << 10, 3 << 20, 1)])
def test_pieces_begin_on_a_line_and_share_no_byte(sizes: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weight_memory, "_CHUNK", 1 << 20)
    memory = WeightMemory()
    taken = [memory.take(size) for size in sizes]
    for number, piece in enumerate(taken):
        piece.fill_(number)
    assert [len(piece) for piece in taken] == list(sizes)
    assert all(piece.data_ptr() % 64 == 0 for piece in taken)
    assert all(bool((piece == number).all()) for number, piece in enumerate(taken))


def test_chunk_is_given_back_when_nobody_has_a_piece_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    mapped: list[weakref.ref[object]] = []
    map_memory = weight_memory.mmap.mmap

    class Mapped(map_memory):  # type: ignore[misc, valid-type]
        def __init__(self, *args: object, **kwargs: object) -> None:
            mapped.append(weakref.ref(self))

    monkeypatch.setattr(weight_memory.mmap, "mmap", Mapped)
    monkeypatch.setattr(weight_memory, "_CHUNK", 4096)
    memory = WeightMemory()
    first, second = memory.take(4096), memory.take(4096)
    assert len(mapped) == 2
    del first
    assert [chunk() is None for chunk in mapped] == [True, False]
    del second, memory
    assert all(chunk() is None for chunk in mapped)
