"""config.json of models with a language model inside: where its fields are, what is assumed, what is refused."""

from __future__ import annotations

from typing import Any

import pytest

from forebay.base.errors import ModelError
from forebay.families import TEXT_ENCODERS, TYPES
from forebay.families.config.model_config import ModelConfig, config_of
from forebay.families.config.outer import OTHER_NAMES, OUTERS
from forebay.families.small import small_config
from forebay.formats.layer_packing import IgnoredModules

VISION = {"hidden_size": 32, "image_size": 64}
OF_QWEN = {"vision_config": {"hidden_size": 32, "num_heads": 2}}
OWN: dict[str, dict[str, Any]] = {
    "gemma3": {
        "vision_config": {**VISION, "num_attention_heads": 4},
        "boi_token_id": 4,
        "eoi_token_id": 5,
        "mm_tokens_per_image": 4,
    },
    "gemma4": {"vision_config": {"hidden_size": 32}, "boi_token_id": 4, "eoi_token_id": 5},
    "gemma4_unified": {"vision_config": {}, "boi_token_id": 4, "eoi_token_id": 5},
    "kimi_k25": {"vision_config": {"hidden_size": 32, "num_attention_heads": 4}, "projection_hidden_size": 32},
    "lfm2_vl": {"vision_config": {"hidden_size": 32, "num_attention_heads": 4}},
    "mistral3": {"vision_config": {"hidden_size": 32, "num_attention_heads": 4}},
    "muse_glimmer": {"vision_config": {"hidden_size": 32, "num_attention_heads": 4}, "out_hidden_size": 128},
    "qwen2_5_vl": OF_QWEN,
    "qwen2_vl": {"vision_config": {"embed_dim": 32, "num_heads": 2}},
    "qwen3_5": OF_QWEN,
    "qwen3_5_moe": OF_QWEN,
    "qwen3_vl": OF_QWEN,
    "qwen3_vl_moe": OF_QWEN,
    "qwen4_exp": OF_QWEN,
}


def inner(model_type: str) -> dict[str, Any]:
    fields = small_config(model_type, hidden_size=64, num_layers=4, vocab_size=64)
    return {name: value for name, value in fields.items() if name not in ("model_type", "tie_word_embeddings")}


def type_inside(outer: str) -> str:
    """Our type of the language model where the file names none."""
    entry = OUTERS[outer]
    return entry.types.get(entry.text_type, entry.text_type)


def fields_of(outer: str, **more: Any) -> dict[str, Any]:
    text = {**inner(type_inside(outer)), "model_type": OUTERS[outer].text_type}
    own = OWN.get(outer, {})
    return {"model_type": outer, "vision_config": VISION, "image_token_id": 3, "text_config": text, **own, **more}


def with_text(outer: str, **changes: Any) -> ModelConfig:
    fields = fields_of(outer)
    return config_of({**fields, "text_config": {**fields["text_config"], **changes}})


@pytest.mark.parametrize("outer", OUTERS)
def test_language_model_inside_is_read(outer: str) -> None:
    config = config_of(fields_of(outer))
    assert config.model_type == type_inside(outer)
    assert config.outer is OUTERS[outer]
    assert (config.hidden_size, config.num_layers) == (64, 4)
    assert config.unknown_options == ()


def test_table_names_types_that_are_served() -> None:
    for outer in OUTERS:
        assert type_inside(outer) in TYPES
    assert set(OTHER_NAMES.values()) <= {*TYPES, *TEXT_ENCODERS}
    assert not OUTERS.keys() & {*TYPES, *OTHER_NAMES}


@pytest.mark.parametrize("outer", OUTERS)
def test_text_config_without_its_type_has_the_usual_one(outer: str) -> None:
    fields = fields_of(outer)
    del fields["text_config"]["model_type"]
    assert config_of(fields).model_type == type_inside(outer)


@pytest.mark.parametrize("name", [name for name, ours in OTHER_NAMES.items() if ours in TYPES])
def test_other_name_of_a_type_is_the_same_type_alone_and_inside(name: str) -> None:
    ours = OTHER_NAMES[name]
    assert config_of({**inner(ours), "model_type": name, "auto_map": {"AutoConfig": "x.Y"}}).model_type == ours
    assert with_text("kimi_k25", model_type=name).model_type == ours


@pytest.mark.parametrize("text", [None, [], 3, "x"])
@pytest.mark.parametrize("outer", [name for name, entry in OUTERS.items() if not entry.flat])
def test_missing_text_config_is_refused_with_one_line(outer: str, text: Any) -> None:
    with pytest.raises(ModelError, match=f"text_config is .*; a {outer} model has its sizes there") as caught:
        config_of({"model_type": outer, "text_config": text})
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("outer", OUTERS)
def test_text_config_that_is_nested_twice_is_refused(outer: str) -> None:
    with pytest.raises(ModelError, match="language model of its own inside"):
        config_of({"model_type": outer, "text_config": fields_of(outer)})
    with pytest.raises(ModelError, match="language model of its own inside"):
        with_text(outer, text_config={})


@pytest.mark.parametrize("named", ["bert", "gemma4_assistant", "eagle_head", "", 3, [], {}, True])
@pytest.mark.parametrize("outer", OUTERS)
def test_text_config_of_a_type_that_is_not_served_is_refused(outer: str, named: Any) -> None:
    with pytest.raises(ModelError, match="text_config is of type") as caught:
        with_text(outer, model_type=named)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("outer", [name for name, entry in OUTERS.items() if entry.types])
def test_text_config_of_another_family_is_refused(outer: str) -> None:
    with pytest.raises(ModelError, match=f"text_config is of type 'llama', not {OUTERS[outer].text_type}"):
        with_text(outer, model_type="llama")


@pytest.mark.parametrize("outer", OUTERS)
@pytest.mark.parametrize("value", [None, True, -1, 0, 2**70, float("nan"), "x", [], [[]], {}, {"a": 1}])
def test_any_value_in_any_field_is_refused_or_gives_a_configuration(outer: str, value: Any) -> None:
    for name in fields_of(outer)["text_config"]:
        try:
            config = with_text(outer, **{name: value})
        except ModelError:
            continue
        assert config.num_layers > 0


# -- what the outer file says ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("outer", "of_outer", "of_inner", "tied"),
    [
        ("mistral3", {}, {}, True),
        ("mistral3", {"tie_word_embeddings": False}, {}, False),
        ("mistral3", {}, {"tie_word_embeddings": False}, False),
        ("mistral3", {"tie_word_embeddings": True}, {"tie_word_embeddings": False}, True),
        ("llava", {}, {}, False),
        ("llava", {}, {"tie_word_embeddings": True}, True),
        ("llava", {"tie_word_embeddings": False}, {"tie_word_embeddings": True}, True),
        ("qwen3_vl", {}, {}, False),
        ("qwen3_vl", {"tie_word_embeddings": True}, {}, True),
        ("gemma3", {}, {}, True),  # as the family says
    ],
)
def test_tied_embeddings_are_said_by_either_file_or_by_the_table(
    outer: str, of_outer: dict[str, Any], of_inner: dict[str, Any], tied: bool
) -> None:
    fields = fields_of(outer, **of_outer)
    assert config_of({**fields, "text_config": {**fields["text_config"], **of_inner}}).tie_word_embeddings is tied


def test_tied_embeddings_that_are_no_flag_are_refused() -> None:
    with pytest.raises(ModelError, match="tie_word_embeddings"):
        config_of(fields_of("mistral3", tie_word_embeddings="yes"))


def test_end_tokens_of_the_outer_file_count_where_the_inner_has_none() -> None:
    assert config_of(fields_of("llava", eos_token_id=7)).eos_token_ids == (7,)
    fields = fields_of("llava", eos_token_id=7)
    assert config_of({**fields, "text_config": {**fields["text_config"], "eos_token_id": 9}}).eos_token_ids == (9,)


def test_old_llava_files_leave_out_the_sizes_of_llama_7b() -> None:
    text = {"model_type": "llama", "max_position_embeddings": 4096, "rms_norm_eps": 1e-5, "vocab_size": 32_064}
    config = config_of({"model_type": "llava", "text_config": text})
    assert (config.hidden_size, config.num_layers, config.num_kv_heads) == (4096, 32, 32)
    assert (config.vocab_size, config.max_position_embeddings) == (32_064, 4096)
    with pytest.raises(ModelError, match="is missing"):
        config_of({"model_type": "llava", "text_config": {}})


# -- M-RoPE and flat files -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["rope_scaling", "rope_parameters"])
@pytest.mark.parametrize("kind", [{"type": "mrope"}, {"rope_type": "default"}, {}, {"rope_type": "mrope"}])
@pytest.mark.parametrize("outer", ["qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe"])
def test_sections_of_the_rope_have_no_effect(outer: str, kind: dict[str, Any], name: str) -> None:
    rope = {**kind, "mrope_section": [16, 24, 24], "mrope_interleaved": True}
    config = with_text(outer, rope_theta=5e3, **{name: rope})
    assert (config.rope_theta, config.rope_scaling) == (5e3, None)


def test_scaled_rope_with_sections_stays_scaled() -> None:
    rope = {"type": "yarn", "mrope_section": [16, 24, 24], "factor": 4.0, "original_max_position_embeddings": 32_768}
    scaling = with_text("qwen2_5_vl", rope_scaling=rope).rope_scaling
    assert scaling == {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32_768}


@pytest.mark.parametrize("sections", [3, "x", {}, [1.5], [None], [-1, 2, 3], [True]])
def test_sections_that_are_no_whole_numbers_are_refused(sections: Any) -> None:
    with pytest.raises(ModelError, match="mrope_section"):
        with_text("qwen2_5_vl", rope_scaling={"type": "mrope", "mrope_section": sections})


def test_sections_of_other_types_are_refused() -> None:
    with pytest.raises(ModelError, match="mrope_section"):
        with_text("internvl", rope_scaling={"rope_type": "default", "mrope_section": [16, 24, 24]})


@pytest.mark.parametrize("outer", ["qwen2_vl", "qwen2_5_vl"])
def test_flat_file_has_the_fields_beside_the_others(outer: str) -> None:
    fields = fields_of(outer, vision_token_id=4, vision_start_token_id=5)
    flat = {**fields.pop("text_config"), **fields}
    assert config_of(flat) == config_of(fields_of(outer))
    with pytest.raises(ModelError, match="vocab_size is missing"):
        config_of(fields)


@pytest.mark.parametrize(
    ("outer", "theta", "eps"),
    [("qwen2_vl", 1e6, 1e-5), ("qwen2_5_vl", 1e6, 1e-5), ("qwen3_vl", 5e5, 1e-6), ("qwen3_vl_moe", 5e5, 1e-6)],
)
def test_silent_files_have_the_defaults_of_the_type_inside(outer: str, theta: float, eps: float) -> None:
    config = config_of(fields_of(outer))
    assert (config.rope_theta, config.rms_norm_eps) == (theta, eps)


def test_what_the_text_of_qwen3_vl_does_not_read_changes_nothing() -> None:
    windows = {"use_sliding_window": True, "sliding_window": 5, "layer_types": ["sliding_attention"] * 4}
    assert with_text("qwen3_vl", **windows) == config_of(fields_of("qwen3_vl"))
    assert with_text("qwen3_vl_moe", norm_topk_prob=False).norm_topk_prob


# -- codes -----------------------------------------------------------------------------------------------------------

_NAMES = "model.layers.0.self_attn.q_proj.weight", "model.layers.1.self_attn.q_proj.weight", "lm_head.weight"


@pytest.mark.parametrize(
    ("outer", "modules", "plain"),
    [
        ("mistral3", ["language_model.model.layers.0.self_attn"], _NAMES[:1]),
        ("mistral3", ["model.language_model.layers.0.self_attn", "language_model.lm_head"], (_NAMES[0], _NAMES[2])),
        ("mistral3", ["language_model"], _NAMES),
        ("mistral3", ["model.vision_tower", "lm_head"], _NAMES[2:]),
        ("mistral3", [r"re:language_model\.model\.layers\.1\..*"], _NAMES[1:2]),
        ("smolvlm", ["model.text_model.layers.1"], _NAMES[1:2]),
        ("qwen2_5_vl", ["visual", "model.layers.0"], _NAMES[:1]),
        ("qwen3_vl", ["*.layers.1.*"], _NAMES[1:2]),
    ],
)
@pytest.mark.parametrize("of_outer", [False, True])
def test_modules_outside_the_codes_are_named_as_in_the_files(
    outer: str, modules: list[str], plain: tuple[str, ...], of_outer: bool
) -> None:
    fields = fields_of(outer)
    quantization = {"quant_method": "fp8", "weight_block_size": [128, 128], "modules_to_not_convert": modules}
    (fields if of_outer else fields["text_config"])["quantization_config"] = quantization
    packing = config_of(fields).packing
    assert packing is not None
    assert tuple(name for name in _NAMES if packing.format(name, 128) is None) == plain


def test_ignored_modules_without_aliases_match_our_names_alone() -> None:
    ignored = IgnoredModules.of(["language_model.lm_head"])
    assert not ignored.matches("lm_head")
