"""Models with a language model inside. Of the parts around it some encoders of pictures are served (`vision/`).

The table has, for each such type, the place of its language model in configuration and files.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final

from forebay.base.errors import ModelError, brief
from forebay.families import TYPES
from forebay.families.base.rope import RopeSections

OTHER_NAMES: Final = {"deberta-v2": "deberta_v2", "kimi_k2": "deepseek_v3", "new": "gte", "xlm-roberta": "xlm_roberta"}
"""Types by the names that remote code has for them, and by those that are no names of modules."""

_HEAD: Final = "language_model.lm_head"

OUTER_NAMES: Final = re.compile(r"(?:(?:model|language_model|text_model)\.)*")
"""How names of modules begin that lie in models around a language model."""

# What the outer configuration says of the language model, too, where the inner one is silent.
_SHARED: Final = ("bos_token_id", "eos_token_id", "quantization_config", "auto_map", "dtype", "torch_dtype")

# What the flat files of Qwen 2 and 2.5 VL have beside the fields of the language model.
_ROPES: Final = ("rope_scaling", "rope_parameters")
_OF_PICTURES: Final = frozenset({
    "vision_config", "image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id",
    "vision_token_id",
})  # fmt: skip

# transformers up to 4.50 left out of a text_config what is as its class has it by default.
_LEFT_OUT: Final[Mapping[str, Mapping[str, Any]]] = {
    "llama": {
        "vocab_size": 32_000, "hidden_size": 4096, "intermediate_size": 11_008, "num_hidden_layers": 32,
        "num_attention_heads": 32, "max_position_embeddings": 2048,
    },
    "mistral": {
        "vocab_size": 32_000, "hidden_size": 4096, "intermediate_size": 14_336, "num_hidden_layers": 32,
        "num_attention_heads": 32, "num_key_value_heads": 8, "max_position_embeddings": 131_072,
    },
}  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
class Outer:
    """The place of the language model in a larger type.

    `types` are the names of the language model's type in `text_config`, and ours; none if it may be any served type.
    `text_type` is that name if the file has none. `body`: the prefix of its tensors' names instead of `model.`, in
    published files and in those that transformers 5 writes. `parts`: the prefixes of the other parts, and
    `never_served`: those of these that are no encoder of pictures. `tied`: whether the embedding is the head if the
    file has no such field, None if the family decides. `defaults` and `fixed` are fields of `text_config` that count if
    it lacks them, and in any case; `unused` change nothing. `flat`: a file without `text_config` has its fields beside
    the others. `mrope`: the rope's positions are three, which are equal for text; `sections` are those if the file has
    none. `turned_stacks`: published files have all experts of a layer in one tensor with inputs before outputs.
    """

    text_type: str
    types: Mapping[str, str] = field(default_factory=dict)
    body: tuple[str, ...]
    parts: tuple[str, ...]
    never_served: tuple[str, ...] = ()
    tied: bool | None = None
    defaults: Mapping[str, Any] = field(default_factory=dict)
    fixed: Mapping[str, Any] = field(default_factory=dict)
    unused: tuple[str, ...] = ()
    flat: bool = False
    mrope: bool = False
    sections: RopeSections | None = None
    turned_stacks: bool = False

    @property
    def aliases(self) -> tuple[tuple[str, str], ...]:
        """How our names of modules begin, each with how files may have it."""
        return (*(("model.", begin) for begin in self.body), ("lm_head", _HEAD))

    def stored(self, name: str) -> str:
        """Return what published files call a tensor of the language model, by its name in files of that alone."""
        begin = "model."
        return f"{self.body[0]}{name.removeprefix(begin)}" if name.startswith(begin) else name

    def is_of_encoder(self, name: str) -> bool:
        """Return whether a tensor of this name in the files is of the encoder of pictures."""
        return name.startswith(self.parts) and not name.startswith(self.never_served)

    def is_beside(self, module: str) -> bool:
        """Return whether a module of this name is beside the language model, in the whole or in all but its head."""
        begin = "model."
        return f"{module.removeprefix(begin)}.".startswith(tuple(part.removeprefix(begin) for part in self.parts))

    def inner_names(self, stored: Iterable[str], where: str, *, with_encoder: bool) -> tuple[dict[str, str], list[str]]:
        """Return the language model's tensors, with the names that they would have in files of that alone, and the
        parts that others are of. The encoder's are left out `with_encoder`. ModelError for names of two kinds."""
        names: dict[str, str] = {}
        parts: set[str] = set()
        begins: set[str] = set()
        for name in stored:
            if name.startswith(self.parts):
                if not (with_encoder and self.is_of_encoder(name)):
                    parts.add(name.removeprefix("model.").partition(".")[0])
                continue
            begin = next((begin for begin in self.body if name.startswith(begin)), None)
            if begin is not None:
                begins.add(begin)
                names[name] = f"model.{name.removeprefix(begin)}"
            else:
                names[name] = name.removeprefix("language_model.") if name.startswith(f"{_HEAD}.") else name
        if len(begins) > 1:
            both = " and with ".join(map(repr, sorted(begins)))
            raise ModelError(f"{where}: names of the language model's tensors begin with {both}: of two checkpoints")
        return names, sorted(parts)


_LLAVA: Final = ("language_model.model.", "model.language_model.")
_TOWER: Final = ("vision_tower.", "multi_modal_projector.", "model.vision_tower.", "model.multi_modal_projector.")
_AUDIO: Final = ("model.audio_tower.", "model.embed_audio.")
_IDEFICS: Final = Outer(
    text_type="llama",
    body=("model.text_model.",),
    parts=("model.vision_model.", "model.connector."),
    tied=False,
    unused=(
        *("_flash_attn_2_enabled", "is_llama_config", "neftune_noise_alpha", "perceiver_config"),
        *("pixel_shuffle_factor", "qk_layer_norms", "rope_interleaved", "transformers.js_config", "use_resampler"),
    ),
)
_QWEN2: Final = Outer(
    text_type="qwen2_vl_text",
    types={"qwen2_vl_text": "qwen2"},
    body=("model.language_model.", "model."),
    parts=("visual.", "model.visual."),
    tied=False,
    defaults={"rope_theta": 1e6, "rms_norm_eps": 1e-5, "max_window_layers": 80},
    flat=True,
    mrope=True,
    sections=RopeSections((16, 24, 24), interleaved=False),
)
_QWEN3_BODY: Final = ("model.language_model.",)
_QWEN3_PARTS: Final = ("model.visual.",)
_NO_WINDOW: Final = {"use_sliding_window": False, "sliding_window": None, "layer_types": None}
_QWEN3_5_SECTIONS: Final = RopeSections((11, 11, 10), interleaved=True)
_QWEN3_SECTIONS: Final = RopeSections((24, 20, 20), interleaved=True)
_THETA: Final = {"rope_theta": 500_000.0}

OUTERS: Final[Mapping[str, Outer]] = {
    "gemma3": Outer(text_type="gemma3_text", types={"gemma3_text": "gemma3_text"}, body=_LLAVA, parts=_TOWER),
    "gemma3n": Outer(
        text_type="gemma3n_text",
        types={"gemma3n_text": "gemma3n_text"},
        body=("model.language_model.",),
        parts=("model.vision_tower.", "model.embed_vision.", *_AUDIO),
        never_served=_AUDIO,
    ),
    "gemma4": Outer(
        text_type="gemma4_text",
        types={"gemma4_text": "gemma4_text"},
        body=("model.language_model.",),
        parts=("model.vision_tower.", "model.embed_vision.", *_AUDIO),
        never_served=_AUDIO,
    ),
    "gemma4_unified": Outer(
        text_type="gemma4_unified_text",
        types={"gemma4_unified_text": "gemma4_text"},
        body=("model.language_model.",),
        parts=("model.vision_embedder.", "model.embed_vision.", "model.embed_audio."),
        never_served=("model.embed_audio.",),
        defaults={
            "max_position_embeddings": 262_144,
            "sliding_window": 1024,
            "use_bidirectional_attention": "vision",
        },
        fixed={"hidden_size_per_layer_input": 0, "enable_moe_block": False},
    ),
    "glm5_next": Outer(
        text_type="glm5_next_text",
        types={"glm5_next_text": "glm5_next_text"},
        body=("model.language_model.", "model."),
        parts=("model.visual.",),
        flat=True,
    ),
    "idefics3": _IDEFICS,
    "internvl": Outer(text_type="qwen2", body=_LLAVA, parts=_TOWER, tied=True),
    "kimi_k25": Outer(
        text_type="deepseek_v3",
        body=_LLAVA,
        parts=("vision_tower.", "mm_projector.", "model.vision_tower.", "model.mm_projector."),
        tied=True,
    ),
    "lfm2_vl": Outer(text_type="lfm2", body=("model.language_model.",), parts=_TOWER, tied=True),
    "llava": Outer(text_type="llama", body=_LLAVA, parts=_TOWER, tied=False),
    "mistral3": Outer(text_type="mistral", body=_LLAVA, parts=_TOWER, tied=True),
    "muse_glimmer": Outer(
        text_type="muse_glimmer_text",
        types={"muse_glimmer_text": "muse_glimmer_text"},
        body=("model.language_model.",),
        parts=("model.vision_tower.", "model.vision_adapter.", "model.vision_projection."),
    ),
    "qwen2_vl": _QWEN2,
    "qwen2_5_vl": replace(_QWEN2, text_type="qwen2_5_vl_text", types={"qwen2_5_vl_text": "qwen2"}),
    "qwen3_5": Outer(
        text_type="qwen3_5_text",
        types={"qwen3_5_text": "qwen3_5_text"},
        body=_QWEN3_BODY,
        parts=_QWEN3_PARTS,
        sections=_QWEN3_5_SECTIONS,
    ),
    "qwen3_5_moe": Outer(
        text_type="qwen3_5_moe_text",
        types={"qwen3_5_moe_text": "qwen3_5_moe_text"},
        body=_QWEN3_BODY,
        parts=_QWEN3_PARTS,
        sections=_QWEN3_5_SECTIONS,
    ),
    "qwen3_vl": Outer(
        text_type="qwen3_vl_text",
        types={"qwen3_vl_text": "qwen3"},
        body=_QWEN3_BODY,
        parts=_QWEN3_PARTS,
        tied=False,
        defaults=_THETA,
        fixed=_NO_WINDOW,
        mrope=True,
        sections=_QWEN3_SECTIONS,
    ),
    "qwen3_vl_moe": Outer(
        text_type="qwen3_vl_moe_text",
        types={"qwen3_vl_moe_text": "qwen3_moe"},
        body=_QWEN3_BODY,
        parts=_QWEN3_PARTS,
        tied=False,
        defaults=_THETA,
        fixed={**_NO_WINDOW, "norm_topk_prob": True},
        mrope=True,
        sections=_QWEN3_SECTIONS,
        turned_stacks=True,
    ),
    "qwen4_exp": Outer(
        text_type="qwen4_exp_text",
        types={"qwen4_exp_text": "qwen4_exp_text"},
        body=_QWEN3_BODY,
        parts=_QWEN3_PARTS,
        tied=False,
        sections=_QWEN3_5_SECTIONS,
    ),
    "smolvlm": _IDEFICS,
}


def text_config(raw: Mapping[str, Any], outer: Outer, where: str) -> dict[str, Any]:
    """Return the fields of the language model in those of a model around it. Raises ModelError if there are none, and
    for a type of it that is not served."""
    inner = _inner_fields(raw, outer, where)
    model_type = _served(inner, outer, where)
    left_out = _LEFT_OUT.get(model_type, {}) if "model_type" in inner and not outer.types else {}
    shared = {name: raw[name] for name in _SHARED if name in raw}
    own = {name: value for name, value in inner.items() if name not in outer.unused}
    fields = {**shared, **left_out, **outer.defaults, **own, **outer.fixed, "model_type": model_type}
    tied = _tied_in(raw, inner)
    if tied is None:
        tied = outer.tied
    if tied is not None:
        fields["tie_word_embeddings"] = tied
    return _without_sections(fields, where) if outer.mrope else fields


def _inner_fields(raw: Mapping[str, Any], outer: Outer, where: str) -> dict[str, Any]:
    """Return the object of the language model: `text_config`, or if the type may be flat and has none, the fields
    around it without those of pictures."""
    inner = raw.get("text_config")
    if inner is None and outer.flat:
        return {name: value for name, value in raw.items() if name not in {*_OF_PICTURES, "model_type"}}
    if not isinstance(inner, dict):
        found = "missing" if inner is None else brief(inner)
        raise ModelError(f"{where}: text_config is {found}; a {raw['model_type']} model has its sizes there")
    return inner


def _tied_in(*parts: Mapping[str, Any]) -> Any:
    """Return a value of `tie_word_embeddings` in the parts, if possible another one than false; None if none has it."""
    given = [part["tie_word_embeddings"] for part in parts if part.get("tie_word_embeddings") is not None]
    return next((value for value in given if value is not False), False) if given else None


def _served(inner: Mapping[str, Any], outer: Outer, where: str) -> str:
    """Return the type of the language model, as it is served."""
    named = inner.get("model_type", outer.text_type)
    if isinstance(inner.get("text_config"), dict) or (isinstance(named, str) and named in OUTERS):
        raise ModelError(
            f"{where}: text_config is of type {brief(named)}, which has a language model of its own inside"
        )
    found = None
    if isinstance(named, str):
        found = outer.types.get(named) if outer.types else OTHER_NAMES.get(named, named)
    if found is None or found not in TYPES:
        expected = f"not {outer.text_type}" if outer.types else "which is not served"
        raise ModelError(f"{where}: text_config is of type {brief(named)}, {expected}")
    return found


def rope_sections(raw: Mapping[str, Any], outer: Outer, where: str) -> RopeSections | None:
    """Return which of a head's frequencies are for which of three rotary positions, None for a type with one. Raises
    ModelError."""
    if outer.sections is None:
        return None
    inner = raw.get("text_config") or raw
    ropes = (inner.get(name) for name in _ROPES)
    given = next((rope["mrope_section"] for rope in ropes if isinstance(rope, dict) and "mrope_section" in rope), None)
    if given is None:
        return outer.sections
    if not _are_sizes(given) or len(given) != 3:
        raise ModelError(f"{where}: mrope_section is {brief(given)}; it must be a list of three whole numbers")
    time, rows, columns = given
    return replace(outer.sections, sizes=(time, rows, columns))


def _are_sizes(values: Any) -> bool:
    return isinstance(values, list) and all(type(size) is int and size >= 0 for size in values)


def _without_sections(fields: dict[str, Any], where: str) -> dict[str, Any]:
    """Drop from the rope which of a head's dimensions are for which of three positions."""
    for name in _ROPES:
        rope = fields.get(name)
        if not isinstance(rope, dict):
            continue
        sections = rope.get("mrope_section", [])
        if not _are_sizes(sections):
            raise ModelError(f"{where}: mrope_section is {brief(sections)}; it must be a list of whole numbers")
        kind = rope.get("rope_type", rope.get("type", "default"))
        left = {key: value for key, value in rope.items() if key not in ("mrope_section", "mrope_interleaved", "type")}
        fields[name] = {**left, "rope_type": "default" if kind == "mrope" else kind}
    return fields
