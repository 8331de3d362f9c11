"""No key of config.json that changes what transformers computes is ignored: equal, refused, or without effect there."""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from transformers import CONFIG_MAPPING

from forebay.backends import make_ops
from forebay.base.errors import ModelError
from forebay.families import TYPES
from forebay.families.config.model_config import config_from_folder
from forebay.ops import Ops
from tests.models.config_keys import COMMON, ROPES, ChangedKeys
from tests.models.tiny import CASE_OF, by_tier
from tests.together import together

# Of types whose own defaults cannot be built.
NEEDED = {
    "lfm2_moe": {"layer_types": ["conv"] * 32},
    "dots1": {"n_routed_experts": 128, "n_shared_experts": 2, "num_experts_per_tok": 6},
    "glm4_moe": {"head_dim": 128},
    "arcee": {"vocab_size": 128_005},  # which holds its token ids
    "qwen4_exp_text": {
        "indexer_n_heads": 32,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 256,
        "indexer_budget": 2048,
        "indexer_compress_ratio": 16,
    },
}
TOLERANCE = {"rtol": 0, "atol": 1.5e-4}


@pytest.fixture(scope="module")
def torch_ops() -> Ops:
    return make_ops("torch", 1)


@pytest.fixture
def quiet() -> Iterator[None]:
    """Of what transformers says to the strange configurations."""
    import transformers

    verbosity = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity(transformers.logging.CRITICAL)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
    transformers.logging.set_verbosity(verbosity)


def gives_other_results(keys: ChangedKeys, name: str, value: Any) -> bool:
    return give_other_results(keys, {name: value})


def give_other_results(keys: ChangedKeys, changes: dict[str, Any]) -> bool:
    fields = {**keys.fields, **changes}
    try:
        ours = keys.ours(fields)
    except ModelError:
        return False
    theirs = keys.theirs(fields)
    return theirs is not None and not torch.allclose(ours, theirs[: len(ours)], **TOLERANCE)


def takes_short_factors(model_type: str, name: str, value: Any) -> bool:
    """Whether it is a LongRoPE of a phimoe, of which transformers 5.24 takes the short factors at any length."""
    is_rope = model_type == "phimoe" and name == "rope_parameters" and isinstance(value, dict)
    return is_rope and value.get("short_factor") != value.get("long_factor")


@pytest.mark.quick(1)
@pytest.mark.parametrize("model_type", by_tier(TYPES))
def test_no_key_that_changes_results_is_ignored(model_type, tmp_path, torch_ops, quiet):
    """With one value for each, and a null for flags."""
    keys = ChangedKeys(model_type, tmp_path, torch_ops)
    changes = [
        (name, value)
        for name, values in keys.changes()
        for value in values[: 2 if isinstance(keys.fields.get(name), bool) else 1]
        if name not in COMMON
    ]
    assert len(changes) > 30
    assert [change for change in changes if gives_other_results(keys, *change)] == []


@pytest.mark.quick(1)
@pytest.mark.parametrize("model_type", by_tier(name for name in TYPES if "mamba" not in name))
def test_no_part_of_a_rope_is_ignored(model_type, tmp_path, torch_ops, quiet):
    keys = ChangedKeys(model_type, tmp_path, torch_ops)
    assert [changes for changes in ROPES if give_other_results(keys, changes)] == []


@pytest.mark.slow
@pytest.mark.parametrize("model_type", TYPES)
def test_no_value_of_any_key_gives_other_results(model_type, tmp_path, torch_ops, quiet):
    keys = ChangedKeys(model_type, tmp_path, torch_ops)
    changes = [(name, value) for name, values in keys.changes() for value in values]
    changes = [change for change in changes if not takes_short_factors(model_type, *change)]
    assert [change for change in changes if gives_other_results(keys, *change)] == []


def test_what_is_wrong_is_found(tmp_path, torch_ops, quiet, monkeypatch):
    """With a reader that asks for nothing but shapes, as it were."""
    keys = ChangedKeys("llama", tmp_path, torch_ops)
    base = keys.ours(keys.fields)
    monkeypatch.setattr(keys, "ours", lambda fields: base)
    changes = [
        ("rms_norm_eps", 0.5),
        ("is_causal", False),
        ("rope_parameters", {"rope_theta": 700.0}),
        ("use_cache", False),
    ]
    assert [gives_other_results(keys, *change) for change in changes] == [True, True, True, False]


def test_every_type_has_a_case():
    without = sorted(set(TYPES) - set(CASE_OF))
    assert not without, f"add a tiny configuration of {', '.join(without)} to CASES in tests/models/tiny.py"
    assert set(TYPES) == set(CASE_OF)


# What published files say where transformers' own default describes no model.
_NO_MODEL_OF_DEFAULTS = {
    "deepseek_v2": {"num_experts_per_tok": 6},
    "starcoder2": {"bos_token_id": 0, "eos_token_id": 0},  # tokens that its vocabulary does not have
}


@together("model_type", TYPES)
def test_what_transformers_writes_by_itself_is_all_known(model_type, tmp_path):
    """So that the warning of unknown options means something."""
    fields = {**CONFIG_MAPPING[model_type]().to_dict(), **NEEDED.get(model_type, {})}
    fields |= _NO_MODEL_OF_DEFAULTS.get(model_type, {})
    (tmp_path / "config.json").write_text(json.dumps(fields, default=str))
    assert config_from_folder(tmp_path).unknown_options == ()
