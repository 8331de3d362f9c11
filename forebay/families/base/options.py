"""Treatment of the fields of a config.json that no reader has asked for: harmless, refused, or unknown."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, Final

from forebay.base.errors import ModelError, brief
from forebay.families.base.fields import Fields

# Fields that would change what is computed, with the values that change nothing. Absent and null never do.
_NEUTRAL: Final[dict[str, tuple[Any, ...]]] = {
    "attention_multiplier": (),
    "attn_logit_softcapping": (),
    "auto_map": (),
    "clip_qkv": (),
    "embedding_multiplier": (1,),
    "final_logit_softcapping": (),
    "hidden_act": ("silu",),
    "is_encoder_decoder": (False,),
    "logit_scale": (1,),
    "logits_scaling": (1,),
    "per_layer_config": (),
    "pretraining_tp": (1,),
    "rescale_prenorm_residual": (False,),
    "residual_multiplier": (1,),
    "use_bidirectional_attention": (False,),
    "use_mrope": (False,),
    "use_qk_norm": (False,),
}

# About training, files, token ids, tasks, or what a caller of transformers is given: nothing that is computed here.
_HARMLESS: Final = frozenset({
    "_attn_implementation_autoset", "_name_or_path", "architectures", "attention_dropout", "attn_implementation",
    "aux_loss_alpha", "chunk_size_feed_forward", "decoder_start_token_id", "dtype", "embd_pdrop", "ep_size",
    "finetuning_task", "hidden_dropout", "hidden_dropout_prob", "id2label", "initializer_range", "label2id",
    "model_type", "mtp_loss_scaling_factor", "name_or_path", "num_labels", "num_logits_to_keep", "num_mtp_layers",
    "num_nextn_predict_layers", "output_attentions", "output_hidden_states", "output_router_logits", "pad_token_id",
    "prefix", "problem_type", "resid_pdrop", "return_dict", "router_aux_loss_coef", "router_jitter_noise",
    "sep_token_id", "seq_aux", "task_specific_params", "tie_encoder_decoder", "tie_last_hidden_states",
    "tokenizer_class", "torch_dtype", "torchscript", "transformers_version", "unsloth_fixed", "unsloth_version",
    "use_bfloat16", "use_cache", "use_return_dict",
})  # fmt: skip

# How to generate, as files of before generation_config.json have it: a request says these itself.
_GENERATION: Final = frozenset({
    "diversity_penalty", "do_sample", "early_stopping", "encoder_no_repeat_ngram_size", "length_penalty", "max_length",
    "num_beam_groups", "num_return_sequences", "output_scores", "remove_invalid_values", "repetition_penalty",
    "return_dict_in_generate", "temperature", "top_k", "top_p",
})  # fmt: skip

# The others: they change answers, unless they have one of these values.
_CHANGES_ANSWERS: Final[dict[str, tuple[Any, ...]]] = {
    "bad_words_ids": ([],),
    "begin_suppress_tokens": ([],),
    "epsilon_cutoff": (0,),
    "eta_cutoff": (0,),
    "exponential_decay_length_penalty": (),
    "forced_bos_token_id": (),
    "forced_eos_token_id": (),
    "guidance_scale": (1,),
    "min_length": (0,),
    "min_new_tokens": (0,),
    "no_repeat_ngram_size": (0,),
    "num_beams": (1,),
    "sequence_bias": ([], {}),
    "stop_strings": ([],),
    "suppress_tokens": ([],),
    "typical_p": (1,),
    "watermarking_config": (),
}


def unused_of_generation(config: Fields, generation: Fields | None) -> tuple[str, ...]:
    """Return the names of fields about generation that would change answers, in config.json and generation_config.json:
    they are not applied to requests."""
    unused = [name for name in _CHANGES_ANSWERS if _changes_answers(name, config)]
    if generation is not None:
        unused += [f"generation_config.{name}" for name in _CHANGES_ANSWERS if _changes_answers(name, generation)]
    return tuple(unused)


def _changes_answers(name: str, fields: Fields) -> bool:
    value = fields.get(name)
    return value is not None and value not in _CHANGES_ANSWERS[name]


def unknown_options(fields: Fields, harmless: Collection[str]) -> tuple[str, ...]:
    """Return the unknown names among the fields that no reader used.

    Raises ModelError for the first known field that asks for another computation than the one implemented.
    """
    if not fields.flag("is_causal", default=True):
        raise fields.wrong("is_causal", "true: tokens are served as they come")
    left = fields.unread - _HARMLESS - _GENERATION - _CHANGES_ANSWERS.keys() - set(harmless)
    for name in sorted(left & _NEUTRAL.keys()):
        value = fields.raw[name]
        # Python takes true for a 1.
        if not any(
            value == neutral and isinstance(value, bool) == isinstance(neutral, bool) for neutral in _NEUTRAL[name]
        ):
            advice = "remote code is never run" if name == "auto_map" else "the results would be wrong"
            raise ModelError(f"{fields.where}: {name} {brief(value)} is not supported: {advice}")
    return tuple(sorted(left - _NEUTRAL.keys()))
