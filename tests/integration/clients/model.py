"""A large model, scripted: what it says next follows from what the prompt shows, in the format of its chat template."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from types import MappingProxyType
from typing import Final, NamedTuple

import msgspec

from forebay.requests.sampling_params import SamplingParams
from forebay.text.answers.formats import THINK_TAGS
from forebay.text.answers.probes import find_formats
from tests.server.conftest import Running, start
from tests.server.fake_engine import FakeEngine
from tests.server.served import MODEL
from tests.text.answers.spellings import SPELLINGS, Answer
from tests.text.answers.templates import MANNERS
from tests.text.tiny_tokenizer import tiny_tokenizer

CONTEXT: Final = 1 << 20  # bytes are tokens here: prompts of coding agents have 80,000
NO_ASIDES: Final[Mapping[str, str]] = MappingProxyType({})
MOST_PROMPTS: Final = 200  # behind these the last turn ends a client that asks on and on
Turn = tuple[Answer, ...]  # one answer of the model, whose parts may think again between calls


class Family(NamedTuple):
    """A manner of `templates.py`, and the spelling of it."""

    manner: str
    spelling: str


FAMILIES: Final = {
    "qwen3": Family("Qwen 3", "hermes"),
    "qwen3-coder": Family("Qwen 3 Coder", "qwen3_coder"),
    "glm45": Family("GLM 4.5", "glm45"),
    "minimax": Family("MiniMax M2", "minimax_m2"),
    "deepseek-v4": Family("DeepSeek V4", "deepseek_v4"),
    "gpt-oss": Family("gpt-oss", "gpt_oss"),
}


class ScriptedModel:
    """Says `turns[i]` if the prompt shows the turns before it: each has `step-i` in its text or in its calls.

    A prompt that has one of the texts of `asides` is no turn: clients also ask for a title, say. It gets the answer of
    that text, in which `{done}` stands for the turns that it shows. `prompts` has the others.
    """

    def __init__(
        self, family: str, turns: Sequence[Turn], asides: Mapping[str, str] = NO_ASIDES, context: int = CONTEXT
    ) -> None:
        self.prompts: list[str] = []
        self._turns, self._asides = turns, asides
        manner, spelling = FAMILIES[family]
        self._manner, self._spell = MANNERS[manner], SPELLINGS[spelling].spell
        self._tags = THINK_TAGS.get(self._manner.thinking or "")
        tokenizer = tiny_tokenizer(template=self._manner.template)

        def script(prompt: list[int], params: SamplingParams) -> list[int]:
            return tokenizer.encode(self.answer(tokenizer.decode(prompt, skip_special_tokens=False)))

        def engine() -> FakeEngine:
            made = FakeEngine(script, width=3, context_length=context)
            made.info = msgspec.structs.replace(made.info, max_total_tokens=context)
            return made

        self.server: Running = start(tokenizer, engine, model=replace(MODEL, answers=find_formats(tokenizer)))

    def answer(self, prompt: str) -> str:
        """Return what the model says behind a prompt."""
        steps = [f"step-{i}" for i in range(len(self._turns))]
        done = [step for step in steps if step in prompt]
        for text, answer in self._asides.items():
            if text in prompt:
                return self._spelled((Answer(answer.format(done=", ".join(done))),), prompt)
        self.prompts.append(prompt)
        if len(self.prompts) > MOST_PROMPTS:
            return self._spelled(self._turns[-1], prompt)
        following = (turn for turn, step in zip(self._turns, steps, strict=True) if step not in done)
        return self._spelled(next(following, self._turns[-1]), prompt)

    def _spelled(self, turn: Turn, prompt: str) -> str:
        shown = prompt.rstrip()
        if self._manner.thinking is None or (self._tags is not None and shown.endswith(self._tags.closes)):
            turn = tuple(part._replace(thought="") for part in turn)
        text = "".join(map(self._spell, turn))
        if self._tags is None or not shown.endswith(self._tags.opens):
            return text
        return text.removeprefix(self._tags.opens) if turn[0].thought else f"{self._tags.closes}\n\n{text}"

    def close(self) -> None:
        self.server.close()


@contextmanager
def scripted(
    family: str, turns: Sequence[Turn], asides: Mapping[str, str] = NO_ASIDES, context: int = CONTEXT
) -> Iterator[ScriptedModel]:
    model = ScriptedModel(family, turns, asides, context)
    try:
        yield model
    finally:
        model.close()
