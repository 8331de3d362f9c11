from __future__ import annotations

import pytest

from forebay.base.errors import InvalidRequest, ModelError
from forebay.text.chat_template import ChatTemplate

ASK = [{"role": "user", "content": "a<b"}]


def render(source: str) -> str:
    return ChatTemplate(source, {"bos_token": "<s>"}).render(ASK, add_generation_prompt=True)


def test_globals_that_templates_expect() -> None:
    assert render("{{ bos_token }}{{ messages | tojson }}") == '<s>[{"role": "user", "content": "a<b"}]'
    assert render("{% generation %}x{% endgeneration %}{% for i in range(9) %}{% break %}{% endfor %}") == "x"
    assert len(render("{{ strftime_now('%Y') }}")) == 4


@pytest.mark.parametrize(
    "source",
    [
        "{{ raise_exception('roles must alternate') }}",
        "{{ messages.append(1) }}",
        "{{ ().__class__.__base__.__subclasses__() }}",
        "{{ 1 / 0 }}",
        "{{ messages[7].content + 1 }}",
        "{% for i in range(99999) %}{{ 'x' * 1000 }}{% endfor %}",
    ],
)
def test_templates_that_fail_are_the_requests_error(source: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        render(source)
    assert caught.value.code == "chat_template_error"


def test_template_that_does_not_compile_is_named_at_start_up() -> None:
    with pytest.raises(ModelError, match="line 1"):
        ChatTemplate("{% if %}", {})
