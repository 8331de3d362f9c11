"""Rules of families with LayerNorm, capped scores or windows of their own; see `tests.mutants`."""

from __future__ import annotations

from typing import Final

from tests.mutants.mutant import Mutant

_PREFILL = "models/test_oracle.py::test_prefill_gives_the_logits_of_transformers"
_TYPES = "families/test_types_norms.py::"
_ATTENTION = "layers/attention.py"
_MIMO = "models/families/mimo_v2_flash.py"

NORMS: Final[tuple[Mutant, ...]] = (
    Mutant(
        "C28 scores are held within the cap of a model that has one",
        "layers/paged_attention.py",
        "            softcap=self._softcap,\n            ahead",
        "            softcap=0.0,\n            ahead",
        _PREFILL,
    ),
    Mutant(
        "C28 capped scores have their own scale again",
        "ops/reference/attention.py",
        "softcap * torch.tanh(scores / softcap)",
        "torch.tanh(scores / softcap)",
        "ops/test_attention.py::test_a_cap_holds_scores_and_not_sinks",
    ),
    Mutant(
        "C30 a score that is not finite is not capped to a number",
        "ops/reference/attention.py",
        "torch.where(scores.isfinite(), softcap * torch.tanh(scores / softcap), torch.nan)",
        "softcap * torch.tanh(scores / softcap)",
        "ops/test_attention.py::test_a_query_that_is_not_finite_gives_nan_under_a_cap_c30",
    ),
    Mutant(
        "C28 Gemma 2's scores are divided by the root of the configured size, not of a head's",
        "models/families/gemma2.py",
        "replace(plain, scale=scale, softcap=config.scores_cap)",
        "replace(plain, softcap=config.scores_cap)",
        _PREFILL,
    ),
    Mutant(
        "C28 Gemma 2's logits are held within their cap",
        "models/families/gemma2.py",
        "logits_cap=config.logits_cap",
        "logits_cap=0.0",
        _PREFILL,
    ),
    Mutant(
        "C28 every second layer of Gemma 2 has no window",
        "families/gemma2/config.py",
        "range(0, num_layers, 2)",
        "range(num_layers)",
        _TYPES + "test_defaults_are_those_of_transformers",
    ),
    Mutant(
        "C28 StableLM rotates a quarter of each head by default",
        "families/stablelm/config.py",
        "default=0.25",
        "default=0.5",
        _TYPES + "test_stablelm_rotates_a_quarter_of_each_head_by_default",
    ),
    Mutant(
        "C28 norms of heads are in the order of the heads",
        "layers/attention.py",
        'parts.stacked((f"{name.format(i)}.weight" for i in range(count)), dim, own)',
        'parts.stacked((f"{name.format(i)}.weight" for i in reversed(range(count))), dim, own)',
        _PREFILL,
    ),
    Mutant(
        "C28 each head of a StableLM in a GGUF file has its own norm",
        "families/stablelm/gguf.py",
        "[index : index + 1]",
        "[:1]",
        "models/test_gguf_norms.py::test_a_converted_model_gives_the_logits_of_the_original",
    ),
    Mutant(
        "C28 layer normalization subtracts the mean",
        "ops/reference/norms.py",
        "torch.nn.functional.layer_norm(x.float(), x.shape[-1:], eps=eps) * weight.float()",
        "torch.nn.functional.rms_norm(x.float(), x.shape[-1:], eps=eps) * weight.float()",
        "ops/test_rowwise.py::test_layer_norm_equals_the_reference",
    ),
    Mutant(
        "C28 StarCoder 2's norms have biases",
        "layers/norms.py",
        "    bias = None if spec.bias is None else load(spec.bias)",
        "    bias = None",
        _PREFILL,
    ),
    Mutant(
        "C28 StarCoder 2's MLP has no gate",
        "models/families/starcoder2.py",
        "activation=Activation.GELU_TANH_UNGATED",
        "activation=Activation.RELU2",
        _PREFILL,
    ),
    Mutant(
        "C28 Command R's rotary pairs are neighbours",
        "models/families/cohere.py",
        "interleaved=True",
        "interleaved=False",
        _PREFILL,
    ),
    Mutant(
        "C28 weights of heads' norms are in the order of the heads' entries",
        _ATTENTION,
        "partial(in_order, rows=_pair_rows(spec)) if spec.interleaved else unchanged",
        "unchanged",
        _PREFILL,
    ),
    Mutant(
        "C28 Command R's logits are multiplied by the scale, not divided",
        "models/families/parts/parallel.py",
        "logits_scale=config.logit_scale",
        "logits_scale=1 / config.logit_scale",
        _PREFILL,
    ),
    Mutant(
        "C28 Command A's layers without a window have no rotary embedding",
        "models/families/cohere2.py",
        "rotated = config.layer_types[layer] == SLIDING",
        "rotated = True",
        _PREFILL,
    ),
    Mutant(
        "C28 every fourth layer of Command A has no window",
        "families/cohere2/config.py",
        "if (i + 1) % pattern]",
        "]",
        _TYPES + "test_defaults_are_those_of_transformers",
    ),
    Mutant(
        "C28 a group of DeepSeek-V2's experts counts what its best does",
        "models/families/parts/latent.py",
        "summed=experts.summed",
        "summed=2",
        _PREFILL,
    ),
    Mutant(
        "C28 DeepSeek-V2's experts are weighted by their shares of all experts' scores",
        "models/families/parts/latent.py",
        "normalize=experts.normalize",
        "normalize=True",
        _PREFILL,
    ),
    Mutant(
        "C28 DeepSeek-V2's weights of experts are scaled",
        "models/families/parts/latent.py",
        "scale=experts.scale",
        "scale=1.0",
        _PREFILL,
    ),
    Mutant(
        "C28 MiMo's values are scaled",
        _ATTENTION,
        "*((rows, spec.value_scale) for rows in values.values())",
        "*((rows, 1.0) for rows in values.values())",
        _PREFILL,
    ),
    Mutant(
        "C28 MiMo has sinks in windows",
        _MIMO,
        "sinks=in_window",
        "sinks=False",
        _PREFILL,
    ),
    Mutant(
        "C28 MiMo has twice the KV heads in windows",
        _MIMO,
        "config.num_kv_heads * (2 if in_window else 1)",
        "config.num_kv_heads",
        _PREFILL,
    ),
    Mutant(
        "C28 MiMo rotates a part of each head",
        _MIMO,
        "RopeSpec(rope.dim, rope.theta, rope.scaling)",
        "RopeSpec(config.head_dim, rope.theta, rope.scaling)",
        _PREFILL,
    ),
    Mutant(
        "C28 a window of MiMo's files does not count the query itself",
        "families/mimo_v2_flash/config.py",
        'fields.size("sliding_window_size", most=1 << 23) + 1',
        'fields.size("sliding_window_size", most=1 << 23)',
        _TYPES + "test_a_published_mimo_file_is_read_as_transformers_reads_it",
    ),
    Mutant(
        "C28 values of windowed layers have a size of their own",
        "pools/cache_spec.py",
        "v=(heads, values))",
        "v=(heads, spec.head_dim))",
        _PREFILL,
    ),
)
