"""The process that a chat template runs in, from outside."""

from __future__ import annotations

from forebay.base.confined import ConfinedProcess, NoAnswer
from forebay.text.template_frames import LIMITS, Answer, Failed, decode_answer


class TemplateProcess(ConfinedProcess):
    """Client of the confined process that compiles and renders one chat template."""

    def __init__(self) -> None:
        super().__init__("forebay.text.template_worker", LIMITS, "the chat template")

    def ask(self, question: bytes, timeout_s: float) -> Answer:
        """The answer to an encoded question; a `Failed` of ours where there is none. The process has then ended."""
        try:
            return decode_answer(self.exchange(question, timeout_s))
        except NoAnswer as error:
            return Failed(str(error))
