from __future__ import annotations

from typing import Final

from forebay.families.base.fields import Fields
from forebay.families.config.model_config import Family
from forebay.families.parts.mamba import HARMLESS, NAMES, MambaConfig, mamba1_mixer, mixers_only, small


def parse(fields: Fields) -> MambaConfig:
    """Read Mamba's fields: layers of mixers alone, with tied embeddings by default."""
    return MambaConfig(**mixers_only(fields, tied=True), mixer=mamba1_mixer(fields))


FAMILY: Final = Family(parse=parse, small=small, harmless=HARMLESS, names=NAMES)
