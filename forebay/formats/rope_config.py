"""Rotary embedding parameters: transformers 5's `rope_parameters`, or `rope_theta` and `rope_scaling` of before."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from typing import Any, Final

from forebay.base.errors import ModelError

# What each type needs, and what it may have besides. `frequency_factors` is how GGUF files store llama3 scaling.
_NEEDED: Final[dict[str, tuple[str, ...]]] = {
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "yarn": ("factor", "original_max_position_embeddings"),
    "frequency_factors": ("factors",),
    "proportional": ("partial_rotary_factor",),
}
_ALLOWED: Final[dict[str, tuple[str, ...]]] = {
    "dynamic": ("original_max_position_embeddings",),
    "proportional": ("factor",),
    "yarn": ("attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate"),
}
_COMMON: Final = ("rope_type", "type", "rope_theta", "partial_rotary_factor")


def rope_theta_and_scaling(
    raw: Mapping[str, Any], where: str, *, default_theta: float, max_positions: int
) -> tuple[float, dict[str, Any] | None]:
    """The base, and the scaling as `{"rope_type": ..., ...}` with all it needs, or None for the plain embedding."""
    parameters = raw.get("rope_scaling") or raw.get("rope_parameters") or {}
    if not isinstance(parameters, dict):
        raise ModelError(f"{where}: rope_parameters is {str(parameters)[:80]!r}, not an object")
    theta = _positive(where, "rope_theta", parameters.get("rope_theta") or raw.get("rope_theta") or default_theta)
    rope_type = parameters.get("rope_type", parameters.get("type", "default"))
    for source in (parameters, raw):
        if rope_type != "proportional" and source.get("partial_rotary_factor") not in (None, 1, 1.0):
            raise ModelError(f"{where}: partial_rotary_factor {source['partial_rotary_factor']!r} is not supported")
    if not isinstance(rope_type, str) or rope_type not in _NEEDED:
        raise ModelError(f"{where}: rope type {str(rope_type)[:80]!r} is not supported; known are {', '.join(_NEEDED)}")
    _check_keys(parameters, rope_type, where)
    if rope_type == "default":
        return theta, None
    own = {*_NEEDED[rope_type], *_ALLOWED.get(rope_type, ())}
    values = {key: value for key, value in parameters.items() if key in own and value is not None}
    if rope_type in ("llama3", "yarn"):
        values.setdefault("original_max_position_embeddings", max_positions)
    return theta, {"rope_type": rope_type, **_checked(values, rope_type, where)}


def without_partial_rotary(
    raw: Mapping[str, Any], where: str, *, default: float, ignored: Collection[str] = ()
) -> tuple[float, dict[str, Any]]:
    """Which share of a head's dimensions is rotated, and the configuration without the fields that say so, and without
    those of the rope that are to be `ignored`. What is left is one of a rope over all dimensions."""
    names = ("rope_scaling", "rope_parameters")
    parameters: dict[str, Any] = next((raw[n] for n in names if isinstance(raw.get(n), dict) and raw[n]), {})
    given = parameters.get("partial_rotary_factor", raw.get("partial_rotary_factor"))
    share = _positive(where, "partial_rotary_factor", default if given is None else given)
    if share > 1:
        raise ModelError(f"{where}: partial_rotary_factor is {share}; it must be at most 1")
    left = {name: value for name, value in raw.items() if name != "partial_rotary_factor"}
    dropped = {"partial_rotary_factor", *ignored}
    for name in names:
        if isinstance(left.get(name), dict):
            left[name] = {key: value for key, value in left[name].items() if key not in dropped}
    return share, left


def _check_keys(parameters: Mapping[str, Any], rope_type: str, where: str) -> None:
    known = {*_COMMON, *_NEEDED[rope_type], *_ALLOWED.get(rope_type, ())}
    for key in parameters:
        if key not in known:
            raise ModelError(f"{where}: {str(key)[:80]!r} of a rope of type {rope_type!r} is not supported")


def _checked(values: dict[str, Any], rope_type: str, where: str) -> dict[str, Any]:
    for key in _NEEDED[rope_type]:
        if key not in values:
            raise ModelError(f"{where}: a rope of type {rope_type!r} needs {key}")
    for key, value in values.items():
        if key == "factors":
            for factor in value:
                _positive(where, key, factor)
        elif key == "truncate":
            if not isinstance(value, bool):
                raise ModelError(f"{where}: truncate is {value!r}, not true or false")
        else:
            _positive(where, key, value)
    if rope_type == "proportional" and values["partial_rotary_factor"] > 1:
        raise ModelError(f"{where}: partial_rotary_factor must be at most 1")
    if rope_type == "llama3" and values["high_freq_factor"] <= values["low_freq_factor"]:
        raise ModelError(f"{where}: high_freq_factor must be greater than low_freq_factor")
    return values


def _positive(where: str, name: str, value: Any) -> float:
    if (
        isinstance(value, bool)
        or not isinstance(value, int | float)
        or not math.isfinite(value)
        or not 0 < value < 1e30
    ):
        raise ModelError(f"{where}: {name} is {str(value)[:80]!r}; it must be a number above 0")
    return float(value)
