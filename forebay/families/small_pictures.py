"""Small configurations of models that read pictures: the encoder's, and the files and tokens that come with it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from forebay.families.outer import OUTERS
from forebay.families.shape import Shape

_TILE_SIZE, _PATCH_SIZE, _SCALE_FACTOR = 64, 8, 2
_MOST_TILES: Final = 4  # in a row
_PROCESSORS: Final[Mapping[str, str]] = {"idefics3": "Idefics3", "smolvlm": "SmolVLM"}

WITH_PICTURES: Final = tuple(_PROCESSORS)
"""Types of which there are small models with an encoder."""

PICTURE_TOKENS: Final = (
    "<image>",
    "<fake_token_around_image>",
    "<global-img>",
    *(f"<row_{row}_col_{col}>" for row in range(1, _MOST_TILES + 1) for col in range(1, _MOST_TILES + 1)),
)
"""Tokens of their prompts, behind those of the text. The first stands for a row of an encoding."""

TEMPLATE: Final = """\
{%- for message in messages -%}
<|im_start|>{{ message['role'] }}
{% if message['content'] is string -%}
{{ message['content'] }}
{%- else -%}
{%- for part in message['content'] -%}
{%- if part['type'] == 'image' -%}<image>{%- else -%}{{ part['text'] }}{%- endif -%}
{%- endfor -%}
{%- endif -%}
<|im_end|>
{% endfor -%}
{%- if add_generation_prompt -%}
<|im_start|>assistant
{% endif -%}
"""
"""Their chat template: ChatML, with a placeholder for each image."""


def picture_fields(model_type: str, text: Mapping[str, Any], shape: Shape) -> dict[str, Any]:
    """Return the fields around those of a language model, `text`, whose tokens are those of `shape`. The tokens of
    pictures come behind."""
    inner = {name: value for name, value in text.items() if name != "tie_word_embeddings"}
    return {
        "model_type": model_type,
        "image_token_id": shape.vocab_size,
        "scale_factor": _SCALE_FACTOR,
        "tie_word_embeddings": True,
        "text_config": {
            **inner,
            "model_type": OUTERS[model_type].text_type,
            "vocab_size": shape.vocab_size + len(PICTURE_TOKENS),
        },
        "vision_config": {
            "model_type": f"{model_type}_vision",
            "hidden_size": shape.hidden_size,
            "intermediate_size": 3 * shape.hidden_size,
            "num_hidden_layers": shape.num_layers,
            "num_attention_heads": shape.num_heads,
            "image_size": _TILE_SIZE,
            "patch_size": _PATCH_SIZE,
        },
    }


def processor_files(model_type: str) -> dict[str, dict[str, Any]]:
    """Return the fields of the files that say how pictures become tiles and tokens, by their names."""
    name, halves = _PROCESSORS[model_type], [0.5, 0.5, 0.5]
    steps = ("do_convert_rgb", "do_resize", "do_image_splitting", "do_rescale", "do_normalize", "do_pad")
    return {
        "preprocessor_config.json": {
            "image_processor_type": f"{name}ImageProcessor",
            **dict.fromkeys(steps, True),
            "image_mean": halves,
            "image_std": halves,
            "max_image_size": {"longest_edge": _TILE_SIZE},
            "resample": 1,
            "rescale_factor": 1 / 255,
            "size": {"longest_edge": _MOST_TILES * _TILE_SIZE},
        },
        "processor_config.json": {
            "processor_class": f"{name}Processor",
            "image_seq_len": (_TILE_SIZE // _PATCH_SIZE // _SCALE_FACTOR) ** 2,
        },
    }
