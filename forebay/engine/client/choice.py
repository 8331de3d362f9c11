"""One output on its way from tokens to text: detokenized, read, stopped, scored."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple, Protocol

from forebay.base.errors import Unavailable
from forebay.engine.client.scores import Scored, WaitingScores
from forebay.memory.retention import NotKept, RetentionRequest
from forebay.requests.pictures import Picture
from forebay.requests.sampling_params import Grammar, SamplingParams
from forebay.requests.step_plan import TokenLogprob
from forebay.requests.updates import CacheReport, FinishReason, History, MemoryReport, SpeculationReport, Update
from forebay.text.answers.parts import CallArguments, CallBegun, CallEnded, Kind, Part, Said, Thought
from forebay.text.answers.reading import AnswerReader
from forebay.text.detokenizer import Delta, Detokenizer
from forebay.text.token_bytes import TokenBytes


class Reading(NamedTuple):
    """How answers to a prompt are read: by a reader each, from the bytes in `table`, to the end of the first call if
    only one call is allowed. Thinking is always separated from the answer; `with_thinking` returns it as well. If
    `opened`, the prompt ends within the thinking."""

    make: Callable[[], AnswerReader]
    table: TokenBytes
    one_call: bool
    with_thinking: bool = True
    opened: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """`text` is None if the client sent ids. Later requests are likely to continue from the first `resume_points`
    tokens, and the client asks for `retentions`. `grammar` constrains the answers; None if the constraint of the whole
    request applies. Of the tokens, `num_image_tokens` stand for images; `pictures` are these, until the engine has
    them."""

    token_ids: list[int]
    text: str | None = None
    resume_points: tuple[int, ...] = ()
    retentions: tuple[RetentionRequest, ...] = ()
    reading: Reading | None = None
    grammar: Grammar | None = None
    pictures: tuple[Picture, ...] = ()
    num_image_tokens: int = 0


_KINDS: Final[Mapping[type[Part], Kind]] = {
    Said: Said,
    Thought: Thought,
    CallBegun: CallArguments,
    CallArguments: CallArguments,
    CallEnded: CallArguments,
}


@dataclass(slots=True)
class Run:
    """Tokens in a row of an answer that belong to one kind of part, or to none: to markers and layout."""

    kind: Kind | None
    num_tokens: int = 0


class Piece(NamedTuple):
    """The addition of one update to a choice; `finish` comes with the last. Where answers are read, `parts` are what
    `text` would be."""

    text: str
    tokens: list[Scored]
    finish: str | None
    parts: Sequence[Part] = ()


class Abortable(Protocol):
    """A source of a choice's updates, which can be aborted."""

    @property
    def request_id(self) -> int: ...

    def abort(self) -> None:
        """End the request; its last update then has the finish reason `abort`."""


def weights_changed(num_tokens: int) -> Unavailable:
    """Return the error of a client that has received `num_tokens` tokens of an answer that restarts."""
    return Unavailable(
        f"the weights were updated behind the first {num_tokens} tokens of this answer: send it again",
        code="weights_changed",
    )


class Choice:
    """One stream on its way to text."""

    def __init__(
        self,
        index: int,
        prompt: Prompt,
        stream: Abortable,
        params: SamplingParams,
        table: TokenBytes,
        *,
        discard: bool = False,
        keep_token_ids: bool = False,
    ) -> None:
        """`discard`: only the log-probabilities of the prompt are wanted."""
        self.index = index
        self.prompt = prompt
        self.stream = stream
        self.finish: str | None = None
        self.stopped: str | None = None  # the stop string that ended it
        self.cache = CacheReport()
        self.speculation: SpeculationReport | None = None
        self.memory = MemoryReport(not_kept=NotKept.UNFINISHED if prompt.retentions else NotKept.NOT_ASKED)
        self.history = History()
        self.prompt_logprobs: list[TokenLogprob | None] | None = None
        self.weight_version = 0
        self._table = table
        self._params = params
        self._discard = discard
        self._keep_token_ids = keep_token_ids
        self._wants_scores = params.logprobs >= 0
        self._scores_per_token = 1 + max(0, params.logprobs)
        self._one_call = prompt.reading is not None and prompt.reading.one_call
        self._with_thinking = prompt.reading is None or prompt.reading.with_thinking
        # A token is its text and no more: nothing is to be looked for, scored or dropped.
        self.is_plain = not (params.stop or params.stop_regex or self._wants_scores or self._discard or keep_token_ids)
        self.restart()

    def restart(self) -> None:
        """Discard the output so far."""
        self.num_tokens = 0
        self.token_ids: list[int] = []  # of the output, if they are kept
        self.num_calls = self.num_reasoning_tokens = 0
        self.runs: list[Run] = []  # of the output, if it is read
        reading = self.prompt.reading
        self._reader = None if reading is None else reading.make()
        table = self._table if reading is None else reading.table
        how = self._params
        self._detokenizer = Detokenizer(
            table,
            how.stop,
            patterns=how.stop_regex,
            include_stop=how.include_stop_str_in_output,
            min_tokens=how.min_tokens,
        )
        self._waiting: WaitingScores | None = None
        if self._wants_scores:
            self._waiting = WaitingScores(self._detokenizer, self._reader, with_thinking=self._with_thinking)

    def feed_tokens(self, token_ids: list[int]) -> str | Piece:
        """Return what more tokens add to a plain choice; most often text and nothing else."""
        if self._reader is None:
            self.num_tokens += len(token_ids)
            return "".join(map(self._detokenizer.push_token, token_ids))
        if self.finish is not None:
            return ""
        parts: list[Part] = []
        for token in token_ids:
            self.num_tokens += 1
            self._take(self._reader, self._detokenizer.push_token(token), parts)
            if self._is_enough(parts):
                break
        said = [part.text for part in parts if type(part) is Said]
        if len(said) == len(parts):
            return "".join(said)
        answered = self._up_to_first_call(parts)
        return Piece("", [], self.finish, answered)

    def feed(self, update: Update) -> Piece:
        """Raises the typed error of a failed request."""
        if update.cache is not None:
            self.cache, self.weight_version = update.cache, update.weight_version
        if update.prompt_logprobs is not None:
            self.prompt_logprobs = update.prompt_logprobs
        self.speculation = update.speculation
        self.memory, self.history = update.memory or self.memory, update.history or self.history
        if update.finish is FinishReason.ERROR:
            self.finish = "error"
            assert update.failure is not None, "who fails says why"
            raise update.failure.error
        if self._discard:
            self.finish = None if update.finish is None else "length"
            return Piece("", [], self.finish)
        return self._advance(update)

    def _advance(self, update: Update) -> Piece:
        tokens = update.token_ids
        # The token that ended it counts, but is no text.
        ending = update.matched_stop is not None and tokens[-1:] == [update.matched_stop]
        parts: list[Part] = []
        shown = tokens[:-1] if ending else tokens
        reader = self._reader
        text, stopped, used = self._detokenizer.push(shown) if reader is None else self._push(reader, shown, parts)
        self.num_tokens += used
        self._add_scores(update, used)
        if stopped is None:
            self.num_tokens += ending
            if update.finish is not None:
                tail = self._detokenizer.finish()
                text += tail.text
                stopped = tail.stopped
                self.finish = str(update.finish.value)
        if self._keep_token_ids:
            self.token_ids += tokens[: used + (ending and stopped is None)]
        if stopped is not None:
            self.finish, self.stopped = "stop", stopped
            self.stream.abort()
        if reader is not None:
            parts = self._read(reader, text, parts)
            text = ""
        ended, waiting = self.finish is not None, self._waiting
        scores = waiting.released(everything=ended and stopped is None, ended=ended) if waiting is not None else []
        return Piece(text, scores, self.finish, parts)

    def _add_scores(self, update: Update, used: int) -> None:
        """Keep the log-probabilities of the first `used` tokens until their text is released."""
        if used and self._waiting is not None and update.logprobs is not None:
            self._waiting.add(update.token_ids[:used], update.logprobs[:used])

    def _read(self, reader: AnswerReader, text: str, parts: list[Part]) -> list[Part]:
        """Return `parts` with those of a remaining text; at the end of the answer with all that the reader has."""
        if text:
            parts += reader.push(text)
        if self.finish is not None:
            parts += reader.finish()
        return self._up_to_first_call(parts)

    def _push(self, reader: AnswerReader, token_ids: list[int], parts: list[Part]) -> Delta:
        """Read one token after the other: each is of the thinking or is not, and none is looked at behind the one call
        that may be."""
        for used, token in enumerate(token_ids, 1):
            text, stopped, _ = self._detokenizer.push([token])
            self._take(reader, text, parts)
            if stopped is not None or self._is_enough(parts):
                return Delta("", stopped, used)
        return Delta("", None, len(token_ids))

    def _take(self, reader: AnswerReader, text: str, parts: list[Part]) -> None:
        """The text of one more token."""
        part = reader.pass_by(text)
        if part is not None:
            parts.append(part)
            self.num_reasoning_tokens += reader.thinking
            self._count_in_run(Thought if reader.thinking else _KINDS[type(part)])
            return
        thinks = reader.thinking
        found = reader.push(text)
        parts += found
        thinks = thinks or reader.thinking
        self.num_reasoning_tokens += thinks
        self._count_in_run(Thought if thinks else _KINDS[type(found[-1])] if found else None)

    def _count_in_run(self, kind: Kind | None) -> None:
        if not self.runs or self.runs[-1].kind is not kind:
            self.runs.append(Run(kind))
        self.runs[-1].num_tokens += 1

    def _is_enough(self, parts: list[Part]) -> bool:
        return self._one_call and any(isinstance(part, CallEnded) for part in parts)

    def _up_to_first_call(self, parts: list[Part]) -> list[Part]:
        """Return `parts`; if only one call is allowed, up to the end of the first call."""
        if self._is_enough(parts):
            parts = parts[: next(i for i, part in enumerate(parts, 1) if isinstance(part, CallEnded))]
            self.finish = "stop"
            self.stream.abort()
        self.num_calls += sum(isinstance(part, CallEnded) for part in parts)
        if self.finish == "stop" and self.num_calls:
            self.finish = "tool_calls"
        return parts if self._with_thinking else [part for part in parts if not isinstance(part, Thought)]

    @property
    def num_scores(self) -> int:
        """How many log-probabilities the whole answer has."""
        num_tokens = len(self.prompt_logprobs or ()) + (self.num_tokens if self._wants_scores else 0)
        return num_tokens * self._scores_per_token

    def prompt_scores(self, table: TokenBytes | None = None) -> list[Scored]:
        """Return the scores of the prompt's tokens, with places in the text that `table` makes of them (default: that
        of the answer). Takes time by the prompt's length."""
        if self.prompt_logprobs is None:
            return []
        decoder = Detokenizer(table or self._table)
        decoder.push(self.prompt.token_ids)
        return list(map(Scored, self.prompt.token_ids, decoder.offsets, self.prompt_logprobs))
