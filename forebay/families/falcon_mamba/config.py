from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from forebay.families.base.fields import Fields
from forebay.families.config.model_config import Family
from forebay.families.parts.mamba import HARMLESS, NAMES, MambaConfig, mamba1_mixer, mixers_only, small


@dataclass(frozen=True, kw_only=True, slots=True)
class FalconMambaConfig(MambaConfig):
    """A Mamba configuration with the epsilon of the norms of dt, b and c."""

    mixer_rms_eps: float


def parse(fields: Fields) -> FalconMambaConfig:
    """Read Falcon Mamba's fields: Mamba's, and `mixer_rms_eps`."""
    eps = fields.number("mixer_rms_eps", default=1e-6)
    return FalconMambaConfig(**mixers_only(fields, tied=True), mixer=mamba1_mixer(fields), mixer_rms_eps=eps)


FAMILY: Final = Family(parse=parse, small=small, harmless=HARMLESS, names=NAMES)
