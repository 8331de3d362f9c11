"""What `config.json` says in the tests of this folder, beside what they are about."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Final

import pytest

GIVEN: Final[dict[str, Any]] = {
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": 1,
    "eos_token_id": 2,
}

HOSTILE: Final[tuple[object, ...]] = (
    *(None, True, -1, 0, 3, 2**70, 1.5, float("nan"), float("inf"), 1e300),
    *("x", [], [[]], {}, {"a": 1}, [None] * 8),
)
"""Values that a field may not expect."""

PARTS: Final = 3
IN_PARTS: Final = pytest.mark.parametrize(
    "part", [0, *(pytest.param(i, marks=pytest.mark.slow) for i in range(1, PARTS))]
)
"""The short tier tries a third of the values in each field, neighbouring fields other thirds; the long tier all."""


def tried(names: Iterable[str], values: Sequence[Any], part: int) -> Iterator[tuple[str, Any]]:
    """Yield each field with each of its values of this part."""
    for number, name in enumerate(sorted(names)):
        for value in values[(number + part) % PARTS :: PARTS]:
            yield name, value
