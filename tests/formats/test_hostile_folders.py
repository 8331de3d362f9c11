"""Whatever lies in a model's folder, reading it ends in one typed line, and takes no more than its kind can need."""

from __future__ import annotations

import json
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from forebay.base.errors import ModelError
from forebay.families.base.fields import Fields
from forebay.families.base.tensor_names import TensorNames
from forebay.families.checkpoint import open_checkpoint
from forebay.families.config.model_config import config_from_folder
from forebay.families.config.transformer import FULL, SLIDING
from forebay.families.small import small_config
from forebay.formats import files
from forebay.formats.safetensors import MAX_TENSORS, SafetensorsFile
from forebay.models import needs_of
from forebay.text.tokenizer import Tokenizer
from tests.formats.hostile import (
    CONTENTS,
    FILES,
    JSON_FILES,
    NOT_FILES,
    VOCAB_SIZE,
    read_all,
    replacements,
    sound_folder,
)

MIB = 1 << 20


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return sound_folder(tmp_path_factory.mktemp("model"))


@pytest.fixture
def folder(kept: Path, tmp_path: Path) -> Path:
    """A copy, by links."""
    for path in kept.iterdir():
        (tmp_path / path.name).symlink_to(path)
    return tmp_path


@pytest.fixture
def most_memory() -> Iterator[list[int]]:
    """Its one element is the most bytes that Python may have taken when the test ends."""
    limit = [256 * MIB]
    tracemalloc.start()
    yield limit
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < limit[0], f"{peak / MIB:.0f} MiB"


def test_the_folder_is_sound(folder):
    read_all(folder)


# Where what is strange stands in nobody's way: a template that writes nothing, a text, numbers that nobody reads.
_TEXTS = {"nothing", *CONTENTS} - {"not UTF-8", "UTF-16", "many values"}
UNREAD = {("chat_template.jinja", kind) for kind in _TEXTS}
UNREAD |= {(name, "no number") for name in ("special_tokens_map.json", "tokenizer_config.json")}


def read_or_refused(folder: Path, name: str, kind: str) -> None:
    if (name, kind) in UNREAD:
        read_all(folder)
    else:
        with pytest.raises(ModelError, match=f"{name}|chat template") as raised:
            read_all(folder)
        assert "\n" not in str(raised.value)
        assert len(str(raised.value)) < 1000


@pytest.mark.parametrize("kind", NOT_FILES)
@pytest.mark.parametrize("name", FILES)
def test_what_is_no_file_is_refused_by_its_name(name, kind, folder, most_memory):
    most_memory[0] = 160 * MIB
    (folder / name).unlink()
    NOT_FILES[kind](folder / name)
    read_or_refused(folder, name, kind)


@pytest.mark.long
@pytest.mark.parametrize("kind", CONTENTS)
@pytest.mark.parametrize("name", [*JSON_FILES, "chat_template.jinja"])
def test_what_cannot_be_read_is_refused_by_its_name(name, kind, folder, most_memory):
    (folder / name).unlink()
    (folder / name).write_bytes(CONTENTS[kind])
    read_or_refused(folder, name, kind)


@pytest.mark.parametrize("name", JSON_FILES)
def test_a_mark_of_byte_order_is_passed_over(name, folder):
    data = (folder / name).read_bytes()
    (folder / name).unlink()
    (folder / name).write_bytes(b"\xef\xbb\xbf" + data)
    read_all(folder)


def outcome(folder: Path, name: str, value: object) -> str:
    """What went wrong in reading the folder with this in a file; "" where it is refused or read."""
    (folder / name).write_text(json.dumps(value))
    try:
        read_all(folder)
    except ModelError as error:
        return "" if "\n" not in str(error) else f"{error!r} has several lines"
    except BaseException as error:
        return f"{type(error).__name__}: {str(error)[:200]}: {str(value)[-1000:]}"
    return ""


@pytest.mark.quick(2)
@pytest.mark.parametrize("name", JSON_FILES)
def test_wrong_types_anywhere_are_refused_or_do_not_matter(name, folder):
    sound = json.loads((folder / name).read_text())
    if name == "tokenizer.json":
        sound["model"] |= {"vocab": dict(list(sound["model"]["vocab"].items())[:3]), "merges": []}
    (folder / name).unlink()
    tried = [outcome(folder, name, value) for value in replacements(sound)]
    assert len(tried) > 30
    assert [wrong for wrong in tried if wrong] == []


def _with_vocabulary(folder: Path, vocab_size: int) -> None:
    config = {**json.loads((folder / "config.json").read_text()), "vocab_size": vocab_size}
    (folder / "config.json").unlink()
    (folder / "config.json").write_text(json.dumps(config))


def test_a_tokenizer_with_more_tokens_than_the_model_has_is_another_models(folder):
    _with_vocabulary(folder, VOCAB_SIZE - 2)
    with pytest.raises(ModelError, match=f"2 tokens beyond the model's vocabulary of {VOCAB_SIZE - 2}, such as"):
        Tokenizer.from_path(folder)


def test_added_token_beyond_the_vocabulary_needs_parsed_special_tokens(folder):
    """Gemma 3 1B has one."""
    layout = json.loads((folder / "tokenizer.json").read_text())
    layout["added_tokens"].append({**layout["added_tokens"][0], "id": VOCAB_SIZE, "content": "<image>"})
    (folder / "tokenizer.json").unlink()
    (folder / "tokenizer.json").write_text(json.dumps(layout))
    tokenizer = Tokenizer.from_path(folder)
    assert max(tokenizer.encode("hello <image>")) < VOCAB_SIZE
    assert max(tokenizer.encode("hello <image>", parse_special=True)) == VOCAB_SIZE


def test_a_token_id_without_bound_makes_no_table_of_that_size(folder, most_memory):
    most_memory[0] = 64 * MIB
    layout = json.loads((folder / "tokenizer.json").read_text())
    layout["model"]["vocab"]["far"] = 2**32 - 1
    (folder / "tokenizer.json").unlink()
    (folder / "tokenizer.json").write_text(json.dumps(layout))
    with pytest.raises(ModelError, match="token id 4294967295"):
        Tokenizer.from_path(folder)


@pytest.mark.long
def test_a_header_of_too_many_tensors_is_refused_before_it_is_parsed(tmp_path, most_memory, monkeypatch):
    monkeypatch.setattr(files.json, "loads", None)
    entry = b'"t%d":{"dtype":"U8","shape":[1],"data_offsets":[%d,%d]}'
    text = b"{" + b",".join(entry % (i, i, i + 1) for i in range(100_000)) + b"}"
    (tmp_path / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text)
    most_memory[0] = 40 * MIB
    with pytest.raises(ModelError, match=f"about 100000 tensors; at most {MAX_TENSORS}"):
        SafetensorsFile(tmp_path / "model.safetensors")


def test_the_tensors_of_all_files_are_counted(tmp_path, monkeypatch):
    monkeypatch.setattr("forebay.families.checkpoint.MAX_CHECKPOINT_TENSORS", 5)
    sound_folder(tmp_path)
    names = [f"model-{i}.safetensors" for i in range(3)]
    for name in names:
        save_file({f"{name}.{part}": np.zeros(2, np.float32) for part in "ab"}, tmp_path / name)
    index = {"weight_map": {name: name for name in names}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ModelError, match="more than 5 tensors in 3"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize("fields", [{"num_hidden_layers": 4096}, {"num_experts": 1 << 24}], ids=str)
def test_a_configuration_of_more_experts_than_can_be_is_refused(fields, tmp_path):
    config = small_config("qwen3_moe", hidden_size=32, num_layers=2, vocab_size=64)
    (tmp_path / "config.json").write_text(json.dumps({**config, "num_experts": 64, "num_experts_per_tok": 2, **fields}))
    with pytest.raises(ModelError, match="at most 131072 experts"):
        config_from_folder(tmp_path)


class _Name(str):
    """Counts how often a table is asked for it."""

    lookups = 0

    def __hash__(self) -> int:
        _Name.lookups += 1
        return super().__hash__()


def test_the_work_for_a_tensor_does_not_grow_with_their_number(tmp_path, monkeypatch):
    sound_folder(tmp_path)
    (tmp_path / "model.safetensors.index.json").unlink()
    save_file({f"t{i}": np.zeros(1, np.float32) for i in range(500)}, tmp_path / "model.safetensors")
    monkeypatch.setattr(TensorNames, "here", lambda self, name, num_layers: _Name(name))
    _Name.lookups = 0
    assert len(open_checkpoint(tmp_path).tensors) == 500
    assert _Name.lookups < 20 * 500


ROPES: dict[str, dict[str, Any]] = {
    "dynamic": {"factor": 2.0, "original_max_position_embeddings": 64},
    "llama3": {"factor": 2.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8},
    "yarn": {"factor": 2.0, "beta_fast": 32.0, "mscale": 1.0, "truncate": False, "original_max_position_embeddings": 8},
    "frequency_factors": {"factors": [1.0] * 16},
    "proportional": {"partial_rotary_factor": 0.5},
}
KIMI = {"full_attn_layers": [2], "kda_layers": [1], "head_dim": 8, "num_heads": 4, "short_conv_kernel_size": 3}
NESTED = [
    *(("llama", {"rope_parameters": {"rope_type": kind, "rope_theta": 1e4, **rope}}) for kind, rope in ROPES.items()),
    ("qwen3_next", {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5, "mrope_section": [1]}}),
    ("gemma3_text", {"rope_parameters": {kind: {"rope_type": "default"} for kind in (SLIDING, FULL)}}),
    ("kimi_linear", {"layer_types": None, "linear_attn_config": KIMI}),
    ("gpt_oss", {"quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": ["x"]}}),
    ("falcon_h1", {"mlp_multipliers": [1.0, 2.0], "ssm_multipliers": [1.0] * 5, "time_step_limit": [0.0, 1.0]}),
    ("llama", {"id2label": {"0": "x"}, "eos_token_id": [1, 2], "layer_types": [FULL] * 2}),
]


@pytest.mark.parametrize(("model_type", "nested"), NESTED, ids=lambda value: str(value)[:60])
def test_wrong_types_within_a_configuration_are_refused_or_read(model_type, nested, tmp_path):
    sound = {**small_config(model_type, hidden_size=64, num_layers=2, vocab_size=64), **nested}
    wrong = []
    for value in ({**sound, **changed} for changed in (nested, *replacements(nested))):
        (tmp_path / "config.json").write_text(json.dumps(value))
        try:
            needs_of(config_from_folder(tmp_path))
        except ModelError as error:
            wrong += [error] if "\n" in str(error) else []
        except Exception as error:
            wrong.append(f"{error!r}: {value}")
    assert wrong == []


@pytest.mark.parametrize("name", ["full_attn_idxs", "mlp_only_layers", "no_rope_layers", "attn_layer_indices"])
def test_lists_of_layers_are_no_longer_than_there_can_be_layers(name):
    with pytest.raises(ModelError, match="at most 4096"):
        Fields.of_file({name: [1] * 5000}, "there").ints(name, default=[])
