"""The sampling parameters of a request, and their checks."""

from __future__ import annotations

import hashlib
import math
import secrets
from collections.abc import Collection, Mapping
from difflib import get_close_matches
from enum import StrEnum
from typing import Any, Final, Self

import msgspec

from forebay.base.errors import InvalidRequest, ModelError, brief
from forebay.base.foreign import PASSED, why_field_is_absent
from forebay.base.sampling import ADJUSTS, NUMBERS, Numbers
from forebay.text.stop_patterns import BadPattern, machine_of

MAX_TOP_LOGPROBS = 20
MAX_LOGIT_BIAS = 1024
MAX_STOP_TOKEN_IDS = 256
MAX_STOP = 16
MAX_STOP_BYTES = 256
MAX_STOP_PATTERNS = 4
MAX_COUNT = 1 << 20  # of outputs of one prompt
MAX_ALLOWED_TOKEN_IDS = 1 << 16
MAX_BAD_WORDS = 64
MAX_BAD_SPELLINGS = 2 * MAX_BAD_WORDS  # in tokens: a text has one with a space before it, and one without
MAX_BAD_WORD_TOKENS = 256
MAX_SCORED_TOKEN_IDS = 256
MAX_SEED = 2**63 - 1
RANDOM_SEED = -1  # as in the field: another one each time
LOGIT_BIAS: Final = (-100.0, 100.0)  # inclusive


class GrammarKind(StrEnum):
    """Kind of constraint on an output; the comments say what the grammar's text holds."""

    JSON_SCHEMA = "json_schema"
    JSON_OBJECT = "json_object"  # without a text
    REGEX = "regex"
    CHOICE = "choice"  # a JSON list of texts
    LARK = "lark"  # or the EBNF that llama.cpp has
    STRUCTURAL = "structural"  # a JSON object of tags that begin behind triggers
    ANSWER = "answer"  # llguidance's own, of what a server knows of its model: no client's


class Grammar(msgspec.Struct, frozen=True, array_like=True):
    """A grammar that the whole output must match."""

    kind: GrammarKind
    text: str = ""


class PoolingKind(StrEnum):
    """Reduction of a prompt's hidden states to one vector."""

    LAST = "last"  # the last token's hidden state
    MEAN = "mean"  # that of all tokens, on average
    CLS = "cls"  # the first token's
    ALL = "all"  # no reduction: that of each token, one behind the other


class Pooling(msgspec.Struct, frozen=True, array_like=True):
    """The result of a prompt that generates no tokens: a vector of float32, the hidden state behind the last
    norm; or with `token_ids`, where the last token is pooled, the log-probabilities of these behind it; or with
    `head` what the model's head makes of the vector, or of each token's: logits of labels, or another vector, of which
    `outputs` says from where to where, if that is not all."""

    kind: PoolingKind
    token_ids: tuple[int, ...] = ()
    head: bool = False
    outputs: tuple[int, int] | None = None


ALIASES: Final = {"max_new_tokens": "max_tokens"}  # by the name that SGLang's and transformers' users write


def _by_own_names(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values that are not None, by the names of the fields instead of by aliases."""
    named: dict[str, Any] = {}
    for name, value in values.items():
        own = ALIASES.get(name, name)
        if own in named:
            raise InvalidRequest(f"{own} is given by two names, {name} too: leave one of them out", param=name)
        if value is not None:
            named[own] = value
    return named


class _CheckedAtConstruction(msgspec.StructMeta):
    """Calling the class checks its arguments. A decoded object, or a copy made by msgspec, is not checked here."""

    def __call__(cls, **values: Any) -> Any:
        named = _by_own_names(values)
        if unknown := [name for name in named if name not in cls.__struct_fields__]:
            raise _unknown(unknown[0], cls.__struct_fields__)
        for name, number in NUMBERS.items():
            if number.also is not None and named.get(name) == number.also:
                named[name] = number.default
        texts = [name for name in ("stop", "stop_regex", "bad_words") if isinstance(named.get(name), str)]
        named |= {name: (named[name],) for name in texts}
        try:
            params = msgspec.convert(named, cls, str_keys=True)  # JSON has no others
        except msgspec.ValidationError as error:
            what, _, where = str(error).partition(" - at ")
            field = where.partition("$.")[2].partition("`")[0].partition("[")[0]
            raise InvalidRequest(f"{field} is {brief(named[field])}: {what.lower()}", param=field) from error
        params.check_values()
        return params


class SamplingParams(Numbers, metaclass=_CheckedAtConstruction, frozen=True, kw_only=True, omit_defaults=True):
    """How the output of one request is sampled, in the field's names and units.

    An invalid value raises InvalidRequest at construction, with the number and its limits; so does an unknown name.
    None stands for the default, a list for a tuple, `max_new_tokens` for `max_tokens`.

    The numbers are those of `forebay.base.sampling`; `temperature` 0 is greedy. `logprobs` is the number of
    alternatives reported besides the chosen token (-1: none at all, not even the chosen one's). `seed` fixes the
    request's random draws whatever the batch around it; without one, or with -1, equal prompts are continued
    differently. A `grammar` allows only tokens from which a match is still possible. With `pooling` nothing is sampled
    (`of_pooling`).

    An output ends with `max_tokens`, with an end token of the model's unless `ignore_eos`, or with one of
    `stop_token_ids`. It also ends if its text has one of `stop` or matches one of `stop_regex`. The text of these is
    left out unless `include_stop_str_in_output`. Before `min_tokens` no end token can come, and no stop string counts
    that ends there. If `allowed_token_ids` are given, only they can come, and never a token that completes one of
    `bad_words`: texts, as the tokenizer spells them with and without a space before, or tuples of token ids.

    Parameters about texts are for the owner of a tokenizer: the engine itself gets the parameters of `of_tokens`.
    """

    max_tokens: int = 128
    min_tokens: int = 0
    n: int = 1
    stop: tuple[str, ...] = ()
    stop_regex: tuple[str, ...] = ()
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    logit_bias: dict[int, float] = {}
    seed: int = RANDOM_SEED
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    allowed_token_ids: tuple[int, ...] = ()
    bad_words: tuple[str | tuple[int, ...], ...] = ()
    logprobs: int = -1
    prompt_logprobs: int = -1
    grammar: Grammar | None = None
    pooling: Pooling | None = None

    @classmethod
    def of_pooling(cls, pooling: Pooling) -> SamplingParams:
        """Return the parameters of a pooled prompt. Its KV is that of a prompt with one token behind it."""
        return msgspec.structs.replace(_POOLED, pooling=pooling)

    def of_tokens(self) -> SamplingParams:
        """Return a copy without the fields about texts and their number, which an engine does not use."""
        return self if self._is_of_tokens else msgspec.structs.replace(self, **_TEXTLESS)

    @property
    def _is_of_tokens(self) -> bool:
        return all(getattr(self, name) == value for name, value in _TEXTLESS.items())

    @property
    def num_generated(self) -> int:
        """The most tokens that come behind the prompt."""
        return 0 if self.pooling else self.max_tokens

    @classmethod
    def defaults(cls, values: Mapping[str, float], source: str) -> Self:
        """Return the parameters that a model gives as defaults. Raises ModelError for values that no request may
        have."""
        try:
            params = msgspec.convert(values, cls)
            params.check_values()
        except (msgspec.ValidationError, InvalidRequest) as error:
            raise ModelError(
                f"{source} has sampling values that cannot be: {error}: --sampling-defaults openai"
            ) from error
        return params

    def with_seed(self) -> SamplingParams:
        """Return a copy with a random seed if none was given and sampling is not greedy."""
        if self.seed != RANDOM_SEED or self.greedy:
            return self
        return msgspec.structs.replace(self, seed=secrets.randbits(63))

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0

    @property
    def adjusts(self) -> bool:
        """Whether a request's own tokens and parameters change its logits."""
        return self.penalizes or self.restricts

    @property
    def restricts(self) -> bool:
        """Whether some tokens may not come, whatever their logits."""
        return bool(self.min_tokens or self.allowed_token_ids or self.bad_words)

    @property
    def penalizes(self) -> bool:
        """Whether a number or a logit bias changes logits."""
        return bool(self.logit_bias) or any(getattr(self, number.name) != number.neutral for number in ADJUSTS)

    def check(self, vocab_size: int) -> None:
        """Raise InvalidRequest for the first value that is out of range; every id is checked against the vocabulary,
        and parameters about texts are refused."""
        self.check_values()
        if not self._is_of_tokens:
            name = next(name for name, value in _TEXTLESS.items() if getattr(self, name) != value)
            raise InvalidRequest(f"{name} is about texts, and only token ids are known here: use generate", param=name)
        for name in ("logit_bias", "stop_token_ids", "allowed_token_ids"):
            check_token_ids(name, getattr(self, name), vocab_size)
        for word in self.bad_words:
            if isinstance(word, str):
                raise InvalidRequest(
                    f"bad_words has the text {brief(word)}: only token ids are known here", param="bad_words"
                )
            check_token_ids("bad_words", word, vocab_size)
        check_token_ids("token_ids", self.pooling.token_ids if self.pooling else (), vocab_size)

    def check_values(self) -> None:
        """As far as that can be done without a model. A prompt that is pooled has the defaults for all else."""
        if self.pooling:
            self._check_pooling(self.pooling)
            return
        _within("max_tokens", self.max_tokens, 1, 2**31 - 1)
        for name, number in NUMBERS.items():
            _within(name, getattr(self, name), number.low, number.high)
        _within("seed", self.seed, RANDOM_SEED, MAX_SEED)
        _within("logprobs", self.logprobs, -1, MAX_TOP_LOGPROBS)
        _within("prompt_logprobs", self.prompt_logprobs, -1, MAX_TOP_LOGPROBS)
        _at_most("logit_bias", len(self.logit_bias), MAX_LOGIT_BIAS)
        _at_most("stop_token_ids", len(self.stop_token_ids), MAX_STOP_TOKEN_IDS)
        self._check_texts()
        self._check_restrictions()
        if self.top_p == 0.0:
            raise InvalidRequest(
                "top_p is 0.0; it must be above 0 (use temperature 0 for greedy decoding)", param="top_p"
            )
        for value in self.logit_bias.values():
            _within("logit_bias", value, *LOGIT_BIAS)

    def _check_texts(self) -> None:
        _within("n", self.n, 1, MAX_COUNT)
        _at_most("stop", len(self.stop), MAX_STOP)
        _at_most("stop_regex", len(self.stop_regex), MAX_STOP_PATTERNS)
        for name in ("stop", "stop_regex"):
            for text in getattr(self, name):
                if not 1 <= (size := len(text.encode("utf-8", "replace"))) <= MAX_STOP_BYTES:
                    what = f"{name} has one of {size} bytes; it must have between 1 and {MAX_STOP_BYTES}"
                    raise InvalidRequest(what, param=name)
        for pattern in self.stop_regex:
            try:
                machine_of(pattern)
            except BadPattern as error:
                raise InvalidRequest(f"stop_regex cannot be used: {error}", param="stop_regex") from error

    def _check_restrictions(self) -> None:
        _within("min_tokens", self.min_tokens, 0, self.max_tokens)
        _at_most("allowed_token_ids", len(self.allowed_token_ids), MAX_ALLOWED_TOKEN_IDS)
        texts = sum(isinstance(word, str) for word in self.bad_words)
        _at_most("bad_words", texts, MAX_BAD_WORDS)
        _at_most("bad_words", len(self.bad_words) + texts, MAX_BAD_SPELLINGS)
        for word in self.bad_words:
            if not 1 <= len(word) <= MAX_BAD_WORD_TOKENS:
                what = f"bad_words has one of length {len(word)}; it must be between 1 and {MAX_BAD_WORD_TOKENS}"
                raise InvalidRequest(what, param="bad_words")
        for name in ("ignore_eos", "min_tokens", "allowed_token_ids", "bad_words"):
            if self.grammar and getattr(self, name):
                raise InvalidRequest(
                    f"{name} is not supported with a grammar, which decides the tokens and the end", param=name
                )

    def _check_pooling(self, pooling: Pooling) -> None:
        if self != SamplingParams.of_pooling(pooling):
            raise InvalidRequest(
                "nothing is sampled behind a prompt that is pooled: leave all else out", param="pooling"
            )
        if pooling.token_ids and pooling.kind is not PoolingKind.LAST:
            raise InvalidRequest(
                f"tokens are scored behind the last one, and pooling is {pooling.kind}: take last", param="pooling"
            )
        if pooling.token_ids and pooling.head:
            raise InvalidRequest("tokens are scored, or a head is applied, not both: leave one out", param="pooling")
        if pooling.outputs and not (pooling.head and 0 <= pooling.outputs[0] < pooling.outputs[1]):
            raise InvalidRequest(f"{pooling.outputs} are no outputs of a head: leave them out", param="pooling")
        _at_most("token_ids", len(pooling.token_ids), MAX_SCORED_TOKEN_IDS)


def seed_of_choice(seed: int, number: int) -> int:
    """Return the seed of output `number` of a prompt: a user's `seed` or one derived from it, so that outputs differ
    and repeat; or a fresh one each."""
    if seed == RANDOM_SEED:
        return secrets.randbits(63)
    seed &= MAX_SEED
    if number == 0:
        return seed
    return int.from_bytes(hashlib.blake2b(f"{seed}:{number}".encode(), digest_size=8).digest(), "big") & MAX_SEED


def check_token_ids(param: str, token_ids: Collection[int], vocab_size: int) -> None:
    """The one check of every id a client can send: a negative id would silently index from the end. Raises
    InvalidRequest."""
    for token in (min(token_ids), max(token_ids)) if token_ids else ():
        if not 0 <= token < vocab_size:
            raise InvalidRequest(f"{param}: token id {token} is not in 0..{vocab_size - 1}", param=param)


def _unknown(name: str, known: tuple[str, ...]) -> InvalidRequest:
    near = get_close_matches(name, known, n=1)
    hint = "it changes no token: leave it out" if name in PASSED else _IN_PYTHON.get(name, why_field_is_absent(name))
    hint = hint or (f"did you mean {near[0]}?" if near else f"there are {', '.join(known)}")
    return InvalidRequest(f"SamplingParams knows no {name}: {hint}", code="unknown_field", param=name)


def _within(param: str, value: float, low: float, high: float) -> None:
    if not (math.isfinite(value) and low <= value <= high):
        raise InvalidRequest(f"{param} is {value}; it must be between {low} and {high}", param=param)


def _at_most(param: str, count: int, limit: int) -> None:
    if count > limit:
        raise InvalidRequest(f"{param} has {count} entries; at most {limit} are allowed", param=param)


_IN_PYTHON: Final = dict.fromkeys(  # what `why_field_is_absent` says there is in a body
    (
        *("structured_outputs", "response_format", "guided_decoding", "structural_tag", "format"),
        *("guided_json", "guided_regex", "guided_choice", "guided_grammar", "json_schema", "regex", "ebnf"),
    ),
    "give grammar=Grammar(kind, text)",
)
_TEXTLESS: Final = {
    "n": 1,
    "stop": (),
    "stop_regex": (),
    "include_stop_str_in_output": False,
    "skip_special_tokens": True,
}
_POOLED: Final = SamplingParams(max_tokens=1, temperature=0.0)
