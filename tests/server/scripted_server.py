"""A server whose model says what a test wants, through a chat template that knows tools."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

from llguidance import LLTokenizer

from forebay.grammar.vocabulary import Vocabulary
from forebay.requests.sampling_params import SamplingParams
from forebay.text.answers.probes import find_formats
from tests.server.conftest import start
from tests.server.fake_engine import FakeEngine
from tests.server.served import MODEL
from tests.text.tiny_tokenizer import TEMPLATE, sharing_tokenizer


@cache
def tiny_vocabulary() -> LLTokenizer:
    """Return what grammars of every scripted server are compiled for. To make it takes a fifth of a second."""
    tokenizer = sharing_tokenizer(TEMPLATE)
    return Vocabulary.of(tokenizer.table, [2], 49152).tokenizer(tokenizer.encode)


class ScriptedServer:
    """A server whose model says `answer`, in the format that `declared` is a response template of."""

    def __init__(self, template: str, engine: Callable[..., FakeEngine] = FakeEngine, *, declared: Any = None) -> None:
        self.answer = ""
        tokenizer = sharing_tokenizer(template)
        tokenizer.response_template = declared

        def script(prompt: list[int], params: SamplingParams) -> list[int]:
            return tokenizer.encode(self.answer)

        model = replace(MODEL, answers=find_formats(tokenizer))
        self.server = start(tokenizer, lambda: engine(script, width=3), model=model)

    def prompt(self) -> str:
        stream = self.server.engine.submitted[-1]
        return self.server.tokenizer.decode(stream.prompt, skip_special_tokens=False)
