"""The operator's default sampling values: their flags, and the values that result from them and from the model's."""

from __future__ import annotations

from typing import Final

from forebay.base.errors import ConfigError
from forebay.base.sampling import NUMBERS
from forebay.config.flag import FLOAT, Flag, Kind, Settled, in_group
from forebay.families.base.sampling import NEUTRAL, SamplingDefaults

GROUP: Final = "default sampling values"


def _parse_integer(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise ConfigError(f"{text!r} is not a whole number") from None


_INTEGER: Final = Kind("N", _parse_integer, int)

FLAGS: Final = in_group(
    GROUP,
    *(
        Flag(
            number.name,
            _INTEGER if number.is_whole else FLOAT,
            number.flag,
            aliases=number.options,
            low=1e-6 if number.above_low else number.least,
            high=number.high,
        )
        for number in NUMBERS.values()
    ),
    Flag(
        "seed",
        _INTEGER,
        "seed of each request: equal requests then get equal answers; -1 draws a seed for each",
        aliases=("-s",),
        low=-1,
        high=2**63 - 1,
    ),
)
OPTIONAL: Final = {flag.name: "none: see sampling_defaults" for flag in FLAGS} | {
    "seed": "none: each request gets one of its own"
}


def defaults(settled: Settled, of_model: SamplingDefaults) -> SamplingDefaults:
    """Return the defaults of requests: the operator's values, then the model's if `sampling_defaults` is model."""
    base = of_model if settled["sampling_defaults"] == "model" else NEUTRAL
    own = {flag.name: value for flag in FLAGS if isinstance(value := settled.get(flag.name), int | float)}
    if not own:
        return base
    read = {name: NUMBERS[name].read(value) if name in NUMBERS else value for name, value in own.items()}
    return SamplingDefaults({**base.values, **read}, f"{base.source}, and the operator's {', '.join(own)}")
