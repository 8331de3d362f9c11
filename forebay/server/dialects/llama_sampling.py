"""Sampling fields by the names of llama.cpp, which llama-server and Ollama share."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Final, Self

from pydantic import Field, model_validator

from forebay.requests.foreign import PASSED
from forebay.requests.sampling_params import BOUNDS, RANDOM_SEED
from forebay.server.protocol.ignored import Harmless, one_of
from forebay.server.protocol.requests import I32, WITHIN, Stop
from forebay.server.protocol.strict import Strict
from forebay.server.protocol.validation import UNSUPPORTED_FIELD, refusal

MAX_U32: Final = 2**32 - 1
_OFF: Final = one_of(None, 0, 0.0)
_WHOLE: Final = one_of(None, 1, 1.0)
# Values that leave a sampler out; they are llama.cpp's defaults, and clients send them.
NEUTRAL: Final[dict[str, Harmless]] = {
    **dict.fromkeys(("mirostat", "dynatemp_range", "xtc_probability", "dry_multiplier"), _OFF),
    **dict.fromkeys(("typical_p", "typ_p", "tfs_z"), _WHOLE),
    "top_n_sigma": one_of(None, -1, -1.0),
}
# Values of samplers that are left out.
_IDLE: Final = frozenset(
    {
        *("mirostat_tau", "mirostat_eta", "dynatemp_exponent", "xtc_threshold"),
        *("dry_base", "dry_allowed_length", "dry_penalty_last_n", "dry_sequence_breakers"),
    }
)
# A completion's or chat's field, by its name here.
_NAMES: Final = {
    **{name: name for name in ("temperature", "top_k", "top_p", "min_p", "presence_penalty", "frequency_penalty")},
    "repeat_penalty": "repetition_penalty",
    "stop": "stop",
}


class LlamaSampling(Strict):
    """A `seed` of -1, or of 2^32 - 1, stands for none. `repeat_last_n` matters only if there is a penalty."""

    ignored: ClassVar[dict[str, Harmless]] = NEUTRAL
    passed = PASSED | _IDLE
    temperature: Annotated[float, WITHIN["temperature"]] | None = None
    top_k: Annotated[int, Field(ge=-1, le=I32)] | None = None
    top_p: Annotated[float, Field(gt=BOUNDS["top_p"][0], le=BOUNDS["top_p"][1])] | None = None
    min_p: Annotated[float, WITHIN["min_p"]] | None = None
    repeat_penalty: Annotated[float, WITHIN["repetition_penalty"]] | None = None
    presence_penalty: Annotated[float, WITHIN["presence_penalty"]] | None = None
    frequency_penalty: Annotated[float, WITHIN["frequency_penalty"]] | None = None
    repeat_last_n: Annotated[int, Field(ge=-1, le=I32)] | None = None
    seed: Annotated[int, Field(ge=-1, le=MAX_U32)] | None = None
    stop: Stop | None = None

    @model_validator(mode="after")
    def _check_penalties(self) -> Self:
        penalized = self.repeat_penalty not in (None, 1.0) or self.presence_penalty or self.frequency_penalty
        if penalized and self.repeat_last_n not in (None, -1):
            what = f"repeat_last_n is {self.repeat_last_n}: penalties are over all tokens, use -1 or leave it out"
            raise refusal(UNSUPPORTED_FIELD, "repeat_last_n", what)
        return self

    def sampling(self) -> dict[str, Any]:
        """Return the fields of a completion or a chat that the client has set."""
        found = {theirs: getattr(self, name) for name, theirs in _NAMES.items()}
        seed = RANDOM_SEED if self.seed == MAX_U32 else self.seed
        return {name: value for name, value in {**found, "seed": seed}.items() if value is not None}

    @staticmethod
    def renamings(prefix: str = "") -> dict[str, str]:
        """Return the names here, behind `prefix`, by a completion's field."""
        return {theirs: prefix + name for name, theirs in {**_NAMES, "seed": "seed"}.items()}
