"""Text and image encoders on the GPU's kernels give what transformers gives, whatever else is in the step (C28).

Without a GPU a few run in Triton's interpreter.
"""

from __future__ import annotations

from typing import Any, Final

import pytest
import torch

from forebay import models
from forebay.families.checkpoint import open_checkpoint
from forebay.models.encoder import load_encoder
from forebay.ops import Ops
from tests.models.outers import OUTERS, make_outer
from tests.models.test_encoder import encode, expected, tiles
from tests.models.text_encoders import CASES, compute, shared_encoder, some_ids
from tests.models.visual import oracle_features, shared_visual
from tests.ops.triton_device import ALL_ROWS, HAS_GPU, INTERPRETER_ALONE, Choice, Choices, TritonOps, attention
from tests.runtime.elementwise import SameEverywhere

LENGTHS: Final = (1, 19, 2, 7)
# Attention to all tokens and to near ones, ropes, fewer heads of keys, and a bias of each distance.
TEXTS: Final = ("bert", "modernbert", "mpnet", "gemma3_text")
IMAGES: Final = ("mistral3", "gemma4", "qwen2_5_vl", "smolvlm")
ALL_IMAGES: Final = (
    "smolvlm",
    "idefics3",
    "lfm2_vl",
    "mistral3",
    "gemma3",
    "gemma4",
    "qwen2_vl",
    "qwen2_5_vl",
    "qwen3_vl",
)


def runs(interpreted: tuple[str, ...], names: tuple[str, ...]) -> list[Any]:
    return [
        *(pytest.param("cpu", name, marks=[INTERPRETER_ALONE, pytest.mark.slow]) for name in interpreted),
        *(pytest.param("cuda", name, marks=pytest.mark.gpu) for name in names),
    ]


@pytest.fixture(autouse=True)
def _few_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    """For a machine that runs one program at a time."""
    if not HAS_GPU:
        monkeypatch.setattr(attention, "_PROGRAMS", 8)


def ops_of(device: str) -> Ops:
    """Products of dense layers are Forebay's own, too: those of the library are compared at a start."""
    return TritonOps(device, 1, Choices(lambda weight: Choice(ALL_ROWS, "tried")))


@pytest.mark.filterwarnings("ignore:invalid value")  # NumPy's, of NaN in rows that nobody reads
@pytest.mark.filterwarnings("ignore:overflow encountered")  # of a sigmoid that is 0
@pytest.mark.parametrize(("device", "case"), runs(TEXTS, tuple(CASES)))
def test_c28_text_encoder_on_triton_gives_hidden_states_of_transformers_and_the_same_bits_beside_other_texts(
    device: str, case: str
) -> None:
    oracle = shared_encoder(case)
    model = models.load(open_checkpoint(oracle.path), ops=ops_of(device), dtype=torch.float32, device=device)
    texts = [some_ids(length, seed, max(1, oracle.num_types)) for seed, length in enumerate(LENGTHS)]
    with SameEverywhere():
        together = compute(model, texts, device=device)
        alone = compute(model, [texts[1]], device=device)[0]
    for ids, hidden in zip(texts, together, strict=True):
        torch.testing.assert_close(hidden.cpu(), oracle.hidden(ids), rtol=0, atol=1e-4)
    assert torch.equal(alone, together[1])


@pytest.mark.parametrize(("device", "name"), runs(IMAGES, ALL_IMAGES))
def test_image_encoder_on_triton_gives_the_encodings_of_transformers(device: str, name: str, tmp_path: Any) -> None:
    if name.startswith("qwen"):
        model = shared_visual(name)
        pixels = torch.randint(0, 256, (3 * model.token_edge, 2 * model.token_edge, 3)).byte()
        (wanted,), folder = oracle_features(model.oracle, [pixels.numpy()]), model.path
    else:
        oracle, folder = make_outer(OUTERS[name]), tmp_path
        oracle.save_pretrained(folder)
        (pixels,) = tiles(oracle, 1)
        (wanted,) = expected(oracle, [pixels])
    how: dict[str, Any] = {"ops": ops_of(device), "dtype": torch.float32, "device": device}
    encoder = load_encoder(open_checkpoint(folder), progress=lambda done, total: None, **how)
    torch.testing.assert_close(encode(encoder, pixels.to(device)).cpu(), wanted, rtol=0, atol=1e-4)
