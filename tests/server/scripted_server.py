"""A server whose model says what a test wants, through a chat template that knows tools."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from forebay.requests.sampling_params import SamplingParams
from forebay.text.answers.probes import find_formats
from tests.server.conftest import MODEL, start
from tests.server.fake_engine import FakeEngine
from tests.text.tiny_tokenizer import sharing_tokenizer


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
