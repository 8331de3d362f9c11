import pytest

from forebay.ops import weight_memory
from forebay.ops.weight_memory import WeightMemory


@pytest.mark.parametrize("sizes", [(1, 63, 64, 65), (0, 4096, 0), (100 << 10, 3 << 20, 1)])
def test_pieces_begin_on_a_line_and_share_no_byte(sizes: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weight_memory, "CHUNK_BYTES", 1 << 20)
    memory = WeightMemory()
    taken = [memory.take(size) for size in sizes]
    for number, piece in enumerate(taken):
        piece.fill_(number)
    assert [len(piece) for piece in taken] == list(sizes)
    assert all(piece.data_ptr() % 64 == 0 for piece in taken)
    assert all(bool((piece == number).all()) for number, piece in enumerate(taken))
