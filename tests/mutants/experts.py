"""Rules of families with experts; see `tests.mutants`."""

from __future__ import annotations

from typing import Final

from tests.mutants.mutant import Mutant

_ORACLE: Final = "models/test_oracle.py::test_prefill_gives_the_logits_of_transformers"
_GGUF: Final = "models/test_gguf_experts.py::test_gguf_of_a_converted_model_gives_the_logits_of_the_original"
_DRAFT: Final = "models/test_draft_head.py::test_a_draft_head_guesses_what_its_layers_do_in_transformers"
_RULES: Final = "families/test_types_experts.py::test_parts_that_transformers_builds_by_rules_are_built_by_the_same"

EXPERTS: Final[tuple[Mutant, ...]] = (
    Mutant(
        "C28 what is added to experts' scores for the choice is not in their weights",
        "ops/reference/experts.py",
        "weights = _weights(scores, ids, gating)\n        return ids, weights if",
        "weights = _weights(chosen_by, ids, gating)\n        return ids, weights if",
        _GGUF,
    ),
    Mutant(
        "C28 experts' weights are divided by no less than the least sum",
        "ops/reference/experts.py",
        ".clamp(min=gating.least_sum)",
        "",
        "ops/test_routing.py::test_gating_equals_the_reference",
    ),
    Mutant(
        "C28 the least sum of ERNIE's experts is the configuration's",
        "models/families/ernie4_5_moe.py",
        "least_sum=config.norm_min,",
        "least_sum=0.0,",
        _ORACLE,
    ),
    Mutant(
        "C28 experts' weights are scaled",
        "models/families/parts/latent.py",
        "scale=experts.scale,",
        "scale=1.0,",
        _GGUF,
    ),
    Mutant(
        "C28 the shared expert of Qwen's mixtures has a gate",
        "models/families/parts/shared_experts.py",
        'second=ScalarGateSpec(gate=f"{name}.shared_expert_gate", part=shared, hidden_size=config.hidden_size),',
        "second=shared,",
        _GGUF,
    ),
    Mutant(
        "C28 Mixtral's weights of experts sum to 1",
        "models/families/mixtral.py",
        "normalize=True",
        "normalize=False",
        _GGUF,
    ),
    Mutant(
        "C28 OLMoE's weights of experts sum to 1 only where the file says so",
        "models/families/olmoe.py",
        'f"{layer_name(layer)}.mlp", config.norm_topk_prob',
        'f"{layer_name(layer)}.mlp", True',
        _GGUF,
    ),
    Mutant(
        "C28 GLM rotates part of each head",
        "models/families/glm4_moe.py",
        "rope=replace(rope_spec(config), dim=config.rotary_dim)",
        "rope=rope_spec(config)",
        _GGUF,
    ),
    Mutant(
        "C28 MiniMax rotates part of each head",
        "models/families/minimax_m2.py",
        "rope=replace(rope_spec(config), dim=config.rotary_dim)",
        "rope=rope_spec(config)",
        _GGUF,
    ),
    Mutant(
        "C28 ERNIE's rotary pairs are neighbours",
        "models/families/ernie4_5_moe.py",
        "interleaved=True",
        "interleaved=False",
        _GGUF,
    ),
    Mutant(
        "C28 every second layer of Qwen2's mixtures has a window",
        "families/qwen2_moe/config.py",
        "default=28, least=0)), 2)",
        "default=28, least=0)), 1)",
        _RULES,
    ),
    Mutant(
        "C28 full layers of dots.llm1 have no window",
        "families/dots1/config.py",
        'range(fields.size("max_window_layers", default=62, least=0), num_layers)',
        "range(num_layers)",
        _RULES,
    ),
    Mutant(
        "C28 the first layers of GLM's mixtures have an MLP",
        "families/glm4_moe/config.py",
        "dense=1),",
        "dense=0),",
        _RULES,
    ),
    Mutant(
        "C28 a GGUF file of Llama's architecture with experts is Mixtral's",
        "families/llama/gguf.py",
        'if config.get("num_experts"):',
        'if config.get("num_experts") is False:',
        _GGUF,
    ),
    Mutant(
        "C28 blocks of a GGUF file that draft are none of the model's layers",
        "families/parts/gguf/latent.py",
        'header.config["num_hidden_layers"] = blocks - drafting',
        'header.config["num_hidden_layers"] = blocks',
        "models/test_gguf_experts.py::test_gguf_blocks_that_draft_are_left_out",
    ),
    Mutant(
        "C28 the last norm of Hy3's draft head is its final_layernorm",
        "families/hy_v3/config.py",
        '"model.layers.{0}.shared_head.norm."',
        '"model.layers.{0}.final_layernorm."',
        f"{_DRAFT}[torch-hy_v3]",
    ),
    Mutant(
        "C28 a SparseMixer weighs the second expert without the first",
        "ops/reference/experts.py",
        'others = logits.scatter(1, ids[:, :1], float("-inf"))',
        "others = logits",
        _ORACLE + "[torch-phimoe]",
    ),
    Mutant(
        "C28 a SparseMixer leaves out experts that are far below the chosen one",
        "ops/reference/experts.py",
        "(top - logits) / torch.maximum(logits.abs(), top) > 2 * jitter",
        "(top - logits) / torch.maximum(logits.abs(), top) > 4 * jitter",
        _ORACLE + "[torch-phimoe]",
    ),
    Mutant(
        "C28 Phi-3.5-MoE's logits have a bias",
        "models/decoder.py",
        "bias=spec.head_bias, min_bits",
        "bias=False, min_bits",
        _ORACLE + "[torch-phimoe]",
    ),
    Mutant(
        "C28 a LongRoPE has its long factors above the length that it was trained on",
        "families/base/rope.py",
        'return num_positions > float(scaling["original_max_position_embeddings"])',
        'return num_positions >= float(scaling["original_max_position_embeddings"])',
        "layers/test_rotary.py::test_longrope_takes_the_angles_of_the_table_s_length",
    ),
    Mutant(
        "C28 a LongRoPE's amplitude grows with the ratio of the lengths",
        "families/base/rope.py",
        "math.log(factor) / math.log(length)",
        "math.log(factor)",
        _ORACLE + "[torch-phi3-longrope-partial]",
    ),
)
