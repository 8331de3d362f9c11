"""C21: the bytes of every column that a model type declares arrive, by every transport.

An engine of the field knew a kind of state with one transport and sent nothing of it with another.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from transformers import AutoConfig

from forebay.config.engine_config import CacheTypes, DisaggregationMode
from forebay.families.config.model_config import config_from_folder
from forebay.models import needs_of
from forebay.pools.cache_spec import CacheSpec
from tests.models.tiny import BASE, CASE_OF, CASES
from tests.models.visual import shared_visual
from tests.transfer.pair import BACKENDS, half, transfer

FLOATS = CacheTypes(dtype="float32", kv_cache_dtype="float32", movable=True)
EIGHT_BITS = CacheTypes(dtype="float32", kv_cache_dtype="int8", movable=True)
PICTURED = "qwen4_exp-ngrams"  # keeps rotary positions of open blocks, which its text alone does not
# One type for each set of columns that types declare.
TYPES = (
    *("llama", "gpt_oss", "starcoder2", "deepseek_v3", "deepseek_v4", "lfm2", "lfm3"),
    *("falcon_h1", "jamba", "mamba", "mamba2", "kimi_linear", "glm5_next_text", "qwen4_exp_text"),
    PICTURED,
)


@functools.cache
def specs_of(model_type: str, folder: Path) -> Sequence[CacheSpec]:
    """What the layers of a type keep, by its configuration alone."""
    if model_type == PICTURED:
        return needs_of(config_from_folder(shared_visual(model_type).path)).cache_specs
    name, options = CASES[CASE_OF[model_type]]
    path = folder / model_type
    path.mkdir()
    AutoConfig.for_model(name, **{**BASE, **options}).to_json_file(path / "config.json", use_diff=False)
    return needs_of(config_from_folder(path)).cache_specs


def declared(specs: Sequence[CacheSpec]) -> frozenset[tuple[str, str, int, int]]:
    """The columns: kind, name, dimensions, tokens of an entry."""
    columns = itertools.chain.from_iterable(spec.columns(FLOATS) for spec in specs)
    return frozenset((column.per, column.name, len(column.shape), column.tokens) for column in columns)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("types")


def test_types_here_declare_every_set_of_columns_that_any_type_does(folder: Path) -> None:
    ours = {declared(specs_of(model_type, folder)) for model_type in TYPES}
    assert len(ours) == len(TYPES)
    assert [t for t in CASE_OF if declared(specs_of(t, folder)) not in ours] == []


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("model_type", TYPES)
def test_every_column_of_a_type_arrives_by_every_transport(model_type: str, backend: str, folder: Path) -> None:
    """Decode verifies drafts, prefill has none; every other transport is tried with 8-bit KV and its scales."""
    # V4's entries of several tokens have too few scales for one to go with each token: such a pair is refused.
    others = replace(FLOATS, kv_cache_dtype="bfloat16") if model_type == "deepseek_v4" else EIGHT_BITS
    specs, types = specs_of(model_type, folder), (FLOATS, others)[BACKENDS.index(backend) % 2]
    shape = {"page_size": 8, "backend": backend}  # whole entries of all
    prefill = half(DisaggregationMode.PREFILL, specs, types=types, **shape)
    decode = half(DisaggregationMode.DECODE, specs, types=replace(types, width=4), **shape)
    try:
        transfer(prefill, decode, 45, in_pages=1)
        transfer(prefill, decode, 33, start=16, seed=5)
    finally:
        decode.transfers.close()
        prefill.transfers.close()
