"""Names of Ministral 3 in GGUF. llama.cpp's converter gives Mistral models the same architecture, without a scale."""

from __future__ import annotations

from typing import Final

from forebay.families.base.architecture import PRE_NORM, Architecture, Header

_LOG_MULTIPLIER: Final = "rope.scaling.yarn_log_multiplier"


def _configure(header: Header) -> None:
    config, scaling = header.config, header.config["rope_scaling"]
    if scaling is not None and scaling["rope_type"] == "yarn":
        header.yarn_options()
        if header.own.get(_LOG_MULTIPLIER):  # llama.cpp takes 1 for the other one of the two
            scaling |= {"mscale": 1.0, "mscale_all_dim": header.own[_LOG_MULTIPLIER]}
    beta = config.pop("llama_4_scaling_beta", None)
    if not beta:
        config["model_type"] = "mistral"
        config.setdefault("sliding_window", None)
        return
    if scaling is None:
        raise header.wrong("attention.temperature_scale without rope.scaling.type: the length is not known")
    scaling["llama_4_scaling_beta"] = beta


ARCHITECTURES: Final = {
    "mistral3": Architecture(
        interleaved_rope=True,
        block_names=PRE_NORM,
        keys={"attention.temperature_scale": "llama_4_scaling_beta", "attention.sliding_window": "sliding_window"},
        checked=("rope.scaling.yarn_beta_fast", "rope.scaling.yarn_beta_slow", _LOG_MULTIPLIER),
        configure=_configure,
    )
}
