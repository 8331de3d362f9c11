from __future__ import annotations

from typing import Any, Final

import numpy as np

from forebay.base.errors import brief
from forebay.families.base.architecture import EXPERTS, PRE_NORM, Architecture, Header
from forebay.families.config.transformer import FULL, SLIDING

_PATTERN: Final = "attention.sliding_window_pattern"
_PERIOD: Final = 4  # llama.cpp's, where a file with a window has no pattern


def _configure(header: Header) -> None:
    config = header.config
    config["norm_topk_prob"] = True  # the format has no key for it: every file of this architecture has it
    windowed = _windowed(header) if "sliding_window" in config else [False] * len(header.layers)
    config["layer_types"] = [SLIDING if window else FULL for window in windowed]
    if config["rope_scaling"] is not None and config["rope_scaling"]["rope_type"] == "yarn":
        header.yarn_options()
    theta, scaling = config.pop("rope_theta", 10_000.0), config.pop("rope_scaling")
    sliding = config.pop("rope_local_base_freq", theta)
    config["rope_parameters"] = {FULL: {"rope_theta": theta, **(scaling or {})}, SLIDING: {"rope_theta": sliding}}


def _windowed(header: Header) -> list[bool]:
    """Whether each layer has a window: listed, or all but every n-th."""
    pattern: Any = header.own.get(_PATTERN, _PERIOD)
    if isinstance(pattern, np.ndarray) and len(pattern) == len(header.layers):
        return [bool(window) for window in pattern.tolist()]
    if type(pattern) is int and pattern > 0:
        return [(layer + 1) % pattern != 0 for layer in header.layers]
    raise header.wrong(f"{_PATTERN} is {brief(pattern)}, no entry for each of {len(header.layers)} layers")


ARCHITECTURES: Final = {
    "mellum": Architecture(
        block_names={**PRE_NORM, **EXPERTS},
        keys={"attention.sliding_window": "sliding_window", "rope.freq_base_swa": "rope_local_base_freq"},
        checked=(_PATTERN, "rope.scaling.yarn_beta_fast", "rope.scaling.yarn_beta_slow"),
        configure=_configure,
    )
}
