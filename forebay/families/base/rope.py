"""Rotary embedding parameters: transformers 5's `rope_parameters`, or `rope_theta` and `rope_scaling` of before."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any, Final

from forebay.base.errors import ModelError, brief
from forebay.families.base.fields import MAX_NUMBER, Fields, is_number

# What LongRoPE multiplies cosines and sines by, with the one list of factors and with the other.
MSCALES: Final = ("short_mscale", "long_mscale")
# What each type needs, and what it may have besides. `frequency_factors` is how GGUF files store llama3 scaling.
_NEEDED: Final[dict[str, tuple[str, ...]]] = {
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "yarn": ("factor", "original_max_position_embeddings"),
    "longrope": ("short_factor", "long_factor", "original_max_position_embeddings"),
    "frequency_factors": ("factors",),
    "proportional": ("partial_rotary_factor",),
}
_ALLOWED: Final[dict[str, tuple[str, ...]]] = {
    "dynamic": ("original_max_position_embeddings",),
    "longrope": ("factor", "attention_factor", *MSCALES),
    "proportional": ("factor",),
    "yarn": ("attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate"),
}
# Of a model without one they have no effect.
ROPE_FIELDS: Final = ("rope_theta", "rope_scaling", "rope_parameters", "partial_rotary_factor")

# What the angles of these are scaled from is the length of before: if need be, the model's own.
TRAINED_LENGTH: Final = ("llama3", "longrope", "yarn")

_COMMON: Final = ("rope_type", "type", "rope_theta", "partial_rotary_factor")


NUM_AXES: Final = 3
"""The rotary positions of a token with M-RoPE: temporal, vertical, horizontal."""


@dataclass(frozen=True, slots=True)
class RopeSections:
    """How M-RoPE divides a head's frequencies among a token's temporal, vertical and horizontal positions: `sizes` of
    them each, in runs or taking turns. Taking turns, the first position has what the sizes of the others leave."""

    sizes: tuple[int, int, int]
    interleaved: bool

    def axes(self, num_frequencies: int) -> list[int]:
        """Return which position, 0 to 2, each frequency has the angle of. ModelError unless there are as many."""
        if sum(self.sizes) != num_frequencies:
            raise ModelError(
                f"mrope_section is {list(self.sizes)}, of {sum(self.sizes)} frequencies; a head has {num_frequencies}"
            )
        if not self.interleaved:
            return [axis for axis, size in enumerate(self.sizes) for _ in range(size)]
        return [i % 3 if i < 3 * self.sizes[i % 3] else 0 for i in range(num_frequencies)]


def rope_theta_and_scaling(
    fields: Fields, *, default_theta: float, max_positions: int
) -> tuple[float, dict[str, Any] | None]:
    """The base, and the scaling as `{"rope_type": ..., ...}` with all it needs, or None for the plain embedding."""
    where, parameters = fields.where, rope_parameters(fields)
    inner, outer = parameters.get("rope_theta"), fields.get("rope_theta", default_theta)
    theta = _positive(where, "rope_theta", outer if inner is None else inner)
    rope_type = _type_of(parameters, fields)
    trained = fields.get("original_max_position_embeddings")
    if rope_type == "default":
        return theta, None
    values = _values_of(parameters, rope_type)
    if rope_type in TRAINED_LENGTH:
        own = trained if rope_type == "longrope" and trained is not None else max_positions
        values.setdefault("original_max_position_embeddings", own)
        if trained not in (None, values["original_max_position_embeddings"]):
            # transformers takes one or the other, by the order in which it meets them.
            raise fields.wrong("original_max_position_embeddings", "within the object that describes the rope")
    checked = _checked(values, rope_type, where)
    if rope_type == "longrope":
        checked = _with_amplitudes(checked, max_positions, where)
    return theta, {"rope_type": rope_type, **checked}


def long_rope(scaling: Mapping[str, Any] | None, num_positions: int) -> bool:
    """Return whether angles of a table of so many positions are those for texts above the length that a LongRoPE was
    trained on. All texts of an engine have the same, so that tokens that are kept serve longer texts, too."""
    if scaling is None or scaling["rope_type"] != "longrope":
        return False
    return num_positions > float(scaling["original_max_position_embeddings"])


def _with_amplitudes(values: dict[str, Any], max_positions: int, where: str) -> dict[str, Any]:
    """Return LongRoPE's values with the amplitude for each list of factors (arXiv 2402.13753, section 3.3)."""
    length = values["original_max_position_embeddings"]
    if length <= 1:
        raise ModelError(f"{where}: original_max_position_embeddings is {brief(length)}; it must be above 1")
    factor = values.pop("factor", max_positions / length)
    grown = math.sqrt(1 + math.log(factor) / math.log(length)) if factor > 1 else 1.0
    amplitude = values.pop("attention_factor", grown)
    return {**values, **{name: values.get(name, amplitude) for name in MSCALES}}


def ropes_by_kind(
    fields: Fields, thetas: Mapping[str, Any], *, scaled: str, max_positions: int
) -> dict[str, tuple[float, dict[str, Any] | None]]:
    """Base and scaling for each kind of attention. `thetas`: the bases of those that name none.

    An older file's `rope_scaling` is that of the layers of the kind `scaled`.
    """
    given = fields.get("rope_parameters") or {kind: {} for kind in thetas}
    if not isinstance(given, dict) or set(given) != set(thetas) or not all(isinstance(r, dict) for r in given.values()):
        raise fields.wrong("rope_parameters", f"an object for each of {' and '.join(thetas)}")
    scaling = fields.get("rope_scaling") or {}
    if not isinstance(scaling, dict):
        raise fields.wrong("rope_scaling", "an object")
    ropes = {}
    for kind, theta in thetas.items():
        parameters = {"rope_theta": theta, **given[kind], **(scaling if kind == scaled else {})}
        ropes[kind] = rope_theta_and_scaling(
            Fields({"rope_parameters": parameters}, f"{fields.where}: {kind}"),
            default_theta=theta,
            max_positions=max_positions,
        )
    return ropes


def rope_parameters(fields: Fields) -> Mapping[str, Any]:
    """Return the object that describes the rope, under its old name or its new one; {} if there is none."""
    old, new = fields.get("rope_scaling"), fields.get("rope_parameters")
    parameters = old or new or {}
    if not isinstance(parameters, dict):
        raise ModelError(f"{fields.where}: rope_parameters is {brief(parameters)}, not an object")
    return parameters


def without_partial_rotary(fields: Fields, *, default: float, ignored: Collection[str] = ()) -> tuple[float, Fields]:
    """Return the rotated share of a head's dimensions, and the configuration without the fields of this share and
    without those of the rope that are to be `ignored`. The remaining fields describe a rope over all dimensions."""
    parameters = rope_parameters(fields)
    given = parameters.get("partial_rotary_factor")
    given = fields.get("partial_rotary_factor", default) if given is None else given
    share = _positive(fields.where, "partial_rotary_factor", given)
    if share > 1:
        raise ModelError(f"{fields.where}: partial_rotary_factor is {share}; it must be at most 1")
    dropped = {"partial_rotary_factor", *ignored}
    left = {key: value for key, value in parameters.items() if key not in dropped}
    return share, fields.replaced(partial_rotary_factor=None, rope_scaling=None, rope_parameters=left)


def rotary_dim(fields: Fields, head_dim: int, share: float) -> int:
    """Return how many of a head's dimensions that is."""
    dim = int(head_dim * share)
    if dim < 2 or dim % 2:
        raise ModelError(
            f"{fields.where}: partial_rotary_factor {share:g} of a head's {head_dim} dimensions is {dim}: must be even"
        )
    return dim


def _type_of(parameters: Mapping[str, Any], fields: Fields) -> str:
    """Return the type of the rope. Raises ModelError for an unknown type, and for a key that the type does not have."""
    where, rope_type = fields.where, parameters.get("rope_type", parameters.get("type", "default"))
    for share in (parameters.get("partial_rotary_factor"), fields.get("partial_rotary_factor")):
        if rope_type != "proportional" and share not in (None, 1, 1.0):
            raise ModelError(f"{where}: partial_rotary_factor {brief(share)} is not supported")
    if not isinstance(rope_type, str) or rope_type not in _NEEDED:
        raise ModelError(f"{where}: rope type {brief(rope_type)} is not supported; known are {', '.join(_NEEDED)}")
    known = {*_COMMON, *_NEEDED[rope_type], *_ALLOWED.get(rope_type, ())}
    for key in parameters:
        if key not in known:
            raise ModelError(f"{where}: {brief(key)} of a rope of type {rope_type!r} is not supported")
    return rope_type


def _values_of(parameters: Mapping[str, Any], rope_type: str) -> dict[str, Any]:
    """Return the values of the keys that belong to the type. A null is none, but for yarn's `truncate`, of which it is
    false, as in transformers."""
    own = {*_NEEDED[rope_type], *_ALLOWED.get(rope_type, ())}
    values = {key: value for key, value in parameters.items() if key in own and value is not None}
    if rope_type == "yarn" and "truncate" in parameters:
        values.setdefault("truncate", False)
    return values


def _checked(values: dict[str, Any], rope_type: str, where: str) -> dict[str, Any]:
    for key in _NEEDED[rope_type]:
        if key not in values:
            raise ModelError(f"{where}: a rope of type {rope_type!r} needs {key}")
    for key, value in values.items():
        _CHECKS.get(key, _positive)(where, key, value)
    if rope_type == "proportional" and values["partial_rotary_factor"] > 1:
        raise ModelError(f"{where}: partial_rotary_factor must be at most 1")
    if rope_type == "llama3" and values["high_freq_factor"] <= values["low_freq_factor"]:
        raise ModelError(f"{where}: high_freq_factor must be greater than low_freq_factor")
    return values


def _positive(where: str, name: str, value: Any) -> float:
    if not is_number(value) or not 0 < value <= MAX_NUMBER:
        raise ModelError(f"{where}: {name} is {brief(value)}; it must be a number above 0")
    return float(value)


def _check_list(where: str, name: str, values: Any) -> None:
    if not isinstance(values, list):
        raise ModelError(f"{where}: {name} is {brief(values)}, not a list of numbers")
    for value in values:
        _positive(where, name, value)


def _check_flag(where: str, name: str, value: Any) -> None:
    if not isinstance(value, bool):
        raise ModelError(f"{where}: {name} is {value!r}, not true or false")


_CHECKS: Final[dict[str, Callable[[str, str, Any], object]]] = {
    **dict.fromkeys(("factors", "short_factor", "long_factor"), _check_list),
    "truncate": _check_flag,
}
"""Checks of values that are not one positive number, by key."""
