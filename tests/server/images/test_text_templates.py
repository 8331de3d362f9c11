"""Images in chats of models whose template is for texts alone, as GGUF files may have."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import pytest

from forebay.server.images.expansion import Expansion
from forebay.text.tokenizer import Tokenizer
from tests.server.images.smolvlm import TILING, write_tokenizer

_START, _END = "{% for message in messages %}{{ message.role }}: ", "{{ '\\n' }}{% endfor %}"
_STRING = "{% if message.content is string %}{{ message.content }}"
_PARTS = "{% for part in message.content %}{% if part['type'] == 'text' %}{{ part['text'] }}{% endif %}{% endfor %}"
TEMPLATES: Final = {
    "joined": f"{_START}{{{{ '' + message.content }}}}{_END}",
    "printed": f"{_START}{{{{ message.content }}}}{_END}",
    "strings alone": f"{_START}{_STRING}{{% endif %}}{_END}",
    "texts of parts": f"{_START}{_STRING}{{% else %}}{_PARTS}{{% endif %}}{_END}",
    "parts alone": f"{_START}{_PARTS}{_END}",
}
MESSAGES: Final = [
    {"role": "user", "content": "hello"},
    {
        "role": "user",
        "content": [{"type": "text", "text": "<image>he"}, {"type": "image"}, {"type": "text", "text": "ll"}],
    },
]


@pytest.mark.whole
@pytest.mark.parametrize("name", TEMPLATES)
def test_expansion_template_for_texts_alone_writes_the_image_between_them(name: str, tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_path(write_tokenizer(tmp_path, TEMPLATES[name]))
    Expansion(tokenizer, TILING)
    assert tokenizer.render(MESSAGES) == "user: hello\nuser: <image>he<image>ll\n"
    ids = tokenizer.encode_chat(MESSAGES)
    assert ids.count(TILING.placeholder) == 1  # what a user wrote is text
    assert tokenizer.decode(ids, skip_special_tokens=False) == tokenizer.render(MESSAGES)
    assert tokenizer.encode_chat_prompt(MESSAGES).token_ids == ids
