"""Texts in and out, for the two ways to use the engine from Python: what prompts may be, and what becomes of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import msgspec

from forebay.base.errors import ForebayError, InvalidRequest
from forebay.engine.client.choice import Abortable, Choice
from forebay.engine.client.choice import Prompt as Tokens
from forebay.engine.client.scores import Logprob, ranked
from forebay.requests.sampling_params import SamplingParams, seed_of_choice
from forebay.requests.step_plan import TokenLogprob
from forebay.requests.updates import CacheReport, FinishReason, Update
from forebay.text.answers.for_template import for_template, whole_message
from forebay.text.answers.probes import Findings
from forebay.text.histories import adapted
from forebay.text.resumption import ChatPrompt, Message
from forebay.text.tokenizer import Tokenizer

Prompt: TypeAlias = str | Sequence[int] | Mapping[str, Any]
"""A text, token ids, or `{"prompt": ..}` or `{"prompt_token_ids": ..}` with these."""


@dataclass(kw_only=True, slots=True)
class CompletionOutput:
    """One output of a prompt: `text` of `token_ids`.

    `finish_reason` is `stop`, `length`, `abort` or `error`; `stop_reason` the stop string, pattern or one of
    `stop_token_ids` that ended it, None for the model's own end. `logprobs`, where asked for, has for each token those
    of the token and of the likeliest others there, by id.
    """

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    logprobs: list[dict[int, Logprob]] | None = None


@dataclass(kw_only=True, slots=True)
class RequestOutput:
    """The result of one prompt: `SamplingParams.n` outputs. `text`, `token_ids`, `finish_reason` and `logprobs` are
    those of the first.

    `error` is set if it failed, with the `finish_reason` `error`; the tokens generated before are kept. `cache` says
    how much of the prompt was reused, and why not more. `prompt_logprobs`, if requested, are as `logprobs`, None for
    the first token.
    """

    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput] = field(default_factory=list)
    error: ForebayError | None = None
    cache: CacheReport = field(default_factory=CacheReport)
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None

    @property
    def text(self) -> str:
        return self.outputs[0].text

    @property
    def token_ids(self) -> list[int]:
        return self.outputs[0].token_ids

    @property
    def finish_reason(self) -> FinishReason | None:
        return self.outputs[0].finish_reason

    @property
    def logprobs(self) -> list[dict[int, Logprob]] | None:
        return self.outputs[0].logprobs


@dataclass(frozen=True, slots=True)
class TextDelta:
    """The addition to output `index`: text that may be shown, and the tokens that have come, of which some text may be
    held back yet. The last of an output has its `finish_reason`; all else is as in `CompletionOutput`."""

    index: int
    text: str
    token_ids: list[int]
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    logprobs: list[dict[int, Logprob]] | None = None


class Writing:
    """A prompt's outputs while they are generated, each from the updates of one request. `asked` are the parameters of
    these requests as the engine gets them."""

    def __init__(self, output: RequestOutput, params: SamplingParams, tokenizer: Tokenizer) -> None:
        self.output, self.params = output, params
        plain = msgspec.structs.replace(params.of_tokens(), bad_words=tokenizer.spellings(params.bad_words))
        self.asked = [
            msgspec.structs.replace(plain, seed=seed_of_choice(params.seed, number)) for number in range(params.n)
        ]
        output.outputs = [CompletionOutput(index=number) for number in range(params.n)]
        self._table = tokenizer.table if params.skip_special_tokens else tokenizer.whole_table
        self._choices: list[Choice] = []

    @property
    def wants_each(self) -> bool:
        """Whether each update must be seen when it comes: something in it may end the output."""
        return bool(self.params.stop or self.params.stop_regex)

    @property
    def finished(self) -> bool:
        return all(made.finish_reason is not None for made in self.output.outputs)

    def begin(self, sources: Sequence[Abortable]) -> None:
        """Take the requests that bring the updates."""
        prompt = Tokens(token_ids=self.output.prompt_token_ids)
        self._choices = [
            Choice(number, prompt, source, self.params, self._table) for number, source in enumerate(sources)
        ]

    def take(self, index: int, update: Update) -> TextDelta:
        """Return the addition to an output that has not finished. The first failure ends all, and is in
        `output.error`."""
        choice, made = self._choices[index], self.output.outputs[index]
        if update.restarted:
            choice.restart()
            made.text, made.token_ids, made.logprobs = "", [], None
        before = choice.num_tokens
        try:
            piece = choice.feed(update)
        except ForebayError as error:
            self._fail(error)
            return TextDelta(index, "", [], made.finish_reason)
        num_new = choice.num_tokens - before
        entries = None if update.logprobs is None else [self._ranked(entry) for entry in update.logprobs[:num_new]]
        made.text += piece.text
        made.token_ids += update.token_ids[:num_new]
        if entries is not None:
            made.logprobs = [*(made.logprobs or ()), *entries]
        self._take_prompt_updates(choice)
        if choice.finish is not None:
            made.finish_reason = FinishReason(choice.finish)
            end = update.matched_stop if update.matched_stop in self.params.stop_token_ids else None
            made.stop_reason = end if choice.stopped is None else choice.stopped
        return TextDelta(index, piece.text, update.token_ids[:num_new], made.finish_reason, made.stop_reason, entries)

    def _take_prompt_updates(self, choice: Choice) -> None:
        output = self.output
        if choice.index == 0:
            output.cache = choice.cache
            if choice.prompt_logprobs is not None and output.prompt_logprobs is None:
                num_top = self.params.prompt_logprobs
                output.prompt_logprobs = [
                    None if entry is None else ranked(self._table, entry.token_id, entry, num_top)
                    for entry in choice.prompt_logprobs
                ]

    def _ranked(self, entry: TokenLogprob) -> dict[int, Logprob]:
        return ranked(self._table, entry.token_id, entry, self.params.logprobs)

    def _fail(self, error: ForebayError) -> None:
        self.output.error = error
        for choice, made in zip(self._choices, self.output.outputs, strict=True):
            if made.finish_reason is None:
                made.finish_reason = FinishReason.ERROR
                choice.stream.abort()


def output_of(prompt: Prompt, tokenizer: Tokenizer) -> RequestOutput:
    """Return an empty output of the prompt. Raises InvalidRequest for a value that is no prompt."""
    if isinstance(prompt, Mapping):
        found = [prompt[name] for name in ("prompt", "prompt_token_ids") if prompt.get(name) is not None]
        if len(found) != 1 or len(prompt) > 2:
            raise InvalidRequest(f"a prompt has the fields {', '.join(prompt)}: give prompt or prompt_token_ids")
        return output_of(found[0], tokenizer)
    if isinstance(prompt, str):
        return RequestOutput(prompt=prompt, prompt_token_ids=tokenizer.encode(prompt, parse_special=True))
    return RequestOutput(prompt=None, prompt_token_ids=list(prompt))


def chat_prompt(
    messages: str | Sequence[Message],
    tokenizer: Tokenizer,
    found: Findings,
    variables: Mapping[str, Any],
    *,
    with_places: bool,
) -> ChatPrompt:
    """Return a conversation as the chat template writes it, in the form that it accepts, as servers do.

    A text is a message of the user. `with_places` finds the lengths from which later requests are likely to continue.
    """
    talk = [{"role": "user", "content": messages}] if isinstance(messages, str) else list(map(whole_message, messages))
    variables = dict(variables)
    if variables.get("tools") or any(message.keys() & {"tool_calls", "tool_call_id"} for message in talk):
        talk = for_template(talk, variables, found)
    talk = list(adapted(talk, found.history).messages)
    if with_places:
        return tokenizer.encode_chat_prompt(talk, **variables)
    return ChatPrompt(tokenizer.encode_chat(talk, **variables), [], [])
