"""A small model with images as the server sees it: its tokenizer, its chat template, its tiles."""

from __future__ import annotations

import json
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from forebay.families.config.model_config import ProcessorFiles
from forebay.families.config.vision.siglip import SiglipConfig
from forebay.server.images.tilings.idefics import squares

TILE = 32
LONGEST = 128
MARKS = [f"<row_{row}_col_{col}>" for row in range(1, 5) for col in range(1, 5)]
ADDED = ["<|im_start|>", "<end_of_utterance>", "<fake_token_around_image>", "<image>", "<global-img>", *MARKS]
TEMPLATE = (
    "<|im_start|>{% for message in messages %}{{message['role'] | capitalize}}{% if message['content'][0]['type'] == "
    "'image' %}{{':'}}{% else %}{{': '}}{% endif %}{% for line in message['content'] %}{% if line['type'] == 'text' %}"
    "{{line['text']}}{% elif line['type'] == 'image' %}{{ '<image>' }}{% endif %}{% endfor %}<end_of_utterance>\n"
    "{% endfor %}{% if add_generation_prompt %}{{ 'Assistant:' }}{% endif %}"
)


def backend() -> Tokenizer:
    """Every byte, a few words, and two line breaks as one token, as in SmolVLM's."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [("Ċ", "Ċ"), ("h", "e"), ("l", "l")]
    vocab = {piece: i for i, piece in enumerate([*letters, *("".join(pair) for pair in merges)])}
    made = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([AddedToken(word, special=True, normalized=False) for word in ADDED])
    return made


PLACEHOLDER = backend().token_to_id("<image>")
assert PLACEHOLDER is not None
VISION = SiglipConfig(
    kind="smolvlm",
    placeholder=PLACEHOLDER,
    image_size=TILE,
    patch_size=8,
    merge=2,
    hidden_size=16,
    intermediate_size=32,
    num_layers=2,
    num_heads=2,
    norm_eps=1e-6,
)
TILING = squares(ProcessorFiles({}, {}, "/nowhere"), VISION)
PER_TILE = TILING.num_tokens((TILE, TILE))


def write_tokenizer(folder: Path, template: str = TEMPLATE, **added: Any) -> Path:
    """The files of a checkpoint's tokenizer; `added` is set in all of its added tokens."""
    layout = json.loads(backend().to_str())
    for token in layout["added_tokens"]:
        token.update(added)
    (folder / "tokenizer.json").write_text(json.dumps(layout))
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    return folder


def file_of(pixels: np.ndarray, kind: str = "PNG", mode: str | None = None, **how: Any) -> bytes:
    """An image file of uint8 [height, width, 3 or 4] or uint16 [height, width]."""
    image, file = Image.fromarray(pixels), BytesIO()
    (image if mode is None else image.convert(mode)).save(file, kind, **how)
    return file.getvalue()


def noise(height: int, width: int, channels: int = 3, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (height, width, channels), dtype=np.uint8)
