from __future__ import annotations

import gc
import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from forebay.base.errors import InvalidRequest, ModelError
from forebay.text import chat_template, tokenizer_files
from forebay.text import tokenizer as tokenizer_module
from forebay.text.chat_template import MAX_SOURCE_CHARS, ChatTemplate, TemplateProcess
from forebay.text.template_frames import LIMITS, Compile, decode_question, encode
from forebay.text.template_worker import Worker
from tests.deadlines import HANGS_S, wait_until
from tests.integration.tree import alive
from tests.text.tiny_tokenizer import tiny_metadata, tiny_tokenizer

ASK = [{"role": "user", "content": "a<b"}]


class InThisProcess:
    """What a template's process does, without one: for what needs no limits."""

    has_ended = False

    def __init__(self) -> None:
        self._worker = Worker()

    def ask(self, question: bytes, timeout_s: float) -> Any:
        return self._worker.answer(decode_question(question))

    def end(self) -> None:
        pass


@pytest.fixture
def in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_template, "TemplateProcess", InThisProcess)


def render(source: str) -> str:
    return ChatTemplate(source, {"bos_token": "<s>"}).render(ASK, add_generation_prompt=True)


def pids(template: ChatTemplate) -> list[int]:
    return [process._child.pid for process in template._processes.living]


@pytest.mark.usefixtures("in_this_process")
def test_globals_that_templates_expect() -> None:
    assert render("{{ bos_token }}{{ messages | tojson }}") == '<s>[{"role": "user", "content": "a<b"}]'
    assert render("{% generation %}x{% endgeneration %}{% for i in range(9) %}{% break %}{% endfor %}") == "x"
    assert len(render("{{ strftime_now('%Y') }}")) == 4


@pytest.mark.usefixtures("in_this_process")
@pytest.mark.parametrize(
    "source",
    [
        "{{ raise_exception('roles must alternate') }}",
        "{{ messages.append(1) }}",
        "{{ ().__class__.__base__.__subclasses__() }}",
        "{{ 1 / 0 }}",
        "{{ messages[7].content + 1 }}",
        "{% for i in range(99999) %}{{ 'x' * 1000 }}{% endfor %}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    ],
)
def test_templates_that_fail_are_the_requests_error(source: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        render(source)
    assert caught.value.code == "chat_template_error"


@pytest.mark.usefixtures("in_this_process")
def test_template_that_does_not_compile_is_named_at_start_up() -> None:
    for source in ("{% if %}", "{{" + "(" * 50_000):
        with pytest.raises(ModelError, match="does not compile"):
            ChatTemplate(source, {}).check()
        with pytest.raises(ModelError, match="does not compile"):
            render(source)


def test_a_source_that_nobody_wrote_by_hand_is_refused() -> None:
    with pytest.raises(ModelError, match=f"at most {MAX_SOURCE_CHARS}"):
        ChatTemplate("x" * (MAX_SOURCE_CHARS + 1), {})
    with pytest.raises(ModelError, match="lone surrogate"):
        ChatTemplate("\ud800", {})
    with pytest.raises(ModelError, match="lone surrogate"):
        ChatTemplate("x", {"bos_token": "\ud800"})


TOO_LONG = [
    "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    pytest.param("{{ (messages[0].content * 9999999) | wordwrap(1) }}", marks=pytest.mark.slow),
    pytest.param("{{ lipsum(n=100000) }}", marks=pytest.mark.slow),
]
TOO_LARGE = [
    "'a' * 10**9",
    "messages[0].content * 10**9",
    "'x' | center(10**9)",
    "messages[0].content.center(10**9)",
    "messages[0].content | indent(10**9)",
    "'%1000000000d' % 1",
    "'%*d' % (10**9, 1)",
    "'{:1000000000}'.format(1)",
    "messages | tojson(indent=10**9)",
    "range(99999) | map('string') | join('x' * 10**6)",
]
HI = [{"role": "user", "content": "hi"}]


@pytest.mark.parametrize("source", TOO_LONG)
def test_a_template_that_takes_for_ever_is_ended_and_the_next_conversation_rendered(source: str) -> None:
    template = ChatTemplate(f"{{% if messages[0].content != 'hi' %}}{source}{{% endif %}}hi", {})
    with pytest.raises(InvalidRequest, match="took longer than 1 s"):
        template.render(ASK, add_generation_prompt=True)
    assert template.render(HI, add_generation_prompt=True) == "hi"


def test_a_template_that_takes_all_memory_has_little_and_the_next_conversation_is_rendered() -> None:
    cases = "".join(
        f"{{% if messages[0].content == '{i}' %}}{{{{ {wish} }}}}{{% endif %}}" for i, wish in enumerate(TOO_LARGE)
    )
    template = ChatTemplate(cases + "hi", {})
    for i in range(len(TOO_LARGE)):
        with pytest.raises(InvalidRequest, match=f"needs more than {LIMITS.memory_bytes >> 20} MiB"):
            template.render([{"role": "user", "content": str(i)}], add_generation_prompt=True)
        assert template.render(HI, add_generation_prompt=True) == "hi"


@pytest.mark.slow
@pytest.mark.quick(1)
@pytest.mark.parametrize(
    ("source", "why"),
    # On a busy machine the limit of time may come before that of memory.
    [("{{ strftime_now('%Y' * 10**8) }}", "MiB|longer than"), ("{{1}}" * 200_000, "longer than")],
)
def test_a_template_that_takes_everything_when_it_is_compiled_is_refused_at_start_up(source: str, why: str) -> None:
    with pytest.raises(ModelError, match=why):
        ChatTemplate(source, {}).check()


def test_memory_is_limited_from_the_beginning() -> None:
    process = TemplateProcess()
    try:
        assert process.ask(encode(Compile("x", {})), HANGS_S) is not None
        limits = Path(f"/proc/{process._child.pid}/limits").read_text()
        assert any(
            line.split()[:5] == ["Max", "data", "size", str(LIMITS.memory_bytes), str(LIMITS.memory_bytes)]
            for line in limits.splitlines()
        )
    finally:
        process.end()


def test_template_memory_limit_does_not_count_untouched_mappings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some distributions' archive of all languages has 220 MB, and every process that has set a locale maps it."""
    archive = tmp_path / "archive"
    with archive.open("wb") as file:
        file.truncate(LIMITS.memory_bytes)
    (tmp_path / "sitecustomize.py").write_text(
        f"import mmap\nfile = open({str(archive)!r}, 'rb')\n"
        "mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    turn = "{% for message in messages %}{% if message.role == 'user' %}{{ message.content }}{% endif %}{% endfor %}"
    assert render(turn * 200) == "a<b" * 200


def test_a_process_that_does_not_answer_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stopped, or swapped out: it uses no time of the processor's."""
    template = ChatTemplate("{{ messages[0].content }}", {})
    template.check()
    (pid,) = pids(template)
    os.kill(pid, signal.SIGSTOP)
    monkeypatch.setattr(chat_template, "MAX_WAIT_S", 0.05)
    with pytest.raises(InvalidRequest, match="gave no answer"):
        template.render(ASK, add_generation_prompt=True)
    assert not Path(f"/proc/{pid}").exists()
    monkeypatch.setattr(chat_template, "MAX_WAIT_S", HANGS_S)
    assert template.render(ASK, add_generation_prompt=True) == "a<b"


def test_one_process_serves_all_renderings_and_one_that_died_is_replaced() -> None:
    template = ChatTemplate("{{ messages[0].content }}", {})
    for _ in range(5):
        assert template.render(ASK, add_generation_prompt=True) == "a<b"
    (pid,) = pids(template)
    os.kill(pid, signal.SIGKILL)
    (process,) = template._processes.living
    wait_until(lambda: process.has_ended)
    assert template.render(ASK, add_generation_prompt=True) == "a<b"
    assert pids(template) != [pid]
    assert len(pids(template)) == 1


def test_threads_render_at_the_same_time() -> None:
    template = ChatTemplate("{{ messages[0].content }}", {})
    texts: list[str] = []

    def work(number: int) -> None:
        for i in range(50):
            said = [{"role": "user", "content": f"{number}.{i}"}]
            assert template.render(said, add_generation_prompt=True) == f"{number}.{i}"
        texts.append(str(number))

    threads = [threading.Thread(target=work, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(HANGS_S)
    assert sorted(texts) == ["0", "1", "2"]
    assert len(pids(template)) <= 3


def test_processes_end_with_their_template() -> None:
    template = ChatTemplate("x", {})
    template.check()
    (pid,) = pids(template)
    del template
    gc.collect()
    assert not Path(f"/proc/{pid}").exists()


def test_processes_end_with_the_one_that_started_them_even_when_it_is_killed() -> None:
    code = (
        "import os, signal\n"
        "from forebay.text.chat_template import ChatTemplate\n"
        "template = ChatTemplate('x', {})\n"
        "template.check()\n"
        "print(*[process._child.pid for process in template._processes.living], flush=True)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=HANGS_S, check=False)
    assert done.returncode == -signal.SIGKILL
    wait_until(lambda: not alive(int(done.stdout)))


def test_a_terminals_signals_are_not_for_templates() -> None:
    template = ChatTemplate("{{ messages[0].content }}", {})
    template.check()
    (pid,) = pids(template)
    for number in (signal.SIGINT, signal.SIGTERM):
        os.kill(pid, number)
    assert template.render(ASK, add_generation_prompt=True) == "a<b"
    assert pids(template) == [pid]


def test_no_key_of_ours_is_in_a_templates_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FOREBAY_API_KEY", "canary-key")
    template = ChatTemplate("x", {})
    template.check()
    assert b"canary-key" not in Path(f"/proc/{pids(template)[0]}/environ").read_bytes()


@pytest.mark.usefixtures("in_this_process")
@pytest.mark.parametrize("value", [lambda: 0, object(), 10**400, "\ud800", {"a": {1, 2}} | {"b": object()}])
def test_variables_that_cannot_travel_are_the_requests_error(value: Any) -> None:
    template = ChatTemplate("x", {})
    with pytest.raises(InvalidRequest, match="only what JSON has"):
        template.render(ASK, add_generation_prompt=True, documents=value)
    assert template.render(ASK, add_generation_prompt=True, documents=[{"a": 1.5, "b": None}]) == "x"


@pytest.mark.usefixtures("in_this_process")
def test_nobody_imports_jinja2_to_speak_with_a_template() -> None:
    code = "import sys, forebay.text.tokenizer; sys.exit('jinja2' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_hints_are_not_worth_a_slow_templates_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside the conversation itself, what is rendered to find places to resume at has a time for all together."""
    tokenizer = tiny_tokenizer(600)
    assert tokenizer.chat_template is not None
    calls: list[int] = []
    now = [0.0]

    def slow(messages: list[Any], **variables: Any) -> str:
        calls.append(len(messages))
        now[0] += 0.6 * tokenizer_module.MAX_PLACES_S
        return "<|im_start|>" + "".join(message["content"] for message in messages)

    monkeypatch.setattr(tokenizer.chat_template, "render", slow)
    monkeypatch.setattr(tokenizer_module, "time", SimpleNamespace(monotonic=lambda: now[0]))
    prompt = tokenizer.encode_chat_prompt([{"role": "user", "content": str(i)} for i in range(9)])
    assert prompt.token_ids
    assert len(calls) == 3  # one for the text, two until the time is over


def test_files_that_are_no_template_are_named(tmp_path: Path) -> None:
    (tmp_path / "chat_template.jinja").write_bytes(b"{{ 'caf\xe9' }}")
    with pytest.raises(ModelError, match="byte 7 is not UTF-8"):
        tokenizer_files._template(tmp_path, {})
    for wrong in (5, ["x"], True):
        with pytest.raises(ModelError, match=r"tokenizer\.chat_template is a"):
            tokenizer_files.from_gguf({**tiny_metadata(600), "tokenizer.chat_template": wrong})


LLAVA = (
    "{% for m in messages %}{{ m.role | upper }}: "
    "{% for part in m['content'] | selectattr('type', 'equalto', 'text') %}{{ part['text'] }} {% endfor %}{% endfor %}"
    "{% if add_generation_prompt %}ASSISTANT:{% endif %}"
)


@pytest.mark.usefixtures("in_this_process")
def test_template_that_shows_words_in_parts_alone_gets_parts() -> None:
    asked = [
        *ASK,
        {"role": "assistant", "content": "yes"},
        {"role": "user", "content": [{"type": "text", "text": "x"}]},
    ]
    text = ChatTemplate(LLAVA, {}).render(asked, add_generation_prompt=True)
    assert text == "USER: a<b ASSISTANT: yes USER: x ASSISTANT:"


@pytest.mark.usefixtures("in_this_process")
@pytest.mark.parametrize(
    "source",
    [
        "{% for m in messages %}{% if m.content is string %}{{ m.content }}{% else %}{{ m.content[0]['type'] }}"
        "{% endif %}{% endfor %}",
        "{{ messages[0]['content'] }}{% if messages[0]['type'] %}x{% endif %}",
    ],
)
def test_template_that_shows_text_gets_text(source: str) -> None:
    assert render(source) == "a<b"


def test_template_of_a_processor_is_read_where_the_tokenizer_has_none(tmp_path: Path) -> None:
    path = tmp_path / "chat_template.json"
    path.write_text(json.dumps({"chat_template": "{{ 'of the processor' }}"}))
    assert tokenizer_files._template(tmp_path, {}) == "{{ 'of the processor' }}"
    assert tokenizer_files._template(tmp_path, {"chat_template": "own"}) == "own"
    path.write_text(json.dumps({"chat_template": 3}))
    with pytest.raises(ModelError, match=r"chat_template.json: the chat_template is int"):
        tokenizer_files._template(tmp_path, {})


@pytest.mark.parametrize(
    ("source", "names"),
    [
        (
            "{{ a }}{% if b is defined and b %}x{% endif %}{% for m in messages %}{{ m.c }}{% endfor %}",
            {"a", "b", "messages"},
        ),
        ("{% if not a is defined %}{% set a = 1 %}{% endif %}{{ a }}", {"a"}),
        ("{% set a = a | default('x') %}{{ a }}", {"a"}),
        ("{% set a = a or 'x' %}{{ a }}", {"a"}),
        ("{% set a = (b if b is not none else a) %}{{ a }}", {"a", "b"}),
        ("{% if b %}{% set a = 1 %}{% else %}{% set a = 2 %}{% endif %}{{ a }}", {"b"}),
        ("{% macro f(x) %}{{ x }}{{ y }}{% endmacro %}{{ f(1) }}{{ raise_exception }}{{ strftime_now }}", {"y"}),
        ("{% for c in b %}{% if c %}{% set d = c %}{% endif %}{% endfor %}{% if c.e is defined %}{% endif %}", {"b"}),
        ("{% set n = namespace(a=a) %}{{ n.a }}{% generation %}{{ z }}{% endgeneration %}", {"a", "z"}),
        ("no variables", set()),
    ],
)
def test_template_variables_are_the_names_that_it_reads_of_what_it_is_given(source: str, names: set[str]) -> None:
    assert ChatTemplate(source, {}).variables == names
