"""The operator's default sampling values: their flags, and the values that result from them and from the model's."""

from __future__ import annotations

from typing import Final

from forebay.base.errors import ConfigError
from forebay.config.flag import FLOAT, Flag, Kind, Settled, in_group
from forebay.families.sampling import NEUTRAL, SamplingDefaults

GROUP: Final = "default sampling values"


def _parse_integer(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise ConfigError(f"{text!r} is not a whole number") from None


_INTEGER: Final = Kind("N", _parse_integer, int)

FLAGS: Final = in_group(
    GROUP,
    Flag("temperature", FLOAT, "0 is greedy", aliases=("--temp",), low=0.0, high=100.0),
    Flag("top_k", _INTEGER, "number of the likeliest tokens to keep; 0 or -1 keeps all", low=-1, high=2**31 - 1),
    Flag("top_p", FLOAT, "total probability of the tokens to keep", low=1e-6, high=1.0),
    Flag("min_p", FLOAT, "least probability of a kept token, as a share of the likeliest one's", low=0.0, high=1.0),
    Flag(
        "repetition_penalty",
        FLOAT,
        "above 1 makes tokens of the prompt and the answer less likely",
        aliases=("--repeat-penalty",),
        low=1e-3,
        high=100.0,
    ),
    Flag("presence_penalty", FLOAT, "above 0 makes tokens of the answer less likely", low=-2.0, high=2.0),
    Flag(
        "frequency_penalty",
        FLOAT,
        "above 0 makes tokens less likely each time they occur in the answer",
        low=-2.0,
        high=2.0,
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
    if "top_k" in own:
        own["top_k"] = max(0, own["top_k"])  # -1 is "all" to some
    return SamplingDefaults({**base.values, **own}, f"{base.source}, and the operator's {', '.join(own)}")
