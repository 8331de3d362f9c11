"""The sampling parameters that are numbers, each declared once.

Requests of all dialects, flags, `forebay generate`, defaults of models, OpenAPI, the page's settings and the columns of
a batch follow from the declaration. What a number does to logits is elsewhere: of those with `draws` in
`forebay/ops/reference/sampling.py` and its twins, of the others in `forebay/runtime/sampling/penalties.py`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated, Final, get_type_hints

import msgspec

MAX_I32: Final = 2**31 - 1


@dataclass(frozen=True, kw_only=True, slots=True)
class Number:
    """A sampling parameter: bounds, names, documentation. `name` and `default` come from the field that it annotates.

    `low` and `high` are inclusive, unless `above_low`. Clients may send `also` for the default. The default changes
    nothing, except that of temperature: there `pad` is what a padding row holds. `draws`: the number is a column of
    `ops.Draws` of that name, used if a row's value is not the pad; any other number changes logits beforehand.
    """

    low: float
    high: float
    about: str  # for /openapi.json
    flag: str  # for --help of the operator's default
    option: str = ""  # for --help of `forebay generate`; "" has none there
    label: str  # in the page's settings, with a hint beside it
    hint: str
    page: tuple[float, float] | None = None  # bounds there, if narrower
    above_low: bool = False
    also: int | None = None
    draws: bool = False
    pad: float | None = None
    example: float | None = None  # a value that takes effect, for warm-up
    llama: str = ""  # the name in llama.cpp's bodies, if another
    gguf: str = ""  # the key below general.sampling; models may give it, in generation_config.json by its own name
    options: tuple[str, ...] = ()  # further spellings of the flag
    name: str = ""
    default: float = 0.0

    @property
    def is_whole(self) -> bool:
        return isinstance(self.default, int)

    @property
    def llama_name(self) -> str:
        return self.llama or self.name

    @property
    def neutral(self) -> float:
        """The value of a row that does not use the number."""
        return self.default if self.pad is None else self.pad

    @property
    def least(self) -> float:
        """The lowest value that clients may send."""
        return self.low if self.also is None else self.also

    def read(self, value: float) -> float:
        """Return a client's value as the engine has it."""
        return max(int(self.low), int(value)) if self.is_whole else value


class Numbers(msgspec.Struct, frozen=True, kw_only=True):
    """The numbers by which one request's tokens are chosen."""

    temperature: Annotated[
        float,
        Number(
            low=0.0,
            high=100.0,
            draws=True,
            pad=0.0,
            about="0 takes the likeliest token; higher draws more freely.",
            flag="0 is greedy",
            option="0 takes the likeliest token",
            options=("--temp",),
            label="Temperature",
            hint="0: always the likeliest",
            page=(0.0, 2.0),
            gguf="temp",
        ),
    ] = 1.0
    top_k: Annotated[
        int,
        Number(
            low=0,
            high=MAX_I32,
            also=-1,
            draws=True,
            example=2,
            about="Only the so many likeliest tokens; 0 or -1 for all.",
            flag="number of the likeliest tokens to keep; 0 or -1 keeps all",
            option="keep this many tokens, 0 for all",
            label="Top-k",
            hint="tokens kept, -1: all",
            gguf="top_k",
        ),
    ] = 0
    top_p: Annotated[
        float,
        Number(
            low=0.0,
            above_low=True,
            high=1.0,
            draws=True,
            example=0.9,
            about="Only the likeliest tokens that together are so likely.",
            flag="total probability of the tokens to keep",
            option="keep the likeliest tokens up to this share",
            label="Top-p",
            hint="share of probability kept",
            page=(0.01, 1.0),
            gguf="top_p",
        ),
    ] = 1.0
    min_p: Annotated[
        float,
        Number(
            low=0.0,
            high=1.0,
            draws=True,
            example=0.1,
            about="Only tokens at least so likely as this share of the likeliest.",
            flag="least probability of a kept token, as a share of the likeliest one's",
            option="drop what is less likely than P x the best",
            label="Min-p",
            hint="least share of the likeliest",
            gguf="min_p",
        ),
    ] = 0.0
    repetition_penalty: Annotated[
        float,
        Number(
            low=1e-3,
            high=100.0,
            about="Logits of tokens that are there already are divided by it, or multiplied where negative.",
            flag="above 1 makes tokens of the prompt and the answer less likely",
            options=("--repeat-penalty",),
            label="Repetition penalty",
            hint="1 is none",
            page=(0.01, 2.0),
            llama="repeat_penalty",
            gguf="penalty_repeat",
        ),
    ] = 1.0
    presence_penalty: Annotated[
        float,
        Number(
            low=-2.0,
            high=2.0,
            about="Taken off a token's logit where it has been generated.",
            flag="above 0 makes tokens of the answer less likely",
            label="Presence penalty",
            hint="for what was said",
        ),
    ] = 0.0
    frequency_penalty: Annotated[
        float,
        Number(
            low=-2.0,
            high=2.0,
            about="Taken off a token's logit for each time that it has been generated.",
            flag="above 0 makes tokens less likely each time they occur in the answer",
            label="Frequency penalty",
            hint="for each time it was",
        ),
    ] = 0.0


def _declared() -> dict[str, Number]:
    hints = get_type_hints(Numbers, include_extras=True)
    return {
        field.name: replace(hints[field.name].__metadata__[0], name=field.name, default=field.default)
        for field in msgspec.structs.fields(Numbers)
    }


NUMBERS: Final[dict[str, Number]] = _declared()
DRAWS: Final = tuple(number for number in NUMBERS.values() if number.draws)
ADJUSTS: Final = tuple(number for number in NUMBERS.values() if not number.draws)
OF_MODELS: Final = tuple(number for number in NUMBERS.values() if number.gguf)
