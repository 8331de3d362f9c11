"""Rules of dense families; see `tests.mutants`."""

from __future__ import annotations

from typing import Final

from tests.mutants.mutant import Mutant

_GGUF: Final = "models/test_gguf_dense.py::test_a_converted_model_gives_the_logits_of_the_original"
_PREFILL: Final = "models/test_oracle.py::test_prefill_gives_the_logits_of_transformers"
_READ: Final = "families/test_types_dense.py::"

DENSE: Final[tuple[Mutant, ...]] = (
    Mutant(
        "C28 OLMo 3 scales the rope of full attention alone",
        "models/families/olmo3.py",
        "*config.ropes[config.layer_types[layer]]",
        '*config.ropes["full_attention"]',
        _GGUF,
    ),
    Mutant(
        "C28 a file's `rope_theta` is of OLMo 3's full attention, as in transformers",
        "families/olmo3/config.py",
        "SLIDING: _THETA}",
        'SLIDING: fields.get("rope_theta", _THETA)}',
        _READ + "test_olmo3_scales_the_rope_of_full_attention_alone",
    ),
    Mutant(
        "C28 Granite's logits are divided by their constant",
        "models/families/parts/multipliers.py",
        "logits_scale=1 / multipliers.logits",
        "logits_scale=multipliers.logits",
        _GGUF,
    ),
    Mutant(
        "C28 Granite's constant scales what each part adds",
        "models/families/parts/multipliers.py",
        "multiplier=multipliers.residual",
        "multiplier=1.0",
        _GGUF,
    ),
    Mutant(
        "C28 Granite's constant stands in scores for the root of a head's size",
        "models/families/parts/multipliers.py",
        "scale=multipliers.attention",
        "scale=0.0",
        _GGUF,
    ),
    Mutant(
        "C28 Granite's constant scales embeddings",
        "models/families/parts/multipliers.py",
        "embedding_scale=multipliers.embedding",
        "embedding_scale=1.0",
        _GGUF,
    ),
    Mutant(
        "C28 EXAONE 4 does not rotate full attention of a model with windows",
        "models/families/parts/windows.py",
        "not config.sliding_window or config.layer_types[layer] == SLIDING",
        "True",
        _GGUF,
    ),
    Mutant(
        "C28 EXAONE 4 rotates full attention of a model without windows",
        "models/families/parts/windows.py",
        "not config.sliding_window or config.layer_types[layer] == SLIDING",
        "config.layer_types[layer] == SLIDING",
        _GGUF,
    ),
    Mutant(
        "C28 the last layer of EXAONE 4's pattern has no window",
        "families/parts/windows.py",
        "(i + 1) % pattern",
        "i % pattern",
        _READ + "test_exaone_rotates_full_attention_only_where_there_is_no_window",
    ),
    Mutant(
        "C28 Hunyuan rotates queries and keys before it norms them",
        "models/families/parts/rotated_first.py",
        "rope_first=True",
        "rope_first=False",
        _GGUF,
    ),
    Mutant(
        "C28 what is rotated first is not rotated again",
        "layers/attention.py",
        "rope=spec.rope if self._cos_sin is None else None",
        "rope=spec.rope",
        _GGUF,
    ),
    Mutant(
        "C28 Hunyuan's alpha grows with a power that depends on the size of heads",
        "families/parts/rotated_first.py",
        "alpha ** (head_dim / (head_dim - 2))",
        "alpha",
        _GGUF,
    ),
    Mutant(
        "C28 a Granite file has rotary pairs as neighbours",
        "families/granite/gguf.py",
        "interleaved_rope=True",
        "interleaved_rope=False",
        _GGUF,
    ),
    Mutant(
        "C28 a GGUF file's amplitude of YaRN is not the default one",
        "families/architecture.py",
        '"rope.scaling.yarn_attn_factor": "attention_factor"',
        '"rope.scaling.yarn_attn_factor": "mscale"',
        _GGUF,
    ),
    Mutant(
        "C28 each fourth layer has no window where a GGUF file names no pattern",
        "families/architecture.py",
        "[(layer + 1) % pattern != 0 for layer in self.layers]",
        "[layer % pattern != 0 for layer in self.layers]",
        "models/test_gguf_dense.py::test_windows_follow_the_file_s_pattern",
    ),
    Mutant(
        "C33 blocks of a GGUF file that draft are not among the model's layers",
        "families/exaone_moe/gguf.py",
        "int(layer[1]) >= config.num_layers",
        "int(layer[1]) > config.num_layers",
        "models/test_gguf_dense.py::test_blocks_that_draft_are_left_out",
    ),
    Mutant(
        "C28 a layer of Granite Swash with a base of 0 has no rotary embedding",
        "models/families/parts/scaled_windows.py",
        "config.rope_scaling) if theta else None",
        "config.rope_scaling) if theta else RopeSpec(config.head_dim, config.rope_theta, config.rope_scaling)",
        _PREFILL + "[torch-granite_swa-ropes-biases-untied]",
    ),
    Mutant(
        "C28 each layer of Granite Swash has its own base of the rotary embedding",
        "models/families/parts/scaled_windows.py",
        "RopeSpec(config.head_dim, theta, config.rope_scaling)",
        "RopeSpec(config.head_dim, config.rope_theta, config.rope_scaling)",
        _PREFILL + "[torch-granite_swa-ropes-biases-untied]",
    ),
    Mutant(
        "C28 Mistral 4's queries are scaled by their position",
        "layers/latent_attention.py",
        "query_scale=spec.query_scale",
        "query_scale=None",
        _PREFILL + "[torch-mistral4]",
    ),
    Mutant(
        "C28 the norms behind Muse Glimmer's parts have an epsilon of their own",
        "layers/blocks.py",
        "after_eps = eps if self.after_eps is None else self.after_eps",
        "after_eps = eps",
        _PREFILL + "[torch-muse_glimmer_text-listed-tied]",
    ),
    Mutant(
        "C28 Muse Glimmer's embeddings are normed",
        "models/decoder.py",
        "if self._embedding_norm is not None:",
        "if self._embedding_norm is not None and self._spec.tied:",
        _PREFILL + "[torch-muse_glimmer_text]",
    ),
    Mutant(
        "C28 Muse Glimmer's normed queries are multiplied by their factor",
        "models/families/muse_glimmer_text.py",
        "scale=config.query_factor * config.head_dim**-0.5",
        "scale=config.head_dim**-0.5",
        _PREFILL + "[torch-muse_glimmer_text]",
    ),
    Mutant(
        "C28 EXAONE 3's published files call an MLP's gate c_fc_0",
        "families/exaone/config.py",
        '(r"\\.mlp\\.c_fc_0\\.", ".mlp.gate_proj."),\n        (r"\\.mlp\\.c_fc_1\\.", ".mlp.up_proj."),',
        '(r"\\.mlp\\.c_fc_1\\.", ".mlp.gate_proj."),\n        (r"\\.mlp\\.c_fc_0\\.", ".mlp.up_proj."),',
        _PREFILL + "[torch-exaone]",
    ),
    Mutant(
        "C28 Apertus' activation grows with the square of what is above 0",
        "ops/reference/elementwise.py",
        "torch.where(values > 0, alpha_p * values * values, below)",
        "torch.where(values > 0, alpha_p * values, below)",
        _PREFILL + "[torch-apertus]",
    ),
    Mutant(
        "C28 Apertus' alphas are stored before their softplus",
        "layers/mlp.py",
        "alpha_n=beta + _softplus(alpha_n)",
        "alpha_n=beta + alpha_n",
        _PREFILL + "[torch-apertus]",
    ),
    Mutant(
        "C28 the alphas of Apertus' GGUF files are in the order of the file's names",
        "families/apertus/gguf.py",
        "for name in Xielu._fields]",
        "for name in reversed(Xielu._fields)]",
        _GGUF + "[torch-apertus]",
    ),
)
