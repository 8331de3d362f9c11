"""Qwen 4 in GGUF. Draft blocks, which follow the model's own, are left out. The table of n-grams stays in the file;
`forebay.ops.reference.tables` has the types that can be read by row."""

from __future__ import annotations

from itertools import accumulate
from typing import Any, Final

import numpy as np

from forebay.base.errors import ModelError, brief
from forebay.families.base.architecture import TOP_NAMES, Architecture, Header, Tensors, within
from forebay.families.base.fields import Fields
from forebay.families.config.transformer import FULL
from forebay.families.parts.gguf import gated_delta
from forebay.families.parts.gguf.latent import DRAFT, leave_out_draft, without_draft
from forebay.families.parts.gguf.shared_experts import EXPERT_NAMES
from forebay.families.qwen4_exp_text.config import Qwen4Config
from forebay.families.qwen4_exp_text.ngrams import ngrams
from forebay.formats.stored_tensor import less_one, one_below_the_other

_TABLE: Final = "per_layer_token_embd"
_TABLES: Final = f"model.{_TABLE}"
_LAYERS: Final = "ple.layers"
_END: Final = "ple.eos_token_id"
_ROW: Final = "embedding_length_per_layer_input"
_RATIOS: Final = "attention.compress_ratios"
_LONGEST_MULTIPLE: Final = 24  # bits
_GATES: Final = {
    "norm": "hc_norm",
    "down": "input_mix_weight_down",
    "up": "input_mix_weight_up",
    "inject": "block_inject_weight",
}
_MIXER: Final = ("norm", "down", "up")
_NGRAM_NAMES: Final = {
    "ple_key": "key_proj",
    "ple_value": "value_proj",
    "ple_norm_key": "norm_key",
    "ple_norm_query": "norm_query",
    "ple_norm_conv": "norm_conv",
    "ple_conv1d": "conv1d",
}
_INDEXER: Final = {
    "indexer.q_proj": "q_proj",
    "indexer.k_proj": "k_proj",
    "indexer.q_norm": "q_layernorm",
    "indexer.k_norm": "k_layernorm",
}


def _gates(stored: str, ours: str) -> dict[str, str]:
    return within(ours, {f"{stored}_{kind}": name for kind, name in _GATES.items()})


def _configure(header: Header) -> None:
    leave_out_draft(header)
    gated_delta.configure_delta(header)
    header.config.update(
        indexer_compress_ratio=_ratio(header),
        indexer_kv_heads=1,
        output_gate_type="sigmoid",  # the format has no key for it, and llama.cpp takes it for granted
        split_ngram_parts=1,
        **(_ngrams(header) if _LAYERS in header.own else {"ple_layer_ids": []}),
    )
    if _LAYERS in header.own:
        _check_hashes(header)


def _ratio(header: Header) -> Any:
    """Return the tokens of a pool. Raises ModelError if layers with attention differ, or others have pools."""
    given, kinds = header.own.get(_RATIOS), header.config["layer_types"]
    ratios = np.asarray(given).tolist()
    if not isinstance(ratios, list) or len(ratios) < len(kinds):
        raise header.wrong(f"{_RATIOS} is {brief(given)}, not a number for each layer")
    pairs = list(zip(ratios, kinds, strict=False))
    found = {ratio for ratio, kind in pairs if kind == FULL}
    if len(found) != 1 or any(ratio for ratio, kind in pairs if kind != FULL):
        raise header.wrong(f"{_RATIOS} is {brief(ratios)}: not one number of layers with attention, and 0 of others")
    return found.pop()


def _ngrams(header: Header) -> dict[str, Any]:
    """Return the fields of the one table of n-grams. Raises ModelError for more of them."""
    layers = np.asarray(header.own[_LAYERS]).tolist()
    if not isinstance(layers, list) or len(layers) != 1 or type(layers[0]) is not int:
        raise header.wrong(f"{_LAYERS} is {brief(layers)}, not the one layer with a table of n-grams")
    longest, heads, width, end = (
        header.whole(f"ple.{key}", least=least)
        for key, least in (("ngram_size", 2), ("heads_per_ngram", 1), ("conv_kernel", 1), ("eos_token_id", 0))
    )
    sizes = _numbers(header, "head_vocab_sizes", (longest - 1) * heads)
    return {
        "ple_layer_ids": [layers[0] + 1],
        "ngram_size": longest,
        "heads_per_ngram": heads,
        "ple_conv_kernel_size": width,
        "ple_embed_dim": header.whole(_ROW) * len(sizes),
        "eos_token_id": [end, *header.config["eos_token_id"]],
        "ngram_vocab_size_base": sizes[0],
        "make_ngram_vocab_size_divisible_by": _multiple(header, sum(sizes)),
    }


def _numbers(header: Header, key: str, count: int) -> list[int]:
    """Return the metadata's `ple.` list of so many whole numbers. Raises ModelError for anything else."""
    given = header.own.get(f"ple.{key}")
    numbers = np.asarray(given).tolist()
    if not isinstance(numbers, list) or len(numbers) != count or any(type(number) is not int for number in numbers):
        raise header.wrong(f"ple.{key} is {brief(given)}, not {count} whole numbers")
    return numbers


def _multiple(header: Header, used: int) -> int:
    """Return what the number of the table's rows, of which so many are used, was rounded up to a multiple of. Raises
    ModelError for other numbers of rows."""
    table = header.file.tensors.get(f"{_TABLE}.weight")
    rows = 0 if table is None else table.shape[0]
    for multiple in (1 << bits for bits in range(_LONGEST_MULTIPLE)):
        if 0 <= rows - used < multiple and rows % multiple == 0:
            return multiple
    raise header.wrong(f"{_TABLE}.weight has {rows} rows, not {used}, rounded up")


def _check_hashes(header: Header) -> None:
    """Raise ModelError unless the factors and sizes of hashes are those that follow from the configuration."""
    config = header.config
    hidden_size, vocab_size = config.get("hidden_size"), config.get("vocab_size")
    if type(hidden_size) is not int or type(vocab_size) is not int or vocab_size < 1:
        raise header.wrong(f"embedding_length and vocab_size are {brief(hidden_size)} and {brief(vocab_size)}")
    fields = Fields.of_file(config, str(header.file.path))
    found = ngrams(fields, num_layers=len(header.layers), vocab_size=vocab_size, hidden_size=hidden_size)
    assert found is not None, "a table of n-grams"
    sizes = found.sizes[0]
    offsets = tuple(accumulate(sizes, initial=0))[:-1]
    expected = {"layer_multipliers": found.multipliers[0], "head_vocab_sizes": sizes, "head_offsets": offsets}
    for key, numbers in expected.items():
        if _numbers(header, key, len(numbers)) != list(numbers):
            raise header.wrong(f"ple.{key} is {brief(header.own[f'ple.{key}'])}, not {brief(numbers)} as of Qwen 4")


def _reorder(tensors: Tensors, config: Qwen4Config) -> Tensors:
    """Undo the order of value heads; the table is of the one layer that has n-grams."""
    reordered = gated_delta.reorder(without_draft(tensors, config), config)
    table = reordered.pop(f"{_TABLES}.weight", None)
    if table is not None and config.ngrams is not None:
        layer = config.ngrams.layers[0]
        reordered[f"model.layers.{layer}.ple.ple_embedding.ngram_embedding.shard_0.weight"] = table
    elif table is not None:
        raise ModelError(f"{_TABLE}.weight is a table of n-grams, and {_LAYERS} names no layer that has any")
    return reordered


def _restore(tensors: Tensors) -> Tensors:
    """Undo what is done to delta rules and norms; an indexer's queries and keys have one layer."""
    restored: Tensors = {}
    for name, tensor in gated_delta.restore(tensors).items():
        if name.endswith(".indexer.q_proj.weight"):
            keys = tensors.get(name.replace(".q_proj.", ".k_proj."))
            if keys is None:
                raise ModelError(f"{name}: there is no layer of keys")
            restored[name.replace(".q_proj.", ".index_qk_proj.")] = one_below_the_other(tensor, keys)
        elif not name.endswith(".indexer.k_proj.weight"):
            restored[name] = less_one(tensor) if ".ple.norm_" in name else tensor
    return restored


ARCHITECTURES: Final = {
    "qwen4exp": Architecture(
        block_names={
            **EXPERT_NAMES,
            **_gates("hc_attn", "attn_hyper_connection"),
            **_gates("hc_ffn", "mlp_hyper_connection"),
            **within("self_attn.indexer", _INDEXER),
            **within("ple", _NGRAM_NAMES),
            **DRAFT,
            **{f"nextn.hc_head_{kind}": f"hyper_connection_mixer.{_GATES[kind]}" for kind in _MIXER},
        },
        top_names={
            **TOP_NAMES,
            **{f"output_hc_{kind}": f"model.hyper_connection_mixer.{_GATES[kind]}" for kind in _MIXER},
            _TABLE: _TABLES,
        },
        keys={
            **gated_delta.KEYS,
            "attention.indexer.head_count": "indexer_n_heads",
            "attention.indexer.key_length": "indexer_head_dim",
            "attention.indexer.top_k": "indexer_budget",
            "hyper_connection.count": "hc_count",
            "hyper_connection.low_rank": "hc_lowrank",
        },
        checked=(
            *gated_delta.CHECKED,
            _RATIOS,
            _LAYERS,
            _END,
            _ROW,
            "ple.ngram_size",
            "ple.heads_per_ngram",
            "ple.conv_kernel",
            "ple.layer_multipliers",
            "ple.head_offsets",
            "ple.head_vocab_sizes",
            "ple.image_token_id",
        ),
        configure=_configure,
        reorder=_reorder,
        restore=_restore,
    ),
}
