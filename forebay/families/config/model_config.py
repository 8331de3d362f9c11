"""The shape of a model, read from config.json or GGUF metadata before any weight is touched. No torch."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Final

from forebay.base.errors import ModelError, brief
from forebay.families import ASSISTANTS, HEADS, TEXT_ENCODERS, TYPES
from forebay.families.base.fields import Fields
from forebay.families.base.gguf_names import hf_config
from forebay.families.base.options import unknown_options, unused_of_generation
from forebay.families.base.rope import RopeSections
from forebay.families.base.sampling import NEUTRAL, SamplingDefaults, of_generation_config, of_gguf
from forebay.families.base.shape import Shape
from forebay.families.base.tensor_names import AS_STORED, TensorNames
from forebay.families.config.outer import OTHER_NAMES, OUTERS, Outer, rope_sections, text_config
from forebay.families.config.vision import vision_of
from forebay.families.config.vision.base import VisionConfig
from forebay.formats.block_layers import block_packing
from forebay.formats.files import is_there, read_json
from forebay.formats.gguf import GgufFile
from forebay.formats.gguf_parts import SUFFIX, model_file
from forebay.formats.layer_packing import LayerPacking
from forebay.formats.packed_layers import packing_of
from forebay.formats.safetensors import weight_files

MAX_EXPERTS: Final = 1 << 17
"""Of all layers together, each with weights of its own: 23,000 is the most that a published model has."""
_SUPPRESSED: Final = "tokenizer.ggml.suppress_tokens"  # generation_config.json has a field of this name


@dataclass(frozen=True, kw_only=True, slots=True)
class Experts:
    """The experts of each layer that has any; `intermediate_size` is one expert's."""

    num_experts: int
    per_token: int
    intermediate_size: int


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelConfig:
    """The values that every architecture has; a family adds its own fields, under transformers' names if these agree.

    `layer_types` are `full_attention`, `sliding_attention` or another mixer of the family. `in_bfloat16`: whether
    tensors that are not in codes count as stored in bfloat16: as config.json has it, or if it names no type, which most
    published models without one are. Pages must hold a multiple of `page_multiple` tokens. `unknown_options` are names
    of fields in the files that no reader knows or applies: they may change the computation elsewhere. `packing`
    describes how safetensors have the layers in codes, if they do. `outer`: the place of the language model in the
    files of a larger one, None for a model of its own. `vision`: the encoder of pictures, None if none is served.
    `rope_sections`: None if a token has one rotary position, or three equal ones.
    """

    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position_embeddings: int
    rms_norm_eps: float
    rope_theta: float
    layer_types: tuple[str, ...]
    rope_scaling: dict[str, Any] | None = None
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    mlp_bias: bool = False
    sliding_window: int = 0  # tokens, 0 for none
    experts: Experts | None = None
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    unknown_options: tuple[str, ...] = ()
    packing: LayerPacking | None = None
    sampling: SamplingDefaults = NEUTRAL
    in_bfloat16: bool = False
    page_multiple: int = 1
    outer: Outer | None = None
    vision: VisionConfig | None = None
    rope_sections: RopeSections | None = None

    @property
    def num_experts(self) -> int:
        return 0 if self.experts is None else self.experts.num_experts

    @property
    def is_text_encoder(self) -> bool:
        """Return whether its tokens attend to all tokens of their text, of which it keeps nothing and generates
        none."""
        return False

    @property
    def num_ids(self) -> int:
        """Return the number of ids that tokens of a step may have."""
        return self.vocab_size

    @property
    def head_outputs(self) -> int:
        """Return how many numbers a head makes of a pooled text, 0 without one."""
        return 0

    @property
    def vector_size(self) -> int:
        """Return how many numbers the vector of a text has."""
        return self.hidden_size

    def with_files(self, path: Path) -> ModelConfig:
        """Return it with the settings in the other files of its checkpoint's folder, or in the rest of its GGUF file.
        Raises ModelError."""
        return self

    @property
    def draft_size(self) -> int:
        """Return the numbers of a token that the model's own draft head is fed with."""
        return self.hidden_size

    @property
    def sparse_top_k(self) -> int:
        """Return the tokens that a query of sparse attention reads, 0 for a model without."""
        return 0


def nothing(shape: Shape) -> dict[str, Any]:
    """Return no fields: a small model of the family needs none of its own."""
    return {}


def none_unused(config: ModelConfig, name: str) -> bool:
    """Return False: every tensor of a checkpoint must be used."""
    return False


@dataclass(frozen=True, kw_only=True, slots=True)
class Family:
    """The interface of a folder's `config.py`, as `FAMILY`: how its fields are read; those of a small model beside the
    sizes of all; which fields that it does not ask for change nothing of what it computes (see `options`); what
    safetensors files call its tensors; which of these, by our names, are of no use to a model of such a
    configuration."""

    parse: Callable[[Fields], ModelConfig]
    small: Callable[[Shape], dict[str, Any]] = nothing
    harmless: frozenset[str] = frozenset()
    names: TensorNames = AS_STORED
    unused: Callable[[ModelConfig, str], bool] = none_unused


def family(model_type: str) -> Family:
    """Return the family of one of `TYPES`, `ASSISTANTS`, `HEADS` or `TEXT_ENCODERS`."""
    own = f"text_encoders.{model_type}" if model_type in TEXT_ENCODERS else f"{model_type}.config"
    found: Family = importlib.import_module(f"forebay.families.{own}").FAMILY
    return found


def family_title(model_type: str) -> str:
    """A sentence about it."""
    own = f"text_encoders.{model_type}" if model_type in TEXT_ENCODERS else model_type
    return (importlib.import_module(f"forebay.families.{own}").__doc__ or "").partition("\n")[0]


def config_from_gguf(file: GgufFile) -> ModelConfig:
    """Read the configuration from a GGUF file's metadata. Raises ModelError for an architecture or a value that is not
    served."""
    config = config_of(hf_config(file), str(file.path)).with_files(file.path)
    unused = (_SUPPRESSED,) if _SUPPRESSED in file.metadata else ()
    return replace(config, sampling=of_gguf(file), unknown_options=(*config.unknown_options, *unused))


def config_from_folder(folder: Path) -> ModelConfig:
    """Read config.json and, if there is one, generation_config.json, which adds end tokens and sampling defaults.
    Raises ModelError for a model_type that is not served, and for anything that would change the computation and is not
    implemented here."""
    if not is_there(folder / "config.json"):
        weight_files(folder)  # says what else it is
        raise ModelError(f"{folder}: there are weights and no config.json")
    raw = read_json(folder / "config.json")
    generation = folder / "generation_config.json"
    more = Fields.of_file(read_json(generation), str(generation)) if is_there(generation) else None
    found = config_of(raw, str(folder / "config.json"), generation=more, processor=image_processor(folder))
    return found.with_files(folder)


def config_at(path: Path) -> ModelConfig | None:
    """Read the configuration of the checkpoint at `path`, a folder or any part of a GGUF model; None if nothing is
    there. Raises ModelError as the functions for each do."""
    first = model_file(path)
    if first.suffix == SUFFIX and first.is_file():
        return config_from_gguf(GgufFile(first))
    return config_from_folder(path) if is_there(path / "config.json") else None


@dataclass(frozen=True, slots=True)
class ProcessorFiles:
    """Fields of an image processor, and those around them in processor_config.json; `where` names them in errors."""

    own: Mapping[str, Any]
    around: Mapping[str, Any]
    where: str


def processor_files(folder: Path) -> ProcessorFiles:
    """Read the fields of a folder's processor, nothing without one. Raises ModelError."""
    around = folder / "processor_config.json"
    return ProcessorFiles(image_processor(folder), read_json(around) if is_there(around) else {}, str(folder))


def image_processor(folder: Path) -> Mapping[str, Any]:
    """Return the fields of the image processor, nothing without one. As in transformers, those in processor_config.json
    count first. Raises ModelError."""
    files = [folder / name for name in ("processor_config.json", "preprocessor_config.json")]
    of_all, own = (read_json(path) if is_there(path) else {} for path in files)
    inner = of_all.get("image_processor", own)
    return inner if isinstance(inner, dict) else own


def _unknown_type(model_type: object) -> str:
    if model_type is None:
        return "there is no model_type, which names the kind of model: take the config.json of the original checkpoint"
    near = get_close_matches(str(model_type), (*TYPES, *TEXT_ENCODERS), n=3)
    like = f"; similar ones are {', '.join(near)}" if near else ""
    return (
        f"model_type {brief(model_type)} is not one of the {len(TYPES) + len(TEXT_ENCODERS)} that are supported{like}: "
        "`forebay models make --help` lists them"
    )


def config_of(
    raw: Mapping[str, Any],
    where: str = "config.json",
    *,
    generation: Fields | None = None,
    processor: Mapping[str, Any] | None = None,
) -> ModelConfig:
    """Read a config.json's fields, and those of its image `processor`; `where` is what errors call it."""
    outer = OUTERS.get(str(raw.get("model_type")))
    config, fields = _parsed(_language_fields(raw, outer, where), outer, where)
    ends = config.eos_token_ids
    if generation is not None:
        ends += generation.token_ids("eos_token_id", config.vocab_size)
    vision, not_known = vision_of(raw, where, processor or {}, config.vocab_size) or (None, ())
    return replace(
        config,
        eos_token_ids=tuple(dict.fromkeys(ends)),
        unknown_options=(*config.unknown_options, *not_known, *unused_of_generation(fields, generation)),
        sampling=of_generation_config(generation),
        outer=outer,
        vision=vision,
        rope_sections=None if vision is None or outer is None else rope_sections(raw, outer, where),
    )


def _language_fields(raw: Mapping[str, Any], outer: Outer | None, where: str) -> Mapping[str, Any]:
    """Return the fields of the language model. Raises ModelError for a type that is not served."""
    inner = _as_head(_of_assistant(raw, where) if outer is None else text_config(raw, outer, where))
    model_type = inner.get("model_type")
    if not isinstance(model_type, str) or model_type not in (*TYPES, *TEXT_ENCODERS, *ASSISTANTS, *HEADS):
        raise ModelError(f"{where}: {_unknown_type(model_type)}")
    return inner


def _parsed(raw: Mapping[str, Any], outer: Outer | None, where: str) -> tuple[ModelConfig, Fields]:
    """Read the fields of the language model. Return the fields as well, which record those that nothing has read."""
    in_blocks = block_packing(raw.get("quantization_config"))
    if in_blocks is not None:  # of any family, also of one that reads the field itself
        raw = {name: value for name, value in raw.items() if name != "quantization_config"}
    own, fields = family(raw["model_type"]), Fields.of_file(raw, where)
    config = own.parse(fields)
    if config.num_layers * config.num_experts > MAX_EXPERTS:
        layers = f"{config.num_layers} layers of {config.num_experts} experts"
        raise ModelError(f"{where}: {layers}; at most {MAX_EXPERTS} experts in all are possible")
    packing = in_blocks or config.packing
    if "quantization_config" in fields.unread:  # the family has not read it
        packing = packing_of(fields.get("quantization_config"), where, () if outer is None else outer.aliases)
    in_bfloat16 = (raw.get("dtype") or raw.get("torch_dtype") or "bfloat16") == "bfloat16"
    unknown = unknown_options(fields, own.harmless)
    return replace(config, packing=packing, unknown_options=unknown, in_bfloat16=in_bfloat16), fields


def _as_head(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    """An EAGLE head's configuration is a Llama's but for the name of the architecture; a Jina BERT v2's is a BERT's but
    for the kind of its positions."""
    if raw.get("model_type") == "bert" and raw.get("position_embedding_type") == "alibi":
        return {**raw, "model_type": "jina_bert_v2"}
    named = raw.get("architectures")
    eagle = isinstance(named, list) and any("eagle" in name.lower() for name in named if isinstance(name, str))
    return {**raw, "model_type": "eagle_head"} if eagle and raw.get("model_type") == "llama" else raw


def _of_assistant(raw: Mapping[str, Any], where: str) -> Mapping[str, Any]:
    """All of an assistant's configuration with the fields of its language model, or any other under our name of its
    type."""
    model_type = raw.get("model_type")
    if isinstance(model_type, str) and model_type in OTHER_NAMES:
        return {**raw, "model_type": OTHER_NAMES[model_type]}
    if model_type not in ASSISTANTS:
        return raw
    inner = raw.get("text_config")
    if not isinstance(inner, dict):
        found = "missing" if inner is None else brief(inner)
        raise ModelError(f"{where}: text_config is {found}; a {model_type} model has its sizes there")
    return {**inner, **{name: value for name, value in raw.items() if name != "text_config"}}
