"""Bodies by the names of llama.cpp: sampling fields, which llama-server and Ollama share, and that of /completion."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Final, Self

from pydantic import Field, PrivateAttr, Tag, model_validator

from forebay.base.foreign import PASSED, passed_fields
from forebay.base.sampling import ADJUSTS, NUMBERS
from forebay.requests.sampling_params import LOGIT_BIAS, MAX_LOGIT_BIAS, MAX_TOP_LOGPROBS, RANDOM_SEED
from forebay.server.api.core.renaming import renamed
from forebay.server.protocol.ignored import Harmless, neutral
from forebay.server.protocol.numbers import Numbered
from forebay.server.protocol.requests import I32, Bias, Choosing, CompletionRequest, DecimalId, PlainText, Prompts, Stop
from forebay.server.protocol.validation import INVALID_VALUE, UNSUPPORTED_FIELD, branch, by_shape, refusal

MAX_U32: Final = 2**32 - 1
# A completion's or chat's field, by its name here.
_NUMBERS: Final = {number.llama_name: name for name, number in NUMBERS.items()}
_NAMES: Final = {**_NUMBERS, "stop": "stop"}


class LlamaSampling(Numbered, numbers=_NUMBERS):
    """A `seed` of -1, or of 2^32 - 1, stands for none."""

    ignored: ClassVar[dict[str, Harmless]] = neutral("llama")
    passed = PASSED | passed_fields("llama_samplers")
    seed: Annotated[int, Field(ge=-1, le=MAX_U32)] | None = None
    stop: Stop | None = None

    def sampling(self) -> dict[str, Any]:
        """Return the fields of a completion or a chat that the client has set."""
        found = {theirs: getattr(self, name) for name, theirs in _NAMES.items()}
        seed = RANDOM_SEED if self.seed == MAX_U32 else self.seed
        return {name: value for name, value in {**found, "seed": seed}.items() if value is not None}

    @staticmethod
    def renamings(prefix: str = "") -> dict[str, str]:
        """Return the names here, behind `prefix`, by a completion's field."""
        return {theirs: prefix + name for name, theirs in {**_NAMES, "seed": "seed"}.items()}


_BANNED: Final = LOGIT_BIAS[0]


def _bias_shape(value: Any) -> str | None:
    return branch("object") if isinstance(value, dict) else branch("pairs") if isinstance(value, list) else None


_Pair = Annotated[list[int | float | bool], Field(min_length=2, max_length=2, fail_fast=True)]
LogitBias = Annotated[
    Annotated[dict[DecimalId, Bias], Field(max_length=MAX_LOGIT_BIAS, fail_fast=True), Tag(branch("object"))]
    | Annotated[list[_Pair], Field(max_length=MAX_LOGIT_BIAS, fail_fast=True), Tag(branch("pairs"))],
    by_shape(_bias_shape, "an object from token ids to numbers, or a list of [token id, number or false]"),
]


class LlamaCompletionRequest(PlainText, LlamaSampling, Choosing):
    """`n_predict` -1 stands for the room that is left in the context; 0 computes the prompt only. `repeat_last_n`
    matters only if there is a penalty."""

    ignored: ClassVar[dict[str, Harmless]] = {**LlamaSampling.ignored, **neutral("llama_completion")}
    model: Annotated[str, Field(max_length=512)] | None = None
    prompt: Prompts
    n_predict: Annotated[int, Field(ge=-1, le=I32)] = -1
    stream: bool = False
    logit_bias: LogitBias | None = None  # type: ignore[assignment]  # pairs as well
    n_probs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] = 0
    return_tokens: bool = False
    timings_per_token: bool = False
    repeat_last_n: Annotated[int, Field(ge=-1, le=I32)] | None = None
    _completion: CompletionRequest = PrivateAttr()

    @classmethod
    def parse(cls, data: dict[str, Any], *, lenient: bool = False, images: bool = False) -> Self:
        body = super().parse(data, lenient=lenient, images=images)
        with renamed(body.own_names):
            body._completion = CompletionRequest.parse(body._as_completion())
        return body

    @property
    def completion(self) -> CompletionRequest:
        return self._completion

    @property
    def own_names(self) -> dict[str, str]:
        """The names here by a completion's field."""
        own = {"max_tokens": "n_predict"}
        return {**self.renamings(), **own, "logprobs": "n_probs"}

    @property
    def has_many(self) -> bool:
        """Whether the answer is a list."""
        return isinstance(self.prompt, list) and not isinstance(self.prompt[0], int)

    @property
    def num_top(self) -> int | None:
        """The number of alternatives of each token; None if the tokens are not needed at all."""
        return self.n_probs if self.n_probs or self.return_tokens else None

    @model_validator(mode="after")
    def _check_penalties(self) -> Self:
        penalized = any(getattr(self, number.llama_name) not in (None, number.default) for number in ADJUSTS)
        if penalized and self.repeat_last_n not in (None, -1):
            what = f"repeat_last_n is {self.repeat_last_n}: penalties are over all tokens, use -1 or leave it out"
            raise refusal(UNSUPPORTED_FIELD, "repeat_last_n", what)
        return self

    @model_validator(mode="after")
    def _check_bias(self) -> Self:
        low, high = LOGIT_BIAS
        for token, bias in self.logit_bias if isinstance(self.logit_bias, list) else ():
            if type(token) is not int or bias is True or not low <= bias <= high:
                what = f"logit_bias has [{token}, {bias}]: it must be a token id, and {low:g} to {high:g} or false"
                raise refusal(INVALID_VALUE, "logit_bias", what)
        return self

    def _as_completion(self) -> dict[str, Any]:
        bias = self.logit_bias
        if isinstance(bias, list):
            bias = {str(token): _BANNED if value is False else float(value) for token, value in bias}
        length = {"n_predict": -1} if self.n_predict < 0 else {"max_tokens": self.n_predict}
        optional = {
            "logit_bias": bias,
            "logprobs": self.num_top if self.n_predict else None,
            "echo": True if self.n_predict == 0 else None,  # a completion without tokens shows its prompt
        }
        return {
            **self.chosen,
            **self.sampling(),
            **length,
            **{name: value for name, value in optional.items() if value is not None},
            "prompt": self.prompt,
            "stream": self.stream,
            "add_special_tokens": self.add_special_tokens,
            "parse_special": self.parse_special,
        }
