from __future__ import annotations

from typing import Final

from forebay.families.base.architecture import EXPERTS, PRE_NORM, Architecture, Header
from forebay.families.parts.gguf.experts import GROUPED_CHECKED, configure_grouped, restore_correction
from forebay.families.parts.gguf.latent import GROUPED, SHARED_EXPERTS


def _configure(header: Header) -> None:
    configure_grouped(header)
    header.config["sliding_window"] = None  # the format has no key for it, and published models none


ARCHITECTURES: Final = {
    "dots1": Architecture(
        block_names={**PRE_NORM, **EXPERTS, **SHARED_EXPERTS, "exp_probs_b": "mlp.gate.e_score_correction"},
        keys=GROUPED,
        checked=GROUPED_CHECKED,
        configure=_configure,
        restore=restore_correction,
    )
}
