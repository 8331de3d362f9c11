"""Small configurations of models that read pictures: the encoder's, and the files and tokens that come with it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from forebay.families.base.shape import Shape
from forebay.families.config.outer import OUTERS
from forebay.families.config.vision.small import SmallPictures
from forebay.families.config.vision.small_gemma3 import SMALL_GEMMA3
from forebay.families.config.vision.small_gemma4 import SMALL_GEMMA4
from forebay.families.config.vision.small_gemma4_unified import SMALL_GEMMA4_UNIFIED
from forebay.families.config.vision.small_internvl import SMALL_INTERNVL
from forebay.families.config.vision.small_kimi_k25 import SMALL_KIMI_K25
from forebay.families.config.vision.small_muse_glimmer import SMALL_MUSE_GLIMMER
from forebay.families.config.vision.small_pixtral import SMALL_PIXTRAL
from forebay.families.config.vision.small_qwen import SMALL_QWEN2_5_VL, SMALL_QWEN2_VL, SMALL_QWEN3_5, SMALL_QWEN3_VL
from forebay.families.config.vision.small_siglip import small_siglip
from forebay.families.config.vision.small_siglip2 import SMALL_SIGLIP2

SMALL: Final[Mapping[str, SmallPictures]] = {
    "gemma3": SMALL_GEMMA3,
    "gemma4": SMALL_GEMMA4,
    "gemma4_unified": SMALL_GEMMA4_UNIFIED,
    "idefics3": small_siglip("idefics3", "Idefics3"),
    "internvl": SMALL_INTERNVL,
    "kimi_k25": SMALL_KIMI_K25,
    "lfm2_vl": SMALL_SIGLIP2,
    "mistral3": SMALL_PIXTRAL,
    "muse_glimmer": SMALL_MUSE_GLIMMER,
    "qwen2_5_vl": SMALL_QWEN2_5_VL,
    "qwen2_vl": SMALL_QWEN2_VL,
    "qwen3_5": SMALL_QWEN3_5,
    "qwen3_5_moe": SMALL_QWEN3_5,
    "qwen3_vl": SMALL_QWEN3_VL,
    "qwen3_vl_moe": SMALL_QWEN3_VL,
    "qwen4_exp": SMALL_QWEN3_5,
    "smolvlm": small_siglip("smolvlm", "SmolVLM"),
}

WITH_PICTURES: Final = tuple(SMALL)
"""Types of which there are small models with an encoder."""

_TEMPLATE: Final = """\
{%- for message in messages -%}
<|im_start|>{{ message['role'] }}
{% if message['content'] is string -%}
{{ message['content'] }}
{%- else -%}
{%- for part in message['content'] -%}
{%- if part['type'] == 'image' -%}IMAGE{%- else -%}{{ part['text'] }}{%- endif -%}
{%- endfor -%}
{%- endif -%}
<|im_end|>
{% endfor -%}
{%- if add_generation_prompt -%}
<|im_start|>assistant
{% endif -%}
"""


def template(model_type: str) -> str:
    """Return the chat template of a small model: ChatML, with a placeholder for each image."""
    small = SMALL[model_type]
    return _TEMPLATE.replace("IMAGE", small.written or small.tokens[0])


def picture_fields(model_type: str, text: Mapping[str, Any], shape: Shape) -> dict[str, Any]:
    """Return the fields around those of a language model, `text`, whose tokens are those of `shape`. The tokens of
    pictures come behind."""
    inner = {name: value for name, value in text.items() if name != "tie_word_embeddings"}
    small = SMALL[model_type]
    return {
        "model_type": model_type,
        "image_token_id": shape.vocab_size,
        "tie_word_embeddings": True,
        "text_config": {
            **inner,
            **small.inside(shape),
            "model_type": OUTERS[model_type].text_type,
            "vocab_size": shape.vocab_size + len(small.tokens),
        },
        **small.around(shape),
    }
