from __future__ import annotations

from typing import Final

from forebay.families.base.architecture import Architecture
from forebay.families.parts.gguf.hunyuan import NAMES

# The base in the files is the stretched one.
ARCHITECTURES: Final = {"hunyuan-dense": Architecture(block_names=NAMES)}
