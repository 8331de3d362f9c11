"""What becomes of a configuration whose field has a value that may mean "off": 0, -1 or null."""

from __future__ import annotations

import json
import math
import os
import tempfile
from enum import Enum
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from forebay import models
from forebay.backends import make_ops
from forebay.base.errors import ModelError
from forebay.families.checkpoint import open_checkpoint
from tests.models.drive import Driver
from tests.models.tiny import random_ids, shared_tiny, stable_topk

IDS: Final = random_ids(24, seed=2)
OFF: Final = (0, -1, None)
_TOLERANCE: Final = 1e-3
# Of text, files and training: logits have nothing to do with them.
_OTHERS: Final = frozenset(
    {"architectures", "attention_dropout", "attn_implementation", "dtype", "id2label", "initializer_range", "label2id"}
    | {"model_type", "output_attentions", "output_hidden_states", "output_router_logits", "return_dict", "torch_dtype"}
    | {"router_aux_loss_coef", "transformers_version", "use_cache", "problem_type", "is_encoder_decoder"}
)


class Fate(Enum):
    """What Forebay does: refuses, has the logits of transformers, or others. Or transformers refuses."""

    REFUSED = "refused"
    EQUAL = "equal"
    OTHER = "other"
    NO_ORACLE = "no oracle"


def fields_of(case: str) -> list[str]:
    """Return the fields of a case that may change logits."""
    fields = json.loads((shared_tiny(case).path / "config.json").read_text())
    return sorted(name for name in fields.keys() - _OTHERS if not name.endswith(("token_id", "dropout", "_loss_coef")))


def fate_of(case: str, name: str, value: Any) -> tuple[Fate, float]:
    """Return what becomes of the checkpoint of a case with another value in a field, and the difference of logits."""
    source = shared_tiny(case).path
    fields = json.loads((source / "config.json").read_text())
    if isinstance(fields[name], float) and value is not None:
        value = float(value)
    with tempfile.TemporaryDirectory() as text, torch.no_grad(), stable_topk():
        folder = Path(text)
        for path in source.iterdir():
            os.symlink(path, folder / path.name)
        (folder / "config.json").unlink()
        (folder / "config.json").write_text(json.dumps({**fields, name: value}))
        try:
            model = models.load(open_checkpoint(folder), ops=make_ops("torch", 1), dtype=torch.float32)
        except ModelError:
            return Fate.REFUSED, 0.0
        try:
            oracle = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
            oracle.eval()  # type: ignore[no-untyped-call]
            expected: Tensor = oracle(torch.tensor([IDS]), use_cache=False).logits[0]
        except Exception:  # whatever its reason
            return Fate.NO_ORACLE, 0.0
        assert isinstance(model, models.Model)
        (found,) = Driver(model).step([(1, IDS)])
    if not expected.isfinite().all():
        return Fate.NO_ORACLE, math.inf
    difference = float((found - expected).abs().max())
    return Fate.EQUAL if difference <= _TOLERANCE else Fate.OTHER, difference
