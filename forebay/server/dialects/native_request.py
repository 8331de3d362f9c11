"""/generate, as SGLang's own clients know it: what may be asked, in the fields of a completion."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Final, Self

from pydantic import Field, PrivateAttr, model_validator

from forebay.config.server_args import MAX_COUNT
from forebay.requests.sampling_params import MAX_SEED, MAX_TOP_LOGPROBS
from forebay.server.dialects.renaming import renamed
from forebay.server.protocol.ignored import Harmless, one_of
from forebay.server.protocol.requests import (
    I32,
    Bootstrap,
    CompletionRequest,
    Prompts,
    Sampler,
)
from forebay.server.protocol.strict import Label, Text
from forebay.server.protocol.validation import INVALID_COMBINATION, MISSING_FIELD, refusal

_DEFAULT_TOKENS: Final = 128
_SAMPLING: Final = {  # by what completions call it
    "max_tokens": "max_new_tokens",
    "seed": "sampling_seed",
    "guided_json": "json_schema",
    "guided_regex": "regex",
    "guided_grammar": "ebnf",
    "include_stop_str_in_output": "no_stop_trim",
    "min_tokens": "min_new_tokens",
    "skip_special_tokens": "skip_special_tokens",
    **{name: name for name in ("temperature", "top_p", "top_k", "min_p", "n", "stop", "stop_token_ids", "stop_regex")},
    **{name: name for name in ("repetition_penalty", "presence_penalty", "frequency_penalty", "ignore_eos")},
}


class NativeSampling(Sampler):
    ignored: ClassVar[dict[str, Harmless]] = {
        "spaces_between_special_tokens": one_of(None, True),
    }
    max_new_tokens: Annotated[int, Field(ge=1, le=I32)] = _DEFAULT_TOKENS
    min_new_tokens: Annotated[int, Field(ge=0, le=I32)] = 0
    n: Annotated[int, Field(ge=1, le=MAX_COUNT)] = 1
    sampling_seed: Annotated[int, Field(ge=0, le=MAX_SEED)] | None = None
    no_stop_trim: bool = False
    json_schema: Text | None = None
    regex: Text | None = None
    ebnf: Text | None = None


class NativeRequest(Bootstrap):
    """Either `text` or `input_ids`, one or several."""

    ignored: ClassVar[dict[str, Harmless]] = {"logprob_start_len": one_of(None, -1)}
    text: Prompts | None = None
    input_ids: Prompts | None = None
    sampling_params: NativeSampling = NativeSampling()
    return_logprob: bool = False
    top_logprobs_num: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] = 0
    return_text_in_logprobs: bool = False
    stream: bool = False
    rid: Label | None = None
    priority: Annotated[int, Field(ge=-(2**31), le=I32)] = 0
    _completion: CompletionRequest = PrivateAttr()

    @classmethod
    def parse(cls, data: dict[str, Any], *, lenient: bool = False) -> Self:
        body = super().parse(data, lenient=lenient)
        with renamed(body.renamings):
            body._completion = CompletionRequest.parse(body._as_completion())
        return body

    @property
    def completion(self) -> CompletionRequest:
        return self._completion

    @property
    def renamings(self) -> dict[str, str]:
        """Which of this body's fields a completion's stand for."""
        source = "text" if self.input_ids is None else "input_ids"
        return {"prompt": source, **{name: f"sampling_params.{own}" for name, own in _SAMPLING.items()}}

    @property
    def has_many(self) -> bool:
        """Whether the answer is a list."""
        prompt = self.text if self.input_ids is None else self.input_ids
        return self.sampling_params.n > 1 or (isinstance(prompt, list) and not isinstance(prompt[0], int))

    @model_validator(mode="after")
    def _check_source(self) -> Self:
        if (self.text is None) == (self.input_ids is None):
            what = "either text or input_ids is to be generated from: send one of them"
            raise refusal(MISSING_FIELD if self.text is None else INVALID_COMBINATION, "text", what)
        for name, value, wrong in (("text", self.text, int), ("input_ids", self.input_ids, str)):
            first = value[0] if isinstance(value, list) else value
            if isinstance(first, wrong) or (isinstance(first, list) and wrong is int):
                raise refusal(INVALID_COMBINATION, name, f"{name} has what is for the other: texts or token ids")
        return self

    def _as_completion(self) -> dict[str, Any]:
        own = {name: getattr(self, name) for name in ("stream", "priority", *Bootstrap.model_fields)}
        sampling = {name: getattr(self.sampling_params, theirs) for name, theirs in _SAMPLING.items()}
        prompt = self.text if self.input_ids is None else self.input_ids
        logprobs = self.top_logprobs_num if self.return_logprob else None
        return {**own, **{k: v for k, v in sampling.items() if v is not None}, "prompt": prompt, "logprobs": logprobs}
