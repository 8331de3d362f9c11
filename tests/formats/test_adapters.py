"""Adapters in PEFT's format: what is read, and what is rejected in one line."""

from __future__ import annotations

import json
import random
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from forebay.base.errors import ModelError
from forebay.formats.adapters import WEIGHTS_NAME, read_adapter
from forebay.formats.safetensors import ADAPTER_NAME
from tests.formats.adapter_files import LAYERS, matrices, read, write_adapter
from tests.formats.hostile import CONTENTS, NOT_FILES, replacements

Q, DOWN, Q1 = LAYERS
PREFIX = "base_model.model."
MIB = 1 << 20


def scales(folder: Path) -> dict[str, float]:
    return {layer: pair.scale for layer, pair in read(folder).pairs.items()}


def refused(folder: Path, match: str, max_rank: int = 16) -> None:
    """Reading it ends in one line that says this."""
    with pytest.raises(ModelError, match=match) as raised:
        read(folder, max_rank)
    assert str(folder) in str(raised.value)
    assert "\n" not in str(raised.value)
    assert len(str(raised.value)) < 1000


def test_adapter_is_read_with_its_factor_in_b(tmp_path: Path) -> None:
    tensors = matrices(dict.fromkeys(LAYERS, 4))
    adapter = read(write_adapter(tmp_path))
    assert (adapter.base, adapter.rank, adapter.pairs.keys()) == ("some/base", 4, LAYERS.keys())
    assert adapter.num_bytes == sum(values.nbytes for values in tensors.values())
    for layer, pair in adapter.pairs.items():
        assert np.array_equal(pair.inputs(), tensors[f"{PREFIX}{layer}.lora_A.weight"])
        assert np.array_equal(pair.outputs(), tensors[f"{PREFIX}{layer}.lora_B.weight"] * np.float32(1.5))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_entries_of_two_bytes_are_widened_without_loss(dtype: torch.dtype, tmp_path: Path) -> None:
    tensors = {name: torch.from_numpy(values).to(dtype) for name, values in matrices({Q: 4}).items()}
    save_file(tensors, write_adapter(tmp_path, lora_alpha=4) / WEIGHTS_NAME)
    (pair,) = read(tmp_path).pairs.values()
    for part, values in (("A", pair.inputs()), ("B", pair.outputs())):
        assert torch.equal(torch.from_numpy(values), tensors[f"{PREFIX}{Q}.lora_{part}.weight"].float())


def test_factor_of_rank_stabilized_adapters_is_divided_by_the_root(tmp_path: Path) -> None:
    assert scales(write_adapter(tmp_path, use_rslora=True)) == dict.fromkeys(LAYERS, 3.0)
    del_fields = {"r": ..., "lora_alpha": ...}
    tensors = matrices(dict.fromkeys(LAYERS, 8))
    assert scales(write_adapter(tmp_path, tensors, **del_fields)) == dict.fromkeys(LAYERS, 1.0)


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        ({"q_proj": 8}, (8, 6, 8)),
        ({"layers.1.self_attn.q_proj": 8, "q_proj": 2.5}, (2.5, 6, 8)),
        ({"q_proj": 2.5, "layers.1.self_attn.q_proj": 8}, (2.5, 6, 2.5)),  # the first that fits
        ({Q: 8, "^model.layers.1.self_attn.q_proj": 2}, (8, 6, 2)),
        ({"^q_proj": 8, "proj": 8, "_proj": 8}, (6, 6, 6)),  # from a dot on, or the whole name
        ({r"model\.layers\.0\.mlp\.down_proj$": 8}, (6, 8, 6)),
    ],
)
def test_patterns_give_alphas_to_layers_as_in_peft(
    pattern: dict[str, float], expected: tuple[float, ...], tmp_path: Path
) -> None:
    found = scales(write_adapter(tmp_path, alpha_pattern=pattern))
    assert [found[layer] for layer in LAYERS] == [alpha / 4 for alpha in expected]


def test_pattern_gives_ranks_which_divide_alphas(tmp_path: Path) -> None:
    write_adapter(tmp_path, matrices({Q: 2, DOWN: 3, Q1: 4}), rank_pattern={Q: 2, "down_proj": 3})
    assert scales(tmp_path) == {Q: 3.0, DOWN: 2.0, Q1: 1.5}
    assert read(tmp_path).rank == 4


def test_names_are_those_of_the_family(tmp_path: Path) -> None:
    outer = {name.replace("model.layers", "model.language_model.layers"): v for name, v in matrices({Q: 4}).items()}

    def rename(name: str) -> str:
        return name.replace(".language_model", "")

    write_adapter(tmp_path, outer, alpha_pattern={"model.language_model.layers.0.self_attn.q_proj": 8})
    adapter = read_adapter(tmp_path, layers=LAYERS, rename=rename, max_rank=4)
    assert {layer: pair.scale for layer, pair in adapter.pairs.items()} == {Q: 2.0}
    both = {**outer, **matrices({Q: 4})}
    write_adapter(tmp_path, both)
    with pytest.raises(ModelError, match="are the same layer of this model"):
        read_adapter(tmp_path, layers=LAYERS, rename=rename, max_rank=4)


def test_digest_is_that_of_tensors_factors_and_layers(tmp_path: Path) -> None:
    digest = read(write_adapter(tmp_path)).digest
    assert len(digest) == 64
    same = {"base_model_name_or_path": "another", "target_modules": "all-linear", "lora_dropout": 0.5}
    assert read(write_adapter(tmp_path, **same)).digest == digest
    assert read(write_adapter(tmp_path, lora_alpha=7)).digest != digest
    assert read(write_adapter(tmp_path, lora_alpha=1e30)).digest != digest, "the largest one"
    assert read(write_adapter(tmp_path, matrices(dict.fromkeys(LAYERS, 4), seed=1))).digest != digest
    tensors = matrices(dict.fromkeys(LAYERS, 4))
    swapped = {name.replace("layers.0.self", "layers.9.self"): values for name, values in tensors.items()}
    swapped = {name.replace("layers.1", "layers.0").replace("layers.9", "layers.1"): v for name, v in swapped.items()}
    assert read(write_adapter(tmp_path, swapped)).digest != digest


UNSUPPORTED: dict[str, Any] = {
    "fan_in_fan_out": True,
    "use_dora": True,
    "use_qalora": True,
    "lora_bias": True,
    "bias": "lora_only",
    "modules_to_save": ["lm_head"],
    "target_parameters": ["mlp.experts.gate_up_proj"],
    "trainable_token_indices": [1, 2],
    "alora_invocation_tokens": [5],
    "layer_replication": [[0, 4], [2, 5]],
    "peft_type": "ADALORA",
    "megatron_config": {"a": 1},
    "use_bdlora": {"a": 1},
    "init_lora_weights": "pissa_niter_4",
    "a_field_of_tomorrow": 0,
}


@pytest.mark.parametrize("name", UNSUPPORTED)
def test_fields_that_are_not_supported_are_rejected_by_name(name: str, tmp_path: Path) -> None:
    refused(write_adapter(tmp_path, **{name: UNSUPPORTED[name]}), name)


def test_fields_that_are_off_do_not_matter(tmp_path: Path) -> None:
    off = {name: None for name in UNSUPPORTED if name != "peft_type"}
    read(write_adapter(tmp_path, **off))
    read(write_adapter(tmp_path, fan_in_fan_out=False, modules_to_save=[], init_lora_weights="gaussian"))


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "no type": ({"peft_type": ...}, "peft_type is 'None'"),
    "rank": ({"r": 0}, "r is 0: a rank of 1 to 65536"),
    "rank that is true": ({"r": True}, "r is True"),
    "alpha": ({"lora_alpha": "8"}, "lora_alpha is '8': a number"),
    "alpha that is no number": ({"lora_alpha": float("nan")}, "lora_alpha is nan"),
    "alpha that is too large": ({"lora_alpha": 1.001e30}, r"lora_alpha is 1\.001e\+30: a number"),
    "alpha that is too small": ({"lora_alpha": -(10**400)}, "lora_alpha is -1000"),
    "flag": ({"use_rslora": 1}, "use_rslora is 1: true or false"),
    "pattern": ({"rank_pattern": ["q_proj"]}, "rank_pattern is .*: an object"),
    "rank of a layer": ({"rank_pattern": {"q_proj": 1.5}}, "rank_pattern, 'q_proj', is 1.5: a rank"),
    "expression": ({"alpha_pattern": {r".*\.(q|k)_proj": 4}}, "alpha_pattern has the key .*: only names of layers"),
}


@pytest.mark.parametrize("case", WRONG)
def test_fields_of_other_types_are_rejected_by_name(case: str, tmp_path: Path) -> None:
    fields, match = WRONG[case]
    refused(write_adapter(tmp_path, **fields), match)


def test_expressions_that_take_years_to_match_are_not_matched(tmp_path: Path) -> None:
    refused(write_adapter(tmp_path, alpha_pattern={"(a+)+" * 20 + "b": 4}), "only names of layers")


def _changed(change: dict[str, Any]) -> dict[str, Any]:
    return {name: v for name, v in {**matrices(dict.fromkeys(LAYERS, 4)), **change}.items() if v is not None}


A, B = (f"{PREFIX}{Q}.lora_{part}.weight" for part in "AB")
TENSORS: dict[str, tuple[dict[str, Any], str]] = {
    "A alone": ({B: None}, f"'{Q}' has lora_A and no lora_B"),
    "B alone": ({A: None}, f"'{Q}' has lora_B and no lora_A"),
    "another width": ({A: np.zeros((4, 7), np.float32)}, r"has the shape \[4, 7\]; .* rank 4 it would be \[4, 6\]"),
    "another height": ({B: np.zeros((9, 4), np.float32)}, r"has the shape \[9, 4\]; .* it would be \[8, 4\]"),
    "another rank": ({A: np.zeros((3, 6), np.float32)}, r"has the shape \[3, 6\]; .* it would be \[4, 6\]"),
    "another number of dimensions": ({A: np.zeros(24, np.float32)}, r"has the shape \[24\]"),
    "no layer": (
        {A.replace(".0.", ".7."): np.zeros(1), B.replace(".0.", ".7."): np.zeros(1)},
        "'model.layers.7.*no layer",
    ),
    "no adapter": ({f"{PREFIX}{Q}.weight": np.zeros(1)}, r"is not the A or B of a layer, base_model.model.<layer>"),
    "an embedding": ({f"{PREFIX}model.embed_tokens.lora_embedding_A": np.zeros(1)}, "lora_embedding_A' is not"),
    "another prefix": ({f"{Q}.lora_A.weight": np.zeros(1)}, "is not the A or B"),
    "whole numbers": ({A: np.zeros((4, 6), np.int32)}, "has dtype I32; supported are F32"),
    "a NaN": (
        {A: np.where(np.eye(4, 6), np.nan, 1).astype(np.float32)},
        "lora_A.weight' has an entry that is infinite or no number",
    ),
    "an infinity": ({B: np.full((8, 4), np.inf, np.float16)}, "lora_B.weight' has an entry that is infinite"),
    "too large with its factor": ({B: np.full((8, 4), 3e38, np.float32)}, "lora_B.weight' has an entry that is inf"),
    "nothing": (dict.fromkeys(matrices(dict.fromkeys(LAYERS, 4))), "it has no tensors"),
}


@pytest.mark.parametrize("case", TENSORS)
def test_tensors_that_do_not_fit_are_rejected_by_name(case: str, tmp_path: Path) -> None:
    change, match = TENSORS[case]
    refused(write_adapter(tmp_path, _changed(change)), match)


def test_rank_above_the_largest_is_rejected_with_what_to_do(tmp_path: Path) -> None:
    read(write_adapter(tmp_path), max_rank=4)
    refused(tmp_path, "has rank 4: start with --max-lora-rank 4 or more", max_rank=3)


def test_no_tensor_is_read_before_all_are_checked(tmp_path: Path) -> None:
    """The last layer's shape is wrong, and the first one's entries are."""
    wrong = {A: np.full((4, 6), np.nan, np.float32), f"{PREFIX}{Q1}.lora_B.weight": np.zeros((1, 4), np.float32)}
    refused(write_adapter(tmp_path, _changed(wrong)), r"has the shape \[1, 4\]")


def test_pickled_adapter_is_never_opened(tmp_path: Path) -> None:
    (write_adapter(tmp_path) / WEIGHTS_NAME).unlink()
    refused(tmp_path, "adapter_model.safetensors: cannot be read")
    (tmp_path / "adapter_model.bin").symlink_to("/dev/zero")
    refused(tmp_path, r"pickled \(adapter_model.bin\), which can run code and is never opened")
    write_adapter(tmp_path)
    read(tmp_path)


def test_what_is_no_folder_is_rejected(tmp_path: Path) -> None:
    refused(tmp_path / "nowhere", "adapter_config.json: cannot be read")
    file = tmp_path / "file"
    file.write_text("{}")
    refused(file, "cannot be read")


# -- hostile folders --------------------------------------------------------------------------------------------------


@pytest.fixture
def most_memory() -> Iterator[list[int]]:
    """Its one element is the most bytes that Python may have taken when the test ends."""
    limit = [160 * MIB]
    tracemalloc.start()
    yield limit
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < limit[0], f"{peak / MIB:.0f} MiB"


@pytest.mark.parametrize("kind", NOT_FILES)
@pytest.mark.parametrize("name", [ADAPTER_NAME, WEIGHTS_NAME])
def test_what_is_no_file_is_refused_by_its_name(name: str, kind: str, tmp_path: Path, most_memory: list[int]) -> None:
    (write_adapter(tmp_path) / name).unlink()
    NOT_FILES[kind](tmp_path / name)
    refused(tmp_path, name)


@pytest.mark.parametrize("kind", CONTENTS)
@pytest.mark.parametrize("name", [ADAPTER_NAME, WEIGHTS_NAME])
def test_what_cannot_be_read_is_refused_by_its_name(
    name: str, kind: str, tmp_path: Path, most_memory: list[int]
) -> None:
    (write_adapter(tmp_path) / name).write_bytes(CONTENTS[kind])
    refused(tmp_path, name)


def outcome(folder: Path) -> str:
    """What went wrong in reading an adapter; "" where it is refused in one line, or read."""
    try:
        read(folder)
    except ModelError as error:
        return "" if "\n" not in str(error) and len(str(error)) < 1000 else f"{error!r} has several lines"
    except Exception as error:
        return f"{type(error).__name__}: {str(error)[:200]}"
    return ""


def test_wrong_types_anywhere_in_the_configuration_are_refused_or_do_not_matter(tmp_path: Path) -> None:
    write_adapter(tmp_path, rank_pattern={"q_proj": 4}, alpha_pattern={"q_proj": 4})
    sound, wrong = json.loads((tmp_path / ADAPTER_NAME).read_text()), []
    tried = list(replacements(sound))
    for value in tried:
        (tmp_path / ADAPTER_NAME).write_text(json.dumps(value))
        wrong += [f"{outcome(tmp_path)}: {value}"] if outcome(tmp_path) else []
    assert len(tried) > 100
    assert wrong == []


@pytest.mark.parametrize("count", [40, pytest.param(200, marks=pytest.mark.slow)])
def test_mutations_of_a_sound_adapter_are_refused_or_read(count: int, tmp_path: Path, most_memory: list[int]) -> None:
    """Bytes changed, cut out, doubled, and the file cut off, in either file."""
    rng, wrong, refusals = random.Random(count), [], 0
    sound = {name: (write_adapter(tmp_path) / name).read_bytes() for name in (ADAPTER_NAME, WEIGHTS_NAME)}
    for seed in range(count):
        name = rng.choice([*sound])
        # Of the tensors' file mostly the header.
        data, end = bytearray(sound[name]), rng.choice([len(sound[name]), min(700, len(sound[name]))])
        for _ in range(rng.randint(1, 4)):
            at, size = rng.randrange(end), rng.randint(1, 8)
            kind = rng.choice(["change", "cut", "double", "end"])
            if kind == "change":
                data[at : at + size] = rng.randbytes(size)
            elif kind == "cut":
                del data[at : at + size]
            elif kind == "double":
                data[at:at] = data[at : at + size]
            else:
                del data[max(at, 1) :]
            end = max(1, min(end, len(data)))
            data = data or bytearray(b"{")
        for other, content in sound.items():
            (tmp_path / other).write_bytes(data if other == name else content)
        if found := outcome(tmp_path):
            wrong.append(f"{seed} {name}: {found}")
        refusals += bool(_error(tmp_path))
    assert wrong == []
    assert refusals > count // 2


def _error(folder: Path) -> str:
    try:
        read(folder)
    except ModelError as error:
        return str(error)
    return ""
