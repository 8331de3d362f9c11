"""Names of Gemma 3n in GGUF. llama.cpp takes for granted that layers from the twentieth on read the KV of others, and
that the first ten are sparse; here the metadata decide."""

from __future__ import annotations

from statistics import NormalDist
from typing import Any, Final

from forebay.base.errors import ModelError, brief
from forebay.families.base.architecture import TOP_NAMES, Architecture, Header, Tensors, within
from forebay.families.base.fields import is_number
from forebay.families.gemma3n_text.config import FAMILY, Gemma3nConfig
from forebay.families.parts.gguf.gemma import GEMMA_NAMES
from forebay.formats.gguf_tensor import GgufStored

_STACKS: Final = {"altup_proj": "model.altup_projections", "altup_unembd_proj": "model.altup_unembed_projections"}
_TOP_NAMES: Final = {
    **TOP_NAMES,
    **_STACKS,
    "per_layer_token_embd": "model.embed_tokens_per_layer",
    "per_layer_model_proj": "model.per_layer_model_projection",
    "per_layer_proj_norm": "model.per_layer_projection_norm",
}
_ALTUP: Final = {
    "altup_correct_coef": "correction_coefs",
    "altup_correct_scale": "correct_output_scale",
    "altup_predict_coef": "prediction_coefs",
    "altup_router": "modality_router",
    "altup_router_norm": "router_norm",
}
_LAUREL: Final = {"laurel_l": "linear_left", "laurel_r": "linear_right", "laurel_post_norm": "post_laurel_norm"}
_BLOCK_NAMES: Final = {
    **GEMMA_NAMES,
    **within("altup", _ALTUP),
    **within("laurel", _LAUREL),
    "inp_gate": "per_layer_input_gate",
    "proj": "per_layer_projection",
    "post_norm": "post_per_layer_input_norm",
}
_LOCAL_BASE: Final = 10_000.0  # of files that do not have it, as llama.cpp has it
_WIDTHS: Final = "feed_forward_length"
_DEVIATIONS: Final = "activation_sparsity_scale"


def _configure(header: Header) -> None:
    """Complete the configuration. Raises ModelError for lists that are not of all layers."""
    config, tensors = header.config, header.file.tensors
    laurel, per_layer = (tensors.get(name) for name in ("blk.0.laurel_l.weight", "per_layer_token_embd.weight"))
    config.update(
        layer_types=header.windowed(),
        rope_local_base_freq=header.own.get("rope.freq_base_swa", _LOCAL_BASE),
        activation_sparsity_pattern=[_share(header, value) for value in header.of_each(_DEVIATIONS)],
        intermediate_size=header.of_each(_WIDTHS),
        altup_correct_scale=header.has("altup_correct_scale.weight"),
        laurel_rank=None if laurel is None else laurel.shape[0],
        vocab_size_per_layer_input=None if per_layer is None else per_layer.shape[0],
    )


def _share(header: Header, deviations: Any) -> float:
    """Return the share of a normal distribution below so many standard deviations; 0 below any."""
    if not is_number(deviations) or deviations != deviations:
        raise header.wrong(f"{_DEVIATIONS} is {brief(deviations)} of a layer, not a number of standard deviations")
    return NormalDist().cdf(deviations)


def _without_unused(tensors: Tensors, config: Gemma3nConfig) -> Tensors:
    """Leave out keys and values of layers that read those of others."""
    return {name: tensor for name, tensor in tensors.items() if not FAMILY.unused(config, name)}


def _restore(tensors: Tensors) -> Tensors:
    """Take stacks of matrices apart; the scale of a layer has no suffix."""
    restored: Tensors = {}
    for name, tensor in tensors.items():
        stem = name.removesuffix(".weight")
        if stem in _STACKS.values():
            if len(tensor.shape) != 3 or not isinstance(tensor, GgufStored):
                raise ModelError(f"{name} has the shape {tensor.shape}, not one matrix for each further stream")
            count, rows, _ = tensor.shape
            for i in range(count):
                restored[f"{stem}.{i}.weight"] = tensor.part(i * rows, (i + 1) * rows)
        else:
            restored[stem if name.endswith(".correct_output_scale.weight") else name] = tensor
    return restored


ARCHITECTURES: Final = {
    "gemma3n": Architecture(
        block_names=_BLOCK_NAMES,
        top_names=_TOP_NAMES,
        keys={
            "altup.active_idx": "altup_active_idx",
            "altup.num_inputs": "altup_num_inputs",
            "attention.shared_kv_layers": "num_kv_shared_layers",
            "attention.sliding_window": "sliding_window",
            "embedding_length_per_layer_input": "hidden_size_per_layer_input",
            "final_logit_softcapping": "final_logit_softcapping",
        },
        checked=(
            "attention.sliding_window_pattern",
            "rope.freq_base_swa",
            _DEVIATIONS,
            _WIDTHS,
        ),
        configure=_configure,
        reorder=_without_unused,
        restore=_restore,
    ),
}
